"""Quantised weights: the numbers they stand for, every architecture's names, and what is refused.

References: transformers' own dequantisation where it has one, else the definition written out number by number.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hybridserve.backends.select import select
from hybridserve.check.checker import Options, check_model
from hybridserve.check.memory import check_memory
from hybridserve.check.report import Report
from hybridserve.check.target import Target
from hybridserve.config import EngineSettings
from hybridserve.engine.core import EngineCore
from hybridserve.errors import UnsupportedModelError, WeightsError
from hybridserve.mixers.host_table import HostTable
from hybridserve.models import CausalLM, build_model, load_weights, plan_weights, resolve
from hybridserve.models.quantisation import read_quantisation
from hybridserve.models.quantised import Mxfp4, ScaledFloat
from hybridserve.models.weights import Piece
from tests.checkpoints import TINY, make, read_config, rewrite_config, rewrite_tensors, save, save_released
from tests.driver import Driver

CPU = torch.device("cpu")
OPS = select(CPU, torch.float32, ["reference"]).ops
BLOCK = (16, 12)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
NAMED = {"architecture": "LlamaForCausalLM"}


def slow(values: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Number by number. values: fp8 [..., R, C]; scale: [..., r, c]. Returns fp32 as values."""
    out = torch.empty(values.shape)
    lead = values.shape[:-2]
    for at in torch.cartesian_prod(*(torch.arange(n) for n in lead)).view(-1, len(lead)).tolist() if lead else [()]:
        for row in range(values.shape[-2]):
            for column in range(values.shape[-1]):
                one = scale[(*at, row // block[0], column // block[1])].float()
                out[(*at, row, column)] = values[(*at, row, column)].float() * one
    return out


def random_fp8(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 30).to(dtype)


def random_scale(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 0.01 + 1e-4


# --- arithmetic ---


@pytest.mark.parametrize(
    "shape",
    [(32, 24), (33, 25), (1, 1), (5, 7), (16, 12), (15, 100), (3, 20, 30), (2, 2, 17, 13)],
    ids=lambda s: "x".join(map(str, s)),
)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_blocks_are_scaled_number_by_number(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = random_fp8(*shape, dtype=dtype)
    scale = random_scale(*shape[:-2], math.ceil(shape[-2] / BLOCK[0]), math.ceil(shape[-1] / BLOCK[1]))
    assert torch.equal(ScaledFloat(BLOCK).decode(values, scale, torch.float32), slow(values, scale, BLOCK))


@pytest.mark.parametrize("shape", [(256, 384), (4, 128, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_blocks_equal_transformers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values, scale = random_fp8(*shape), random_scale(*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    expected = Fp8Dequantize(None)._dequantize_one(values, scale, output_dtype=dtype)
    assert torch.equal(ScaledFloat((128, 128)).decode(values, scale, dtype), expected)


def test_every_fp8_number_is_its_own_value() -> None:
    """All 256 codes, NaN included, in both places of a pair."""
    codes = torch.arange(256, dtype=torch.uint8)
    for values in (torch.stack((codes, codes.flip(0)), 1), torch.stack((codes, codes, codes), 1)):
        eight = values.view(torch.float8_e4m3fn)
        decoded = ScaledFloat(None).decode(eight, torch.tensor([1.0]), torch.float32)
        assert torch.equal(decoded.nan_to_num(777.0), eight.float().nan_to_num(777.0))


def test_scales_of_powers_of_two_are_exponents() -> None:
    values, exponents = random_fp8(32, 24), torch.tensor([[120, 127], [130, 1]], dtype=torch.uint8)
    expected = slow(values, torch.exp2(exponents.double() - 127), BLOCK)
    for scale in (exponents, exponents.view(torch.float8_e8m0fnu)):
        assert torch.equal(ScaledFloat(BLOCK).decode(values, scale, torch.float32), expected)


@pytest.mark.parametrize("scale_shape", [(), (1,), (3, 1, 1), (3,), (3, 5, 1), (3, 5)])
def test_one_scale_for_a_tensor_an_expert_or_a_row(scale_shape: tuple[int, ...]) -> None:
    values, scale = random_fp8(3, 5, 8), random_scale(*scale_shape)
    wide = scale.view(*scale.shape, *(1,) * (3 - scale.dim())) if scale.numel() > 1 else scale
    assert torch.equal(ScaledFloat(None).decode(values, scale, torch.float32), values.float() * wide)


def test_a_large_matrix_is_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts end in the middle of a block."""
    values, scale = random_fp8(50, 24), random_scale(4, 2)
    monkeypatch.setattr("hybridserve.models.quantised._PART", 7 * 24)
    assert torch.equal(ScaledFloat(BLOCK).decode(values, scale, torch.float32), slow(values, scale, BLOCK))


def random_mxfp4(num_experts: int, rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (num_experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(115, 127, blocks.shape[:-1], dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_equals_transformers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, scales = random_mxfp4(3, 10, 96)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(Mxfp4().decode(blocks, scales, dtype), expected)
    monkeypatch.setattr("hybridserve.models.quantised._PART", 96 * 4)
    assert torch.equal(Mxfp4().decode(blocks, scales, dtype), expected)


def test_mxfp4_is_what_its_format_says() -> None:
    """Two numbers a byte, the low half first: sign, two bits of exponent (bias 1), one of mantissa; times 2^(scale - 127)."""
    blocks, scales = torch.arange(16, dtype=torch.uint8).view(1, 1, 1, 16) * 17, torch.tensor([[[125]]], dtype=torch.uint8)
    decoded = Mxfp4().decode(blocks, scales, torch.float32)
    for code in range(16):
        exponent, mantissa = (code >> 1) & 3, code & 1
        value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
        expected = (-value if code & 8 else value) / 4
        assert decoded[0, 2 * code, 0] == decoded[0, 2 * code + 1, 0] == expected


# --- whole models ---


def quantised(tensors: Mapping[str, Tensor], block: tuple[int, int] = BLOCK) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Matrices that releases store in 8 bits, with one scale for each block; and what these stand for."""
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or not name.endswith(
            ("proj.weight", "_proj", "w1.weight", "w2.weight", "w3.weight", "linear.weight")
        ):
            stored[name] = meant[name] = tensor
            continue
        rows, columns = tensor.shape[-2:]
        height, width = min(block[0], rows), min(block[1], columns)
        edges = (0, -columns % width, 0, -rows % height)
        padded = torch.nn.functional.pad(tensor.float(), edges)
        tiles = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))  # [..., r, block rows, c, block columns]
        scale = tiles.abs().amax((-3, -1)) / 448 + 1e-12
        wide = scale.repeat_interleave(height, -2).repeat_interleave(width, -1)[..., :rows, :columns]
        stored[name] = (tensor.float() / wide).to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scale
        meant[name] = (stored[name].float() * wide).to(tensor.dtype)
    return stored, meant


def write(folder: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor], method: Mapping[str, object] | None) -> Path:
    folder.mkdir()
    rewrite_config(folder, {**config, **({} if method is None else {"quantization_config": method})})
    rewrite_tensors(folder, tensors)
    return folder


def open_folder(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    found = resolve(str(folder))
    model = build_model(found.config, OPS, dtype)
    load_weights(model, found, CPU)
    return model


def assert_same(one: CausalLM, other: CausalLM) -> None:
    for name, parameter in one.named_parameters():
        assert parameter.dtype == other.get_parameter(name).dtype, name
        assert torch.equal(parameter, other.get_parameter(name)), name


#: One of each way of naming; the others under `slow`.
TYPICAL = (
    *("qwen3_next", "qwen3_5_moe_vision", "granite_moe", "lara_mini", "nemotron_h", "zamba2", "minimax", "gpt_oss"),
    *("bailing_moe_v3", "kimi_linear", "deepseek_v32", "glm5_next", "qwen4_exp"),
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in TYPICAL else pytest.mark.slow) for name in TINY])
def test_every_architecture_loads_in_8_bits(name: str, tmp_path: Path) -> None:
    """As today's transformers names its tensors, and as releases do: experts one by one or together, parts fused or not."""
    model = make(name)
    for spelling, write_folder in (("saved", save), ("released", save_released)):
        folder = write_folder(model, tmp_path / spelling)
        stored, meant = quantised(load_file(folder / "model.safetensors"))
        assert any(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values())
        config = read_config(folder)
        eight = open_folder(write(folder / "eight", config, stored, FP8), torch.bfloat16)
        assert_same(eight, open_folder(write(folder / "plain", config, meant, None), torch.bfloat16))


def test_weights_and_scales_may_lie_in_different_shards(tmp_path: Path) -> None:
    save(make("qwen3_5_moe"), tmp_path)
    stored, meant = quantised(load_file(tmp_path / "model.safetensors"))
    config = read_config(tmp_path)
    folder = write(tmp_path / "eight", config, stored, FP8)
    (folder / "model.safetensors").unlink()
    parts: list[dict[str, Tensor]] = [{}, {}, {}]
    for i, (name, tensor) in enumerate(sorted(stored.items())):
        parts[i % 3][name] = tensor
    files = [f"model-{i}.safetensors" for i in range(3)]
    for file, part in zip(files, parts, strict=True):
        rewrite_tensors(folder, part)
        (folder / "model.safetensors").rename(folder / file)
    index = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    rewrite_config(folder, {**config, "quantization_config": FP8})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_same(open_folder(folder), open_folder(write(tmp_path / "plain", config, meant, None)))


@pytest.mark.parametrize(
    ("method", "suffix"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, "_scale"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}, "_scale"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}, "ignore": ["lm_head"]}, "_scale"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "quantization_status": "compressed",
                "ignore": ["lm_head"],
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
                        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
                    }
                },
            },
            "_scale",
        ),
    ],
    ids=["fp8", "fbgemm", "modelopt", "compressed"],
)
def test_other_makers_of_8_bits(method: dict[str, object], suffix: str, tmp_path: Path) -> None:
    """One scale a row, with the ranges of activations beside it."""
    save(make("qwen3"), tmp_path)
    stored, meant = quantised(load_file(tmp_path / "model.safetensors"), (1, 10**6))
    stored = {name.replace("_scale_inv", suffix): tensor for name, tensor in stored.items()}
    ranges = {name.replace("weight_scale", "input_scale"): torch.ones(1) for name in stored if name.endswith("weight_scale")}
    config = read_config(tmp_path)
    eight = open_folder(write(tmp_path / "eight", config, {**stored, **ranges}, method))
    assert_same(eight, open_folder(write(tmp_path / "plain", config, meant, None)))


