"""Llama: attention in every layer. Source: published `LlamaForCausalLM`.

Owns how its config is read and its weights are named. Called through the table of architectures; `qwen3.py` differs in its
attention only and uses the rest.
"""

import torch

from hybridserve.backends.ops import Ops
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import mixers
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer, ModelInfo
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.reader import MAX_LAYERS, ConfigReader
from hybridserve.models.rope import read_rotary
from hybridserve.models.weights import Rule, Spelling, WeightMap

WEIGHTS = WeightMap(
    renames=(
        (r"\.mixers\.attention\.mixer\.", ".self_attn."),
        (r"(layers\.\d+)\.norm\.", r"\1.input_layernorm."),
        (r"\.mlp_norm\.", ".post_attention_layernorm."),
        (r"\.mlp\.down\.", ".mlp.down_proj."),
    ),
    rules=(Rule(r"(.*)\.gate_up\.(weight|bias)", (Spelling((r"\1.gate_proj.\2", r"\1.up_proj.\2")),)),),
)


def build_decoder(config: ConfigReader, attention: AttentionConfig, info: ModelInfo, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a decoder with this attention and a dense MLP in every layer."""
    config.expect("hidden_act", "silu")
    eps, width = config.read("rms_norm_eps", float), config.read_size("intermediate_size")
    bias = config.read("mlp_bias", bool, False)

    def make_norm() -> RMSNorm:
        return RMSNorm(info.hidden_size, eps, ops, dtype)

    layers = [
        DecoderLayer(
            [Branch(mixers["attention"](attention, ops, dtype))],
            make_norm(),
            SwiGLU(info.hidden_size, width, ops, dtype, bias=bias),
            make_norm(),
        )
        for _ in range(config.read_size("num_hidden_layers", most=MAX_LAYERS))
    ]
    tied = config.read("tie_word_embeddings", bool, False)
    return CausalLM(info, layers, make_norm(), ops, dtype, tied=tied, weight_map=WEIGHTS)


def read_info(config: ConfigReader) -> ModelInfo:
    """What the engine needs to know."""
    return ModelInfo(
        architecture=config.architecture,
        vocab_size=config.read_size("vocab_size"),
        hidden_size=config.read_size("hidden_size"),
        max_positions=config.read_size("max_position_embeddings", most=2**40),
    )


@architectures.register("LlamaForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Llama."""
    config.declare(Family(norms_qk=False, rotates=True))
    # Slices the projections to imitate a tensor-parallel run; mathematically the same, so any value will do.
    config.ignore("pretraining_tp")
    info = read_info(config)
    num_heads = config.read_size("num_attention_heads")
    head_dim = config.read_size("head_dim", max(1, info.hidden_size // num_heads))
    bias = config.read("attention_bias", bool, False)
    attention = AttentionConfig(
        hidden_size=info.hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.read_size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        rotary=read_rotary(config, head_dim, info.max_positions, default_theta=10_000.0, plain_is_whole=True),
    )
    return build_decoder(config, attention, info, ops, dtype)
