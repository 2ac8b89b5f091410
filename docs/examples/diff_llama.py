"""DiffLlama, a Llama with differential attention in every layer. Source: published `DiffLlamaForCausalLM`.

The attention is that of diff_attention.py, which must be given as a plug-in too.
"""

import torch

from hybridserve.backends.ops import Ops
from hybridserve.errors import UnsupportedModelError
from hybridserve.mixers.base import mixers
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer
from hybridserve.models.llama import read_info
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.reader import MAX_LAYERS, ConfigReader
from hybridserve.models.rope import read_rotary
from hybridserve.models.weights import Rule, Spelling, WeightMap

PLUGIN_API = 1

WEIGHTS = WeightMap(
    renames=(
        (r"\.mixers\.diff_attention\.mixer\.", ".self_attn."),
        (r"(layers\.\d+)\.norm\.", r"\1.input_layernorm."),
        (r"\.mlp_norm\.", ".post_attention_layernorm."),
        (r"\.mlp\.down\.", ".mlp.down_proj."),
    ),
    rules=(Rule(r"(.*)\.gate_up\.weight", (Spelling((r"\1.gate_proj.weight", r"\1.up_proj.weight")),)),),
)


def read_attention(config: ConfigReader, hidden_size: int, max_positions: int) -> dict[str, object]:
    """What the attention of all layers has in common, by the names of its config."""
    config.expect("attention_bias", False)
    config.ignore("attention_dropout", "lambda_std_dev")  # of training
    num_heads = config.read_size("num_attention_heads")
    head_dim = config.read_size("head_dim", max(1, hidden_size // num_heads))
    rotary = read_rotary(config, head_dim, max_positions, default_theta=10_000.0)
    if rotary.scaling is not None or rotary.rotary_dim != head_dim:
        raise UnsupportedModelError("config.json: rope_parameters scale the rotation; DiffLlama's is implemented plain")
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": config.read_size("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "theta": rotary.theta,
        "eps": config.read("rms_norm_eps", float),
    }


@architectures.register("DiffLlamaForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a DiffLlama."""
    config.expect("hidden_act", "silu")
    info, eps, width = read_info(config), config.read("rms_norm_eps", float), config.read_size("intermediate_size")
    attention = read_attention(config, info.hidden_size, info.max_positions)
    kind = mixers["diff_attention"]

    def make_norm() -> RMSNorm:
        return RMSNorm(info.hidden_size, eps, ops, dtype)

    def make_layer(index: int) -> DecoderLayer:
        mixer = kind(kind.Config(**attention, layer_index=index), ops, dtype)
        return DecoderLayer([Branch(mixer)], make_norm(), SwiGLU(info.hidden_size, width, ops, dtype), make_norm())

    layers = [make_layer(index) for index in range(config.read_size("num_hidden_layers", most=MAX_LAYERS))]
    tied = config.read("tie_word_embeddings", bool, False)
    return CausalLM(info, layers, make_norm(), ops, dtype, tied=tied, weight_map=WEIGHTS)
