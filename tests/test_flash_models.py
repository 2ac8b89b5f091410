"""The two headline models at their released shapes: what a token and a sequence cost, their parameters, what is refused.

Shapes and byte figures are from a survey of public configurations. Nothing here has memory for weights.
"""

import math
from collections.abc import Mapping

import pytest
import torch

from hybridserve.backends.select import select
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import PagedSpec, StateSpec
from hybridserve.models import CausalLM, build_model

OPS = select(torch.device("cpu"), torch.bfloat16, ["reference"]).ops

FLASH_NEXT: dict[str, object] = {
    "vocab_size": 248320,
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(48)],
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attn_output_gate": True,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "output_gate_type": "sigmoid",
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 128,
    "eos_token_id": 248044,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
GLM_FLASH: dict[str, object] = {
    "vocab_size": 154880,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 45,
    "layer_types": ["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(45)],
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_kpool": 4,
    "linear_attn_config": {"num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0},
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def wrapped(architecture: str, text: Mapping[str, object]) -> dict[str, object]:
    return {"architectures": [architecture], "text_config": dict(text), "vision_config": {"depth": 27}, "image_token_id": 1}


def flash_next(**changes: object) -> CausalLM:
    return build_model(wrapped("Qwen4ExpForConditionalGeneration", {**FLASH_NEXT, **changes}), OPS, torch.bfloat16)


def glm_flash(**changes: object) -> CausalLM:
    return build_model(wrapped("Glm5NextForConditionalGeneration", {**GLM_FLASH, **changes}), OPS, torch.bfloat16)


def paged_nbytes(model: CausalLM, name: str) -> int:
    """Bytes of one token in all layers' caches of this name; an entry of several tokens is shared by them."""
    found = [spec for layer in model.cache_specs() for full, spec in layer.items() if full.endswith(f".{name}")]
    assert all(isinstance(spec, PagedSpec) for spec in found)
    return sum(spec.entry_nbytes // spec.tokens_per_entry for spec in found if isinstance(spec, PagedSpec))


def state_nbytes(model: CausalLM, ending: str) -> int:
    found = {f"{i}.{name}": spec for i, layer in enumerate(model.cache_specs()) for name, spec in layer.items()}
    return sum(spec.nbytes for name, spec in found.items() if name.endswith(ending) and isinstance(spec, StateSpec))


def test_flash_next_costs_what_the_survey_says() -> None:
    model = flash_next()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert paged_nbytes(model, "kv") == 24_576
    assert paged_nbytes(model, "index") == 768
    assert state_nbytes(model, "gated_delta.state") == 115_458_048
    assert state_nbytes(model, "ngram.state") == 184_336  # nine rows of four streams, two token ids
    assert state_nbytes(model, "open") == 12 * 3 * 128 * 2  # raw keys of an open group
    assert model.layer_kinds()[:4] == ["gated_delta", "ngram+gated_delta", "gated_delta", "indexed_attention"]
    table = sum(parameter.numel() for name, parameter in model.named_parameters() if ".table." in name)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert math.isclose(table, 51e9, rel_tol=0.01)
    assert math.isclose(total - table, 125e9, rel_tol=0.01)
    assert sum(".table.parts." in name for name, _ in model.named_parameters()) == 128


def test_glm_flash_costs_what_the_survey_says() -> None:
    model = glm_flash()
    assert paged_nbytes(model, "kv") == 11_264
    assert paged_nbytes(model, "index") == 704
    assert state_nbytes(model, "kda.state") == 147_619_840
    assert state_nbytes(model, "open") == 11 * 3 * 256 * 2  # keys and gates of an open group
    assert model.layer_kinds().count("kda") == 34
    # The survey counts the draft layer, nearly all of which is one more set of experts.
    experts = 288 * 3 * 4096 * 2048
    assert math.isclose(sum(parameter.numel() for parameter in model.parameters()) + experts, 321e9, rel_tol=0.005)
    kept = {name.rpartition(".")[2] for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert kept == {"A_log", "dt_bias", "base", "scale", "choice_bias", "weight"}
    fp32_weights = {
        name.split(".")[-2] for name, p in model.named_parameters() if p.dtype == torch.float32 and name.endswith("weight")
    }
    assert fp32_weights == {"conv1d", "router"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"indexer_kv_heads": 2}, ["indexer_kv_heads", "2"]),
        ({"indexer_budget": 2047}, ["2047 tokens in groups of 4"]),
        ({"indexer_n_heads": None}, ["indexer_n_heads", "needs"]),
        ({"eos_token_id": None}, ["eos_token_id", "n-gram"]),
        ({"output_gate_type": "tanh"}, ["output_gate_type", "'tanh'"]),
        ({"layer_types": ["sliding_attention"] * 48}, ["layer_types[0]", "'sliding_attention'"]),
        ({"hc_dynamic": True}, ["text_config.hc_dynamic"]),
        ({"heads_per_ngram": 1000}, ["heads_per_ngram", "1000"]),
        ({"ple_embed_dim": 2561}, ["2561 numbers"]),
    ],
)
def test_a_flash_next_that_would_be_served_wrongly_is_refused(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        flash_next(**changes)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qk_rope_head_dim": 64}, ["qk_rope_head_dim", "64"]),
        ({"index_kpool_always_select_tail": False}, ["index_kpool_always_select_tail"]),
        ({"index_topk": 2046}, ["2046 tokens in groups of 4"]),
        ({"indexer_types": ["full"] * 3 + ["shared"] * 42}, ["indexer_types[3]", "shared"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"scoring_func": "softmax"}, ["scoring_func", "'softmax'"]),
        ({"attn_res_block_size": 4}, ["text_config.attn_res_block_size"]),
    ],
)
def test_a_glm_flash_that_would_be_served_wrongly_is_refused(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        glm_flash(**changes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_gate_without_a_bound_is_told_from_one_that_is_not_mentioned() -> None:
    """A null in the config means the plain gate; transformers' default, where the key is absent, is -5."""
    linear = {"num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4}
    bounds = [
        glm_flash(linear_attn_config=nested, **more).layers[0].mixers["kda"].config.lower_bound
        for nested, more in (
            (linear, {}),
            ({**linear, "gate_lower_bound": -2.0}, {}),
            (linear, {"linear_lower_bound": None}),
            (linear, {"linear_lower_bound": -1.0}),
            ({**linear, "gate_lower_bound": None, "safe_gate": True}, {}),
        )
    ]
    assert bounds == [-5.0, -2.0, None, -1.0, -5.0]


def test_kimi_k3_is_refused_by_name() -> None:
    """It states the same model type, and may state the same class."""
    config = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_act": "situ", "hidden_size": 64}
    with pytest.raises(UnsupportedModelError, match="Kimi-K3"):
        build_model(config, OPS, torch.bfloat16)


def test_ling_2_6_is_not_taken_for_ling_3() -> None:
    """One model type, two architectures."""
    config = {"architectures": ["BailingMoeV2_5ForCausalLM"], "model_type": "bailing_hybrid", "hidden_size": 64}
    with pytest.raises(UnsupportedModelError, match="BailingMoeV2_5ForCausalLM"):
        build_model(config, OPS, torch.bfloat16)
