"""Zamba2: Mamba-2 layers, some of which first call one of a few shared transformer blocks. Source: published `Zamba2ForCausalLM`.

Owns how its config is read, its layers, and how its weights are named. Called through the table of architectures. A shared block
sees what the layer is given beside the embeddings; each call has its own cache, its own low-rank adapters and its own projection
of the result, which is added to what Mamba sees, not to what is passed on.

Letters: T rows, D hidden.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybridserve.backends.ops import Activation, Ops
from hybridserve.batch import Batch, LayerCaches
from hybridserve.kv.spec import Spec
from hybridserve.mixers.attention import Attention, AttentionConfig
from hybridserve.mixers.base import States
from hybridserve.mixers.linear import Linear
from hybridserve.mixers.mamba2 import Mamba2, Mamba2Config
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import OFF, Family
from hybridserve.models.decoder import CausalLM, Layer, Streams, named_states
from hybridserve.models.llama import read_info
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_spelled_layer_types
from hybridserve.models.rope import read_rotary
from hybridserve.models.weights import DEPTHWISE, Copy, Rule, Spelling, WeightMap

#: Initialisation, and choices of kernels.
_UNUSED_KEYS = (
    "time_step_max",
    "time_step_floor",
    "chunk_size",
    "use_mem_eff_path",
    "use_long_context",
    "rescale_prenorm_residual",
)
_SHARED = "layers that call one block share its weights; take a release in which they do"
#: What a call has of its own: everything else is its block's.
_OWN = ("adapter_in", "adapter_out", "linear")


class Adapted(Linear):
    """y = (weight + adapter_out adapter_in) x + bias."""

    def __init__(self, in_features: int, out_features: int, rank: int, ops: Ops, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__(in_features, out_features, ops, dtype, bias=bias)
        self.adapter_in = Linear(in_features, rank, ops, dtype)
        self.adapter_out = Linear(rank, out_features, ops, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out]."""
        return super().forward(x) + self.adapter_out(self.adapter_in(x))


