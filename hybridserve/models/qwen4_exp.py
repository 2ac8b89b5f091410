"""Qwen3.8-Flash-Next: gated delta layers and attention by a pooled index, 3 to 1, on four residual streams; text part only.

Owns how its config is read, how its streams are mixed, how n-grams are hashed and how its weights are named. Called through the
table of architectures; mixers and experts are read as for `qwen3_next.py`. The release wraps the text model: its config is
`text_config`, its weights are under `model.language_model.`. Source: published `Qwen4ExpForConditionalGeneration`.

Letters: T rows, n streams, D hidden.
"""

import math

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridserve.backends.ops import Ops
from hybridserve.errors import UnsupportedModelError
from hybridserve.mixers.base import Mixer, mixers
from hybridserve.mixers.index import IndexConfig
from hybridserve.mixers.indexed_attention import IndexedAttentionConfig
from hybridserve.mixers.linear import Linear
from hybridserve.mixers.ngram import NgramConfig
from hybridserve.mixers.norm import GroupedRMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import CausalLM, ModelInfo, Streams
from hybridserve.models.moe import MoE
from hybridserve.models.qwen3_next import IGNORED, RENAMES, RULES, read_attention, read_gated_delta, read_info, read_moe
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_layer_types
from hybridserve.models.streams import Connection, StreamLayer
from hybridserve.models.weights import DEPTHWISE, Rule, Spelling, WeightMap

_RENAMES = (
    (r"\.mixers\.indexed_attention\.", ".self_attn."),
    (r"\.mixers\.gated_delta\.", ".linear_attn."),
    (r"\.mixers\.ngram\.", ".ple."),
    (r"\.mixer_connection\.", ".attn_hyper_connection."),
    (r"\.mlp_connection\.", ".mlp_hyper_connection."),
    (r"^streams\.reader\.", "hyper_connection_mixer."),
    (r"\.ple\.table\.parts\.(\d+)$", r".ple.ple_embedding.ngram_embedding.shard_\1.weight"),
    *RENAMES,
)
_RULES = (Rule(r"(.*\.ple)\.conv_weight", (Spelling((r"\1.conv1d.weight",), DEPTHWISE),)), *RULES)
#: Of the wrapper: the vision tower and the tokens that stand for what it sees.
_VISION_KEYS = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
#: Of the draft head, which plain decoding does not use, and a number of conv states that follows from the other keys.
_UNUSED_KEYS = (
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mtp_layer_types", "number_of_conv_states", "intermediate_size",
)  # fmt: skip
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


