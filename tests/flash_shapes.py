"""The two headline models: configs at their released shapes, and slices of those that fit a small machine.

Owns facts only, from a survey of public configurations. Used by the tests of these models and by `benchmarks/headline_slices.py`.
"""

from collections.abc import Mapping

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


def flash_next_slice(*, layers: int, experts: int, vocab: int, ngram_rows: int, **more: object) -> dict[str, object]:
    """The first layers of Qwen3.8-Flash-Next, all widths and heads as released: gated delta, with n-grams in the second layer,
    and attention last. Cut are experts, rows of the embedding, and rows of each of the 16 heads of the n-gram table.
    """
    cut = {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention"] * (layers - 1) + ["full_attention"],
        "num_experts": experts,
        "vocab_size": vocab,
        "ngram_vocab_size_base": ngram_rows,
        "eos_token_id": 1,
        **more,
    }
    return wrapped("Qwen4ExpForConditionalGeneration", {**FLASH_NEXT, **cut})


def glm_flash_slice(*, layers: int, experts: int, vocab: int, dense: int = 3, **more: object) -> dict[str, object]:
    """The first layers of GLM-5.3-Flash, all widths and heads as released: KDA, attention last, the first layers dense. Cut are
    experts and rows of the embedding.
    """
    cut = {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention"] * (layers - 1) + ["deepseek_sparse_attention"],
        "n_routed_experts": experts,
        "vocab_size": vocab,
        "first_k_dense_replace": dense,
        **more,
    }
    return wrapped("Glm5NextForConditionalGeneration", {**GLM_FLASH, **cut})
