"""Configs as published, and as tools leave them: they load, or are refused by the name of what stands in the way (I37)."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridserve.backends.select import select
from hybridserve.errors import UnsupportedModelError, WeightsError
from hybridserve.models import build_model, resolve
from hybridserve.models.config_keys import HARMLESS

OPS = select(torch.device("cpu"), torch.bfloat16, ["reference"]).ops
CONFIGS: Mapping[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
LOADS = [name for name, entry in CONFIGS.items() if entry["gives"] == "loads"]
QUANTISED = [name for name, entry in CONFIGS.items() if entry["gives"] != "loads"]


def config_of(name: str, tmp_path: Path) -> dict[str, object]:
    """Through the reader of files, as a user gives it."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]["config"]))
    return resolve(str(path), load_format="dummy").config


def build(config: Mapping[str, object], *ignored: str) -> object:
    return build_model(config, OPS, torch.bfloat16, ignore_keys=ignored)


def small(name: str = "Qwen3-0.6B", **values: object) -> dict[str, object]:
    """A published config with two layers, and what the test changes."""
    return {**CONFIGS[name]["config"], "num_hidden_layers": 2, **values}


def refusal_of(config: Mapping[str, object]) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        build(config)
    return str(caught.value)


@pytest.mark.parametrize("name", LOADS)
def test_i37_a_published_config_loads(name: str, tmp_path: Path) -> None:
    build(config_of(name, tmp_path))


@pytest.mark.parametrize("name", QUANTISED)
def test_i37_a_form_of_weights_that_is_not_read_is_named_with_what_to_take(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    error = refusal_of(config)
    assert CONFIGS[name]["gives"] in error
    assert "Take the release" in error
    assert "--ignore-config-keys" not in error
    keys = ("quantization", *(f"quantization_config.{key}" for key in ("quant_algo", "quant_method", "format")))
    with pytest.raises(UnsupportedModelError):
        build(config, *keys)  # nor can it be ignored


#: What tools leave in a config beside the class's keys: `transformers` 4.5x, unsloth, axolotl, LLaMA-Factory, trl.
LEFT_BY_TOOLS: dict[str, object] = {
    "_attn_implementation_autoset": True,
    "attn_implementation": "flash_attention_2",
    "model_max_length": 8192,
    "generation_config": {"temperature": 0.6},
    "unsloth_version": "2026.5.1",
    "unsloth_fixed": True,
    "cache_implementation": "hybrid",
    "tokenizer_model_max_length": 4096,
    "use_flash_attn": True,
    "image_token_id": 7,
}


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "granite-4.0-h-tiny", "LFM2-1.2B"])
def test_what_tools_leave_behind_passes(name: str) -> None:
    build({**CONFIGS[name]["config"], **LEFT_BY_TOOLS})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("use_rope", False), ("qk_norm", False), ("causal", False), ("residual_scale", 0), ("is_causal", False)),
        *(("use_qk_norm", False), ("scale_emb", 0.0), ("parallel_attn", True), ("norm_after", False), ("layers_off", [])),
        *(("gate", ""), ("extra", {}), ("attn_output_gate", True), ("num_experts", 8), ("residual_scale", 0.5)),
    ],
)
def test_i37_a_falsy_value_is_a_value(key: str, value: object) -> None:
    assert f"{key}={value!r}" in refusal_of(small(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_rope", True),
        ("use_qk_norm", True),
        ("causal", True),
        ("residual_scale", 1.0),
        ("qkv_bias", False),
        ("unheard_of", None),
    ],
)
def test_a_key_that_says_what_is_computed_anyway_passes(key: str, value: object) -> None:
    build(small(**{key: value}))


def test_one_cure_names_all_keys_and_works() -> None:
    unread = {"alpha_mode": 1, "beta_mode": False, "gamma_mode": 0, "hidden_act": "gelu"}
    error = refusal_of(small(**unread))
    flags = error.split("--ignore-config-keys ")[1:]
    assert sorted(flag.strip() for flag in flags) == sorted(unread)
    build(small(**unread), *unread)


