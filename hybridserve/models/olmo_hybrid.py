"""Olmo Hybrid: gated delta layers and attention, 3 to 1. Source: published `OlmoHybridForCausalLM`.

Owns how its config is read and its weights are named. Called through the table of architectures. Attention is Olmo 3's, each half
normed after it, and without positions unless the config has a base; gated delta layers have values twice as wide as keys, may
overshoot a value, and are normed before each half.
"""

import torch

from hybridserve.backends.ops import Ops
from hybridserve.errors import UnsupportedModelError
from hybridserve.mixers.base import mixers
from hybridserve.mixers.gated_delta import GatedDeltaConfig
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import ON, Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer
from hybridserve.models.llama import read_info
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.olmo3 import RENAMES, RULES, make_post_norm_layer, read_attention, read_head_dim
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_layer_types
from hybridserve.models.rope import read_rotary
from hybridserve.models.weights import DEPTHWISE, Rule, Spelling, WeightMap

#: Epsilon of the gated norm, which the config does not state.
_GATED_EPS = 1e-5
#: How the training code initialised.
_UNUSED_KEYS = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")


def _weights(delta: GatedDeltaConfig) -> WeightMap:
    """Norms of attention layers are those after a half, of gated delta layers those before."""
    rows = (delta.num_k_heads * delta.k_dim,) * 2 + (delta.num_v_heads * delta.v_dim,)
    projections = {"z": "g", "b": "b", "a": "a"}
    return WeightMap(
        renames=(
            (r"\.mixers\.gated_delta\.mixer\.norm\.", ".linear_attn.o_norm."),
            (r"\.mixers\.gated_delta\.mixer\.out_proj\.", ".linear_attn.o_proj."),
            (r"\.mixers\.gated_delta\.mixer\.", ".linear_attn."),
            *((rf"\.in_proj_{ours}\.", rf".{theirs}_proj.") for ours, theirs in projections.items()),
            *RENAMES,
        ),
        rules=(
            Rule(r"(.*)\.in_proj_qkv\.weight", (Spelling(tuple(rf"\1.{one}_proj.weight" for one in "qkv"), rows=rows),)),
            Rule(
                r"(.*)\.conv1d\.weight",
                (
                    Spelling(tuple(rf"\1.{one}_conv1d.weight" for one in "qkv"), DEPTHWISE, rows=rows),
                    Spelling((r"\1.conv1d.weight",), DEPTHWISE),
                ),
            ),
            Rule(
                r"(layers\.\d+)\.norm\.weight",
                (Spelling((r"\1.attention_layer_norm.weight",)), Spelling((r"\1.input_layernorm.weight",))),
            ),
            Rule(
                r"(layers\.\d+)\.(?:mlp_norm|post_attention_layernorm)\.weight",
                (Spelling((r"\1.feedforward_layer_norm.weight",)), Spelling((r"\1.post_attention_layernorm.weight",))),
            ),
            *RULES,
        ),
    )


def _read_gated_delta(config: ConfigReader) -> GatedDeltaConfig:
    hidden, num_heads = config.read_size("hidden_size"), config.read_size("num_attention_heads")
    num_k_heads = config.read_size("linear_num_key_heads", num_heads)
    k_dim = config.read_size("linear_key_head_dim", max(1, int(0.75 * hidden / num_k_heads)))
    return GatedDeltaConfig(
        hidden_size=hidden,
        num_k_heads=num_k_heads,
        num_v_heads=config.read_size("linear_num_value_heads", num_heads),
        k_dim=k_dim,
        v_dim=config.read_size("linear_value_head_dim", 2 * k_dim),
        conv_width=config.read_size("linear_conv_kernel_dim", 4),
        eps=_GATED_EPS,
        allow_neg_eigval=config.read("linear_allow_neg_eigval", bool, True),
    )


def _read_kinds(config: ConfigReader) -> list[str]:
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    default = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(num_layers)]
    if "full_attention" not in default:
        default[-1] = "full_attention"
    return read_layer_types(config, num_layers, ("linear_attention", "full_attention"), default)


def _has_positions(config: ConfigReader) -> bool:
    """Whether heads are turned: a base that is null says that they are not, an absent one is the default."""
    stated = config.read("rope_scaling", dict[str, object], {}) or config.read("rope_parameters", dict[str, object], {})
    if "rope_theta" in stated:
        return stated["rope_theta"] is not None
    if not stated and config.is_null("rope_parameters") and not (config.has("rope_theta") or config.is_null("rope_theta")):
        raise UnsupportedModelError(
            f"config.json: {config.name('rope_parameters')} is null and there is no rope_theta, which may mean a model without "
            "positions or the default base; state rope_theta: null if it has none, 10000.0 otherwise"
        )
    return not config.is_null("rope_theta")


@architectures.register("OlmoHybridForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out an Olmo Hybrid."""
    config.declare(Family(norms_qk=True, stated={"linear_use_gate": ON}))
    config.expect("hidden_act", "silu")
    config.ignore(*_UNUSED_KEYS)
    info = read_info(config)
    hidden, eps = info.hidden_size, config.read("rms_norm_eps", float)
    width = config.read_size("intermediate_size")
    rotary = None
    if _has_positions(config):
        rotary = read_rotary(config, read_head_dim(config), info.max_positions, default_theta=10_000.0, plain_is_whole=True)
    else:
        config.ignore("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    attention, delta = read_attention(config, rotary), _read_gated_delta(config)

    def make_norm() -> RMSNorm:
        return RMSNorm(hidden, eps, ops, dtype)

    def make_layer(kind: str) -> DecoderLayer:
        if kind == "full_attention":
            return make_post_norm_layer(config, mixers["attention"](attention, ops, dtype), ops, dtype)
        mixer = mixers["gated_delta"](delta, ops, dtype)
        return DecoderLayer([Branch(mixer)], make_norm(), SwiGLU(hidden, width, ops, dtype), make_norm())

    return CausalLM(
        info,
        [make_layer(kind) for kind in _read_kinds(config)],
        make_norm(),
        ops,
        dtype,
        tied=config.read("tie_word_embeddings", bool, False),
        weight_map=_weights(delta),
    )
