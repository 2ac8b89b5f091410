"""Tiny configs of the window, MoE and state-space families, each of which forces every branch of its architecture.

Owns the sizes that all tiny models share. Used by `checkpoints.py`, which seeds, saves and re-spells them.
"""

import re
from collections.abc import Callable, Mapping

import torch
import transformers as tf
from torch import Tensor

VOCAB_SIZE = 96
#: No token id of a tiny vocabulary may end a generation early.
_NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "max_position_embeddings": 512, **_NO_SPECIAL}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4}  # give away copies: configs write into what they are given
#: Shorter than the prompts of the tests, no multiple of a block.
WINDOW = 11
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


def _qwen3_moe() -> tf.PreTrainedModel:
    config = tf.Qwen3MoeConfig(
        **SIZES,
        **HEADS,
        **_EXPERTS,
        num_hidden_layers=3,
        intermediate_size=48,
        head_dim=24,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        rope_parameters=dict(ROPE),
    )
    return tf.Qwen3MoeForCausalLM(config)


def _gpt_oss() -> tf.PreTrainedModel:
    yarn = {
        "rope_type": "yarn", "rope_theta": 1.5e5, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    config = tf.GptOssConfig(
        **SIZES,
        **HEADS,
        num_hidden_layers=4,
        intermediate_size=24,
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=WINDOW,
        swiglu_limit=0.4,
        rope_parameters=yarn,
    )
    return tf.GptOssForCausalLM(config)


_GEMMA3 = {
    **SIZES,
    **HEADS,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "intermediate_size": 48,
    "head_dim": 24,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 10,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def _gemma3() -> tf.PreTrainedModel:
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**_GEMMA3, final_logit_softcapping=3.0))


def _gemma3_vision() -> tf.PreTrainedModel:
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    special = {"image_token_index": VOCAB_SIZE, "boi_token_index": VOCAB_SIZE, "eoi_token_index": VOCAB_SIZE}
    config = tf.Gemma3Config(text_config=_GEMMA3, vision_config=vision, mm_tokens_per_image=4, **special)
    return tf.Gemma3ForConditionalGeneration(config)


def _olmo3() -> tf.PreTrainedModel:
    kinds = ("full_attention", "sliding_attention")
    rope = {kind: {"rope_type": "default", "rope_theta": 5e5} for kind in kinds}
    rope["full_attention"] |= {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
        "attention_factor": 1.2,
    }  # fmt: skip
    config = tf.Olmo3Config(
        **SIZES, **HEADS, num_hidden_layers=4, intermediate_size=48, sliding_window=WINDOW, rope_parameters=rope
    )
    return tf.Olmo3ForCausalLM(config)


def _olmo_hybrid() -> tf.PreTrainedModel:
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    without_positions = {"rope_type": "default", "rope_theta": None}
    config = tf.OlmoHybridConfig(
        **SIZES, **HEADS, num_hidden_layers=4, layer_types=kinds, intermediate_size=48, rope_parameters=without_positions
    )
    return tf.OlmoHybridForCausalLM(config)


def _olmo_hybrid_rope() -> tf.PreTrainedModel:
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 20}
    kinds = ["full_attention", "linear_attention"]
    config = tf.OlmoHybridConfig(
        **SIZES,
        **HEADS,
        **delta,
        num_hidden_layers=2,
        layer_types=kinds,
        intermediate_size=48,
        linear_allow_neg_eigval=False,
        rope_parameters=dict(ROPE),
        tie_word_embeddings=True,
    )
    return tf.OlmoHybridForCausalLM(config)


def _lara_mini() -> tf.PreTrainedModel:
    config = tf.LaraMiniConfig(
        **SIZES,
        **HEADS,
        **_EXPERTS,
        num_hidden_layers=5,
        head_dim=24,
        sliding_window=WINDOW,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        shared_expert_intermediate_size=40,
        rope_parameters=dict(ROPE),
    )
    return tf.LaraMiniForCausalLM(config)


