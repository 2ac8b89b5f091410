"""Keys of published configs that no architecture reads, and why each may stay unread.

Owns two tables. `HARMLESS` keys never change what a text decoder computes in inference. `NEUTRAL` keys would, but not with
the values listed, which say that something is absent that no class here has, or present that all have; a class that differs reads
the key itself. A `Family` is what is true of one architecture alone: its own file has it. Everything else that is unread is
refused by name. Must not know how keys are read (`reader.py`), nor any architecture.
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

OFF = (False,)
ON = (True,)
_NONE = (0,)
_ONE = (1,)
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("causal", "is_causal", "use_causal_mask", "use_rmsnorm", "use_rms_norm"), ON),
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
        OFF,
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


_QK_KEYS = ("use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm")
_ROPE_KEYS = ("use_rope", "use_rotary", "use_rotary_embedding", "use_rotary_pos_emb")


@dataclass(frozen=True)
class Family:
    """What published configs of one architecture state that its class does in any case; its file declares it to the reader.

    Keys that are `unused` may hold anything, those of `stated` one of the values given. A key of `same` must hold what another
    key does, or if that is absent the value beside it. `norms_qk` and `rotates` say whether queries and keys are normed, and
    turned by positions, where that is no matter of the config: several keys state them.
    """

    unused: frozenset[str] = frozenset()
    stated: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    same: Mapping[str, tuple[str, object]] = field(default_factory=dict)
    norms_qk: bool | None = None
    rotates: bool | None = None

    def values_of(self, key: str) -> tuple[object, ...]:
        """The values with which a key that nobody read changes nothing."""
        for value, keys in ((self.norms_qk, _QK_KEYS), (self.rotates, _ROPE_KEYS)):
            if value is not None and key in keys and key not in self.stated:
                return (value,)
        return self.stated.get(key, NEUTRAL.get(key, ()))


#: Routers whose scores the class computes in fp32 in any case.
_FP32 = ("float32", "fp32")
FP32_ROUTER: Mapping[str, tuple[object, ...]] = {"router_dtype": _FP32, "moe_router_dtype": _FP32}