class SharedCall(nn.Module):
    """One call of a shared block: linear(mlp(mlp_norm(attention(norm(x)))))."""

    def __init__(self, config: ConfigReader, attention: AttentionConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.read_size("hidden_size"), config.read("rms_norm_eps", float)
        rank, width = config.read_size("adapter_rank", 128), config.read_size("intermediate_size", 4 * hidden)
        bias = config.read("add_bias_linear", bool, False)
        activation: Activation = "gelu"
        inner, kv_dim = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        self.norm = RMSNorm(2 * hidden, eps, ops, dtype)
        self.attention = Attention(attention, ops, dtype)
        self.attention.o_proj = Linear(inner, hidden, ops, dtype)
        if config.read("use_shared_attention_adapter", bool, False):
            self.attention.q_proj = Adapted(2 * hidden, inner, rank, ops, dtype)
            self.attention.k_proj = Adapted(2 * hidden, kv_dim, rank, ops, dtype)
            self.attention.v_proj = Adapted(2 * hidden, kv_dim, rank, ops, dtype)
        self.mlp_norm = RMSNorm(hidden, eps, ops, dtype)
        self.mlp = SwiGLU(hidden, width, ops, dtype, bias=bias, activation=activation)
        self.mlp.gate_up = Adapted(hidden, 2 * width, rank, ops, dtype, bias=bias)
        self.linear = Linear(hidden, hidden, ops, dtype)

    def share(self, owner: "SharedCall") -> None:
        """Take the block's parameters from the first call of the same block."""
        for name, parameter in owner.named_parameters():
            path, _, leaf = name.rpartition(".")
            if not any(own in path for own in _OWN):
                setattr(self.get_submodule(path), leaf, parameter)

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """x: [T, 2D]; caches: the attention's. Returns [T, D]."""
        return self.linear(self.mlp(self.mlp_norm(self.attention(self.norm(x), batch, caches))))


class Zamba2Layer(Layer):
    """x += mamba(norm(x + call(x, embeddings))), the embeddings passed on unchanged."""

    def __init__(self, mamba: Mamba2, norm: RMSNorm, call: SharedCall | None) -> None:
        super().__init__()
        self.mamba = mamba
        self.norm = norm
        self.call = call
        self.kind = mamba.kind if call is None else f"{call.attention.kind}+{mamba.kind}"

    def cache_specs(self) -> dict[str, Spec]:
        """Mamba's, and the call's own."""
        specs = {f"mamba2.{name}": spec for name, spec in self.mamba.specs().items()}
        if self.call is not None:
            specs |= {f"attention.{name}": spec for name, spec in self.call.attention.specs().items()}
        return specs

    def initial_states(self) -> States:
        """Mamba's, and the call's own."""
        return named_states(self.mamba, *(() if self.call is None else (self.call.attention,)))

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """x: [T, 2D], hidden beside embeddings. Returns the same shape."""
        hidden, embeddings = x.chunk(2, dim=-1)
        seen = hidden
        if self.call is not None:
            seen = hidden + self.call(x, batch, {"kv": caches["attention.kv"]})
        y = self.mamba(self.norm(seen), batch, {"state": caches["mamba2.state"]})
        return torch.cat((hidden + y, embeddings), dim=-1)


class BesideEmbeddings(Streams):
    """Hidden rows, and the embeddings that shared blocks see again."""

    def open(self, x: Tensor) -> Tensor:
        """x: [T, D]. Returns [T, 2D]."""
        return torch.cat((x, x), dim=-1)

    def close(self, x: Tensor) -> Tensor:
        """x: [T, 2D]. Returns [T, D]."""
        return x.chunk(2, dim=-1)[0]


def _weights(calling: Sequence[int], num_blocks: int) -> WeightMap:
    """A block's tensors are stored with the first layer that calls it, the adapters of all its calls among them."""
    owners = [calling[i % num_blocks] for i in range(len(calling))]
    adapters = [
        rename
        for i, (layer, owner) in enumerate(zip(calling, owners, strict=True))
        for rename in (
            (
                rf"layers\.{layer}\.call\.attention\.([qkv])_proj\.adapter",
                rf"layers.{owner}.shared_transformer.self_attn.linear_\1_adapter_list.{i}",
            ),
            (
                rf"layers\.{layer}\.call\.mlp\.gate_up\.adapter",
                rf"layers.{owner}.shared_transformer.feed_forward.gate_up_proj_adapter_list.{i}",
            ),
        )
    ]
    some = "|".join(str(layer) for layer in calling)
    return WeightMap(
        renames=(
            *adapters,
            (r"(adapter_list\.\d+)_in\.", r"\1.0."),
            (r"(adapter_list\.\d+)_out\.", r"\1.1."),
            (r"\.call\.attention\.", ".shared_transformer.self_attn."),
            (r"\.call\.norm\.", ".shared_transformer.input_layernorm."),
            (r"\.call\.mlp_norm\.", ".shared_transformer.pre_ff_layernorm."),
            (r"\.call\.mlp\.(gate_up|down)\.", r".shared_transformer.feed_forward.\1_proj."),
            (r"\.call\.linear\.", ".linear."),
            (rf"layers\.({some})\.mamba\.", r"layers.\1.mamba_decoder.mamba."),
            (rf"layers\.({some})\.norm\.", r"layers.\1.mamba_decoder.input_layernorm."),
            (r"(layers\.\d+)\.norm\.", r"\1.input_layernorm."),
            (r"^norm\.", "final_layernorm."),
        ),
        rules=(Rule(r"(.*\.conv1d)\.weight", (Spelling((r"\1.weight",), DEPTHWISE),)),),
        copies=tuple(
            Copy(rf"model\.layers\.{layer}\.shared_transformer\.(.*)", rf"model.layers.{owner}.shared_transformer.\1", _SHARED)
            for layer, owner in zip(calling, owners, strict=True)
            if layer != owner
        ),
    )


def _read_kinds(config: ConfigReader) -> list[str]:
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    if not (config.has("layers_block_type") or config.has("layer_types")):
        config.read("layers_block_type", list[str])
    allowed, default = ("linear_attention", "hybrid"), ["linear_attention"] * num_layers
    kinds = read_spelled_layer_types(config, num_layers, allowed, default, ("layers_block_type", "layer_types"))
    config.expect("hybrid_layer_ids", [i for i, kind in enumerate(kinds) if kind == "hybrid"])
    return kinds


def _read_attention(config: ConfigReader, max_positions: int) -> AttentionConfig:
    """Heads share twice the hidden size; scores are scaled as if heads were half as wide."""
    hidden, num_heads = config.read_size("hidden_size"), config.read_size("num_attention_heads")
    head_dim = max(1, 2 * hidden // num_heads)
    for key, value in (
        ("attention_hidden_size", 2 * hidden), ("attention_head_dim", head_dim), ("head_dim", head_dim),
        ("kv_channels", hidden // num_heads), ("num_query_groups", num_heads),
    ):  # fmt: skip
        config.expect(key, value)
    rotary = None
    if config.read("use_mem_rope", bool, False):
        rotary = read_rotary(config, head_dim, max_positions, default_theta=10_000.0, plain_is_whole=True)
    else:
        config.ignore("rope_theta", "rope_parameters", "rope_scaling")
    return AttentionConfig(
        hidden_size=2 * hidden,
        num_heads=num_heads,
        num_kv_heads=config.read_size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        scale=(head_dim / 2) ** -0.5,
        rotary=rotary,
    )


def _read_mamba(config: ConfigReader) -> Mamba2Config:
    """Mamba-2, whose time step has a lower bound: the published class takes it from what else only initialises."""
    hidden, num_heads = config.read_size("hidden_size"), config.read_size("n_mamba_heads", 8)
    head_dim = max(1, config.read_size("mamba_expand", 2) * hidden // num_heads)
    config.expect("mamba_headdim", head_dim)
    config.expect("use_conv_bias", True)
    return Mamba2Config(
        hidden_size=hidden,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=config.read_size("mamba_ngroups", 1),
        state_size=config.read_size("mamba_d_state", 64),
        conv_width=config.read_size("mamba_d_conv", 4),
        proj_bias=config.read("add_bias_linear", bool, False),
        eps=1e-5,
        time_step_limit=(config.read("time_step_min", float, 0.001), math.inf),
    )


@architectures.register("Zamba2ForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Zamba2."""
    config.declare(
        Family(norms_qk=False, stated={"use_shared_block_adapter": OFF}, same={"ffn_hidden_size": ("intermediate_size", None)})
    )
    config.ignore(*_UNUSED_KEYS)
    config.expect("hidden_act", "gelu")
    config.expect("use_shared_mlp_adapter", True)
    config.expect("tie_word_embeddings", True)  # in the published class, what ties the head ties the blocks as well
    info = read_info(config)
    eps, kinds = config.read("rms_norm_eps", float), _read_kinds(config)
    attention, mamba = _read_attention(config, info.max_positions), _read_mamba(config)
    calling = [i for i, kind in enumerate(kinds) if kind == "hybrid"]
    num_blocks = config.read_size("num_mem_blocks", 1)
    calls = {layer: SharedCall(config, attention, ops, dtype) for layer in calling}
    for i, layer in enumerate(calling[num_blocks:]):
        calls[layer].share(calls[calling[i % num_blocks]])
    layers = [
        Zamba2Layer(Mamba2(mamba, ops, dtype), RMSNorm(info.hidden_size, eps, ops, dtype), calls.get(i))
        for i in range(len(kinds))
    ]
    return CausalLM(
        info,
        layers,
        RMSNorm(info.hidden_size, eps, ops, dtype),
        ops,
        dtype,
        tied=True,
        weight_map=_weights(calling, num_blocks),
        streams=BesideEmbeddings(),
    )
