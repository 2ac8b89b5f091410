"""N-gram embeddings, against the published layer of transformers and through the conformance kit; their table on the host."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.qwen4_exp import modeling_qwen4_exp

from hybridserve.errors import UnsupportedModelError, WeightsError
from hybridserve.mixers import Mixer
from hybridserve.mixers.host_table import HostTable
from hybridserve.mixers.ngram import Ngram, NgramConfig
from hybridserve.models import build_model, load_weights, resolve
from hybridserve.models.loader import host_parameters
from tests import checkpoints
from tests.conformance import ALL_CHECKS, FP32, Check, Rows, allocate, blocks_for, build_batch, rows_of, run_whole
from tests.test_mixers import NUM_ROWS, Case, Layer, build, reference_ops, rope
from tests.test_mixers_mla import Renamed

END = 5
VOCAB_SIZE = 40


def published(index: int = 0) -> nn.Module:
    """The published layer, `index` of those in a model, and its config's hash in ours."""
    config = transformers.Qwen4ExpTextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        num_hidden_layers=3,
        layer_types=["linear_attention"] * 3,
        rope_parameters=rope(),
        hc_count=2,
        ple_layer_ids=[1, 3],
        ple_embed_dim=24,
        ple_conv_kernel_size=3,
        ngram_size=4,
        heads_per_ngram=2,
        ngram_vocab_size_base=30,
        make_ngram_vocab_size_divisible_by=8,
        eos_token_id=END,
    )
    return modeling_qwen4_exp.Qwen4ExpTextPLELayer(config, 2 * index, index).eval()


def ours(index: int = 0, num_parts: int = 1) -> NgramConfig:
    """The same sizes, and the hash that the published layer has made."""
    embedding = published(index).ple_embedding
    return NgramConfig(
        hidden_size=32,
        num_streams=2,
        embed_dim=24,
        multipliers=tuple(embedding.layer_multipliers.tolist()),
        head_sizes=tuple(embedding.ngram_heads_vocab_sizes.tolist()),
        num_rows=len(embedding.ngram_embedding.weight),
        num_parts=num_parts,
        end_token=END,
        conv_width=3,
    )


def oracle() -> tuple[nn.Module, Layer]:
    """The layer on token 0 throughout, as the kit's batches have it."""
    layer = published()
    names = {"table.parts.0": ("ple_embedding.ngram_embedding.weight",), "conv_weight": ("conv1d.weight",)}
    return Renamed(layer, names), lambda x: layer(x[None], torch.zeros(1, len(x), dtype=torch.int64), None)[0]


CASES: dict[str, Case] = {"ngram-qwen": Case("ngram", ours(), oracle)}


@functools.cache
def built() -> tuple[Mixer, Layer]:
    """In fp32 with reference operations; checks leave it as it is."""
    return build(CASES["ngram-qwen"])


def test_a_mixer_is_the_published_layer() -> None:
    mixer, layer = built()
    x = rows_of(mixer, NUM_ROWS)
    with torch.no_grad():
        expected = layer(x)
    assert expected.abs().mean() > 0.02
    FP32.check(run_whole(mixer, x)[0], expected, "ngram")


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_mixer_conforms(check: Check) -> None:
    check(built()[0], FP32)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
def test_ids_are_those_of_the_published_layer_whatever_the_chunks(index: int, size: int) -> None:
    """Ends of text among them: at the start, twice in a row, beside a chunk's end."""
    layer = published(index)
    mixer = Ngram(ours(index, num_parts=5), reference_ops(), torch.float32)
    fill(mixer, layer)
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(VOCAB_SIZE, (40,), generator=generator)
    ids[[0, 4, 9, 10, 11, 20, 23]] = END
    x = torch.randn(40, 32, generator=generator)
    with torch.no_grad():
        expected = layer(x[None], ids[None], None)[0]
    specs = mixer.specs()
    caches, out = allocate(specs), []
    for at in range(0, 40, size):
        stop = min(at + size, 40)
        rows = Rows(stop - at, at, 3 if at else -1, ((stop - at - 1, 3),), blocks_for(40))
        batch = replace(build_batch([rows], specs.values()), input_ids=ids[at:stop])
        with torch.no_grad():
            out.append(mixer(x[at:stop], batch, caches))
    FP32.check(torch.cat(out), expected, f"chunks of {size}")


