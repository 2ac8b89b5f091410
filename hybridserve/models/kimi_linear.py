"""Kimi Linear: Kimi delta attention and latent attention without positions, 3 to 1, with a mixture of experts.

Owns how its config is read and its weights are named. Called through the table of architectures; the other families with Kimi
delta attention use the parts that they share. Kimi-K3 states the same model type with other mathematics and is refused by name.
Source: published `KimiLinearForCausalLM`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridserve.backends.ops import Ops
from hybridserve.errors import UnsupportedModelError
from hybridserve.mixers.base import mixers
from hybridserve.mixers.kda import KDAConfig
from hybridserve.mixers.mla import MLAConfig
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import FP32_ROUTER, Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer, ModelInfo
from hybridserve.models.deepseek_v3 import (
    RENAMES,
    UNUSED_KEYS,
    RoutingDefaults,
    ignored_drafts,
    make_mlps,
    read_info,
    read_mla,
    read_sigmoid_moe,
    read_sparse_layers,
)
from hybridserve.models.qwen3_next import RULES
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_layer_types
from hybridserve.models.weights import DEPTHWISE, Rule, Shape, Spelling, WeightMap


@dataclass(frozen=True, slots=True)
class _PerHead:
    """One number a head, stored as [1, 1, H, 1]."""

    def disk_shape(self, shape: Shape) -> Shape:
        return (1, 1, *shape, 1)

    def arrange(self, tensor: Tensor, shape: Shape) -> Tensor:
        return tensor.view(shape)


#: Low-rank gates, and the joint projection and convolution of queries, keys and values.
KDA_RENAMES = ((r"\.([fg])_proj\.([ab])\.", r".\1_\2_proj."),)
KDA_RULES = (
    Rule(r"(.*)\.in_proj_qkv\.weight", (Spelling((r"\1.q_proj.weight", r"\1.k_proj.weight", r"\1.v_proj.weight")),)),
    Rule(
        r"(.*)\.conv1d\.weight",
        (Spelling((r"\1.q_conv1d.weight", r"\1.k_conv1d.weight", r"\1.v_conv1d.weight"), DEPTHWISE),),
    ),
)
#: Experts are w1, w3 and w2. A dense MLP is called `mlp` in the release, and as the experts are in what transformers saves.
_RULES = (
    Rule(r"(.*)\.A_log", (Spelling((r"\1.A_log",), _PerHead()), Spelling((r"\1.A_log",)))),
    Rule(
        r"(.*)\.mlp\.gate_up\.weight",
        tuple(Spelling((rf"\1.{at}.gate_proj.weight", rf"\1.{at}.up_proj.weight")) for at in ("mlp", "block_sparse_moe")),
    ),
    Rule(
        r"(.*)\.mlp\.down_proj\.weight",
        tuple(Spelling((rf"\1.{at}.down_proj.weight",)) for at in ("mlp", "block_sparse_moe")),
    ),
    Rule(
        r"(.*)\.mlp\.gate_up",
        (
            Spelling(
                (r"\1.block_sparse_moe.experts.{expert}.w1.weight", r"\1.block_sparse_moe.experts.{expert}.w3.weight"),
                per_expert=True,
            ),
        ),
    ),
    Rule(r"(.*)\.mlp\.down", (Spelling((r"\1.block_sparse_moe.experts.{expert}.w2.weight",), per_expert=True),)),
    *KDA_RULES,
    *RULES,
)
_RENAMES = (*RENAMES, *KDA_RENAMES, (r"\.mlp\.(gate|shared_experts)\.", r".block_sparse_moe.\1."))
#: The rotation that latent attention without positions does not have.
_UNUSED_KEYS = (*UNUSED_KEYS, "rope_theta", "rope_scaling", "rope_parameters")


def refuse_kimi_k3(config: ConfigReader) -> None:
    """Raise UnsupportedModelError for a config of Kimi-K3: another activation, residual attention, latent experts."""
    if config.has("attn_res_block_size") or config.read("hidden_act", str, "silu") == "situ":
        raise UnsupportedModelError(
            "config.json has attn_res_block_size, or 'situ' as hidden_act: this is Kimi-K3, which shares the model type "
            "'kimi_linear' with Kimi-Linear but not its mathematics, and is not implemented; serve Kimi-Linear instead"
        )


def read_kinds(config: ConfigReader, linear: ConfigReader) -> list[str]:
    """The kind of each layer: `layer_types`, or the release's two lists of layers, which count from 1."""
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    full = linear.read("full_attn_layers", list[int], [])
    kda = linear.read("kda_layers", list[int], [])
    if not config.has("layer_types") and sorted((*full, *kda)) != list(range(1, num_layers + 1)):
        raise UnsupportedModelError(
            f"config.json: {linear.name('full_attn_layers')} and {linear.name('kda_layers')} must name each of the layers 1 to "
            f"{num_layers} once between them; they name {sorted((*full, *kda))!r:.200}"
        )
    default = ["full_attention" if i + 1 in full else "linear_attention" for i in range(num_layers)]
    return read_layer_types(config, num_layers, ("linear_attention", "full_attention"), default)


