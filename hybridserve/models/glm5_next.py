"""GLM-5.3-Flash: Kimi delta attention and latent attention with a pooled index, 3 to 1, on four residual streams; text part only.

Owns how its config is read, how its streams are mixed and how its weights are named. Called through the table of architectures.
The release wraps the text model: its config is `text_config`, its weights are under `model.language_model.`. Source: published
`Glm5NextForConditionalGeneration`; streams: manifold-constrained hyper-connections (arXiv 2512.24880).

Letters: T rows, n streams, D hidden.
"""

import msgspec
import torch
from torch import Tensor

from hybridserve.backends.ops import Ops
from hybridserve.errors import UnsupportedModelError
from hybridserve.mixers.base import Mixer, empty_parameter, mixers
from hybridserve.mixers.index import IndexConfig
from hybridserve.mixers.indexed_mla import IndexedMLAConfig
from hybridserve.mixers.kda import KDAConfig
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import FP32_ROUTER, ON, Family
from hybridserve.models.decoder import CausalLM, Streams
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
from hybridserve.models.glm_moe_dsa import read_indexer_types
from hybridserve.models.kimi_linear import KDA_RENAMES, KDA_RULES
from hybridserve.models.qwen3_next import RULES
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_layer_types
from hybridserve.models.streams import Connection, StreamLayer
from hybridserve.models.weights import WeightMap

