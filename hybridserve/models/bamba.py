"""Bamba: Mamba-2 and attention, both with an MLP. Source: published `BambaForCausalLM`.

Owns how its config is read and its weights are named. Called through the table of architectures. Half of each head is rotated.
"""

import torch

from hybridserve.backends.ops import Ops
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import Mixer, mixers
from hybridserve.mixers.mamba2 import Mamba2Config
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer
from hybridserve.models.falcon_h1 import WEIGHTS
from hybridserve.models.granite_moe_hybrid import read_mamba_head_dim, read_time_step_limit
from hybridserve.models.llama import read_info
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_spelled_layer_types
from hybridserve.models.rope import read_rotary


def _read_kinds(config: ConfigReader) -> list[str]:
    """Attention where `attn_layer_indices` says; other spellings of the list must agree with it."""
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    attention = set(config.read("attn_layer_indices", list[int], []))
    default = ["full_attention" if i in attention else "linear_attention" for i in range(num_layers)]
    allowed = ("linear_attention", "full_attention")
    return read_spelled_layer_types(config, num_layers, allowed, default, ("layers_block_type", "layer_types"))


def _read_attention(config: ConfigReader, max_positions: int) -> AttentionConfig:
    hidden, num_heads = config.read_size("hidden_size"), config.read_size("num_attention_heads")
    head_dim = config.read_size("head_dim", max(1, hidden // num_heads))
    bias = config.read("attention_bias", bool, False)
    config.expect("partial_rotary_factor", 0.5)  # the published class turns half of a head, whatever it says beside the others
    return AttentionConfig(
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=config.read_size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        rotary=read_rotary(config, head_dim, max_positions, default_theta=10_000.0, default_partial=0.5),
    )


def _read_mamba(config: ConfigReader) -> Mamba2Config:
    hidden, num_heads = config.read_size("hidden_size"), config.read_size("mamba_n_heads")
    return Mamba2Config(
        hidden_size=hidden,
        num_heads=num_heads,
        head_dim=read_mamba_head_dim(config, config.read_size("mamba_expand", 2) * hidden, num_heads),
        num_groups=config.read_size("mamba_n_groups", 1),
        state_size=config.read_size("mamba_d_state", 256),
        conv_width=config.read_size("mamba_d_conv", 4),
        conv_bias=config.read("mamba_conv_bias", bool, True),
        proj_bias=config.read("mamba_proj_bias", bool, False),
        eps=config.read("rms_norm_eps", float),
        time_step_limit=read_time_step_limit(config),
    )


@architectures.register("BambaForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Bamba."""
    config.declare(Family(norms_qk=False, rotates=True))
    config.expect("hidden_act", "silu")
    config.ignore("z_loss_coefficient")  # of training
    info = read_info(config)
    eps, width = config.read("rms_norm_eps", float), config.read_size("intermediate_size")
    bias = config.read("mlp_bias", bool, False)
    attention, mamba = _read_attention(config, info.max_positions), _read_mamba(config)
    config.expect("attn_rotary_emb", None if attention.rotary is None else attention.rotary.rotary_dim)

    def make_mixer(kind: str) -> Mixer:
        return mixers["attention"](attention, ops, dtype) if kind == "full_attention" else mixers["mamba2"](mamba, ops, dtype)

    def make_norm() -> RMSNorm:
        return RMSNorm(info.hidden_size, eps, ops, dtype)

    layers = [
        DecoderLayer([Branch(make_mixer(kind))], make_norm(), SwiGLU(info.hidden_size, width, ops, dtype, bias=bias), make_norm())
        for kind in _read_kinds(config)
    ]
    tied = config.read("tie_word_embeddings", bool, False)
    return CausalLM(info, layers, make_norm(), ops, dtype, tied=tied, weight_map=WEIGHTS)
