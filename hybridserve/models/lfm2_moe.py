"""LFM2 with experts after the first layers. Source: published `Lfm2MoeForCausalLM`.

Owns how its config is read and its weights are named. Called through the table of architectures.
"""

from dataclasses import replace

import torch
from torch import nn

from hybridserve.backends.ops import Ops
from hybridserve.mixers.base import Mixer, mixers
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer
from hybridserve.models.lfm2 import ATTENTION_RENAMES, RENAMES, RULES, read_attention, read_conv, read_kinds, read_tied
from hybridserve.models.llama import read_info
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.moe import MoE, MoeConfig
from hybridserve.models.reader import ConfigReader, read_choice
from hybridserve.models.weights import Rule, Spelling, WeightMap

_EXPERTS = r"\1.feed_forward.experts.{expert}"
WEIGHTS = WeightMap(
    renames=(
        *RENAMES,
        *ATTENTION_RENAMES,
        (r"\.mlp\.router\.", ".feed_forward.gate."),
        (r"\.mlp\.choice_bias$", ".feed_forward.expert_bias"),
    ),
    rules=(
        Rule(r"(.*)\.mlp\.gate_up", (Spelling((f"{_EXPERTS}.w1.weight", f"{_EXPERTS}.w3.weight"), per_expert=True),)),
        Rule(r"(.*)\.mlp\.down", (Spelling((f"{_EXPERTS}.w2.weight",), per_expert=True),)),
        *RULES,
    ),
)


def _read_moe(config: ConfigReader) -> MoeConfig:
    num_experts, num_chosen = read_choice(config, "num_experts", "num_experts_per_tok")
    return MoeConfig(
        hidden_size=config.read_size("hidden_size"),
        num_experts=num_experts,
        num_chosen=num_chosen,
        width=config.read_size("moe_intermediate_size"),
        routing="sigmoid",
        renormalise=config.read("norm_topk_prob", bool, True),
        renormalise_eps=1e-6,
        weight_scale=config.read("routed_scaling_factor", float, 1.0),
        choice_bias=config.read("use_expert_bias", bool, True),
    )


@architectures.register("Lfm2MoeForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out an LFM2 with experts."""
    config.declare(Family(norms_qk=True, rotates=True))
    info = read_info(config)
    eps, width = config.read("norm_eps", float), config.read_size("intermediate_size")
    moe, num_dense = _read_moe(config), config.read("num_dense_layers", int, 2)
    attention, conv = read_attention(config, info.max_positions), read_conv(config, 3)

    def make_mixer(kind: str) -> Mixer:
        return mixers["short_conv"](conv, ops, dtype) if kind == "conv" else mixers["attention"](attention, ops, dtype)

    def make_mlp(index: int) -> nn.Module:
        return SwiGLU(info.hidden_size, width, ops, dtype) if index < num_dense else MoE(moe, ops, dtype)

    def make_norm() -> RMSNorm:
        return RMSNorm(info.hidden_size, eps, ops, dtype)

    layers = [
        DecoderLayer([Branch(make_mixer(kind))], make_norm(), make_mlp(i), make_norm())
        for i, kind in enumerate(read_kinds(config))
    ]
    # Without its use the bias is stored all the same.
    ignored = WEIGHTS.ignored if moe.choice_bias else (*WEIGHTS.ignored, r".*\.feed_forward\.expert_bias")
    weight_map = replace(WEIGHTS, ignored=ignored)
    return CausalLM(info, layers, make_norm(), ops, dtype, tied=read_tied(config), weight_map=weight_map)
