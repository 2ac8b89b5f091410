"""Jamba: Mamba and attention without positions, experts in every second layer. Source: published `JambaForCausalLM`.

Owns how its config is read and its weights are named. Called through the table of architectures.
"""

import torch
from torch import nn

from hybridserve.backends.ops import Ops
from hybridserve.errors import UnsupportedModelError
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import Mixer, mixers
from hybridserve.mixers.mamba1 import Mamba1Config
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer
from hybridserve.models.llama import read_info
from hybridserve.models.mamba import read_time_step_rank
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.moe import MoE, MoeConfig
from hybridserve.models.qwen3_next import RULES
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_choice
from hybridserve.models.weights import WeightMap

WEIGHTS = WeightMap(
    renames=(
        (r"\.mixers\.attention\.mixer\.", ".self_attn."),
        (r"\.mixers\.mamba1\.mixer\.", ".mamba."),
        (r"\.mamba\.(dt|b|c)_norm_weight$", r".mamba.\1_layernorm.weight"),
        (r"\.mamba\.dt_bias$", ".mamba.dt_proj.bias"),
        (r"(layers\.\d+)\.norm\.", r"\1.input_layernorm."),
        (r"\.mlp_norm\.", ".pre_ff_layernorm."),
        (r"\.mlp\.", ".feed_forward."),
        (r"\.down\.weight$", ".down_proj.weight"),
        (r"^norm\.", "final_layernorm."),
    ),
    rules=RULES,
)


def _read_every(config: ConfigReader, what: str, period: int, offset: int, num_layers: int) -> list[bool]:
    """Which layers have it: those at `offset` within every `period`."""
    period = config.read_size(f"{what}_layer_period", period, most=MAX_LAYERS)
    offset = config.read(f"{what}_layer_offset", int, offset)
    if not 0 <= offset < period:
        raise UnsupportedModelError(
            f"config.json: {config.name(f'{what}_layer_offset')} is {offset}; it must be from 0 to below the period, {period}"
        )
    return [i % period == offset for i in range(num_layers)]


def _read_attention(config: ConfigReader) -> AttentionConfig:
    config.expect("sliding_window")
    hidden, num_heads = config.read_size("hidden_size"), config.read_size("num_attention_heads")
    return AttentionConfig(
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=config.read_size("num_key_value_heads", num_heads),
        head_dim=config.read_size("head_dim", max(1, hidden // num_heads)),
    )


def _read_mamba(config: ConfigReader) -> Mamba1Config:
    config.expect("mamba_inner_layernorms", True)
    hidden = config.read_size("hidden_size")
    return Mamba1Config(
        hidden_size=hidden,
        inner=config.read_size("mamba_expand", 2) * hidden,
        state_size=config.read_size("mamba_d_state", 16),
        dt_rank=read_time_step_rank(config, "mamba_dt_rank", hidden),
        conv_width=config.read_size("mamba_d_conv", 4),
        conv_bias=config.read("mamba_conv_bias", bool, True),
        proj_bias=config.read("mamba_proj_bias", bool, False),
        inner_norms="weighted",
        eps=config.read("rms_norm_eps", float),
    )


def _read_moe(config: ConfigReader) -> MoeConfig | None:
    """Softmax over all experts, the best k as they are; None where the only expert is an MLP."""
    config.spell("num_experts", "num_local_experts")
    if config.read("num_experts", int, 16) == 1:
        config.ignore("num_experts_per_tok")
        return None
    num_experts, num_chosen = read_choice(config, "num_experts", "num_experts_per_tok", default_experts=16, default_chosen=2)
    return MoeConfig(
        hidden_size=config.read_size("hidden_size"),
        num_experts=num_experts,
        num_chosen=num_chosen,
        width=config.read_size("intermediate_size"),
        routing="softmax_topk",
        renormalise=False,
    )


@architectures.register("JambaForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Jamba."""
    config.declare(Family(norms_qk=False, rotates=False))
    config.expect("hidden_act", "silu")
    # Choices of kernels and of what training returns.
    config.ignore("use_mambapy", "use_associative_scan", "calc_logits_for_entire_prompt", "n_ctx")
    info = read_info(config)
    hidden, width = info.hidden_size, config.read_size("intermediate_size")
    eps, num_layers = config.read("rms_norm_eps", float), config.read_size("num_hidden_layers", most=MAX_LAYERS)
    attention, mamba, moe = _read_attention(config), _read_mamba(config), _read_moe(config)
    is_attention = _read_every(config, "attn", 8, 4, num_layers)
    is_sparse = [one and moe is not None for one in _read_every(config, "expert", 2, 1, num_layers)]
    # Lists that follow from the periods; transformers 4 wrote the first.
    config.expect("layers_block_type", ["attention" if one else "mamba" for one in is_attention])
    config.expect("layers_num_experts", [moe.num_experts if one and moe is not None else 1 for one in is_sparse])

    def make_mixer(attends: bool) -> Mixer:
        return mixers["attention"](attention, ops, dtype) if attends else mixers["mamba1"](mamba, ops, dtype)

    def make_mlp(sparse: bool) -> nn.Module:
        return SwiGLU(hidden, width, ops, dtype) if moe is None or not sparse else MoE(moe, ops, dtype)

    def make_norm() -> RMSNorm:
        return RMSNorm(hidden, eps, ops, dtype)

    layers = [
        DecoderLayer([Branch(make_mixer(attends))], make_norm(), make_mlp(sparse), make_norm())
        for attends, sparse in zip(is_attention, is_sparse, strict=True)
    ]
    tied = config.read("tie_word_embeddings", bool, False)
    return CausalLM(info, layers, make_norm(), ops, dtype, tied=tied, weight_map=WEIGHTS)
