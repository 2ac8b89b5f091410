"""LFM2 and LFM2.5 (dense): short convolutions and attention. Source: published `Lfm2ForCausalLM`.

Owns how its config is read and its weights are named. Called through the table of architectures; `lfm2_moe.py` and `lfm3.py`
use the parts that they share. The final norm is called `embedding_norm` on disk.
"""

import torch

from hybridserve.backends.ops import Ops
from hybridserve.errors import UnsupportedModelError
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import Mixer, mixers
from hybridserve.mixers.norm import RMSNorm
from hybridserve.mixers.short_conv import ShortConvConfig
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer
from hybridserve.models.llama import read_info
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_layer_types
from hybridserve.models.rope import read_rotary
from hybridserve.models.weights import DEPTHWISE, Rule, Spelling, WeightMap

RENAMES = (
    (r"\.mixers\.attention\.mixer\.", ".self_attn."),
    (r"\.mixers\.short_conv\.mixer\.", ".conv."),
    (r"(layers\.\d+)\.norm\.", r"\1.operator_norm."),
    (r"\.mlp_norm\.", ".ffn_norm."),
    (r"\.mlp\.down\.", ".feed_forward.w2."),
    (r"^norm\.", "embedding_norm."),
)
#: Names that LFM3 has given up.
ATTENTION_RENAMES = (
    (r"\.self_attn\.o_proj\.", ".self_attn.out_proj."),
    (r"\.self_attn\.([qk])_norm\.", r".self_attn.\1_layernorm."),
)
RULES = (
    Rule(r"(.*\.conv\.conv)\.weight", (Spelling((r"\1.weight",), DEPTHWISE),)),
    Rule(r"(.*)\.mlp\.gate_up\.weight", (Spelling((r"\1.feed_forward.w1.weight", r"\1.feed_forward.w3.weight")),)),
)
#: Written by the training code; initialisation, and shapes that the other keys already give.
_UNUSED_KEYS = (
    "block_dim", "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "block_norm_eps", "conv_dim",
    "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta", "block_ffn_te_autocast", "ffn_te_autocast",
    "block_sequence_parallel_norm_across_tp", "sequence_parallel_norm_across_tp",
)  # fmt: skip


def read_width(config: ConfigReader) -> int:
    """Width of the MLP: `block_ff_dim`, once `intermediate_size`, adjusted as the training code did."""
    config.ignore("intermediate_size")
    width = config.read_size("block_ff_dim" if config.has("block_ff_dim") else "intermediate_size")
    adjusted = config.read("block_auto_adjust_ff_dim", bool, True)
    multiplier = config.read("block_ffn_dim_multiplier", float, 1.0)
    multiple = config.read_size("block_multiple_of", 256)
    if not adjusted:
        return width
    return multiple * -(-int(multiplier * int(2 * width / 3)) // multiple)


def read_kinds(config: ConfigReader) -> list[str]:
    """The kind of each layer: `layer_types`, or attention where `full_attn_idxs` says."""
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    attention = config.read("full_attn_idxs", list[int], list(range(num_layers)))
    default = ["full_attention" if i in attention else "conv" for i in range(num_layers)]
    return read_layer_types(config, num_layers, ("conv", "full_attention"), default)


@architectures.register("Lfm2ForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out an LFM2."""
    config.declare(Family(norms_qk=True, rotates=True))
    config.ignore(*_UNUSED_KEYS)
    config.expect("block_use_swiglu", True)
    config.expect("use_pos_enc", True)
    info = read_info(config)
    eps, width = config.read("norm_eps", float), read_width(config)
    attention, conv = read_attention(config, info.max_positions), read_conv(config, 3)

    def make_mixer(kind: str) -> Mixer:
        return mixers["short_conv"](conv, ops, dtype) if kind == "conv" else mixers["attention"](attention, ops, dtype)

    def make_norm() -> RMSNorm:
        return RMSNorm(info.hidden_size, eps, ops, dtype)

    layers = [
        DecoderLayer([Branch(make_mixer(kind))], make_norm(), SwiGLU(info.hidden_size, width, ops, dtype), make_norm())
        for kind in read_kinds(config)
    ]
    weight_map = WeightMap((*RENAMES, *ATTENTION_RENAMES), RULES)
    return CausalLM(info, layers, make_norm(), ops, dtype, tied=read_tied(config), weight_map=weight_map)


def read_tied(config: ConfigReader) -> bool:
    """Whether the head is the embedding, in either spelling."""
    return config.read("tie_embedding", bool, config.read("tie_word_embeddings", bool, True))


def read_conv(config: ConfigReader, default_width: int) -> ShortConvConfig:
    """The short convolution that the family shares."""
    width = config.read_size("conv_L_cache", default_width)
    if width < 2:
        raise UnsupportedModelError(f"config.json: {config.name('conv_L_cache')} is {width}; it must be at least 2")
    return ShortConvConfig(
        hidden_size=config.read_size("hidden_size"),
        width=width,
        bias=config.read("conv_bias", bool, False),
    )


def read_attention(config: ConfigReader, max_positions: int) -> AttentionConfig:
    """The attention of LFM2, dense and with experts."""
    hidden, num_heads = config.read_size("hidden_size"), config.read_size("num_attention_heads")
    head_dim = config.read_size("head_dim", max(1, hidden // num_heads))
    return AttentionConfig(
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=config.read_size("num_key_value_heads", 8),
        head_dim=head_dim,
        qk_norm="head",
        qk_norm_eps=config.read("norm_eps", float),
        rotary=read_rotary(config, head_dim, max_positions, default_theta=1_000_000.0, plain_is_whole=True),
    )
