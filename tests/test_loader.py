"""Finding, checking and reading weights: what is broken is refused by name, before anything is read (P14, I31, R2)."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridserve.backends.select import select
from hybridserve.config import EngineSettings
from hybridserve.errors import HybridServeError, UnsafeContentError, UnsupportedModelError, UsageError, WeightsError
from hybridserve.models import CausalLM, build_model, load, load_dummy, load_weights, plan_weights, resolve
from tests.checkpoints import VOCAB_SIZE, make, read_config, rewrite_config, rewrite_tensors, save, save_released
from tests.driver import Driver

CPU = torch.device("cpu")
OPS = select(CPU, torch.float32, ["reference"]).ops
LAYER = "model.layers.1."


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make("granite_moe"), tmp_path_factory.mktemp("granite"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of a good folder, to be broken."""
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((saved / file).read_bytes())
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save(make("qwen3"), tmp_path, shard_size="60KB")


def open_folder(folder: Path, dtype: str = "auto") -> CausalLM:
    found = resolve(str(folder))
    model = build_model(found.config, OPS, found.dtype(dtype))
    load_weights(model, found, CPU)
    return model


def refused(kind: type[HybridServeError], folder: Path, *words: str) -> None:
    with pytest.raises(kind) as caught:
        open_folder(folder)
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)


# --- broken folders ---


def test_a_folder_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(WeightsError, folder, "no config.json", "downloaded")


@pytest.mark.parametrize("text", ["{", "[1]", "\x00", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    refused(WeightsError, folder, "config.json", "download the file again")


def test_an_unknown_architecture_is_refused(folder: Path) -> None:
    rewrite_config(folder, {**read_config(folder), "architectures": ["GraniteSwaForCausalLM"], "auto_map": {"AutoModel": "x.Y"}})
    refused(UnsupportedModelError, folder, "'GraniteSwaForCausalLM'", "'GraniteMoeHybridForCausalLM'", "auto_map", "never run")


def test_a_key_that_is_not_implemented_is_refused(folder: Path) -> None:
    rewrite_config(folder, {**read_config(folder), "normalization_function": "layernorm"})
    refused(UnsupportedModelError, folder, "normalization_function", "'layernorm'", "'rmsnorm'")


def test_a_missing_shard_is_refused(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refused(WeightsError, sharded, shard.name, "missing", "model.", "Download all")


def test_a_missing_index_is_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    refused(WeightsError, sharded, "model.safetensors.index.json", "download the index")


def test_an_index_of_another_release_is_refused(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    name = next(name for name, file in index["weight_map"].items() if file == files[0])
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], name: files[1]}}))
    refused(WeightsError, sharded, name, files[0], files[1])
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], "model.ghost": files[1]}}))
    refused(WeightsError, sharded, "model.ghost", files[1])
    path.write_text(json.dumps({"weight_map": []}))
    refused(WeightsError, sharded, "weight_map")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "model.bin"])
def test_an_index_may_not_point_elsewhere(sharded: Path, name: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    refused(UnsafeContentError, sharded, name)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused(folder: Path, keep: float) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * keep)])
    refused(WeightsError, folder, "model.safetensors", "truncated", "download the file again")


def test_a_truncated_file_names_the_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    refused(WeightsError, folder, "'model.norm.weight'")


def test_a_git_lfs_pointer_is_recognised(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(WeightsError, folder, "Git LFS", "git lfs pull")


def write_header(folder: Path, header: object, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{ ", ["JSON"]),
        (b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": {}}', ["twice"]),
        ([], ["header"]),
        ({"a": 3}, ["'a'"]),
        ({"a": {"dtype": "F12", "shape": [1], "data_offsets": [0, 4]}}, ["'a'", "F12"]),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, ["'a'"]),
        ({"a": {"dtype": "F32", "shape": [2**70], "data_offsets": [0, 4]}}, ["'a'"]),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, ["'a'", "4 bytes"]),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, ["'a'", "byte 4"]),
        (
            {
                "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            },
            ["'b'", "overlap"],
        ),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, ["4 bytes after"]),
    ],
)
def test_a_bad_header_is_refused(folder: Path, header: object, words: list[str]) -> None:
    write_header(folder, header, bytes(8))
    refused(WeightsError, folder, "model.safetensors", *words)