def _lfm2_moe() -> tf.PreTrainedModel:
    config = tf.Lfm2MoeConfig(
        **SIZES,
        **HEADS,
        **_EXPERTS,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        num_dense_layers=1,
        intermediate_size=48,
        routed_scaling_factor=1.3,
        conv_bias=True,
        rope_parameters=dict(ROPE),
    )
    return tf.Lfm2MoeForCausalLM(config)


def _lfm3() -> tf.PreTrainedModel:
    config = tf.Lfm3Config(
        **SIZES,
        **HEADS,
        num_hidden_layers=5,
        layer_types=["conv", "sliding_attention", "conv", "full_attention", "sliding_attention"],
        intermediate_size=48,
        head_dim=24,
        sliding_window=WINDOW,
        conv_bias=True,
    )
    return tf.Lfm3ForCausalLM(config)


_NEMOTRON = {
    **SIZES,
    **HEADS,
    "head_dim": 24,
    "intermediate_size": 48,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
}


def _nemotron_h() -> tf.PreTrainedModel:
    kinds = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"]
    groups = {"n_group": 4, "topk_group": 2}
    return tf.NemotronHForCausalLM(tf.NemotronHConfig(**_NEMOTRON, **groups, layers_block_type=kinds, time_step_min=0.3))


def _nemotron_h_latent() -> tf.PreTrainedModel:
    biases = dict.fromkeys(("use_bias", "mlp_bias"), True)
    kinds = ["mlp", "moe", "linear_attention", "full_attention"]
    config = tf.NemotronHConfig(**_NEMOTRON, **biases, layers_block_type=kinds, moe_latent_size=32, norm_topk_prob=False)
    return tf.NemotronHForCausalLM(config)


def _bamba() -> tf.PreTrainedModel:
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
    biases = dict.fromkeys(("mamba_proj_bias", "mlp_bias", "attention_bias"), True)
    config = tf.BambaConfig(
        **SIZES,
        **HEADS,
        **mamba,
        **biases,
        num_hidden_layers=3,
        attn_layer_indices=[1],
        intermediate_size=48,
        rope_parameters=dict(ROPE),
    )
    return tf.BambaForCausalLM(config)


def _mamba2() -> tf.PreTrainedModel:
    sizes = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "use_bias": True}
    config = tf.Mamba2Config(**{k: v for k, v in SIZES.items() if k != "max_position_embeddings"}, **sizes, num_hidden_layers=3)
    return tf.Mamba2ForCausalLM(config)


_ZAMBA2 = {
    **SIZES,
    "num_attention_heads": 4,
    "num_hidden_layers": 7,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid", "hybrid", "hybrid"],
    "intermediate_size": 48,
    "n_mamba_heads": 8,
    "mamba_d_state": 16,
    "mamba_ngroups": 2,
    "num_mem_blocks": 2,
    "adapter_rank": 6,
}


def _zamba2() -> tf.PreTrainedModel:
    config = tf.Zamba2Config(
        **_ZAMBA2, use_shared_attention_adapter=True, use_mem_rope=True, add_bias_linear=True, rope_parameters=dict(ROPE)
    )
    return tf.Zamba2ForCausalLM(config)


def _zamba2_plain() -> tf.PreTrainedModel:
    return tf.Zamba2ForCausalLM(tf.Zamba2Config(**_ZAMBA2, time_step_min=0.3, rms_norm_eps=1e-4))


