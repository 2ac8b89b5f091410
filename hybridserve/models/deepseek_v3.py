"""DeepSeek-V3: latent attention in every layer, experts chosen by sigmoid scores within groups. Source: published
`DeepseekV3ForCausalLM`.

Owns how its config is read and its weights are named. Called through the table of architectures; the other latent-attention
families use the parts that they share.
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import nn

from hybridserve.backends.ops import Ops
from hybridserve.mixers.base import Mixer, mixers
from hybridserve.mixers.mla import MLAConfig
from hybridserve.mixers.norm import RMSNorm
from hybridserve.mixers.rotary import RotaryConfig, YarnScaling
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import FP32_ROUTER, Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer, ModelInfo
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.moe import MoE, MoeConfig
from hybridserve.models.qwen3_next import RULES
from hybridserve.models.reader import MAX_EXPERTS, MAX_LAYERS, ConfigReader, read_choice, read_groups, read_layer_types
from hybridserve.models.rope import read_rotary
from hybridserve.models.weights import WeightMap

RENAMES = (
    (r"\.mixers\.\w+\.mixer\.", ".self_attn."),
    (r"(layers\.\d+)\.norm\.", r"\1.input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.mlp\.router\.", ".mlp.gate."),
    (r"\.mlp\.choice_bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.mlp\.shared\.", ".mlp.shared_experts."),
    (r"\.down\.weight$", ".down_proj.weight"),
)
#: Names that DeepSeek gave, and those that Kimi, Ling and transformers use.
_SPELLINGS = (
    ("n_shared_experts", "num_shared_experts"),
    ("n_routed_experts", "num_experts", "num_local_experts"),
    ("num_experts_per_tok", "num_experts_per_token"),
    ("n_group", "num_expert_group"),
    ("norm_topk_prob", "moe_renormalize"),
)
#: Training, tensor-parallel layout, and sizes that the other keys already give.
UNUSED_KEYS = (
    "pretraining_tp", "ep_size", "seq_aux", "aux_loss_alpha", "qk_head_dim", "head_dim",
)  # fmt: skip


def read_info(config: ConfigReader) -> ModelInfo:
    """What the engine needs to know."""
    config.spell("max_position_embeddings", "model_max_length")
    return ModelInfo(
        architecture=config.architecture,
        vocab_size=config.read_size("vocab_size"),
        hidden_size=config.read_size("hidden_size"),
        max_positions=config.read_size("max_position_embeddings", most=2**40),
    )


def read_mla(
    config: ConfigReader, rotary: RotaryConfig | None, *, output_gate: bool = False, has_query_rank: bool = False
) -> MLAConfig:
    """Latent attention in the keys that all families share. Its inner norms have an epsilon of their own.

    With `has_query_rank` queries have a low rank by default, so that a config must say that they have none.
    """
    has_query_rank = has_query_rank and not config.is_null("q_lora_rank")
    num_heads = config.read_size("num_attention_heads")
    config.expect("num_key_value_heads", num_heads, given="num_attention_heads")
    nope_dim = config.read_size("qk_nope_head_dim")
    rope_dim = config.read("qk_rope_head_dim", int)
    return MLAConfig(
        hidden_size=config.read_size("hidden_size"),
        num_heads=num_heads,
        kv_rank=config.read_size("kv_lora_rank"),
        q_rank=config.read_size("q_lora_rank") if has_query_rank or config.has("q_lora_rank") else None,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=config.read_size("v_head_dim"),
        rotary=rotary,
        scale=(nope_dim + rope_dim) ** -0.5 * _sharpening(rotary),
        bias=config.read("attention_bias", bool, False),
        output_gate="head" if output_gate else "none",
    )


def _sharpening(rotary: RotaryConfig | None) -> float:
    """What yarn multiplies all scores by, beside what it does to cosine and sine: the square of its factor for all dims."""
    scaling = None if rotary is None else rotary.scaling
    if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim:
        return 1.0
    return scaling.mscale_of(scaling.mscale_all_dim) ** 2


def read_latent_rotary(
    config: ConfigReader, max_positions: int, *, interleaved: bool = True, default_theta: float | None = None
) -> RotaryConfig:
    """The rotation of the rotary part, whose pairs lie together unless told otherwise."""
    rotary = read_rotary(
        config, config.read_size("qk_rope_head_dim"), max_positions, default_theta=default_theta, plain_is_whole=True
    )
    return msgspec.structs.replace(rotary, interleaved=interleaved)


class RoutingDefaults(msgspec.Struct, frozen=True):
    """What a class takes for keys that its config lacks: the factor on the weights, groups, and how many of those are chosen."""

    weight_scale: float
    num_groups: int = 1
    num_chosen_groups: int = 1


def read_sigmoid_moe(config: ConfigReader, defaults: RoutingDefaults, *, limit: float | None = None) -> MoeConfig:
    """Sigmoid scores with a bias for the choice, groups of experts, and shared experts as one wide MLP.

    Each count goes by the name that DeepSeek gave it or by the one that Kimi and Ling use.
    """
    config.expect("hidden_act", "silu")
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    config.expect("moe_layer_freq", 1)
    width = config.read_size("moe_intermediate_size")
    for spellings in _SPELLINGS:
        config.spell(*spellings)
    num_shared = config.read_size("n_shared_experts", 1, most=MAX_EXPERTS)
    num_experts, num_chosen = read_choice(config, "n_routed_experts", "num_experts_per_tok")
    num_groups, num_chosen_groups = read_groups(
        config, "n_routed_experts", num_experts, "n_group", "topk_group", (defaults.num_groups, defaults.num_chosen_groups)
    )
    return MoeConfig(
        hidden_size=config.read_size("hidden_size"),
        num_experts=num_experts,
        num_chosen=num_chosen,
        width=width,
        routing="sigmoid",
        renormalise=config.read("norm_topk_prob", bool, True),
        renormalise_eps=1e-20,
        weight_scale=config.read("routed_scaling_factor", float, defaults.weight_scale),
        choice_bias=True,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        router_fp32=True,
        limit=limit,
        shared_width=width * num_shared,
    )


def read_sparse_layers(config: ConfigReader, default_dense: int, *, is_counted: bool = True) -> list[bool]:
    """Which layers have experts: `mlp_layer_types`, or all but the first `first_k_dense_replace`.

    Without `is_counted` the published class has no such number: it may say what the class does anyway.
    """
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    if is_counted:
        dense = config.read("first_k_dense_replace", int, default_dense)
    else:
        dense = default_dense
        if config.has("mlp_layer_types"):
            config.ignore("first_k_dense_replace")
        else:
            config.expect("first_k_dense_replace", dense)
    default = ["dense" if i < dense else "sparse" for i in range(num_layers)]
    return [one == "sparse" for one in read_layer_types(config, num_layers, ("dense", "sparse"), default, "mlp_layer_types")]


def make_mlps(config: ConfigReader, moe: MoeConfig, sparse: Sequence[bool], ops: Ops, dtype: torch.dtype) -> list[nn.Module]:
    """Experts where `sparse` says so, a dense MLP elsewhere."""
    hidden, width = config.read_size("hidden_size"), config.read_size("intermediate_size")
    return [MoE(moe, ops, dtype) if one else SwiGLU(hidden, width, ops, dtype, limit=moe.limit) for one in sparse]


def ignored_drafts(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Tensors that plain decoding leaves alone: draft layers are stored after the last layer."""
    config.spell("num_nextn_predict_layers", "num_mtp_layers")
    num_drafts = config.read("num_nextn_predict_layers", int, 1)
    drafts = "|".join(str(num_layers + i) for i in range(max(0, min(num_drafts, MAX_LAYERS))))
    return (r".*\.rotary_emb\.inv_freq", *([rf"(.*\.)?layers\.({drafts})\..*"] if drafts else []))