NAN, INF = math.nan, math.inf
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        *(("rms_norm_eps", value, "rms_norm_eps") for value in (NAN, INF, -1e-6, 0, 0.0, 2.0, "1e-6", 10**400)),
        *(("rope_theta", value, "rope_theta") for value in (NAN, INF, -1.0, 0, 10**400)),
        *(("rope_scaling", {**YARN, "factor": value}, "factor") for value in (NAN, INF, -1.0, 0)),
        *(("rope_scaling", {**YARN, "attention_factor": value}, "attention_factor") for value in (NAN, -1.0, 0)),
        ("rope_scaling", {**YARN, "beta_fast": 0}, "beta_fast"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": NAN}, "rope_theta"),
        ("rope_parameters", {"rope_type": "linear", "factor": 0, "rope_theta": 1e4}, "factor"),
        ("head_dim", NAN, "head_dim"),
        ("hidden_size", 2**60, "hidden_size"),
        ("num_attention_heads", True, "num_attention_heads"),
    ],
)
def test_numbers_that_no_model_has_are_refused_by_name(key: str, value: object, name: str) -> None:
    error = refusal_of(small(**{key: value}))
    assert name in error
    assert "config.json" in error


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("granite-4.0-h-tiny", {"logits_scaling": 0}, "logits_scaling"),
        ("granite-4.0-h-tiny", {"embedding_multiplier": INF}, "embedding_multiplier"),
        ("Falcon-H1-0.5B", {"ssm_multipliers": [1.0, NAN, 1.0, 1.0, 1.0]}, "ssm_multipliers"),
        ("Mamba-Codestral-7B", {"time_step_limit": [0.0, NAN]}, "time_step_limit"),
        ("Mamba-Codestral-7B", {"layer_norm_epsilon": -1.0}, "layer_norm_epsilon"),
        ("gemma-3-1b-it", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("DeepSeek-V3", {"routed_scaling_factor": NAN}, "routed_scaling_factor"),
        ("MiniMax-M1 (8 layers)", {"layernorm_mlp_alpha": INF}, "layernorm_mlp_alpha"),
    ],
)
def test_numbers_are_checked_in_every_family(name: str, change: dict[str, object], word: str) -> None:
    assert word in refusal_of({**CONFIGS[name]["config"], **change})


def test_restated_keys_must_agree() -> None:
    nemotron = CONFIGS["Nemotron-H-8B-Base-8K"]["config"]
    assert "attention_head_dim=64" in refusal_of({**nemotron, "attention_head_dim": 64})
    assert "attn_rotary_emb" in refusal_of({**CONFIGS["Bamba-9B-v1"]["config"], "attn_rotary_emb": 32})
    assert "output_gate_type" in refusal_of(
        {
            **CONFIGS["Qwen3.8-27B"]["config"],
            "text_config": {**CONFIGS["Qwen3.8-27B"]["config"]["text_config"], "output_gate_type": "sigmoid"},
        }
    )


def test_minimax_reads_its_first_spelling_of_the_weights_of_halves() -> None:
    config = CONFIGS["MiniMax-M1 (8 layers)"]["config"]
    new = {
        f"{kind}_attn_{one}_factor": config[f"layernorm_{kind}_attention_{one}"]
        for kind in ("linear", "full")
        for one in ("alpha", "beta")
    }
    new |= {f"mlp_{one}_factor": config[f"layernorm_mlp_{one}"] for one in ("alpha", "beta")}
    old_keys = {key for key in config if key.startswith("layernorm_")}
    first = build(config)
    second = build(
        {**{key: value for key, value in config.items() if key not in old_keys}, **new, "architectures": ["MiniMaxForCausalLM"]}
    )
    assert [layer.weights for layer in first.layers] == [layer.weights for layer in second.layers]  # type: ignore[attr-defined]
    assert "layernorm_mlp_alpha" in refusal_of({**config, "mlp_alpha_factor": 1.0})


