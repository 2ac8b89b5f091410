"""Lara Mini: gated delta layers, attention within a window and over all tokens in one model, all with experts.

Owns how its config is read and its weights are named. Called through the table of architectures. Only layers with a window know
positions; the router works in fp32; the shared expert is not gated. Source: published `LaraMiniForCausalLM`.
"""

import msgspec
import torch

from hybridserve.backends.ops import Ops
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import Mixer, mixers
from hybridserve.mixers.gated_delta import GatedDeltaConfig
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer
from hybridserve.models.llama import read_info
from hybridserve.models.moe import MoE, MoeConfig
from hybridserve.models.qwen3_next import RENAMES, RULES, read_gated_delta
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_choice, read_layer_types
from hybridserve.models.rope import read_rotary
from hybridserve.models.weights import Interleaved, Rule, Spelling, WeightMap

_PATTERN = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")


def _weights(delta: GatedDeltaConfig) -> WeightMap:
    """The release has q, k, v, z, b and a in one projection, and another name for the gated norm."""
    key, value = delta.num_k_heads * delta.k_dim, delta.num_v_heads * delta.v_dim
    widths = (2 * key + value, value, delta.num_v_heads, delta.num_v_heads)
    projections = (
        Rule(
            rf"(.*\.linear_attn)\.in_proj_{name}\.weight",
            (
                Spelling((r"\1.in_proj.weight",), Interleaved(1, widths, (part,))),
                Spelling((rf"\1.in_proj_{name}.weight",)),
            ),
        )
        for part, name in enumerate(("qkv", "z", "b", "a"))
    )
    norm = Rule(r"(.*\.linear_attn)\.norm\.weight", (Spelling((r"\1.out_norm.weight",)), Spelling((r"\1.norm.weight",))))
    return WeightMap(RENAMES, (*projections, norm, *RULES))


def _read_attention(config: ConfigReader, max_positions: int) -> AttentionConfig:
    """Attention over all tokens, with the rotary embedding that only the other kind uses."""
    head_dim = config.read_size("head_dim", 128)
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


def _read_moe(config: ConfigReader) -> MoeConfig:
    config.spell("num_experts", "num_local_experts")
    num_experts, num_chosen = read_choice(config, "num_experts", "num_experts_per_tok", default_experts=128)
    return MoeConfig(
        hidden_size=config.read_size("hidden_size"),
        num_experts=num_experts,
        num_chosen=num_chosen,
        width=config.read_size("moe_intermediate_size"),
        routing="softmax_topk",
        renormalise=config.read("norm_topk_prob", bool, True),
        router_fp32=True,
        shared_width=config.read_size("shared_expert_intermediate_size"),
    )


@architectures.register("LaraMiniForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Lara Mini."""
    config.declare(Family(norms_qk=True))
    info = read_info(config)
    eps, moe, delta = config.read("rms_norm_eps", float), _read_moe(config), read_gated_delta(config)
    sliding = msgspec.structs.replace(_read_attention(config, info.max_positions), window=config.read_size("sliding_window", 512))
    full = msgspec.structs.replace(sliding, window=None, rotary=None)
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    default = [_PATTERN[i % len(_PATTERN)] for i in range(num_layers)]
    kinds = read_layer_types(config, num_layers, ("linear_attention", "sliding_attention", "full_attention"), default)

    def make_mixer(kind: str) -> Mixer:
        if kind == "linear_attention":
            return mixers["gated_delta"](delta, ops, dtype)
        return mixers["attention"](sliding if kind == "sliding_attention" else full, ops, dtype)

    def make_norm() -> RMSNorm:
        return RMSNorm(info.hidden_size, eps, ops, dtype)

    layers = [DecoderLayer([Branch(make_mixer(kind))], make_norm(), MoE(moe, ops, dtype), make_norm()) for kind in kinds]
    tied = config.read("tie_word_embeddings", bool, True)
    return CausalLM(info, layers, make_norm(), ops, dtype, tied=tied, weight_map=_weights(delta))