def test_a_folder_with_only_pickles_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    refused(UnsafeContentError, folder, "pytorch_model.bin", "safetensors")


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(WeightsError, folder, "safetensors", "--load-format dummy")


# --- tensors that are not the model's ---

Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(LAYER + "self_attn.k_proj.weight"), ["1 missing", LAYER + "self_attn.k_proj.weight"]),
        (lambda t: t.pop("lm_head.weight"), ["1 missing", "lm_head.weight"]),
        (lambda t: t.update({LAYER + "self_attn.g_proj.weight": torch.ones(4, 64)}), ["1 unexpected", "self_attn.g_proj.weight"]),
        (lambda t: t.update({"model.norm.weight": torch.ones(65)}), ["wrong shape", "model.norm.weight", "[65]", "[64]"]),
        (
            lambda t: t.update({"model.layers.0.mamba.conv1d.weight": torch.ones(192, 4)}),
            ["wrong shape", "conv1d.weight", "[192, 4]", "[192, 1, 4]"],
        ),
        (
            lambda t: t.update({LAYER + "block_sparse_moe.input_linear.weight": torch.ones(7, 48, 64)}),
            ["wrong shape", "input_linear.weight", "[7, 48, 64]", "[8, 48, 64]"],
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}), ["model.norm.weight", "I32"]),
    ],
)
def test_i31_weights_that_do_not_fit_are_refused(folder: Path, change: Change, words: list[str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    rewrite_tensors(folder, tensors)
    refused(WeightsError, folder, *words)


def test_i31_one_missing_expert_is_named(tmp_path: Path) -> None:
    save(make("qwen3_5_moe"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    rewrite_tensors(tmp_path, tensors)
    refused(WeightsError, tmp_path, "1 missing: model.layers.2.mlp.experts.5.up_proj.weight.")


def test_i31_a_parameter_in_two_spellings_is_refused(tmp_path: Path) -> None:
    save(make("qwen3_5_moe"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.mlp.experts.down_proj"] = torch.ones(8, 64, 24)
    rewrite_tensors(tmp_path, tensors)
    refused(WeightsError, tmp_path, "1 unexpected: model.layers.2.mlp.experts.down_proj")


def test_i31_a_layer_too_many_is_refused(folder: Path) -> None:
    config = read_config(folder)
    assert isinstance(config["layer_types"], list)
    rewrite_config(folder, {**config, "num_hidden_layers": 3, "layer_types": config["layer_types"][:3]})
    refused(WeightsError, folder, "unexpected", "model.layers.3.")


def test_a_tied_head_on_disk_is_left_alone(tmp_path: Path) -> None:
    save(make("qwen3"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite_tensors(tmp_path, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert open_folder(tmp_path).lm_head is None


#: A model, a tensor of it that says again what another holds (and that other, where it is not stored), what the refusal names.
REPEATED = [
    ("qwen3", "lm_head.weight", "model.embed_tokens.weight", ["tie_word_embeddings", "model.embed_tokens.weight"]),
    ("gemma3", "lm_head.weight", "model.embed_tokens.weight", ["tie_word_embeddings"]),
    ("mamba", "lm_head.weight", "backbone.embeddings.weight", []),
    (
        "zamba2",
        "model.layers.4.shared_transformer.feed_forward.down_proj.weight",
        "model.layers.1.shared_transformer.feed_forward.down_proj.weight",
        ["model.layers.1.shared_transformer.feed_forward.down_proj.weight"],
    ),
    ("minimax", "model.layers.1.self_attn.slope_rate", None, ["config.json"]),
]


@pytest.mark.parametrize(("name", "repeated", "original", "words"), REPEATED)
def test_what_repeats_another_tensor_is_left_alone_or_refused(
    name: str, repeated: str, original: str | None, words: list[str], tmp_path: Path
) -> None:
    save(make(name), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if original is not None:
        tensors[repeated] = tensors[original].clone()
        config = read_config(tmp_path)
        rewrite_config(tmp_path, {**config, "tie_word_embeddings": True})
        if name == "mamba":
            tensors["lm_head.weight"] = tensors[original].clone()
    rewrite_tensors(tmp_path, tensors)
    open_folder(tmp_path)
    tensors[repeated].flatten()[-1] += 0.25
    rewrite_tensors(tmp_path, tensors)
    refused(WeightsError, tmp_path, repeated, *words)


def test_a_missing_tensor_is_named_as_the_file_spells_its_like(tmp_path: Path) -> None:
    save_released(make("qwen3_5_moe"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.language_model.layers.2.mlp.experts.gate_up_proj"]
    rewrite_tensors(tmp_path, tensors)
    refused(WeightsError, tmp_path, "1 missing: model.language_model.layers.2.mlp.experts.gate_up_proj.")


def test_one_file_counts_before_an_index_that_does_not_name_it(sharded: Path) -> None:
    """As for transformers. An index may name it, too: then that is one of its shards."""
    tensors = {name: tensor for path in sharded.glob("*.safetensors") for name, tensor in load_file(path).items()}
    tensors["model.norm.weight"] += 1.0
    rewrite_tensors(sharded, tensors)
    assert torch.equal(open_folder(sharded).norm.weight, tensors["model.norm.weight"])


def test_the_plan_reads_no_data(folder: Path) -> None:
    """`check-model` needs headers only: a file whose data are zeros has the same plan."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    data = 8 + int.from_bytes(raw[:8], "little")
    path.write_bytes(raw[:data] + bytes(len(raw) - data))
    found = resolve(str(folder))
    matched = plan_weights(build_model(found.config, OPS, torch.float32), found)
    assert {piece.tensor for piece in matched.pieces} == set(matched.entries)


# --- loading ---


def test_shards_load_like_one_file(sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    ids = list(range(20))
    with torch.no_grad():
        expected = make("qwen3")(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(Driver(open_folder(sharded)).step([("a", ids)])[0], expected, atol=1e-4, rtol=1e-4)


def test_weights_are_mapped_not_copied_where_they_can_be(saved: Path) -> None:
    found = resolve(str(saved))
    model = build_model(found.config, OPS, torch.float32)
    fractions: list[float] = []
    report = load_weights(model, found, CPU, progress=fractions.append)
    # Granite's tensors lie on disk as they are used.
    assert report.mapped_nbytes == report.weights_nbytes == sum(p.numel() * 4 for p in model.parameters())
    assert report.num_parameters == sum(p.numel() for p in model.parameters())
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert str(saved / "model.safetensors") in mapped


def test_another_dtype_is_cast_and_states_stay_in_fp32(saved: Path) -> None:
    exact, cast = open_folder(saved), open_folder(saved, "bfloat16")
    for name, parameter in cast.named_parameters():
        wanted = torch.float32 if name.endswith(("A_log", "dt_bias", ".D")) else torch.bfloat16
        assert parameter.dtype == wanted, name
        assert torch.equal(parameter, exact.get_parameter(name).to(wanted)), name


@pytest.mark.parametrize(
    ("config", "wanted", "dtype"),
    [
        ({"dtype": "float16"}, "auto", torch.float16),
        ({"torch_dtype": "float32"}, "auto", torch.float32),
        ({"text_config": {"dtype": "float32"}, "dtype": "bfloat16"}, "auto", torch.float32),
        ({}, "auto", torch.bfloat16),
        ({"dtype": "float16"}, "float32", torch.float32),
    ],
)
def test_auto_dtype_is_the_configs_own(tmp_path: Path, config: dict[str, object], wanted: str, dtype: torch.dtype) -> None:
    rewrite_config(tmp_path, config)
    assert resolve(str(tmp_path)).dtype(wanted) == dtype


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    rewrite_config(tmp_path, {"dtype": "float4"})
    with pytest.raises(UnsupportedModelError, match=r"float4.*--dtype"):
        resolve(str(tmp_path)).dtype("auto")


def test_the_demo_loads() -> None:
    loaded = load(EngineSettings(model="demo"), OPS, CPU)
    logits = Driver(loaded.model).step([("a", [5, 6, 7])])[0]
    assert logits.shape == (3, loaded.model.info.vocab_size)
    assert logits.isfinite().all()


def test_what_is_not_run_is_noted(folder: Path) -> None:
    rewrite_config(folder, {**read_config(folder), "auto_map": {"AutoModelForCausalLM": "modeling.Model"}})
    (folder / "pytorch_model.bin").write_bytes(b"")
    (folder / "modeling.py").write_text("raise SystemExit")
    auto_map, pickles = resolve(str(folder)).notes()
    assert "auto_map" in auto_map
    assert "pytorch_model.bin" in pickles
    open_folder(folder)


# --- where models come from ---


@pytest.mark.parametrize("source", ["./nowhere", "nowhere", "a/b/c", "/nowhere/at/all", "../no-model-is-here"])
def test_a_source_that_is_nothing_is_refused(source: str) -> None:
    with pytest.raises(UsageError, match="repo id"):
        resolve(source)


def test_a_config_alone_runs_only_with_random_weights(saved: Path) -> None:
    path = str(saved / "config.json")
    with pytest.raises(UsageError, match="--load-format dummy"):
        resolve(path)
    loaded = load(EngineSettings(model=path, load_format="dummy"), OPS, CPU)
    assert not loaded.folder.has_weights
    with pytest.raises(UsageError, match="folder"):
        resolve(str(saved / "model.safetensors"))


def test_a_repo_id_fetches_data_and_no_code(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def fetch(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve("owner/name-1.5B").path == saved
    assert resolve("owner/name", load_format="dummy").path == saved
    assert [repo_id for repo_id, _ in asked] == ["owner/name-1.5B", "owner/name"]
    assert "*.safetensors" in asked[0][1]
    assert "*.safetensors" not in asked[1][1]
    assert not any(pattern.endswith((".py", ".bin")) for _, patterns in asked for pattern in patterns)


def test_a_repo_that_cannot_be_fetched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(repo_id: str, *, allow_patterns: list[str]) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(UsageError, match=r"owner/name.*HF_HUB_OFFLINE"):
        resolve("owner/name")


# --- random weights ---


@pytest.mark.parametrize("name", ["qwen3_next", "granite_moe", "falcon_h1_norm", "lfm2"])
def test_random_weights_run_and_repeat(name: str, tmp_path: Path) -> None:
    found = resolve(str(save(make(name), tmp_path)))

    def logits(seed: int) -> Tensor:
        model = build_model(found.config, OPS, torch.float32)
        load_dummy(model, CPU, seed=seed)
        return Driver(model).run_chunks("a", list(range(VOCAB_SIZE // 2)), 16)

    first = logits(seed=1)
    assert first.isfinite().all()
    assert first.std() > 0
    assert torch.equal(first, logits(seed=1))
    assert not torch.equal(first, logits(seed=2))


def test_random_norms_are_neutral_and_decays_in_range(tmp_path: Path) -> None:
    found = resolve(str(save(make("qwen3_next"), tmp_path)))
    model = build_model(found.config, OPS, torch.bfloat16)
    load_dummy(model, CPU, seed=0)
    weights = dict(model.named_parameters())
    layer = "layers.0.mixers.gated_delta.mixer."
    assert (weights["norm.weight"] == 0).all()  # zero-centred: the factor is 1 + weight
    assert (weights[layer + "norm.weight"] == 1).all()
    assert ((weights[layer + "A_log"] >= 0) & (weights[layer + "A_log"] <= 2.8)).all()
    step = torch.nn.functional.softplus(weights[layer + "dt_bias"])
    assert ((step > 0.9e-3) & (step < 0.11)).all()
    gate_up = weights["layers.0.mlp.gate_up"]
    assert not torch.equal(gate_up[0], gate_up[1])
    assert 0.015 < gate_up.float().std() < 0.025
