"""The two headline models at their released shapes: what a token and a sequence cost, their parameters, what is refused.

Shapes and byte figures are from a survey of public configurations. Nothing here has memory for weights.
"""

import math

import pytest
import torch

from hybridserve.backends.select import select
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import PagedSpec, StateSpec
from hybridserve.models import CausalLM, build_model
from tests.flash_shapes import FLASH_NEXT, GLM_FLASH, wrapped

OPS = select(torch.device("cpu"), torch.bfloat16, ["reference"]).ops


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