def test_a_wrapped_config_may_say_it_inside(tmp_path: Path) -> None:
    save(make("qwen3_5_vision"), tmp_path)
    stored, meant = quantised(load_file(tmp_path / "model.safetensors"))
    config = read_config(tmp_path)
    text = config["text_config"]
    assert isinstance(text, dict)
    inside = {**config, "text_config": {**text, "quantization_config": FP8}}
    folder = write(tmp_path / "eight", inside, stored, None)
    assert any("quantised" in note for note in resolve(str(folder)).notes())
    eight = open_folder(folder)
    assert_same(eight, open_folder(write(tmp_path / "plain", config, meant, None)))


def test_experts_of_gpt_oss_in_4_bits(tmp_path: Path) -> None:
    """As released: blocks and scales of both projections, all else in 16 bits."""
    config = tiny_gpt_oss(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stored, meant = {}, {}
    for seed, (name, tensor) in enumerate(tensors.items()):
        if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
            stored[name] = meant[name] = tensor.bfloat16()
            continue
        num_experts, columns, rows = tensor.shape
        blocks, scales = random_mxfp4(num_experts, rows, columns, seed)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    four = open_folder(write(tmp_path / "four", config, stored, method), torch.bfloat16)
    assert_same(four, open_folder(write(tmp_path / "plain", config, meant, None), torch.bfloat16))
    assert_logits_equal_transformers(tmp_path / "four")
    broken = dict(stored)
    name = next(name for name in broken if name.endswith("_scales"))
    del broken[name]
    refused(write(tmp_path / "broken", config, broken, method), name, "missing", "model.safetensors")
    orphan = {key: value for key, value in stored.items() if key != name.replace("_scales", "_blocks")}
    refused(write(tmp_path / "orphan", config, orphan, method), name, "scale of nothing", "model.safetensors")
    short = {**stored, name: stored[name][:, :-1]}
    refused(write(tmp_path / "short", config, short, method), name, "and [experts, rows, groups]", "model.safetensors")


def assert_logits_equal_transformers(folder: Path) -> None:
    """transformers opens the same folder, and decodes for itself."""
    theirs = tf.GptOssForCausalLM.from_pretrained(
        folder, quantization_config=tf.Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    ids = list(range(40))
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    logits = Driver(open_folder(folder)).step([("a", ids)])[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def tiny_gpt_oss(folder: Path) -> dict[str, object]:
    """Sizes of which 32 is a divisor, as 4 bits need. Returns its config."""
    model = make("gpt_oss")
    model.config.intermediate_size = 32
    torch.manual_seed(0)
    save(type(model)(model.config), folder)
    return read_config(folder)


# --- the table that stays on the host ---


@pytest.mark.parametrize("whole", [True, False], ids=["one scale", "one a shard"])
def test_a_table_in_8_bits_stays_as_it_is(whole: bool, tmp_path: Path) -> None:
    """Mapped and not decoded; the rows that are gathered are scaled."""
    save_released(make("qwen4_exp"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shards = [name for name in tensors if ".ngram_embedding.shard_" in name]
    assert shards
    stored, meant = dict(tensors), dict(tensors)
    for i, name in enumerate(shards):
        scale = torch.tensor([0.5 if whole else 0.25 * (i + 1)])
        stored[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        meant[name] = stored[name].float() * scale
        stored[(name.partition(".shard_")[0] + ".weight_scale") if whole else f"{name}_scale"] = scale
    config, method = read_config(tmp_path), {**FP8, "modules_to_convert": ["ngram_embedding"]}
    folder = write(tmp_path / "eight", config, stored, method)
    eight, plain = open_folder(folder), open_folder(write(tmp_path / "plain", config, meant, None))
    for name, module in eight.named_modules():
        if isinstance(module, HostTable):
            other = plain.get_submodule(name)
            assert all(part.dtype == torch.float8_e4m3fn for part in module.parts)
            ids = torch.arange(sum(len(part) for part in module.parts))
            assert torch.equal(module(ids), other(ids))
    misshapen = {**stored, next(iter(set(stored) - set(tensors))): torch.ones(stored[shards[0]].shape[0], 1)}
    refused(write(tmp_path / "rows", config, misshapen, {**method, "weight_block_size": None}), "scale", "model.safetensors")


# --- refusals ---


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(WeightsError) as caught:
        open_folder(folder)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], dict[str, Tensor]]:
    folder = save(make("qwen3"), tmp_path_factory.mktemp("qwen"))
    return read_config(folder), quantised(load_file(folder / "model.safetensors"))[0]


WEIGHT = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{WEIGHT}_scale_inv": None}, [WEIGHT, "its scale is nowhere", "Download all shards"]),
        ({f"{WEIGHT}_scale_inv": torch.ones(2, 2)}, [f"{WEIGHT}_scale_inv", "[2, 2]"]),
        ({f"{WEIGHT}_scale_inv": torch.ones(1, dtype=torch.int32)}, [f"{WEIGHT}_scale_inv", "I32"]),
        ({WEIGHT: torch.ones(48, 64)}, [f"{WEIGHT}_scale_inv", "scale of nothing", "not stored in 8 bits"]),
        ({WEIGHT: None}, [f"{WEIGHT}_scale_inv", "scale of nothing"]),
        ({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}, ["model.norm.weight", "scale"]),
        ({"model.layers.1.self_attn.x_proj.weight_scale_inv": torch.ones(1)}, ["x_proj.weight_scale_inv", "scale of nothing"]),
        ({"model.layers.1.self_attn.x_scale": torch.ones(1)}, ["unexpected", "x_scale"]),
    ],
)
def test_i31_scales_that_do_not_fit_are_refused(
    qwen: tuple[dict[str, object], dict[str, Tensor]], changes: Mapping[str, Tensor | None], words: list[str], tmp_path: Path
) -> None:
    config, stored = qwen
    tensors = {name: tensor for name, tensor in {**stored, **changes}.items() if tensor is not None}
    file = [] if words[0] == "unexpected" else ["model.safetensors"]
    refused(write(tmp_path / "broken", config, tensors, FP8), *words, *file)


def test_8_bits_that_the_config_does_not_speak_of_are_refused(
    qwen: tuple[dict[str, object], dict[str, Tensor]], tmp_path: Path
) -> None:
    config, stored = qwen
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith("_scale_inv")}
    refused(
        write(tmp_path / "bare", config, tensors, None), "F8_E4M3", "no quantization_config", "model.safetensors", "proj.weight"
    )
    refused(write(tmp_path / "other", config, tensors, {"quant_method": "mxfp4"}), "F8_E4M3", "mxfp4")


def test_a_head_in_8_bits_beside_a_tie_is_no_copy_of_the_embedding(
    qwen: tuple[dict[str, object], dict[str, Tensor]], tmp_path: Path
) -> None:
    config, stored = qwen
    head = {"lm_head.weight": random_fp8(4, 4), "lm_head.weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(WeightsError, match=r"lm_head\.weight .* differs from model\.embed_tokens\.weight"):
        open_folder(write(tmp_path / "head", config, {**stored, **head}, FP8))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, ["'awq'", "'fp8'", "'mxfp4'", "not quantised"]),
        ({"quant_method": "gptq", "bits": 4}, ["'gptq'"]),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["'bitsandbytes'"]),
        ({"bits": 4}, ["'unnamed'"]),
        ({**FP8, "expert_dtype": "fp4"}, ["quantization_config.expert_dtype", "'fp4'"]),
        ({**FP8, "rotation": "hadamard"}, ["quantization_config.rotation", "'hadamard'"]),
        ({**FP8, "weight_block_size": [128]}, ["quantization_config.weight_block_size"]),
        ({**FP8, "weight_block_size": [0, 128]}, ["quantization_config.weight_block_size", "1 or more"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ["quantization_config.quant_algo", "'NVFP4'"]),
        ({"quant_method": "modelopt"}, ["quantization_config.quant_algo"]),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, ["quantization_config.format", "'pack-quantized'"]),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}},
            ["quantization_config.config_groups.g.weights.num_bits", "4"],
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, ["quantization_config.config_groups", "0 ways"]),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"strategy": "group"}}}},
            ["quantization_config.config_groups.g.weights.strategy", "'group'"],
        ),
    ],
)
def test_other_quantisations_are_refused_by_name(values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_quantisation({"quantization_config": values}, **NAMED)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_refusal_may_be_overruled_by_name() -> None:
    values = {"quantization_config": {**FP8, "rotation": "none"}}
    assert read_quantisation(values, **NAMED, ignore_keys=("quantization_config.rotation",)) == ScaledFloat(BLOCK)


# --- memory ---


def anonymous_nbytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("RssAnon"))) * 1024