def fill(mixer: Ngram, layer: nn.Module) -> None:
    """Random weights in both."""
    generator = torch.Generator().manual_seed(9)
    theirs = dict(layer.named_parameters())
    for parameter in theirs.values():
        parameter.data.normal_(generator=generator)
    table = theirs.pop("ple_embedding.ngram_embedding.weight").data
    for part, rows in zip(mixer.table.parts, table.split(mixer.table.rows_per_part), strict=True):
        part.data.copy_(rows)
    mixer.conv_weight.data.copy_(theirs.pop("conv1d.weight").data[:, 0])
    for name, parameter in theirs.items():
        mixer.get_parameter(name).data.copy_(parameter.data)


# --- the table ---


@pytest.mark.parametrize(("num_rows", "num_parts"), [(12, 1), (12, 4), (13, 4), (10, 7), (3, 8)])
def test_a_table_in_parts_is_a_table(num_rows: int, num_parts: int) -> None:
    """Cut as `torch.chunk` cuts, which may give fewer parts than asked for."""
    whole = torch.arange(num_rows * 2.0).view(num_rows, 2)
    table = HostTable(num_rows, 2, num_parts, torch.float32)
    parts = whole.chunk(num_parts)
    assert [part.shape for part in table.parts] == [part.shape for part in parts]
    for part, rows in zip(table.parts, parts, strict=True):
        part.data.copy_(rows)
    ids = torch.randint(num_rows, (50,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(table(ids), whole[ids])
    assert table(ids[:0]).shape == (0, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(checkpoints.make("qwen4_exp"), tmp_path_factory.mktemp("qwen4_exp"))


def tables(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if ".table." in name}


def test_a_table_stays_on_the_host_as_it_lies_on_disk(folder: Path) -> None:
    """Mapped, in the dtype of the file, whatever the model's; results are in the model's."""
    found = resolve(str(folder))
    model = build_model(found.config, reference_ops(torch.bfloat16), torch.bfloat16)
    assert host_parameters(model) == set(tables(model))
    assert len(tables(model)) == 8
    report = load_weights(model, found, torch.device("cpu"))
    assert all(parameter.dtype == torch.float32 for parameter in tables(model).values())
    assert report.mapped_nbytes >= sum(parameter.nbytes for parameter in tables(model).values())
    mixer = next(module for module in model.modules() if isinstance(module, Ngram))
    assert mixer.table(torch.tensor([0, 3])).dtype == torch.bfloat16


def test_a_table_is_left_on_the_host_when_the_model_is_not(folder: Path) -> None:
    """Any other device will do for the rest: here one without memory."""
    found = resolve(str(folder))
    model = build_model(found.config, reference_ops(), torch.float32)
    load_weights(model, found, torch.device("meta"))
    assert all(parameter.device.type == "cpu" for parameter in tables(model).values())
    assert all(parameter.is_meta for name, parameter in model.named_parameters() if name not in tables(model))


def test_a_hash_that_the_config_does_not_give_is_refused(tmp_path: Path) -> None:
    """The multipliers follow from the seed; a file that holds others was trained with another hash."""
    model = checkpoints.make("qwen4_exp")
    checkpoints.save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layer_multipliers"))
    tensors[name] = tensors[name] + 2
    checkpoints.rewrite_tensors(tmp_path, tensors)
    found = resolve(str(tmp_path))
    with pytest.raises(WeightsError, match="layer_multipliers"):
        load_weights(build_model(found.config, reference_ops(), torch.float32), found, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"multipliers": (3,)}, "up to 1 tokens"),
        ({"embed_dim": 25}, "heads of 25 numbers"),
        ({"num_rows": 100}, "do not fit a table of 100"),
        ({"conv_width": 1}, "conv_width is 1"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    fields = {name: getattr(ours(), name) for name in NgramConfig.__struct_fields__}
    with pytest.raises(UnsupportedModelError, match=named):
        NgramConfig(**{**fields, **changes})