def _jamba() -> tf.PreTrainedModel:
    periods = {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    mamba = {"mamba_d_state": 6, "mamba_dt_rank": 5, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_proj_bias": True}
    experts = {"num_experts": 6, "num_experts_per_tok": 3}
    config = tf.JambaConfig(**SIZES, **HEADS, **periods, **mamba, **experts, num_hidden_layers=4, intermediate_size=48)
    return tf.JambaForCausalLM(config)


_MAMBA = {**{k: v for k, v in SIZES.items() if k != "max_position_embeddings"}, "state_size": 6, "num_hidden_layers": 3}


def _mamba() -> tf.PreTrainedModel:
    return tf.MambaForCausalLM(tf.MambaConfig(**_MAMBA, use_bias=True, tie_word_embeddings=False))


def _falcon_mamba() -> tf.PreTrainedModel:
    return tf.FalconMambaForCausalLM(tf.FalconMambaConfig(**_MAMBA, time_step_rank=7, mixer_rms_eps=1e-3))


def _minimax() -> tf.PreTrainedModel:
    factors = {
        "full_attn_alpha_factor": 1.3, "full_attn_beta_factor": 0.8, "linear_attn_alpha_factor": 1.1,
        "linear_attn_beta_factor": 0.9, "mlp_alpha_factor": 1.2, "mlp_beta_factor": 0.7,
    }  # fmt: skip
    config = tf.MiniMaxConfig(
        **SIZES,
        **HEADS,
        **factors,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        head_dim=24,
        intermediate_size=24,
        num_local_experts=6,
        num_experts_per_tok=3,
        block_size=16,
        rope_parameters=dict(ROPE),
    )
    return tf.MiniMaxForCausalLM(config)


#: Makers by name. Of the last four, transformers is the reference in one pass only: its chunks start from no state, or from
#: the wrong position.
TINY: Mapping[str, Callable[[], tf.PreTrainedModel]] = {
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "gemma3": _gemma3,
    "gemma3_vision": _gemma3_vision,
    "olmo3": _olmo3,
    "olmo_hybrid": _olmo_hybrid,
    "olmo_hybrid_rope": _olmo_hybrid_rope,
    "lara_mini": _lara_mini,
    "lfm2_moe": _lfm2_moe,
    "lfm3": _lfm3,
    "nemotron_h": _nemotron_h,
    "nemotron_h_latent": _nemotron_h_latent,
    "bamba": _bamba,
    "mamba2": _mamba2,
    "zamba2": _zamba2,
    "zamba2_plain": _zamba2_plain,
    "jamba": _jamba,
    "mamba": _mamba,
    "falcon_mamba": _falcon_mamba,
    "minimax": _minimax,
}


def respelled(tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensors of a folder that transformers saved, in the other spelling of their family where there is one."""
    respell = _RESPELL.get(str(config["model_type"]))
    return dict(tensors) if respell is None else respell(tensors, config)


def with_olmo_convolutions(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convolutions of q, k and v with their own channels each, as released; saving cuts them into thirds."""
    out = dict(tensors)
    for name in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        names = [name.replace("q_conv1d", f"{one}_conv1d") for one in "qkv"]
        rows = [len(tensors[one.replace("conv1d", "proj")]) for one in names]
        whole = torch.cat([tensors[one] for one in names])
        out |= dict(zip(names, torch.split_with_sizes(whole, rows), strict=True))
    return out


def _olmo_names(tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> dict[str, Tensor]:
    """Saving calls the norms of attention layers as if they were gated delta layers."""
    kinds = config["layer_types"]
    assert isinstance(kinds, list)
    attention = "|".join(str(i) for i, kind in enumerate(kinds) if kind == "full_attention")
    pattern = rf"(layers\.(?:{attention}))\.feedforward_layer_norm"
    return {re.sub(pattern, r"\1.post_attention_layernorm", name): tensor for name, tensor in tensors.items()}


def _lara_parts(tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> dict[str, Tensor]:
    """The projections one by one, as in transformers' own module."""
    heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    assert isinstance(heads, int)
    assert isinstance(value_heads, int)
    value = value_heads * int(str(config["linear_value_head_dim"]))
    widths = [2 * heads * int(str(config["linear_key_head_dim"])) + value, value, value_heads, value_heads]
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("linear_attn.in_proj.weight"):
            parts = zip(("qkv", "z", "b", "a"), torch.split_with_sizes(tensor, widths), strict=True)
            out |= {name.replace("in_proj", f"in_proj_{part}"): piece for part, piece in parts}
        else:
            out[name.replace("out_norm", "norm")] = tensor
    return out


def _lfm3_names(tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> dict[str, Tensor]:
    """The gate as transformers' own module calls it."""
    return {name.replace("self_attn.gate_proj", "self_attn.g_proj"): tensor for name, tensor in tensors.items()}


_RESPELL: Mapping[str, Callable[[Mapping[str, Tensor], Mapping[str, object]], dict[str, Tensor]]] = {
    "olmo_hybrid": _olmo_names,
    "lara_mini": _lara_parts,
    "lfm3": _lfm3_names,
}