class GatedResidual(Connection):
    """Reads the normed streams by a sigmoid gate for each number of each stream, of low rank; writes by one for each stream."""

    def __init__(
        self, num_streams: int, hidden_size: int, rank: int, eps: float, ops: Ops, dtype: torch.dtype, *, writes: bool = True
    ) -> None:
        super().__init__()
        wide = num_streams * hidden_size
        self._num_streams = num_streams
        self.hc_norm = GroupedRMSNorm(wide, eps, dtype, group_size=hidden_size)
        self.input_mix_weight_down = Linear(wide, rank, ops, dtype)
        self.input_mix_weight_up = Linear(rank, wide, ops, dtype)
        self.block_inject_weight = Linear(wide, num_streams, ops, dtype) if writes else None

    def enter(self, streams: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """streams: [T, n, D]. Returns [T, D], and the weight of writing to each stream [T, n], if it writes."""
        normed = self.hc_norm(streams.flatten(1))
        gate = self.input_mix_weight_up(F.silu(self.input_mix_weight_down(normed) / self._num_streams)).sigmoid()
        row = (gate * normed).view_as(streams).mean(1)
        if self.block_inject_weight is None:
            return row, ()
        return row, (2 * (self.block_inject_weight(normed) / self._num_streams).sigmoid(),)

    def leave(self, streams: Tensor, y: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        """streams: [T, n, D]; y: [T, D]. Returns [T, n, D]."""
        (weights,) = kept
        return streams + y[:, None] * weights[..., None]


class GatedStreams(Streams):
    """Every stream begins as the embedding; what the head is given is read as the layers read."""

    def __init__(self, num_streams: int, hidden_size: int, rank: int, eps: float, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__()
        self._num_streams = num_streams
        self.reader = GatedResidual(num_streams, hidden_size, rank, eps, ops, dtype, writes=False)

    def open(self, x: Tensor) -> Tensor:
        """x: [T, D]. Returns [T, n, D]."""
        return x[:, None].expand(-1, self._num_streams, -1)

    def close(self, x: Tensor) -> Tensor:
        """x: [T, n, D]. Returns [T, D]."""
        row, _ = self.reader.enter(x)
        return row


@architectures.register("Qwen4ExpForConditionalGeneration")
@architectures.register("Qwen4ExpForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out the text part of a Qwen3.8-Flash-Next."""
    config.declare(Family(norms_qk=True, rotates=True, unused=frozenset({"ple_embedding_dtype"})))
    config.ignore(*_VISION_KEYS)
    text = config.nested("text_config") if config.has("text_config") else config
    text.ignore(*_UNUSED_KEYS)
    info, eps = read_info(text), text.read("rms_norm_eps", float)
    num_streams, rank = text.read_size("hc_count", 4, most=64), text.read_size("hc_lowrank", 320)
    moe = read_moe(text)
    ngrams = _read_ngrams(text, info, num_streams)

    def connect() -> GatedResidual:
        return GatedResidual(num_streams, info.hidden_size, rank, eps, ops, dtype)

    layers = [
        StreamLayer(
            mixer,
            MoE(moe, ops, dtype),
            (connect(), connect()),
            first=mixers["ngram"](ngrams[i], ops, dtype) if i in ngrams else None,
        )
        for i, mixer in enumerate(_make_mixers(text, info, ops, dtype))
    ]
    inner = text.read("tie_word_embeddings", bool, False)
    stated = {f"layers.{i}.ple.ple_embedding.{name}": v for i, ngram in ngrams.items() for name, v in _stated(ngram).items()}
    return CausalLM(
        info,
        layers,
        nn.Identity(),
        ops,
        dtype,
        tied=config.read("tie_word_embeddings", bool, inner),  # the wrapper's word counts, as for transformers
        weight_map=WeightMap(_RENAMES, _RULES, prefixes=("model.language_model.", "model."), ignored=IGNORED, stated=stated),
        streams=GatedStreams(num_streams, info.hidden_size, rank, eps, ops, dtype),
    )


def _make_mixers(config: ConfigReader, info: ModelInfo, ops: Ops, dtype: torch.dtype) -> list[Mixer]:
    """The mixer of each layer; every n-th is attention. The release calls it `full_attention`, with an index all the same."""
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    interval = config.read_size("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % interval else "indexed_attention" for i in range(num_layers)]
    allowed = ("linear_attention", "full_attention", "indexed_attention")
    config.expect("output_gate_type", "silu", "sigmoid")
    gate = config.read("output_gate_type", str, config.read("hidden_act", str, "silu"))
    delta = msgspec.structs.replace(read_gated_delta(config), gate_activation=gate)
    attention = _read_attention(config, info)
    return [
        mixers["gated_delta"](delta, ops, dtype)
        if kind == "linear_attention"
        else mixers["indexed_attention"](attention, ops, dtype)
        for kind in read_layer_types(config, num_layers, allowed, default)
    ]


def _read_attention(config: ConfigReader, info: ModelInfo) -> IndexedAttentionConfig:
    """Qwen's gated attention, with an index whose keys are turned as far as the attention's own."""
    attention = read_attention(config, info.max_positions, default_partial=1.0)
    config.expect("indexer_kv_heads", 1)
    index = IndexConfig(
        hidden_size=info.hidden_size,
        query_size=info.hidden_size,
        num_heads=config.read_size("indexer_n_heads"),
        head_dim=config.read_size("indexer_head_dim"),
        budget=config.read_size("indexer_budget"),
        group=config.read_size("indexer_compress_ratio"),
        rotary=attention.rotary,
        eps=config.read("rms_norm_eps", float),
    )
    return IndexedAttentionConfig(**msgspec.structs.asdict(attention), index=index)


def _read_ngrams(config: ConfigReader, info: ModelInfo, num_streams: int) -> dict[int, NgramConfig]:
    """The n-gram embeddings by layer, counted from 0. `ple_layer_ids` count from 1."""
    layer_ids = sorted(set(config.read("ple_layer_ids", list[int], [])))
    longest, heads = config.read_size("ngram_size", 3, most=16), config.read_size("heads_per_ngram", 8, most=64)
    base, seed = config.read_size("ngram_vocab_size_base", 20_000_000, most=10**9), config.read("seed", int, 1234)
    divisor, num_parts = config.read_size("make_ngram_vocab_size_divisible_by", 128), config.read_size("split_ngram_parts", 512)
    width, embed_dim = config.read_size("ple_conv_kernel_size", 4), config.read_size("ple_embed_dim", info.hidden_size)
    num_heads = (longest - 1) * heads
    primes = _primes_from(base, num_heads * len(layer_ids))
    found = {}
    for index, layer_id in enumerate(layer_ids):
        sizes = primes[index * num_heads : (index + 1) * num_heads]
        found[layer_id - 1] = NgramConfig(
            hidden_size=num_streams * info.hidden_size,
            num_streams=num_streams,
            embed_dim=embed_dim,
            multipliers=_multipliers(info.vocab_size, longest, seed + 10007 * index),
            head_sizes=sizes,
            num_rows=-(-sum(sizes) // divisor) * divisor,
            num_parts=num_parts,
            end_token=_read_end_token(config),
            conv_width=width,
            eps=config.read("rms_norm_eps", float),
        )
    return found


def _read_end_token(config: ConfigReader) -> int:
    """The id that ends a text; the first, if there are several."""
    value = config.read("eos_token_id", object, -1)
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, int) or first < 0:
        raise UnsupportedModelError(
            f"config.json: {config.name('eos_token_id')} is {value!r:.100}; n-gram embeddings need the id that ends a text"
        )
    return first


def _stated(ngram: NgramConfig) -> dict[str, tuple[int, ...]]:
    """The numbers of the hash that releases store beside the table."""
    firsts = tuple(sum(ngram.head_sizes[:i]) for i in range(len(ngram.head_sizes)))
    return {
        "layer_multipliers": ngram.multipliers,
        "ngram_heads_vocab_sizes": ngram.head_sizes,
        "ngram_heads_offsets": firsts,
    }


def _multipliers(vocab_size: int, count: int, seed: int) -> tuple[int, ...]:
    """Odd factors, small enough that no product with a token id leaves 63 bits. Drawn by SplitMix64, as published."""
    bound = max(1, ((1 << 63) - 1) // max(vocab_size, 1) // 2)
    return tuple(2 * (_splitmix64(seed + _GAMMA * (i + 1)) % bound) + 1 for i in range(count))


def _splitmix64(value: int) -> int:
    """One number of SplitMix64 (Steele et al. 2014)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _primes_from(start: int, count: int) -> tuple[int, ...]:
    """The first `count` primes from `start` on: each head of a hash has its own number of rows."""
    found: list[int] = []
    while len(found) < count:
        if start > 1 and all(start % divisor for divisor in range(2, math.isqrt(start) + 1)):
            found.append(start)
        start += 1
    return tuple(found)
