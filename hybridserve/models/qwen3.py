"""Qwen3 (dense): Llama with normed queries and keys. Source: published `Qwen3ForCausalLM`.

Owns how its config is read. Called through the table of architectures; `qwen3_moe.py` has the same attention.
"""

import torch

from hybridserve.backends.ops import Ops
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import CausalLM
from hybridserve.models.llama import build_decoder, read_info
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_layer_types
from hybridserve.models.rope import read_rotary


def read_attention(config: ConfigReader, max_positions: int, *, default_head_dim: int = 128) -> AttentionConfig:
    """The attention that all of Qwen3 share."""
    config.expect("use_sliding_window", False)
    config.ignore("sliding_window", "max_window_layers")  # they count only with use_sliding_window
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    read_layer_types(config, num_layers, ("full_attention",), ["full_attention"] * num_layers)
    head_dim = config.read_size("head_dim", default_head_dim)
    bias = config.read("attention_bias", bool, False)
    return AttentionConfig(
        hidden_size=config.read_size("hidden_size"),
        num_heads=config.read_size("num_attention_heads"),
        num_kv_heads=config.read_size("num_key_value_heads"),
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        qk_norm_eps=config.read("rms_norm_eps", float),
        rotary=read_rotary(config, head_dim, max_positions, default_theta=10_000.0, plain_is_whole=True),
    )


@architectures.register("Qwen3ForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Qwen3."""
    config.declare(Family(norms_qk=True, rotates=True))
    info = read_info(config)
    return build_decoder(config, read_attention(config, info.max_positions), info, ops, dtype)
