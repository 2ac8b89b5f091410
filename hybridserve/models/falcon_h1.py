"""Falcon-H1: attention and Mamba-2 side by side in every layer, with muP multipliers. Source: published `FalconH1ForCausalLM`.

Owns how its config is read and its weights are named. Called through the table of architectures.
"""

import torch

from hybridserve.backends.ops import Ops
from hybridserve.errors import UnsupportedModelError
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import mixers
from hybridserve.mixers.mamba2 import Mamba2Config
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer
from hybridserve.models.granite_moe_hybrid import read_mamba_head_dim, read_time_step_limit
from hybridserve.models.llama import read_info
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.reader import MAX_LAYERS, ConfigReader
from hybridserve.models.rope import read_rotary
from hybridserve.models.weights import DEPTHWISE, Rule, Spelling, WeightMap

WEIGHTS = WeightMap(
    renames=(
        (r"\.mixers\.attention\.mixer\.", ".self_attn."),
        (r"\.mixers\.mamba2\.mixer\.", ".mamba."),
        (r"(layers\.\d+)\.norm\.", r"\1.input_layernorm."),
        (r"\.mlp_norm\.", ".pre_ff_layernorm."),
        (r"\.mlp\.down\.", ".feed_forward.down_proj."),
        (r"^norm\.", "final_layernorm."),
    ),
    rules=(
        Rule(r"(.*\.conv1d)\.weight", (Spelling((r"\1.weight",), DEPTHWISE),)),
        Rule(
            r"(.*)\.mlp\.gate_up\.(weight|bias)",
            (Spelling((r"\1.feed_forward.gate_proj.\2", r"\1.feed_forward.up_proj.\2")),),
        ),
    ),
)


@architectures.register("FalconH1ForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Falcon-H1."""
    config.declare(
        Family(
            norms_qk=False,
            rotates=True,
            unused=frozenset({"mlp_expansion_factor", "time_step_floor", "time_step_max", "time_step_min"}),
        )
    )
    config.expect("hidden_act", "silu")
    config.expect("mamba_use_mlp", True)
    config.ignore("layer_types", "layers_block_type")  # every layer is the same
    info = read_info(config)
    eps = config.read("rms_norm_eps", float)
    return CausalLM(
        info,
        [
            _make_layer(config, info.max_positions, ops, dtype)
            for _ in range(config.read_size("num_hidden_layers", most=MAX_LAYERS))
        ],
        RMSNorm(info.hidden_size, eps, ops, dtype),
        ops,
        dtype,
        tied=config.read("tie_word_embeddings", bool, False),
        weight_map=WEIGHTS,
        embedding_multiplier=config.read("embedding_multiplier", float, 1.0),
        logits_multiplier=config.read("lm_head_multiplier", float, 1.0),
    )


def _make_layer(config: ConfigReader, max_positions: int, ops: Ops, dtype: torch.dtype) -> DecoderLayer:
    hidden, eps = config.read_size("hidden_size"), config.read("rms_norm_eps", float)
    mamba = Branch(mixers["mamba2"](_read_mamba(config), ops, dtype), after=config.read("ssm_out_multiplier", float, 1.0))
    attention = Branch(
        mixers["attention"](_read_attention(config, max_positions), ops, dtype),
        before=config.read("attention_in_multiplier", float, 1.0),
        after=config.read("attention_out_multiplier", float, 1.0),
    )
    gate, down = config.read("mlp_multipliers", tuple[float, float], (1.0, 1.0))
    mlp = SwiGLU(
        hidden,
        config.read_size("intermediate_size"),
        ops,
        dtype,
        bias=config.read("mlp_bias", bool, False),
        gate_multiplier=gate,
        down_multiplier=down,
    )
    return DecoderLayer([mamba, attention], RMSNorm(hidden, eps, ops, dtype), mlp, RMSNorm(hidden, eps, ops, dtype))


def _read_attention(config: ConfigReader, max_positions: int) -> AttentionConfig:
    hidden, num_heads = config.read_size("hidden_size"), config.read_size("num_attention_heads")
    head_dim = config.read_size("head_dim", max(1, hidden // num_heads))
    bias = config.read("attention_bias", bool, False)
    key_multiplier = config.read("key_multiplier", float, 1.0)
    if key_multiplier == 0:
        raise UnsupportedModelError(
            f"config.json: {config.name('key_multiplier')} is 0, with which all scores are equal; take the published config.json"
        )
    return AttentionConfig(
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=config.read_size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        rotary=read_rotary(config, head_dim, max_positions, default_theta=10_000.0, plain_is_whole=True),
        key_multiplier=key_multiplier,
    )


def _read_mamba(config: ConfigReader) -> Mamba2Config:
    hidden, num_heads = config.read_size("hidden_size"), config.read_size("mamba_n_heads")
    inner = config.read_size("mamba_d_ssm", config.read_size("mamba_expand", 2) * hidden)
    return Mamba2Config(
        hidden_size=hidden,
        num_heads=num_heads,
        head_dim=read_mamba_head_dim(config, inner, num_heads),
        num_groups=config.read_size("mamba_n_groups", 1),
        state_size=config.read_size("mamba_d_state"),
        conv_width=config.read_size("mamba_d_conv", 4),
        conv_bias=config.read("mamba_conv_bias", bool, True),
        proj_bias=config.read("mamba_proj_bias", bool, False),
        out_bias=config.read("projectors_bias", bool, False),
        eps=config.read("rms_norm_eps", float),
        gated_norm=config.read("mamba_rms_norm", bool, False),
        norm_first=config.read("mamba_norm_before_gate", bool, True),
        time_step_limit=read_time_step_limit(config),
        ssm_multipliers=config.read("ssm_multipliers", tuple[float, float, float, float, float], (1.0,) * 5),
        in_multiplier=config.read("ssm_in_multiplier", float, 1.0),
    )
