"""Tiny random models of every architecture, made by transformers, and their files in each spelling that is in use.

Owns the configs (chosen so that every branch is taken: more value heads than key heads, grouped queries, partial rotation,
several experts, multipliers other than 1, biases) and the rewriting to the names and keys of the releases. Used by the tests
of models, loader and engine.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import latent_models, tiny_models
from tests.tiny_models import HEADS as _HEADS
from tests.tiny_models import ROPE as _ROPE
from tests.tiny_models import SIZES as _SIZES
from tests.tiny_models import VOCAB_SIZE

__all__ = [
    "TINY", "VOCAB_SIZE", "fill", "load_file", "make", "read_config", "released_config", "rewrite_config",
    "rewrite_tensors", "save", "save_released",
]  # fmt: skip
_GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
_PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
_MROPE = {**_PARTIAL, "mrope_section": [2, 1, 1], "mrope_interleaved": True}


def _qwen3_next() -> tf.PreTrainedModel:
    sizes = {**_SIZES, **_HEADS, **_GATED_DELTA, **_EXPERTS}
    config = tf.Qwen3NextConfig(**sizes, intermediate_size=48, mlp_only_layers=[1], attention_bias=True, rope_parameters=_PARTIAL)
    return tf.Qwen3NextForCausalLM(config)


def _qwen3_5() -> tf.PreTrainedModel:
    config = tf.Qwen3_5TextConfig(
        **_SIZES, **_HEADS, **_GATED_DELTA, intermediate_size=48, rope_parameters=_MROPE, tie_word_embeddings=True
    )
    return tf.Qwen3_5ForCausalLM(config)


def _vision(hidden_size: int) -> dict[str, int]:
    return {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": hidden_size,
        "num_position_embeddings": 16,
    }  # fmt: skip


def _qwen3_5_vision() -> tf.PreTrainedModel:
    text = {**_SIZES, **_HEADS, **_GATED_DELTA, "intermediate_size": 48, "rope_parameters": _MROPE}
    return tf.Qwen3_5ForConditionalGeneration(tf.Qwen3_5Config(text_config=text, vision_config=_vision(64)))


def _qwen3_5_moe() -> tf.PreTrainedModel:
    config = tf.Qwen3_5MoeTextConfig(**_SIZES, **_HEADS, **_GATED_DELTA, **_EXPERTS, rope_parameters=_MROPE)
    return tf.Qwen3_5MoeForCausalLM(config)


def _qwen3_5_moe_vision() -> tf.PreTrainedModel:
    text = {**_SIZES, **_HEADS, **_GATED_DELTA, **_EXPERTS, "rope_parameters": _MROPE}
    return tf.Qwen3_5MoeForConditionalGeneration(tf.Qwen3_5MoeConfig(text_config=text, vision_config=_vision(64)))


_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
_GRANITE = {
    **_SIZES,
    **_HEADS,
    **_MAMBA,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "shared_intermediate_size": 40,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.5,
}


def _granite_dense() -> tf.PreTrainedModel:
    config = tf.GraniteMoeHybridConfig(
        **_GRANITE, num_local_experts=0, num_experts_per_tok=0, tie_word_embeddings=True, mamba_proj_bias=True
    )
    return tf.GraniteMoeHybridForCausalLM(config)


def _granite_moe() -> tf.PreTrainedModel:
    config = tf.GraniteMoeHybridConfig(
        **_GRANITE,
        num_local_experts=8,
        num_experts_per_tok=3,
        intermediate_size=24,
        position_embedding_type="rope",
        rope_parameters=_ROPE,
        attention_bias=True,
    )
    return tf.GraniteMoeHybridForCausalLM(config)


_FALCON = {
    **_SIZES,
    **_HEADS,
    **_MAMBA,
    "mamba_d_ssm": 128,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "mlp_multipliers": [1.5, 0.5],
    "key_multiplier": 0.8,
    "attention_out_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 1.3],
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.6,
}


def _falcon_h1() -> tf.PreTrainedModel:
    config = tf.FalconH1Config(**_FALCON, mamba_norm_before_gate=False, tie_word_embeddings=True)
    return tf.FalconH1ForCausalLM(config)


def _falcon_h1_norm() -> tf.PreTrainedModel:
    biases = dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias"), True)
    config = tf.FalconH1Config(**_FALCON, mamba_rms_norm=True, mamba_norm_before_gate=True, projectors_bias=False, **biases)
    return tf.FalconH1ForCausalLM(config)


def _lfm2() -> tf.PreTrainedModel:
    config = tf.Lfm2Config(
        **_SIZES,
        **_HEADS,
        num_hidden_layers=4,
        layer_types=["conv", "conv", "full_attention", "conv"],
        intermediate_size=72,
        block_multiple_of=20,
        conv_bias=True,
        rope_parameters=_ROPE,
    )
    return tf.Lfm2ForCausalLM(config)


def _llama() -> tf.PreTrainedModel:
    rope = {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    config = tf.LlamaConfig(
        **_SIZES,
        **_HEADS,
        num_hidden_layers=3,
        intermediate_size=48,
        head_dim=24,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=rope,
    )
    return tf.LlamaForCausalLM(config)


def _qwen3() -> tf.PreTrainedModel:
    config = tf.Qwen3Config(
        **_SIZES,
        **_HEADS,
        num_hidden_layers=3,
        intermediate_size=48,
        head_dim=24,
        rope_parameters=_ROPE,
        tie_word_embeddings=True,
    )
    return tf.Qwen3ForCausalLM(config)


#: Makers by name; `make` seeds them.
TINY: Mapping[str, Callable[[], tf.PreTrainedModel]] = {
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "qwen3_5_vision": _qwen3_5_vision,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_5_moe_vision": _qwen3_5_moe_vision,
    "granite_dense": _granite_dense,
    "granite_moe": _granite_moe,
    "falcon_h1": _falcon_h1,
    "falcon_h1_norm": _falcon_h1_norm,
    "lfm2": _lfm2,
    "llama": _llama,
    "qwen3": _qwen3,
    **tiny_models.TINY,
    **latent_models.TINY,
}


def make(name: str, seed: int = 0) -> tf.PreTrainedModel:
    """A tiny fp32 model in which every parameter matters: matrices large enough to mix, norms and biases away from neutral."""
    torch.manual_seed(seed)
    return fill(TINY[name]())


def fill(model: tf.PreTrainedModel) -> tf.PreTrainedModel:
    """Give a model random weights, every one of which matters; from torch's current seed."""
    model.eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(("A_log", "dt_bias")):
                parameter.uniform_(-1.0, 1.0)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(std=0.5 if "conv" in path else 0.08)
        for path, buffer in model.named_buffers():
            if path.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(std=0.2)
    model.generation_config.eos_token_id = None
    return model