def folder_with(tmp_path: Path, config: dict[str, object], sidecar: object, name: str = "hf_quant_config.json") -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / name).write_text(json.dumps(sidecar))
    return str(tmp_path)


@pytest.mark.parametrize("as_file", [False, True])
def test_modelopts_sidecar_tells_how_weights_are_stored(tmp_path: Path, as_file: bool) -> None:
    where = folder_with(
        tmp_path, small(), {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    )
    found = resolve(f"{where}/config.json" if as_file else where, load_format="dummy")
    model = build(found.config)
    assert model.quantisation is not None
    assert model.quantisation.describe() == "fp8"


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}},
            "'NVFP4'",
        ),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}},
            "'MIXED_PRECISION'",
        ),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "'gptq'"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128}, "'awq'"),
    ],
)
def test_other_sidecars_are_refused_by_name(tmp_path: Path, name: str, content: object, word: str) -> None:
    error = refusal_of(resolve(folder_with(tmp_path, small(), content, name)).config)
    assert word in error
    assert "Take the release" in error
    assert "--ignore-config-keys" not in error


def test_a_sidecar_that_says_something_else_than_the_config_is_refused(tmp_path: Path) -> None:
    config = small(quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(UnsupportedModelError, match=r"NVFP4.*FP8"):
        resolve(folder_with(tmp_path, config, {"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(WeightsError, match="hf_quant_config"):
        resolve(folder_with(tmp_path, config, {"quantization": []}))


def test_the_table_of_harmless_keys_has_no_doubles() -> None:
    keys = [key for group in HARMLESS.values() for key in group]
    assert len(keys) == len(set(keys))


def stranger(name: str, model_type: str, **values: object) -> dict[str, object]:
    """A config of a class that is not here."""
    return {**small(), **values, "architectures": [name], "model_type": model_type}


@pytest.mark.parametrize(
    ("name", "model_type", "nearest"),
    [
        ("MixtralForCausalLM", "mixtral", "Qwen3MoeForCausalLM"),
        ("MistralForCausalLM", "mistral", "LlamaForCausalLM"),
        ("Gemma2ForCausalLM", "gemma2", "Gemma3ForCausalLM"),
        ("DeepseekV2ForCausalLM", "deepseek_v2", "DeepseekV3ForCausalLM"),
        ("GraniteMoeSharedForCausalLM", "granitemoeshared", "GraniteMoeHybridForCausalLM"),
        ("Llama4ForCausalLM", "llama4_text", None),
        ("RwkvForCausalLM", "rwkv", None),
        ("Phi9ForCausalLM", "phi9", None),
    ],
)
def test_the_nearest_architecture_is_a_relative_or_none(name: str, model_type: str, nearest: str | None) -> None:
    error = refusal_of(stranger(name, model_type))
    assert f"The nearest is {nearest!r}" in error if nearest else "None of them is known to be near" in error
    assert "reads the same" not in error


@pytest.mark.parametrize(
    ("name", "inner", "words"),
    [
        (
            "Qwen3VLForConditionalGeneration",
            {"model_type": "qwen3_vl_text"},
            ["text_config", "'qwen3_vl_text'", "'Qwen3ForCausalLM'"],
        ),
        (
            "KimiK25ForConditionalGeneration",
            {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]},
            ["text_config", "'DeepseekV3ForCausalLM', which is implemented where a release has it alone"],
        ),
        ("Llama4ForConditionalGeneration", {"model_type": "llama4_text"}, ["text_config", "'llama4_text'", "None of them"]),
    ],
)
def test_a_wrapper_is_told_apart_from_what_it_wraps(name: str, inner: dict[str, object], words: list[str]) -> None:
    text = {key: value for key, value in small().items() if key != "architectures"}
    error = refusal_of({"architectures": [name], "model_type": "wrapper", "text_config": {**text, **inner}, "vision_config": {}})
    for word in words:
        assert word in error
    assert "published with the weights" not in error
    assert "has no 'vocab_size'" not in error