def read_attention(config: ConfigReader, max_positions: int, *, interleaved: bool = True) -> MLAConfig:
    """Latent attention with a rotary part, of DeepSeek's and GLM's sizes."""
    rotary = read_latent_rotary(config, max_positions, interleaved=interleaved, default_theta=10_000.0)
    return read_mla(config, rotary, has_query_rank=True)


def assemble(
    config: ConfigReader, token_mixers: Sequence[Mixer], moe: MoeConfig, sparse: Sequence[bool], ops: Ops, dtype: torch.dtype
) -> CausalLM:
    """A decoder of the given mixers, one a layer, with experts in the layers that are `sparse`."""
    config.ignore(*UNUSED_KEYS)
    info, eps = read_info(config), config.read("rms_norm_eps", float)
    mlps = make_mlps(config, moe, sparse, ops, dtype)

    def make_norm() -> RMSNorm:
        return RMSNorm(info.hidden_size, eps, ops, dtype)

    layers = [DecoderLayer([Branch(mixer)], make_norm(), mlp, make_norm()) for mixer, mlp in zip(token_mixers, mlps, strict=True)]
    tied = config.read("tie_word_embeddings", bool, False)
    weight_map = WeightMap(RENAMES, RULES, ignored=ignored_drafts(config, len(layers)))
    return CausalLM(info, layers, make_norm(), ops, dtype, tied=tied, weight_map=weight_map)


#: Of DeepSeek-V3 and V3.2.
ROUTING = RoutingDefaults(2.5, 8, 4)


@architectures.register("DeepseekV3ForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a DeepSeek-V3."""
    config.declare(Family(rotates=True, stated=FP32_ROUTER))
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    dense = config.read("first_k_dense_replace", int, 3)
    sparse = [i >= dense for i in range(num_layers)]
    # Its class knows no list of layers: one may say the same.
    config.expect("mlp_layer_types", ["sparse" if one else "dense" for one in sparse])
    return build_latent(config, read_sigmoid_moe(config, ROUTING), sparse, ops, dtype)


def build_latent(config: ConfigReader, moe: MoeConfig, sparse: Sequence[bool], ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a decoder with latent attention to all tokens in every layer."""
    interleaved = config.read("rope_interleave", bool, True)
    attention = read_attention(config, read_info(config).max_positions, interleaved=interleaved)
    return assemble(config, [mixers["mla"](attention, ops, dtype) for _ in sparse], moe, sparse, ops, dtype)
