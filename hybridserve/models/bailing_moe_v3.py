"""Ling 3: Kimi delta attention with full-rank, bounded gates, and latent attention with a gate per head, 5 to 1.

Owns how its config is read and its weights are named. Called through the table of architectures. The model type
`bailing_hybrid` is also that of Ling 2.6, which has other mathematics: only `architectures` tells the two apart. Source:
published `BailingHybridForCausalLM`.
"""

import torch

from hybridserve.backends.ops import Ops
from hybridserve.mixers.kda import KDAConfig
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import FP32_ROUTER, OFF, ON, Family
from hybridserve.models.decoder import CausalLM
from hybridserve.models.deepseek_v3 import (
    RENAMES,
    UNUSED_KEYS,
    RoutingDefaults,
    ignored_drafts,
    make_mlps,
    read_info,
    read_latent_rotary,
    read_mla,
    read_sigmoid_moe,
    read_sparse_layers,
)
from hybridserve.models.kimi_linear import KDA_RULES, make_hybrid_layers
from hybridserve.models.qwen3_next import RULES
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_layer_types
from hybridserve.models.weights import WeightMap

_RENAMES = (
    *RENAMES,
    (r"\.self_attn\.", ".attention."),
    (r"\.attention\.o_proj\.", ".attention.dense."),
    (r"\.e_score_correction_bias$", ".expert_bias"),
    (r"^embed_tokens\.", "word_embeddings."),
)


@architectures.register("BailingMoeV3ForCausalLM")
@architectures.register("BailingHybridForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Ling 3."""
    config.declare(
        Family(
            rotates=True,
            stated={
                **FP32_ROUTER,
                "no_kda_lora": ON,
                "gated_attention_proj_granularity_type": ("head_wise", "headwise"),
                "use_qk_norm": ON,
                "use_mla_nope": OFF,
                "rope_interleave": ON,
                "score_function": ("sigmoid",),
                "moe_router_enable_expert_bias": ON,
                "moe_router_enable_routed_scaling": ON,
                "moe_router_enable_shared_expert": ON,
            },
            same={"moe_shared_expert_intermediate_size": ("moe_intermediate_size", None)},
        )
    )
    # `head_dim` is the delta layer's in the release; transformers saves it as `linear_head_dim` and puts another number there.
    head_dim = config.read_size("linear_head_dim", config.read_size("head_dim", 128))
    config.ignore(*UNUSED_KEYS, "mtp_loss_scaling_factor")
    config.expect("tie_word_embeddings", False)
    info, eps = read_info(config), config.read("rms_norm_eps", float)
    num_heads = config.read_size("num_attention_heads")
    kda = KDAConfig(
        hidden_size=info.hidden_size,
        num_heads=config.read_size("linear_num_heads", num_heads),
        head_dim=head_dim,
        conv_width=config.read_size("linear_conv_kernel_dim", config.read_size("short_conv_kernel_size", 4)),
        eps=eps,
        lower_bound=_read_lower_bound(config),
        conv_fp32=True,
    )
    rotary = read_latent_rotary(config, info.max_positions, default_theta=6_000_000.0)
    mla = read_mla(config, rotary, output_gate=True)
    mlps = make_mlps(config, read_sigmoid_moe(config, RoutingDefaults(2.5, 8, 4)), read_sparse_layers(config, 2), ops, dtype)
    layers = make_hybrid_layers(info, eps, _read_kinds(config), kda, mla, mlps, ops, dtype)
    return CausalLM(
        info,
        layers,
        RMSNorm(info.hidden_size, eps, ops, dtype),
        ops,
        dtype,
        tied=False,
        weight_map=WeightMap(_RENAMES, (*KDA_RULES, *RULES), ignored=ignored_drafts(config, len(layers))),
    )


def _read_lower_bound(config: ConfigReader) -> float | None:
    bound = config.read("kda_lower_bound", float, -5.0)
    return bound if config.read("kda_safe_gate", bool, True) else None


def _read_kinds(config: ConfigReader) -> list[str]:
    """The kind of each layer: `layer_types`, or the last of every group is attention."""
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    size = config.read_size("layer_group_size", 6)
    default = ["linear_attention" if (i + 1) % size else "full_attention" for i in range(num_layers)]
    return read_layer_types(config, num_layers, ("linear_attention", "full_attention"), default)