_RENAMES = (
    (r"\.mixers\.\w+\.", ".self_attn."),
    (r"\.mixer_connection\.", ".hc_attn_"),
    (r"\.mlp_connection\.", ".hc_ffn_"),
    *KDA_RENAMES,
    *RENAMES,
)
_IGNORED = (r"(model\.)?visual\..*", r"(.*\.)?layers\.\d+\.shared_head\..*")
#: Of the wrapper: the vision tower and the tokens that stand for what it sees.
_VISION_KEYS = (
    "vision_config", "image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id", "video_start_token_id",
    "video_end_token_id",
)  # fmt: skip
#: Rotation of a part that has no dims.
_UNUSED_KEYS = (*UNUSED_KEYS, "rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "indexer_rope_interleave")


class SinkhornConnection(Connection):
    """Reads the streams by sigmoid weights; writes by others, and mixes the streams by a matrix whose rows and columns sum to 1.

    All weights come from the normed streams, by one projection with a scale and a base for each of the three kinds.
    """

    def __init__(self, num_streams: int, hidden_size: int, norm_eps: float, eps: float, rounds: int, dtype: torch.dtype) -> None:
        super().__init__()
        num_weights = (2 + num_streams) * num_streams
        self.fn = empty_parameter(num_weights, num_streams * hidden_size, dtype=dtype)
        self.base = empty_parameter(num_weights, dtype=torch.float32)
        self.scale = empty_parameter(3, dtype=torch.float32)
        self._parts = (num_streams, num_streams, num_streams * num_streams)
        self._norm_eps = norm_eps
        self._eps = eps
        self._rounds = rounds

    def enter(self, streams: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """streams: [T, n, D]. Returns [T, D], and the weights of writing [T, n] and mixing [T, n, n]."""
        flat = streams.flatten(1).float()
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self._norm_eps)
        logits = torch.split_with_sizes(flat @ self.fn.float().mT, self._parts, -1)
        bases = torch.split_with_sizes(self.base, self._parts, 0)
        read, write, mix = (x * scale + base for x, scale, base in zip(logits, self.scale, bases, strict=True))
        row = ((read.sigmoid() + self._eps)[..., None] * streams).sum(1).to(streams.dtype)
        mix = torch.unflatten(mix, -1, (self._parts[0], -1)).softmax(-1) + self._eps
        return row, (2 * write.sigmoid(), self._balanced(mix))

    def _balanced(self, mix: Tensor) -> Tensor:
        """Sinkhorn's rounds: columns, then rows and columns again, until both sum to 1. mix: [T, n, n] fp32."""
        mix = mix / (mix.sum(-2, keepdim=True) + self._eps)
        for _ in range(self._rounds - 1):
            mix = mix / (mix.sum(-1, keepdim=True) + self._eps)
            mix = mix / (mix.sum(-2, keepdim=True) + self._eps)
        return mix

    def leave(self, streams: Tensor, y: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        """streams: [T, n, D]; y: [T, D]. Returns [T, n, D]."""
        write, mix = (weights.to(streams.dtype) for weights in kept)
        return write[..., None] * y[:, None] + mix.mT @ streams


class EqualStreams(Streams):
    """Every stream begins as the embedding; the final norm is given their mean."""

    def __init__(self, num_streams: int) -> None:
        super().__init__()
        self._num_streams = num_streams

    def open(self, x: Tensor) -> Tensor:
        """x: [T, D]. Returns [T, n, D]."""
        return x[:, None].expand(-1, self._num_streams, -1)

    def close(self, x: Tensor) -> Tensor:
        """x: [T, n, D]. Returns [T, D]."""
        return x.mean(1)


@architectures.register("Glm5NextForConditionalGeneration")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out the text part of a GLM-5.3-Flash."""
    config.declare(Family(rotates=False, stated={**FP32_ROUTER, "mhc": ON, "mla_use_nope": ON, "index_kpool_compress": ON}))
    config.ignore(*_VISION_KEYS)
    text = config.nested("text_config") if config.has("text_config") else config
    text.ignore(*_UNUSED_KEYS)
    for each in (config, text):
        each.expect("tie_word_embeddings", False)
    info, eps = read_info(text), text.read("rms_norm_eps", float)
    token_mixers = _make_mixers(text, ops, dtype)
    moe = read_sigmoid_moe(text, RoutingDefaults(2.5), limit=text.read("swiglu_limit", float, 10.0))
    mlps = make_mlps(text, moe, read_sparse_layers(text, 3, is_counted=False), ops, dtype)
    num_streams = text.read_size("hc_mult", 4, most=64)
    hc_eps, rounds = text.read("hc_eps", float, 1e-6), text.read_size("hc_sinkhorn_iters", 20, most=1000)

    def make_norm() -> RMSNorm:
        return RMSNorm(info.hidden_size, eps, ops, dtype)

    def connect() -> SinkhornConnection:
        return SinkhornConnection(num_streams, info.hidden_size, eps, hc_eps, rounds, dtype)

    layers = [
        StreamLayer(mixer, mlp, (connect(), connect()), norms=(make_norm(), make_norm()))
        for mixer, mlp in zip(token_mixers, mlps, strict=True)
    ]
    return CausalLM(
        info,
        layers,
        make_norm(),
        ops,
        dtype,
        tied=False,
        weight_map=WeightMap(
            _RENAMES,
            (*KDA_RULES, *RULES),
            prefixes=("model.language_model.", "model."),
            ignored=(*_IGNORED, *ignored_drafts(text, len(layers)), *_unused_pooling(text)),
        ),
        streams=EqualStreams(num_streams),
    )


def _unused_pooling(config: ConfigReader) -> tuple[str, ...]:
    """Weights that choose among the tokens of a group: with one token a group they choose nothing, but are stored."""
    return () if config.read_size("index_kpool", 16) > 1 else (r".*\.indexer\.index_kpool_compress_(ape|gate)",)


def _make_mixers(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> list[Mixer]:
    """The mixer of each layer; every fourth is attention unless the config says otherwise."""
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    default = ["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)]
    kinds = read_layer_types(config, num_layers, ("linear_attention", "indexed_attention"), default)
    types = read_indexer_types(config, num_layers)
    kda, mla = _read_kda(config), _read_indexed(config)
    for i, (kind, one) in enumerate(zip(kinds, types, strict=True)):
        if kind == "indexed_attention" and one == "shared":
            raise UnsupportedModelError(
                f"config.json: {config.name('indexer_types')}[{i}] is 'shared'; a choice is not carried across delta layers, "
                "so every attention layer needs an index of its own"
            )
    return [
        mixers["kda"](kda, ops, dtype) if kind == "linear_attention" else mixers["indexed_mla"](mla, ops, dtype) for kind in kinds
    ]


def _read_kda(config: ConfigReader) -> KDAConfig:
    """The delta layer, in the release's nested keys or in those that transformers saves."""
    linear = config.nested("linear_attn_config")
    # Lists of layers that the release carries, counted from 0 here; `layer_types` decides.
    linear.ignore("kda_layers", "full_attn_layers")
    head_dim = linear.read_size("head_dim", config.read_size("linear_head_dim", 128))
    return KDAConfig(
        hidden_size=config.read_size("hidden_size"),
        num_heads=linear.read_size("num_heads", config.read_size("linear_num_heads", 64)),
        head_dim=head_dim,
        conv_width=linear.read_size("short_conv_kernel_size", config.read_size("linear_conv_kernel_dim", 4)),
        eps=config.read("rms_norm_eps", float),
        gate_rank=head_dim,
        lower_bound=_read_lower_bound(config, linear),
        conv_fp32=True,
    )


def _read_lower_bound(config: ConfigReader, linear: ConfigReader) -> float | None:
    """The bound of the gate. A null says that it has none, unless the release's keys call the gate safe."""
    bound = None if config.is_null("linear_lower_bound") else config.read("linear_lower_bound", float, -5.0)
    safe = linear.read("safe_gate", bool, True)
    if linear.is_null("gate_lower_bound"):
        return -5.0 if safe else None
    nested = linear.read_optional("gate_lower_bound", float)
    return bound if nested is None else nested


def _read_indexed(config: ConfigReader) -> IndexedMLAConfig:
    """Latent attention without a rotary part; its index pools the keys of a few tokens."""
    config.expect("qk_rope_head_dim", 0)
    config.expect("index_kpool_always_select_tail", True)
    eps = config.read("rms_norm_eps", float)
    attention = msgspec.structs.replace(read_mla(config, None), eps=eps)
    group = config.read_size("index_kpool", 16)
    index = IndexConfig(
        hidden_size=attention.hidden_size,
        query_size=config.read_size("q_lora_rank"),
        num_heads=config.read_size("index_n_heads"),
        head_dim=config.read_size("index_head_dim"),
        budget=config.read_size("index_topk"),
        group=group,
    )
    return IndexedMLAConfig(**msgspec.structs.asdict(attention), index=index, pooling="learned" if group > 1 else "none")
