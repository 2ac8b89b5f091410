"""Qwen3-Next: gated delta layers and gated attention, 3 to 1, with a mixture of experts.

Owns how its config is read and its weights are named. Called through the table of architectures; `qwen3_5.py` uses the parts
that the two share. Norms are zero-centred except the gated one; keys and queries are normed per head. Source: published
`Qwen3NextForCausalLM`.
"""

from collections.abc import Sequence

import torch
from torch import nn

from hybridserve.backends.ops import Ops
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import Mixer, mixers
from hybridserve.mixers.gated_delta import GatedDeltaConfig
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer, ModelInfo
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.moe import MoE, MoeConfig
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_choice, read_layer_types
from hybridserve.models.rope import read_rotary
from hybridserve.models.weights import DEPTHWISE, Interleaved, Rule, Spelling, WeightMap

RENAMES = (
    (r"\.mixers\.attention\.mixer\.", ".self_attn."),
    (r"\.mixers\.gated_delta\.mixer\.", ".linear_attn."),
    (r"(layers\.\d+)\.norm\.", r"\1.input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.mlp\.router\.", ".mlp.gate."),
    (r"\.mlp\.shared\.", ".mlp.shared_expert."),
    (r"\.mlp\.shared_gate\.", ".mlp.shared_expert_gate."),
    (r"\.down\.weight$", ".down_proj.weight"),
)
#: Tensors of releases that a text decoder leaves alone: the draft head, and of those that wrap it the vision tower.
_DRAFTS = r"mtp\..*"
IGNORED = (_DRAFTS, r"(model\.)?visual\..*")
RULES = (
    Rule(r"(.*\.conv1d)\.weight", (Spelling((r"\1.weight",), DEPTHWISE),)),
    Rule(
        r"(.*)\.gate_up",
        (
            Spelling((r"\1.experts.{expert}.gate_proj.weight", r"\1.experts.{expert}.up_proj.weight"), per_expert=True),
            Spelling((r"\1.experts.gate_up_proj",)),
        ),
    ),
    Rule(
        r"(.*)\.down",
        (Spelling((r"\1.experts.{expert}.down_proj.weight",), per_expert=True), Spelling((r"\1.experts.down_proj",))),
    ),
    Rule(r"(.*)\.gate_up\.weight", (Spelling((r"\1.gate_proj.weight", r"\1.up_proj.weight")),)),
)


def read_attention(config: ConfigReader, max_positions: int, *, default_partial: float = 0.25) -> AttentionConfig:
    """The gated attention that Qwen3-Next and Qwen3.5 share."""
    config.expect("attn_output_gate", True)
    config.expect("use_sliding_window", False)
    head_dim = config.read_size("head_dim")
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
        zero_centred_norm=True,
        output_gate="element",
        rotary=read_rotary(config, head_dim, max_positions, default_partial=default_partial),
    )


def read_gated_delta(config: ConfigReader) -> GatedDeltaConfig:
    """The gated delta layer that Qwen3-Next and Qwen3.5 share. Its state is kept in fp32 whatever the config says."""
    config.expect("hidden_act", "silu")
    config.expect("mamba_ssm_dtype", "float32", "auto")
    return GatedDeltaConfig(
        hidden_size=config.read_size("hidden_size"),
        num_k_heads=config.read_size("linear_num_key_heads"),
        num_v_heads=config.read_size("linear_num_value_heads"),
        k_dim=config.read_size("linear_key_head_dim"),
        v_dim=config.read_size("linear_value_head_dim"),
        conv_width=config.read_size("linear_conv_kernel_dim"),
        eps=config.read("rms_norm_eps", float),
    )


