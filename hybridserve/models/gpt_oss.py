"""gpt-oss: attention with sinks, in turn within a window and over all tokens, and experts with biases and bounds.

Owns how its config is read and its weights are named. Called through the table of architectures. Experts are read in 16 bits or
in MXFP4, which `quantised.py` decodes. Source: published `GptOssForCausalLM`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridserve.backends.ops import Ops
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import mixers
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import ON, Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer
from hybridserve.models.llama import read_info
from hybridserve.models.moe import MoE, MoeConfig
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_choice, read_layer_types
from hybridserve.models.rope import read_rotary
from hybridserve.models.weights import Rule, Shape, Spelling, WeightMap


@dataclass(frozen=True, slots=True)
class _Transposed:
    """Experts' weights as [E, in, out] on disk; with `paired`, the outputs are gate and up in turn. Biases are [E, out]."""

    paired: bool

    def disk_shape(self, shape: Shape) -> Shape:
        return (shape[0], *reversed(shape[1:]))

    def arrange(self, tensor: Tensor, shape: Shape) -> Tensor:
        rows = tensor.transpose(1, -1)  # [E, out, in], or a bias as it is
        if self.paired:
            rows = torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)
        return rows.contiguous()


WEIGHTS = WeightMap(
    renames=(
        (r"\.mixers\.attention\.mixer\.", ".self_attn."),
        (r"(layers\.\d+)\.norm\.", r"\1.input_layernorm."),
        (r"\.mlp_norm\.", ".post_attention_layernorm."),
    ),
    rules=(
        Rule(r"(.*\.mlp)\.gate_up", (Spelling((r"\1.experts.gate_up_proj",), _Transposed(paired=True)),)),
        Rule(r"(.*\.mlp)\.gate_up_bias", (Spelling((r"\1.experts.gate_up_proj_bias",), _Transposed(paired=True)),)),
        Rule(r"(.*\.mlp)\.down", (Spelling((r"\1.experts.down_proj",), _Transposed(paired=False)),)),
        Rule(r"(.*\.mlp)\.down_bias", (Spelling((r"\1.experts.down_proj_bias",)),)),
    ),
)


#: Of a config that says nothing of it.
_DEFAULT_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _read_moe(config: ConfigReader) -> MoeConfig:
    """The best k, softmax over those; (min(gate, l) * sigmoid(1.702 min(gate, l))) * (up within l + 1)."""
    config.expect("hidden_act", "silu")  # what the published config says of it; the experts' own function has no key
    config.expect("swiglu_alpha", 1.702)
    config.spell("num_local_experts", "num_experts")
    num_experts, num_chosen = read_choice(config, "num_local_experts", "num_experts_per_tok")
    config.expect("experts_per_token", num_chosen)
    return MoeConfig(
        hidden_size=config.read_size("hidden_size"),
        num_experts=num_experts,
        num_chosen=num_chosen,
        width=config.read_size("intermediate_size"),
        routing="topk_softmax",
        router_bias=True,
        activation="quick_gelu",
        limit=config.read("swiglu_limit", float, 7.0),
        up_shift=1.0,
        expert_bias=True,
    )


def _read_attention(config: ConfigReader, max_positions: int, window: int | None) -> AttentionConfig:
    head_dim = config.read_size("head_dim", 64)
    bias = config.read("attention_bias", bool, True)
    return AttentionConfig(
        hidden_size=config.read_size("hidden_size"),
        num_heads=config.read_size("num_attention_heads"),
        num_kv_heads=config.read_size("num_key_value_heads"),
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        rotary=read_rotary(
            config, head_dim, max_positions, default_theta=150_000.0, plain_is_whole=True, default_parameters=_DEFAULT_ROPE
        ),
        window=window,
        sinks=True,
    )


@architectures.register("GptOssForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a gpt-oss."""
    config.declare(Family(norms_qk=False, rotates=True, stated={"mlp_bias": ON}))
    config.ignore("initial_context_length")  # the yarn parameters carry it
    info = read_info(config)
    eps, moe = config.read("rms_norm_eps", float), _read_moe(config)
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    windows = {"sliding_attention": config.read_size("sliding_window", 128), "full_attention": None}
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    kinds = read_layer_types(config, num_layers, tuple(windows), default)
    attention = {kind: _read_attention(config, info.max_positions, window) for kind, window in windows.items()}

    def make_norm() -> RMSNorm:
        return RMSNorm(info.hidden_size, eps, ops, dtype)

    layers = [
        DecoderLayer([Branch(mixers["attention"](attention[kind], ops, dtype))], make_norm(), MoE(moe, ops, dtype), make_norm())
        for kind in kinds
    ]
    tied = config.read("tie_word_embeddings", bool, False)
    return CausalLM(info, layers, make_norm(), ops, dtype, tied=tied, weight_map=WEIGHTS)
