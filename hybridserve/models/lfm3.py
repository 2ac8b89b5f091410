"""LFM3: short convolutions, attention within a window and over all tokens; norms on both sides of each half, gated heads.

Owns how its config is read and its weights are named. Called through the table of architectures. Source: published
`Lfm3ForCausalLM`.
"""

from collections.abc import Mapping

import torch

from hybridserve.backends.ops import Ops
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import Mixer, mixers
from hybridserve.mixers.norm import RMSNorm
from hybridserve.mixers.rotary import RotaryConfig
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer
from hybridserve.models.lfm2 import RENAMES, RULES, read_conv, read_tied
from hybridserve.models.llama import read_info
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_layer_types
from hybridserve.models.rope import read_rotary_by_kind
from hybridserve.models.weights import Rule, Spelling, WeightMap

WEIGHTS = WeightMap(
    renames=(*RENAMES, (r"\.after_norm\.", ".post_operator_norm."), (r"\.after_mlp_norm\.", ".post_ffn_norm.")),
    rules=(
        Rule(
            r"(.*\.self_attn)\.g_proj\.weight",
            (Spelling((r"\1.gate_proj.weight",)), Spelling((r"\1.g_proj.weight",))),
        ),
        *RULES,
    ),
)
_THETAS = {"full_attention": 1_000_000.0, "sliding_attention": 1_000_000.0}
#: Of a config that says nothing of it.
_DEFAULT_ROPE: Mapping[str, Mapping[str, object]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}


def _read_attention(config: ConfigReader, rotary: RotaryConfig, window: int | None) -> AttentionConfig:
    bias = config.read("attention_bias", bool, False)
    return AttentionConfig(
        hidden_size=config.read_size("hidden_size"),
        num_heads=config.read_size("num_attention_heads"),
        num_kv_heads=config.read_size("num_key_value_heads"),
        head_dim=config.read_size("head_dim", 128),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        qk_norm_eps=config.read("norm_eps", float),
        output_gate="head" if config.read("use_attention_gate", bool, True) else "none",
        rotary=rotary,
        window=window,
    )


@architectures.register("Lfm3ForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out an LFM3."""
    config.declare(Family(norms_qk=True, rotates=True))
    config.spell("norm_eps", "rms_norm_eps")
    info = read_info(config)
    eps, width = config.read("norm_eps", float), config.read_size("intermediate_size")
    has_after_norms = config.read("use_sandwich_norm", bool, True)
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    windows = {"full_attention": None, "sliding_attention": config.read_size("sliding_window", 256)}
    config.expect("rope_scaling", {})  # one for both kinds: its class cannot be given that
    rotary = read_rotary_by_kind(
        config,
        config.read_size("head_dim", 128),
        info.max_positions,
        _THETAS,
        sliding_theta_key="rope_theta",
        default_parameters=_DEFAULT_ROPE,
    )
    attention = {kind: _read_attention(config, rotary[kind], window) for kind, window in windows.items()}
    conv = read_conv(config, 7)

    def make_mixer(kind: str) -> Mixer:
        return mixers["short_conv"](conv, ops, dtype) if kind == "conv" else mixers["attention"](attention[kind], ops, dtype)

    def make_norm() -> RMSNorm:
        return RMSNorm(info.hidden_size, eps, ops, dtype)

    layers = [
        DecoderLayer(
            [Branch(make_mixer(kind))],
            make_norm(),
            SwiGLU(info.hidden_size, width, ops, dtype),
            make_norm(),
            after_norm=make_norm() if has_after_norms else None,
            after_mlp_norm=make_norm() if has_after_norms else None,
        )
        for kind in read_layer_types(config, num_layers, ("conv", *windows), _default_kinds(num_layers))
    ]
    return CausalLM(info, layers, make_norm(), ops, dtype, tied=read_tied(config), weight_map=WEIGHTS)


def _default_kinds(num_layers: int) -> list[str]:
    """Attention in every second layer, over all tokens and within the window in turn."""
    by_rest = {2: "full_attention", 0: "sliding_attention"}
    return [by_rest.get(i % 4, "conv") if i else "conv" for i in range(num_layers)]
