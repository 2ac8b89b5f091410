"""Tiny configs of the families with latent, indexed and delta attention, each of which forces every branch of its architecture.

Owns their sizes and how the keys of their releases differ from what transformers saves. Used by `checkpoints.py`, which seeds,
saves and re-spells them.
"""

from collections.abc import Callable, Mapping

import transformers as tf

from tests.tiny_models import ROPE, SIZES

_LATENT = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "num_hidden_layers": 3,
}  # fmt: skip
_SIGMOID = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "intermediate_size": 48, "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}  # fmt: skip


def _deepseek_v3() -> tf.PreTrainedModel:
    rope = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0,
        "mscale_all_dim": 0.8, "beta_fast": 32.0, "beta_slow": 1.0,
    }  # fmt: skip
    groups = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    config = tf.DeepseekV3Config(
        **SIZES, **_LATENT, **_SIGMOID, **groups, q_lora_rank=24, attention_bias=True, rope_parameters=rope
    )
    return tf.DeepseekV3ForCausalLM(config)


def _glm4_moe_lite() -> tf.PreTrainedModel:
    config = tf.Glm4MoeLiteConfig(
        **SIZES,
        **_LATENT,
        **_SIGMOID,
        q_lora_rank=None,
        mlp_layer_types=["sparse", "dense", "sparse"],
        norm_topk_prob=False,
        rope_interleave=False,
        rope_parameters=ROPE,
    )
    return tf.Glm4MoeLiteForCausalLM(config)


_KDA = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_KIMI_EXPERTS = {
    "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "intermediate_size": 48, "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}  # fmt: skip


def _kimi_linear() -> tf.PreTrainedModel:
    linear = {"linear_head_dim": 12, "linear_num_heads": 6, "linear_conv_kernel_dim": 3}
    config = tf.KimiLinearConfig(**SIZES, **{**_LATENT, **_KDA}, **_KIMI_EXPERTS, **linear, q_lora_rank=None)
    return tf.KimiLinearForCausalLM(config)


def _bailing_moe_v3() -> tf.PreTrainedModel:
    groups = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "layer_group_size": 3, "head_dim": 12}
    config = tf.BailingHybridConfig(
        **SIZES, **{**_LATENT, **_KDA}, **_KIMI_EXPERTS, **groups, q_lora_rank=24, kda_lower_bound=-3.0, rope_theta=1e4
    )
    return tf.BailingHybridForCausalLM(config)


def _bailing_plain_gate() -> tf.PreTrainedModel:
    sizes = {**SIZES, **_LATENT, **_KDA, **_KIMI_EXPERTS, "head_dim": 16, "n_group": 1, "topk_group": 1, "layer_group_size": 3}
    return tf.BailingHybridForCausalLM(tf.BailingHybridConfig(**sizes, q_lora_rank=None, kda_safe_gate=False))


#: Index scores are often all 0 with few heads, and the reference breaks ties at random.
_INDEX = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 12, "q_lora_rank": 24}


def _deepseek_v32() -> tf.PreTrainedModel:
    groups = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    config = tf.DeepseekV32Config(**SIZES, **_LATENT, **_SIGMOID, **groups, **_INDEX, rope_parameters=ROPE)
    return tf.DeepseekV32ForCausalLM(config)


def _glm_moe_dsa() -> tf.PreTrainedModel:
    shared = {"indexer_types": ["full", "shared", "full", "shared"], "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
    config = tf.GlmMoeDsaConfig(
        **SIZES, **{**_LATENT, "num_hidden_layers": 4}, **_SIGMOID, **_INDEX, **shared, attention_bias=True, rope_parameters=ROPE
    )
    return tf.GlmMoeDsaForCausalLM(config)


_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
}  # fmt: skip


def _glm5_next() -> tf.PreTrainedModel:
    text = {
        **SIZES, **_LATENT, **_SIGMOID, **_INDEX, "qk_rope_head_dim": 0, "num_hidden_layers": 4, "linear_head_dim": 12,
        "linear_num_heads": 3, "linear_conv_kernel_dim": 3, "linear_lower_bound": -3.0, "index_kpool": 4, "hc_sinkhorn_iters": 5,
        "swiglu_limit": 0.3, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    }  # fmt: skip
    vision = {**_VISION, "projection_intermediate_size": 16, "image_size": 8}
    return tf.Glm5NextForConditionalGeneration(tf.Glm5NextConfig(text_config=text, vision_config=vision))


def _qwen4_exp() -> tf.PreTrainedModel:
    text = {
        **SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 4, "eos_token_id": 7,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4, "output_gate_type": "sigmoid", "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "hc_count": 3, "hc_lowrank": 20,
        "ple_layer_ids": [1, 3], "ple_embed_dim": 48, "ngram_size": 3, "heads_per_ngram": 3, "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4, "indexer_n_heads": 16, "indexer_kv_heads": 1,
        "indexer_head_dim": 12, "indexer_budget": 12, "indexer_compress_ratio": 4,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    }  # fmt: skip
    return tf.Qwen4ExpForConditionalGeneration(tf.Qwen4ExpConfig(text_config=text, vision_config=_VISION))


#: Makers by name.
TINY: Mapping[str, Callable[[], tf.PreTrainedModel]] = {
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite,
    "kimi_linear": _kimi_linear,
    "bailing_moe_v3": _bailing_moe_v3,
    "bailing_plain_gate": _bailing_plain_gate,
    "deepseek_v32": _deepseek_v32,
    "glm_moe_dsa": _glm_moe_dsa,
    "glm5_next": _glm5_next,
    "qwen4_exp": _qwen4_exp,
}


def released_config(config: dict[str, object]) -> dict[str, object]:
    """The config in the keys of the release: layers counted from 1 and nested sizes (Kimi), Ling's one `head_dim`."""
    old = dict(config)
    if config["model_type"] == "kimi_linear":
        kinds = old.pop("layer_types")
        assert isinstance(kinds, list)
        old["linear_attn_config"] = {
            "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
            "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
            "head_dim": old.pop("linear_head_dim"),
            "num_heads": old.pop("linear_num_heads"),
            "short_conv_kernel_size": old.pop("linear_conv_kernel_dim"),
        }
        old |= {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "num_nextn_predict_layers": 0}
    if config["model_type"] == "glm5_next_text":
        kinds = old["layer_types"]
        assert isinstance(kinds, list)
        old["layer_types"] = [{"indexed_attention": "deepseek_sparse_attention"}.get(kind, kind) for kind in kinds]
        old["linear_attn_config"] = {
            "kda_layers": [i for i, kind in enumerate(kinds) if kind == "linear_attention"],
            "head_dim": old.pop("linear_head_dim"),
            "num_heads": old.pop("linear_num_heads"),
            "short_conv_kernel_size": old.pop("linear_conv_kernel_dim"),
            "gate_lower_bound": old.pop("linear_lower_bound"),
            "safe_gate": True,
        }
    if config["model_type"] == "qwen4_exp_text":
        kinds = old["layer_types"]
        assert isinstance(kinds, list)
        old["layer_types"] = [{"indexed_attention": "full_attention"}.get(kind, kind) for kind in kinds]
        old |= {"mtp_num_hidden_layers": 1, "attn_output_gate": True}
    if config["model_type"] == "bailing_hybrid":
        old["head_dim"] = old.pop("linear_head_dim")
        del old["linear_num_heads"], old["linear_conv_kernel_dim"], old["layer_types"]
    return old