def read_moe(config: ConfigReader) -> MoeConfig:
    """Softmax over all experts, the best k renormalised, and a shared expert behind a sigmoid gate."""
    num_experts, num_chosen = read_choice(config, "num_experts", "num_experts_per_tok")
    return MoeConfig(
        hidden_size=config.read_size("hidden_size"),
        num_experts=num_experts,
        num_chosen=num_chosen,
        width=config.read_size("moe_intermediate_size"),
        routing="softmax_topk",
        renormalise=config.read("norm_topk_prob", bool, True),
        shared_width=config.read_size("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def read_kinds(config: ConfigReader) -> list[str]:
    """The kind of each layer: `layer_types`, or every n-th is attention."""
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    interval = config.read_size("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    return read_layer_types(config, num_layers, ("linear_attention", "full_attention"), default)


def read_info(config: ConfigReader) -> ModelInfo:
    """What the engine needs to know, under the key names that most families share."""
    return ModelInfo(
        architecture=config.architecture,
        vocab_size=config.read_size("vocab_size"),
        hidden_size=config.read_size("hidden_size"),
        max_positions=config.read_size("max_position_embeddings", most=2**40),
    )


def make_layers(
    config: ConfigReader, info: ModelInfo, mlps: Sequence[nn.Module], ops: Ops, dtype: torch.dtype
) -> list[DecoderLayer]:
    """Layers around the given MLPs, one each."""
    eps = config.read("rms_norm_eps", float)
    attention, gated_delta = read_attention(config, info.max_positions), read_gated_delta(config)

    def make_mixer(kind: str) -> Mixer:
        if kind == "full_attention":
            return mixers["attention"](attention, ops, dtype)
        return mixers["gated_delta"](gated_delta, ops, dtype)

    def make_norm() -> RMSNorm:
        return RMSNorm(info.hidden_size, eps, ops, dtype, zero_centred=True)

    return [
        DecoderLayer([Branch(make_mixer(kind))], make_norm(), mlp, make_norm())
        for kind, mlp in zip(read_kinds(config), mlps, strict=True)
    ]


def final_norm(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> RMSNorm:
    """The norm after the last layer."""
    return RMSNorm(config.read_size("hidden_size"), config.read("rms_norm_eps", float), ops, dtype, zero_centred=True)


def is_moe(config: ConfigReader, num_layers: int) -> list[bool]:
    """Which layers have experts."""
    dense = set(config.read("mlp_only_layers", list[int], []))
    every = config.read_size("decoder_sparse_step", 1)
    return [i not in dense and (i + 1) % every == 0 for i in range(num_layers)]


def _projections(config: GatedDeltaConfig) -> tuple[Rule, ...]:
    """q, k, v, z and b, a of each key head lie together on disk."""
    heads, ratio = config.num_k_heads, config.num_v_heads // config.num_k_heads
    qkvz = (config.k_dim, config.k_dim, ratio * config.v_dim, ratio * config.v_dim)
    sources = {
        "qkv": ("qkvz", Interleaved(heads, qkvz, (0, 1, 2))),
        "z": ("qkvz", Interleaved(heads, qkvz, (3,))),
        "b": ("ba", Interleaved(heads, (ratio, ratio), (0,))),
        "a": ("ba", Interleaved(heads, (ratio, ratio), (1,))),
    }
    return tuple(
        Rule(rf"(.*)\.in_proj_{part}\.weight", (Spelling((rf"\1.in_proj_{fused}.weight",), layout),))
        for part, (fused, layout) in sources.items()
    )


@architectures.register("Qwen3NextForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Qwen3-Next."""
    config.declare(
        Family(
            norms_qk=True,
            rotates=True,
            unused=frozenset({"max_window_layers", "sliding_window"}),
            stated={"output_gate_type": ("swish", "silu")},
        )
    )
    info = read_info(config)
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    moe, width = read_moe(config), config.read_size("intermediate_size")
    mlps = [
        MoE(moe, ops, dtype) if sparse else SwiGLU(info.hidden_size, width, ops, dtype) for sparse in is_moe(config, num_layers)
    ]
    return CausalLM(
        info,
        make_layers(config, info, mlps, ops, dtype),
        final_norm(config, ops, dtype),
        ops,
        dtype,
        tied=config.read("tie_word_embeddings", bool, False),
        weight_map=WeightMap(RENAMES, (*_projections(read_gated_delta(config)), *RULES), ignored=(_DRAFTS,)),
    )