def test_decoding_holds_one_tensor_beside_the_weights(
    qwen: tuple[dict[str, object], dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is decoded is in its place before the next tensor is read: nothing is left over, and the most at any time is
    the weights so far, the tensor being decoded and one part of it in fp32."""
    config, _ = qwen
    wide = {**config, "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 3}
    model = build_model(wide, OPS, torch.bfloat16)
    tensors = {
        name: torch.zeros(shape, dtype=torch.bfloat16)
        for name, shape in {piece.tensor: piece.shape for piece in plain_pieces(model)}.items()
    }
    stored = {
        name: tensor.to(torch.float8_e4m3fn) if name.endswith("proj.weight") else tensor for name, tensor in tensors.items()
    }
    stored |= {f"{name}_scale_inv": torch.ones(()) for name, one in stored.items() if one.dtype == torch.float8_e4m3fn}
    found = resolve(str(write(tmp_path / "eight", wide, stored, FP8)))
    largest = max(tensor.nbytes for tensor in tensors.values())
    del tensors, stored
    model = build_model(found.config, OPS, torch.bfloat16)
    monkeypatch.setattr("hybridserve.models.quantised._PART", 2**18)
    before, held = anonymous_nbytes(), []
    report = load_weights(model, found, CPU, progress=lambda done: held.append(anonymous_nbytes() - before))
    slack = 24 * 2**20
    assert report.weights_nbytes > 5 * largest
    assert max(held) < report.weights_nbytes + largest + slack
    assert anonymous_nbytes() - before < report.weights_nbytes + slack


def plain_pieces(model: CausalLM) -> list[Piece]:
    """Every tensor of a release that isn't quantised, found by asking for each parameter."""
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    ways = [model.weight_map._find(name, shape, "model.") for name, shape in wanted.items()]
    return [piece for way in ways for piece in next(iter(way.values()))]


def test_the_plan_counts_what_loading_reads(qwen: tuple[dict[str, object], dict[str, Tensor]], tmp_path: Path) -> None:
    config, stored = qwen
    found = resolve(str(write(tmp_path / "eight", config, stored, FP8)))
    matched = plan_weights(build_model(found.config, OPS, torch.float32), found)
    names = {piece.tensor for piece in matched.pieces}
    assert sum(matched.nbytes(name) for name in names) == sum(tensor.nbytes for tensor in stored.values())
    assert set(matched.quantised()) == {name for name in stored if f"{name}_scale_inv" in stored}


# --- what check-model tells ---


def checked(folder: Path, **settings: object) -> Report:
    return check_model(Options(EngineSettings(model=str(folder), **settings), device="cpu", memory_nbytes=2**30))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen4_exp"])
def test_check_model_counts_what_the_engine_holds(name: str, tmp_path: Path) -> None:
    """Decoded weights in the model's dtype; a table in 8 bits as it lies on disk."""
    save_released(make(name), tmp_path)
    stored, _ = quantised(load_file(tmp_path / "model.safetensors"))
    for shard in [one for one in stored if ".ngram_embedding.shard_" in one]:
        stored |= {shard: stored[shard].to(torch.float8_e4m3fn), f"{shard}_scale": torch.ones(1)}
    folder = write(tmp_path / "eight", {**read_config(tmp_path), "dtype": "bfloat16"}, stored, FP8)
    sizes: dict[str, object] = {"kv_cache_memory": 2**20, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 100}
    report = checked(folder, **sizes)
    assert not [one for one in report.checks if one.status == "FAIL" and not one.id.startswith("chat")]
    info = EngineCore(EngineSettings(model=str(folder), device="cpu", **sizes)).info
    assert report.memory is not None
    assert report.memory.weights_nbytes == info.weights_nbytes
    assert report.memory.cache_nbytes == info.superpage_nbytes * info.num_superpages
    tables = sum(tensor.nbytes for shard, tensor in stored.items() if ".ngram_embedding.shard_" in shard and tensor.dim() == 2)
    assert report.memory.host_nbytes == tables
    told = {one.id: one.detail for one in report.checks}
    count = sum(
        f"{one}_scale_inv" in stored or f"{one}_scale" in stored
        for one in stored
        if not one.startswith(("mtp.", "model.visual."))
    )
    assert f"fp8 in blocks of 16 x 12: {count} x F8_E4M3" in told["tensors.quantised"]
    assert "become bfloat16 on load" in told["tensors.quantised"]
    assert "fp8 in blocks of 16 x 12" in told["numerics.quantisation"]


def test_tables_of_the_host_take_none_of_the_devices_memory() -> None:
    """A config alone: the plan for a GPU leaves the n-gram table out, the one for random weights in host memory does not."""
    config = {**make("qwen4_exp").config.to_dict(), "architectures": ["Qwen4ExpForConditionalGeneration"]}
    model = build_model(config, OPS, torch.bfloat16)
    tables = sum(p.nbytes for name, p in model.named_parameters() if ".table." in name)
    settings = EngineSettings(model="x", load_format="dummy")
    gpu = Target("cuda:h200", torch.device("cuda"), 2**30, False, "given")
    _, on_gpu = check_memory(model, settings, gpu)
    _, on_cpu = check_memory(model, settings, Target("cpu", CPU, 2**30, True, "given"))
    assert on_gpu.weights_nbytes == on_cpu.weights_nbytes == sum(p.nbytes for p in model.parameters())
    assert on_gpu.host_nbytes == tables > 0
    fits = Target("cuda:h200", torch.device("cuda"), on_gpu.weights_nbytes - tables // 2, False, "given")
    findings, _ = check_memory(model, settings, fits)
    assert findings[0].status == "PASS"
    assert "stay in files" in findings[0].detail