def save(model: tf.PreTrainedModel, folder: Path, shard_size: str = "1GB") -> Path:
    """As transformers saves it today. Returns the folder."""
    model.save_pretrained(folder, max_shard_size=shard_size)
    if model.config.model_type == "olmo_hybrid":
        rewrite_tensors(folder, tiny_models.with_olmo_convolutions(load_file(folder / "model.safetensors")))
    return folder


def save_released(model: tf.PreTrainedModel, folder: Path) -> Path:
    """In the other spelling: keys of before transformers 5, names that `save` does not write, tensors beside the model."""
    save(model, folder)
    config = read_config(folder)
    rewrite_config(folder, released_config(config))
    tensors = tiny_models.respelled(load_file(folder / "model.safetensors"), config)
    if str(config["model_type"]).startswith(("qwen3_next", "qwen3_5")):  # their releases hold a draft head as well
        tensors |= {"mtp.fc.weight": torch.ones(2, 2), "mtp.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}
    rewrite_tensors(folder, {_renamed(name, config): tensor for name, tensor in _with_fused_experts(tensors).items()})
    return folder


def _renamed(name: str, config: Mapping[str, object]) -> str:
    if config["model_type"] in ("qwen3_5_text", "qwen3_5_moe_text"):
        return re.sub(r"^model\.", "model.language_model.", name)
    if config["model_type"] == "granitemoehybrid":
        name = name.replace("moe.input_linear.weight", "moe.experts.gate_up_proj")
        name = name.replace("moe.output_linear.weight", "moe.experts.down_proj")
        return name.replace("router.layer.", "router.")
    if config["model_type"] == "gemma3":
        return re.sub(r"^model\.language_model\.", "language_model.model.", re.sub(r"^model\.(vision|multi)", r"\1", name))
    if config["model_type"] == "kimi_linear":
        # The dense layers' name is not changed in the release.
        return re.sub(r"block_sparse_moe\.((gate|up|down)_proj)", r"mlp.\1", name)
    return name


def released_config(config: dict[str, object]) -> dict[str, object]:
    """The config in the keys of before transformers 5: rope beside each other, old layer kinds, `torch_dtype`."""
    old: dict[str, object] = {}
    for key, value in config.items():
        if key == "text_config":
            assert isinstance(value, dict)
            if config["model_type"] in ("gemma3", "glm5_next", "qwen4_exp"):
                old[key] = released_config(value)
                continue
            old[key] = {**value, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "attn_output_gate": True}
        elif key == "rope_parameters" and config["model_type"] != "lfm3":  # which has no older spelling
            assert isinstance(value, dict)
            if "sliding_attention" in value:
                old["rope_local_base_freq"] = value["sliding_attention"]["rope_theta"]
                value = value["full_attention"]
            if config["model_type"] == "olmo3":
                old.pop("rope_local_base_freq")  # it has one base
            scaling = {k: v for k, v in value.items() if k not in ("rope_theta", "partial_rotary_factor")}
            old["rope_scaling"] = scaling if scaling != {"rope_type": "default"} else None
            old |= {k: value[k] for k in ("rope_theta", "partial_rotary_factor") if k in value}
        elif key == "layer_types" and config["model_type"] == "granitemoehybrid":
            assert isinstance(value, list)
            old[key] = [{"linear_attention": "mamba", "full_attention": "attention"}[kind] for kind in value]
        elif key == "dtype":
            old["torch_dtype"] = value
        else:
            old[key] = value
    return latent_models.released_config(old)


def _with_fused_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts in one tensor where transformers wrote one each."""
    out: dict[str, Tensor] = {}
    fused: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        single = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if single is None:
            out[name] = tensor
        else:
            fused.setdefault(single[1], {}).setdefault(int(single[2]), {})[single[3]] = tensor
    for prefix, experts in fused.items():
        ordered = [experts[i] for i in range(len(experts))]
        if "gate" in ordered[0]:
            out[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([one["gate"], one["up"]]) for one in ordered])
        else:
            out[f"{prefix}.up_proj"] = torch.stack([one["up"] for one in ordered])
        out[f"{prefix}.down_proj"] = torch.stack([one["down"] for one in ordered])
    return out


def read_config(folder: Path) -> dict[str, object]:
    """The config.json of a folder."""
    content = json.loads((folder / "config.json").read_text())
    assert isinstance(content, dict)
    return content


def rewrite_config(folder: Path, config: Mapping[str, object]) -> None:
    """Replace the config.json of a folder."""
    (folder / "config.json").write_text(json.dumps(config))


def rewrite_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace the weights of a folder."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
