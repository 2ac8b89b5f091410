"""Granite 4 (hybrid and not, dense and with experts): Mamba-2 and attention. Source: published `GraniteMoeHybridForCausalLM`.

Owns how its config is read and its weights are named. Called through the table of architectures. Four multipliers: on the
embedding, on what each half-layer adds, in place of 1/sqrt(head dim), and one that divides the logits.
"""

import math

import torch
from torch import nn

from hybridserve.backends.ops import Ops
from hybridserve.errors import UnsupportedModelError
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import Mixer, mixers
from hybridserve.mixers.mamba2 import Mamba2Config
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer
from hybridserve.models.llama import read_info
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.moe import MoE, MoeConfig
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_choice, read_spelled_layer_types
from hybridserve.models.rope import read_rotary
from hybridserve.models.weights import DEPTHWISE, Rule, Spelling, WeightMap

_RENAMES = (
    (r"\.mixers\.attention\.mixer\.", ".self_attn."),
    (r"\.mixers\.mamba2\.mixer\.", ".mamba."),
    (r"(layers\.\d+)\.norm\.", r"\1.input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    # Without experts the MLP is the shared one.
    (r"\.mlp\.(?:shared\.)?gate_up\.weight$", ".shared_mlp.input_linear.weight"),
    (r"\.mlp\.(?:shared\.)?down\.weight$", ".shared_mlp.output_linear.weight"),
)
_MOE = r"\1.block_sparse_moe"
#: The released spelling first, then that of transformers from 5.0 on.
WEIGHTS = WeightMap(
    _RENAMES,
    (
        Rule(r"(.*\.conv1d)\.weight", (Spelling((r"\1.weight",), DEPTHWISE),)),
        Rule(r"(.*)\.mlp\.gate_up", (Spelling((f"{_MOE}.input_linear.weight",)), Spelling((f"{_MOE}.experts.gate_up_proj",)))),
        Rule(r"(.*)\.mlp\.down", (Spelling((f"{_MOE}.output_linear.weight",)), Spelling((f"{_MOE}.experts.down_proj",)))),
        Rule(
            r"(.*)\.mlp\.router\.weight",
            (Spelling((f"{_MOE}.router.layer.weight",)), Spelling((f"{_MOE}.router.weight",))),
        ),
    ),
)

_MAMBA_KEYS = (
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_conv_bias",
    "mamba_proj_bias", "time_step_limit",
)  # fmt: skip


@architectures.register("GraniteMoeHybridForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Granite 4."""
    config.declare(Family(norms_qk=False))
    config.expect("hidden_act", "silu")
    config.expect("normalization_function", "rmsnorm")
    info = read_info(config)
    eps = config.read("rms_norm_eps", float)
    kinds, attention = _read_kinds(config), _read_attention(config, info.max_positions)
    residual = config.read("residual_multiplier", float, 1.0)
    if "linear_attention" not in kinds:
        config.ignore(*_MAMBA_KEYS)  # the releases without Mamba layers carry its keys, whatever they say

    def make_mixer(kind: str) -> Mixer:
        return (
            mixers["mamba2"](_read_mamba(config), ops, dtype)
            if kind == "linear_attention"
            else mixers["attention"](attention, ops, dtype)
        )

    def make_norm() -> RMSNorm:
        return RMSNorm(info.hidden_size, eps, ops, dtype)

    layers = [
        DecoderLayer(
            [Branch(make_mixer(kind))], make_norm(), _make_mlp(config, ops, dtype), make_norm(), residual_multiplier=residual
        )
        for kind in kinds
    ]
    return CausalLM(
        info,
        layers,
        make_norm(),
        ops,
        dtype,
        tied=config.read("tie_word_embeddings", bool, False),
        weight_map=WEIGHTS,
        embedding_multiplier=config.read("embedding_multiplier", float, 1.0),
        logits_multiplier=1.0 / config.read("logits_scaling", float, 1.0),
    )


def _read_kinds(config: ConfigReader) -> list[str]:
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    allowed, default = ("linear_attention", "full_attention"), ["linear_attention"] * num_layers
    return read_spelled_layer_types(config, num_layers, allowed, default, ("layer_types", "layers_block_type"))


def _make_mlp(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> nn.Module:
    hidden, shared = config.read_size("hidden_size"), config.read_size("shared_intermediate_size")
    if config.read("num_local_experts", int, 8) == 0:
        config.ignore("num_experts_per_tok", "intermediate_size")
        return SwiGLU(hidden, shared, ops, dtype)
    num_experts, num_chosen = read_choice(config, "num_local_experts", "num_experts_per_tok", default_experts=8, default_chosen=2)
    moe = MoeConfig(
        hidden_size=hidden,
        num_experts=num_experts,
        num_chosen=num_chosen,
        width=config.read_size("intermediate_size"),
        routing="topk_softmax",
        shared_width=shared,
    )
    return MoE(moe, ops, dtype)


def _read_attention(config: ConfigReader, max_positions: int) -> AttentionConfig:
    hidden, num_heads = config.read_size("hidden_size"), config.read_size("num_attention_heads")
    head_dim = config.read_size("head_dim", max(1, hidden // num_heads))
    config.expect("position_embedding_type", "nope", "rope")
    rotary = None
    if config.read("position_embedding_type", str, "nope") == "rope":
        rotary = read_rotary(config, head_dim, max_positions, default_theta=10_000.0, plain_is_whole=True)
    else:
        config.ignore("rope_theta", "rope_scaling", "rope_parameters")
    bias = config.read("attention_bias", bool, False)
    return AttentionConfig(
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=config.read_size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        scale=None if config.is_null("attention_multiplier") else config.read("attention_multiplier", float, 1.0),
        qkv_bias=bias,
        out_bias=bias,
        rotary=rotary,
    )


def _read_mamba(config: ConfigReader) -> Mamba2Config:
    hidden = config.read_size("hidden_size")
    inner = config.read_size("mamba_expand", 2) * hidden
    num_heads = config.read_size("mamba_n_heads", 128)
    bias = config.read("mamba_proj_bias", bool, False)
    return Mamba2Config(
        hidden_size=hidden,
        num_heads=num_heads,
        head_dim=read_mamba_head_dim(config, inner, num_heads),
        num_groups=config.read_size("mamba_n_groups", 1),
        state_size=config.read_size("mamba_d_state", 256),
        conv_width=config.read_size("mamba_d_conv", 4),
        conv_bias=config.read("mamba_conv_bias", bool, True),
        proj_bias=bias,
        eps=config.read("rms_norm_eps", float),
        time_step_limit=read_time_step_limit(config),
    )


def read_mamba_head_dim(config: ConfigReader, inner: int, num_heads: int) -> int:
    """`mamba_d_head`, or what is left for each head of the inner size when it says "auto"."""
    is_auto = config.read("mamba_d_head", object, "auto") == "auto"
    head_dim = inner // num_heads if is_auto else config.read_size("mamba_d_head")
    if head_dim * num_heads != inner:
        raise UnsupportedModelError(
            f"config.json: mamba_d_head is {head_dim}, with {num_heads} heads; the two must multiply to the inner size, {inner}"
        )
    return head_dim


def read_time_step_limit(config: ConfigReader) -> tuple[float, float]:
    """Bounds of Mamba's time step, infinite if not given."""
    low, high = config.read("time_step_limit", tuple[float, float], (0.0, math.inf))
    return low, high
