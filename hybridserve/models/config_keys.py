"""Keys of published configs that no architecture reads, and why each may stay unread.

Owns three tables. `HARMLESS` keys never change what a text decoder computes in inference. `NEUTRAL` keys would, but not with
the values listed, which say that something is absent that no class here has, or present that all have; a class that differs reads
the key itself. `family_of` tells what is true of one architecture alone. Everything else that is unread is refused by name. Must
not know how keys are read (`reader.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

HARMLESS: Mapping[str, tuple[str, ...]] = {
    "names, versions and where the file came from": (
        "architectures", "model_type", "transformers_version", "_name_or_path", "name_or_path", "_model_name_or_path",
        "_commit_hash", "_auto_class", "auto_map", "license", "model_name", "model_id", "model_version", "base_model", "revision",
        "language", "tags", "library_name", "pipeline_tag", "is_llama_config", "transformers.js_config", "torch_version",
        "unsloth_fixed", "unsloth_version", "axolotl_version", "for_llm_compressor", "custom_pipelines", "_diffusers_version",
    ),
    "the dtype, which is chosen elsewhere": ("torch_dtype", "dtype", "use_bfloat16", "params_dtype"),
    "how weights are stored, which `quantisation.py` reads as strictly": ("quantization_config", "quantization"),
    "which kernels run, and how often": (
        "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset", "attn_implementation",
        "_experts_implementation", "_flash_attn_2_enabled", "use_flash_attn", "use_flash_attention", "use_flash_attention_2",
        "flash_attention", "fused_add_norm", "use_fused_rmsnorm", "use_mamba_kernels", "use_kernels", "mamba_chunk_size",
        "chunk_size_feed_forward", "num_logits_to_keep", "logits_to_keep", "gradient_checkpointing", "torchscript", "use_cache",
        "cache_implementation", "low_cpu_mem_usage", "device_map", "tensor_parallel", "tp_size", "ep_size", "tp_plan",
        "base_model_tp_plan", "base_model_pp_plan", "base_model_ep_plan", "moe_shared_expert_overlap", "use_cuda_graph",
    ),
    "what published code returns": (
        "output_attentions", "output_hidden_states", "output_router_logits", "output_scores", "return_dict",
        "return_dict_in_generate", "keys_to_ignore_at_inference",
    ),
    "training": (
        "initializer_range", "initializer_factor", "init_method", "init_std", "init_device", "init_method_std",
        "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop",
        "resid_dropout", "embd_pdrop", "attn_pdrop", "attn_dropout", "embedding_dropout", "output_dropout", "ffn_dropout",
        "mlp_dropout", "residual_dropout", "classifier_dropout", "layerdrop", "dropout", "router_aux_loss_coef",
        "router_z_loss_coef", "aux_loss_alpha", "seq_aux", "aux_loss_coef", "z_loss_coefficient", "z_loss_coeff",
        "router_jitter_noise", "router_bias_update_rate", "moe_router_bias_update_rate", "rescale_prenorm_residual",
        "gradient_checkpointing_kwargs", "label_smoothing", "problem_type", "finetuning_task", "task_specific_params",
        "num_labels", "id2label", "label2id", "pruned_heads", "loss_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
    ),
    "tokens and tokenizers": (
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "cls_token_id", "mask_token_id",
        "decoder_start_token_id", "bos_token", "eos_token", "pad_token", "tokenizer_class", "tokenizer_model_max_length",
        "tokenizer_padding_side", "padding_side", "model_max_length", "max_sequence_length", "prefix", "add_bos_token",
        "add_eos_token",
        "pad_vocab_size_multiple", "image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id",
        "vision_start_token_id", "vision_end_token_id", "vision_token_id",
    ),
    "sampling, of the time before generation_config.json": (
        "generation_config", "max_length", "min_length", "max_new_tokens", "min_new_tokens", "do_sample", "early_stopping",
        "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "min_p", "typical_p",
        "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "penalty_alpha",
        "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id",
        "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "stop_strings",
        "guidance_scale", "renormalize_logits",
    ),
    "encoders, which no architecture here has": ("is_encoder_decoder", "is_decoder", "tie_encoder_decoder"),
    "draft heads, which plain decoding leaves alone": (
        "mtp", "num_mtp_layers", "num_mtp_modules", "mtp_num_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
        "mtp_layer_types", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "mtp_loss_scaling_factor", "mtp_loss_weight",
        "mtp_lambda", "mtp_transformer_layers", "mtp_unroll_steps", "use_mtp", "enable_mtp", "num_nextn_predict_layers",
        "index_share_for_mtp_iteration", "eagle_config",
    ),
}  # fmt: skip
HARMLESS_KEYS: Final = frozenset(key for keys in HARMLESS.values() for key in keys)

_OFF = (False,)
_ON = (True,)
_NONE = (0,)
_ONE = (1,)
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("causal", "is_causal", "use_causal_mask", "use_rmsnorm", "use_rms_norm"), _ON),
    **dict.fromkeys(
        (
            *("rope_interleaved", "use_sliding_window", "use_bidirectional_attention", "bidirectional", "add_cross_attention"),
            *("qkv_bias", "use_qkv_bias", "add_qkv_bias", "attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "bias"),
            *("add_bias_linear", "lm_head_bias", "alibi", "use_alibi", "parallel_attn", "use_parallel_residual"),
            *("parallel_residual", "use_mrope", "attn_output_gate", "use_output_gate", "attention_sink", "use_attention_sinks"),
            *("add_swa_attention_sink_bias", "scale_embedding", "use_layer_scale", "use_long_context", "use_mem_rope"),
            *("residual_in_fp32", "use_double_wide_mlp", "moe_shared_expert_gate", "norm_head", "norm_softmax"),
            *("apply_residual_connection_post_layernorm", "language_model_only", "use_expert_bias"),
        ),
        _OFF,
    ),
    **dict.fromkeys(
        (
            *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "num_experts_per_token"),
            *("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size", "shared_intermediate_size"),
            *("moe_intermediate_size", "num_kv_shared_layers", "hidden_size_per_layer_input"),
        ),
        _NONE,
    ),
    **dict.fromkeys(
        (
            *("residual_scale", "residual_multiplier", "embedding_scale", "embedding_multiplier", "logit_scale"),
            *("logits_scaling", "decoder_sparse_step", "pretraining_tp"),
        ),
        _ONE,
    ),
    **dict.fromkeys(("mlp_only_layers", "no_rope_layers", "deepstack_visual_indexes"), ([],)),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "compression_config", "sparsity_config"), ({},)),
    "normalization_function": ("rmsnorm",),
}


@dataclass(frozen=True)
class Family:
    """What is true of one architecture. Keys that are `unused` may hold anything, those of `stated` one of the values given.
    A key of `same` must hold what another key does, or if that is absent the value beside it.
    """

    unused: frozenset[str] = frozenset()
    stated: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    same: Mapping[str, tuple[str, object]] = field(default_factory=dict)


_QK_KEYS = ("use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm")
_ROPE_KEYS = ("use_rope", "use_rotary", "use_rotary_embedding", "use_rotary_pos_emb")
#: Whether queries and keys are normed, by architecture.
_QK_NORMS: Mapping[bool, tuple[str, ...]] = {
    True: (
        *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Qwen4ExpForCausalLM"),
        *("Qwen4ExpForConditionalGeneration", "Olmo3ForCausalLM", "OlmoHybridForCausalLM", "Gemma3ForCausalLM"),
        *("Gemma3ForConditionalGeneration", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm3ForCausalLM", "LaraMiniForCausalLM"),
    ),
    False: (
        *("LlamaForCausalLM", "GptOssForCausalLM", "GraniteMoeHybridForCausalLM", "FalconH1ForCausalLM", "BambaForCausalLM"),
        *("JambaForCausalLM", "Zamba2ForCausalLM", "NemotronHForCausalLM", "MiniMaxForCausalLM", "MiniMaxM1ForCausalLM"),
        "MiniMaxText01ForCausalLM",
    ),
}
#: Whether positions turn queries and keys, where that is no matter of the config.
_ROTATES: Mapping[bool, tuple[str, ...]] = {
    True: (
        *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Qwen4ExpForCausalLM", "Olmo3ForCausalLM"),
        *("Qwen4ExpForConditionalGeneration", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Lfm2ForCausalLM"),
        *("Lfm2MoeForCausalLM", "Lfm3ForCausalLM", "LlamaForCausalLM", "GptOssForCausalLM", "FalconH1ForCausalLM"),
        *("BambaForCausalLM", "MiniMaxForCausalLM", "MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM", "DeepseekV3ForCausalLM"),
        *("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "Glm4MoeLiteForCausalLM", "BailingMoeV3ForCausalLM"),
        "BailingHybridForCausalLM",
    ),
    False: ("JambaForCausalLM", "NemotronHForCausalLM", "KimiLinearForCausalLM", "Glm5NextForConditionalGeneration"),
}
_FP32 = ("float32", "fp32")
_FP32_ROUTER: Mapping[str, tuple[object, ...]] = {"router_dtype": _FP32, "moe_router_dtype": _FP32}
#: Of Qwen3.5's gated norm, under the name that its kernels use.
_QWEN3_5 = Family(
    unused=frozenset({"sliding_window", "max_window_layers"}),  # they count only with use_sliding_window
    stated={"output_gate_type": ("swish", "silu")},
)
_LING = Family(
    stated={
        **_FP32_ROUTER,
        "no_kda_lora": _ON,
        "gated_attention_proj_granularity_type": ("head_wise", "headwise"),
        "use_qk_norm": _ON,  # of the delta layers, whose keys and queries are unit vectors
        "use_mla_nope": _OFF,
        "rope_interleave": _ON,
        "score_function": ("sigmoid",),
        **dict.fromkeys(
            ("moe_router_enable_expert_bias", "moe_router_enable_routed_scaling", "moe_router_enable_shared_expert"), _ON
        ),
    },
    same={"moe_shared_expert_intermediate_size": ("moe_intermediate_size", None)},
)
_MAMBA = Family(
    stated={"rms_norm": _ON, "ssm_cfg": ({},)},
    same={"d_model": ("hidden_size", None), "d_inner": ("intermediate_size", None), "n_layer": ("num_hidden_layers", None)},
)
_MINIMAX = Family(unused=frozenset({"shared_moe_mode"}))  # of a shared expert, whose size must be 0

_BY_NAME: Mapping[str, Family] = {
    "BailingMoeV3ForCausalLM": _LING,
    "BailingHybridForCausalLM": _LING,
    # Sizes and steps that only initialise.
    "FalconH1ForCausalLM": Family(
        unused=frozenset({"mlp_expansion_factor", "time_step_min", "time_step_max", "time_step_floor"}),
    ),
    "GlmMoeDsaForCausalLM": Family(stated=_FP32_ROUTER),
    "Glm4MoeLiteForCausalLM": Family(stated=_FP32_ROUTER),
    "DeepseekV3ForCausalLM": Family(stated=_FP32_ROUTER),
    "DeepseekV32ForCausalLM": Family(stated=_FP32_ROUTER),
    "KimiLinearForCausalLM": Family(stated=_FP32_ROUTER),
    "Glm5NextForConditionalGeneration": Family(
        # The two flags that only restate the kind of the layers.
        stated={**_FP32_ROUTER, "mhc": _ON, "mla_use_nope": _ON, "index_kpool_compress": _ON},
    ),
    "GptOssForCausalLM": Family(stated={"mlp_bias": _ON}),
    "MambaForCausalLM": _MAMBA,
    "FalconMambaForCausalLM": _MAMBA,
    "Mamba2ForCausalLM": _MAMBA,
    "MiniMaxForCausalLM": _MINIMAX,
    "MiniMaxM1ForCausalLM": _MINIMAX,
    "MiniMaxText01ForCausalLM": _MINIMAX,
    "NemotronHForCausalLM": Family(
        unused=frozenset({"time_step_rank"}),
        stated=_FP32_ROUTER,
        same={"attention_head_dim": ("head_dim", 128), "rms_norm_eps": ("layer_norm_epsilon", 1e-5)},
    ),
    "OlmoHybridForCausalLM": Family(stated={"linear_use_gate": _ON}),
    "Qwen3NextForCausalLM": _QWEN3_5,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    # The dtypes of tensors are in the headers of their files.
    "Qwen4ExpForCausalLM": Family(unused=frozenset({"ple_embedding_dtype"})),
    "Qwen4ExpForConditionalGeneration": Family(unused=frozenset({"ple_embedding_dtype"})),
    "Zamba2ForCausalLM": Family(stated={"use_shared_block_adapter": _OFF}, same={"ffn_hidden_size": ("intermediate_size", None)}),
}


def family_of(architecture: str) -> Family:
    """What is true of an architecture; nothing of one that is not listed."""
    known = _BY_NAME.get(architecture, Family())
    flags: dict[str, tuple[object, ...]] = {}
    for table, keys in ((_QK_NORMS, _QK_KEYS), (_ROTATES, _ROPE_KEYS)):
        for value, names in table.items():
            if architecture in names:
                flags |= dict.fromkeys(keys, (value,))
    return Family(known.unused, {**flags, **known.stated}, known.same)
