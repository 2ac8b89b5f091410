"""Olmo 3: three layers with a window to one without, each half normed after it, queries and keys over the whole projection.

Owns how its config is read and its weights are named. Called through the table of architectures; `olmo_hybrid.py` uses the
parts that the two share. Source: published `Olmo3ForCausalLM`.
"""

import torch

from hybridserve.backends.ops import Ops
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import Mixer, mixers
from hybridserve.mixers.norm import RMSNorm
from hybridserve.mixers.rotary import RotaryConfig
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer
from hybridserve.models.llama import read_info
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_layer_types
from hybridserve.models.rope import read_rotary_by_kind
from hybridserve.models.weights import Rule, Spelling, WeightMap

RENAMES = (
    (r"\.mixers\.attention\.mixer\.", ".self_attn."),
    (r"\.after_norm\.", ".post_attention_layernorm."),
    (r"\.after_mlp_norm\.", ".post_feedforward_layernorm."),
    (r"\.mlp\.down\.", ".mlp.down_proj."),
)
RULES = (Rule(r"(.*)\.gate_up\.weight", (Spelling((r"\1.gate_proj.weight", r"\1.up_proj.weight")),)),)
_THETAS = {"full_attention": 500_000.0, "sliding_attention": 500_000.0}


def read_head_dim(config: ConfigReader) -> int:
    """Width of a head, which the config need not state."""
    return config.read_size("head_dim", max(1, config.read_size("hidden_size") // config.read_size("num_attention_heads")))


def read_attention(config: ConfigReader, rotary: RotaryConfig | None, window: int | None = None) -> AttentionConfig:
    """The attention that the family shares."""
    num_heads = config.read_size("num_attention_heads")
    bias = config.read("attention_bias", bool, False)
    return AttentionConfig(
        hidden_size=config.read_size("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=config.read_size("num_key_value_heads", num_heads),
        head_dim=read_head_dim(config),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="full",
        qk_norm_eps=config.read("rms_norm_eps", float),
        rotary=rotary,
        window=window,
    )


def make_post_norm_layer(config: ConfigReader, mixer: Mixer, ops: Ops, dtype: torch.dtype) -> DecoderLayer:
    """x += norm(mixer(x)); x += norm(mlp(x))."""
    hidden, eps = config.read_size("hidden_size"), config.read("rms_norm_eps", float)
    return DecoderLayer(
        [Branch(mixer)],
        None,
        SwiGLU(hidden, config.read_size("intermediate_size"), ops, dtype),
        None,
        after_norm=RMSNorm(hidden, eps, ops, dtype),
        after_mlp_norm=RMSNorm(hidden, eps, ops, dtype),
    )


@architectures.register("Olmo3ForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out an Olmo 3."""
    config.declare(Family(norms_qk=True, rotates=True))
    config.expect("hidden_act", "silu")
    info = read_info(config)
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    default = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(num_layers)]
    kinds = read_layer_types(config, num_layers, tuple(_THETAS), default)
    rotary = read_rotary_by_kind(config, read_head_dim(config), info.max_positions, _THETAS)
    windows = {"sliding_attention": config.read_size("sliding_window", 4096), "full_attention": None}
    attention = {kind: read_attention(config, rotary[kind], window) for kind, window in windows.items()}
    return CausalLM(
        info,
        [make_post_norm_layer(config, mixers["attention"](attention[kind], ops, dtype), ops, dtype) for kind in kinds],
        RMSNorm(info.hidden_size, config.read("rms_norm_eps", float), ops, dtype),
        ops,
        dtype,
        tied=config.read("tie_word_embeddings", bool, False),
        weight_map=WeightMap(RENAMES, RULES),
    )
