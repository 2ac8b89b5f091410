"""Qwen3 with a mixture of experts. Source: published `Qwen3MoeForCausalLM`.

Owns how its config is read and its weights are named. Called through the table of architectures.
"""

import torch
from torch import nn

from hybridserve.backends.ops import Ops
from hybridserve.mixers.base import mixers
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer
from hybridserve.models.llama import read_info
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.moe import MoE, MoeConfig
from hybridserve.models.qwen3 import read_attention
from hybridserve.models.qwen3_next import RENAMES, RULES, is_moe
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_choice
from hybridserve.models.weights import WeightMap

WEIGHTS = WeightMap(RENAMES, RULES)


def read_moe(config: ConfigReader) -> MoeConfig:
    """Softmax over all experts, the best k. Today's files call the experts local."""
    config.expect("hidden_act", "silu")
    config.spell("num_experts", "num_local_experts")
    num_experts, num_chosen = read_choice(config, "num_experts", "num_experts_per_tok", default_experts=128)
    return MoeConfig(
        hidden_size=config.read_size("hidden_size"),
        num_experts=num_experts,
        num_chosen=num_chosen,
        width=config.read_size("moe_intermediate_size"),
        routing="softmax_topk",
        renormalise=config.read("norm_topk_prob", bool, False),
    )


@architectures.register("Qwen3MoeForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Qwen3 with experts."""
    config.declare(Family(norms_qk=True, rotates=True))
    info = read_info(config)
    eps, width = config.read("rms_norm_eps", float), config.read_size("intermediate_size")
    head_dim = max(1, info.hidden_size // config.read_size("num_attention_heads"))
    attention, moe = read_attention(config, info.max_positions, default_head_dim=head_dim), read_moe(config)

    def make_norm() -> RMSNorm:
        return RMSNorm(info.hidden_size, eps, ops, dtype)

    def make_mlp(sparse: bool) -> nn.Module:
        return MoE(moe, ops, dtype) if sparse else SwiGLU(info.hidden_size, width, ops, dtype)

    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    layers = [
        DecoderLayer([Branch(mixers["attention"](attention, ops, dtype))], make_norm(), make_mlp(sparse), make_norm())
        for sparse in is_moe(config, num_layers)
    ]
    tied = config.read("tie_word_embeddings", bool, False)
    return CausalLM(info, layers, make_norm(), ops, dtype, tied=tied, weight_map=WEIGHTS)