def read_kda(config: ConfigReader, linear: ConfigReader) -> KDAConfig:
    """The delta layer, in the release's nested keys or in those that transformers saves."""
    head_dim = linear.read_size("head_dim", config.read_size("linear_head_dim", 128))
    return KDAConfig(
        hidden_size=config.read_size("hidden_size"),
        num_heads=linear.read_size("num_heads", config.read_size("linear_num_heads", 32)),
        head_dim=head_dim,
        conv_width=linear.read_size("short_conv_kernel_size", config.read_size("linear_conv_kernel_dim", 4)),
        eps=config.read("rms_norm_eps", float),
        gate_rank=head_dim,
    )


def make_hybrid_layers(
    info: ModelInfo,
    eps: float,
    kinds: Sequence[str],
    kda: KDAConfig,
    mla: MLAConfig,
    mlps: Sequence[nn.Module],
    ops: Ops,
    dtype: torch.dtype,
) -> list[DecoderLayer]:
    """Layers of the two kinds around the given MLPs, one each."""

    def make_norm() -> RMSNorm:
        return RMSNorm(info.hidden_size, eps, ops, dtype)

    def make_branch(kind: str) -> Branch:
        return Branch(mixers["kda"](kda, ops, dtype) if kind == "linear_attention" else mixers["mla"](mla, ops, dtype))

    return [DecoderLayer([make_branch(kind)], make_norm(), mlp, make_norm()) for kind, mlp in zip(kinds, mlps, strict=True)]


@architectures.register("KimiLinearForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Kimi Linear."""
    config.declare(Family(rotates=False, stated=FP32_ROUTER))
    refuse_kimi_k3(config)
    config.ignore(*_UNUSED_KEYS)
    config.expect("mla_use_nope", True)
    config.expect("moe_router_activation_func", "sigmoid")
    config.expect("use_grouped_topk", True)
    config.expect("tie_word_embeddings", False)
    info, eps = read_info(config), config.read("rms_norm_eps", float)
    linear = config.nested("linear_attn_config")
    kinds = read_kinds(config, linear)
    mlps = make_mlps(config, read_sigmoid_moe(config, RoutingDefaults(2.446)), read_sparse_layers(config, 1), ops, dtype)
    layers = make_hybrid_layers(info, eps, kinds, read_kda(config, linear), read_mla(config, None), mlps, ops, dtype)
    return CausalLM(
        info,
        layers,
        RMSNorm(info.hidden_size, eps, ops, dtype),
        ops,
        dtype,
        tied=False,
        weight_map=WeightMap(_RENAMES, _RULES, ignored=ignored_drafts(config, len(layers))),
    )
