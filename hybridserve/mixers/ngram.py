"""Embeddings of the last few token ids together, added to all residual streams (Qwen3.8-Flash-Next's per-layer embedding).

Owns its parameters, its spec and its mathematics; the table of embeddings is a `HostTable`. Must not know pools, models or the
scheduler. Built by architectures by the name "ngram". Source: published `Qwen4ExpTextPLELayer`.

An n-gram is hashed once for each head of its order; a hash is a row of the table. N-grams do not reach over the end of a text.

Letters: T rows, n streams, D hidden of one stream, G longest n-gram, H heads of all orders, E embedding size, W conv width.
"""

from itertools import pairwise

import torch
from torch import Tensor

from hybridserve.backends.ops import Ops
from hybridserve.batch import Batch, LayerCaches
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import Spec, StateSpec, TensorSpec
from hybridserve.mixers.base import Mixer, MixerConfig, dtype_name, empty_parameter, mixers
from hybridserve.mixers.host_table import HostTable
from hybridserve.mixers.linear import Linear
from hybridserve.mixers.norm import GroupedRMSNorm


class NgramConfig(MixerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shapes and hashing. `hidden_size` is that of all streams together.

    `multipliers`: one for each place of an n-gram, the newest first. `head_sizes`: rows of the table that each head has, heads of
    2-grams first. The convolution's taps are as far apart as the longest n-gram is long.
    """

    num_streams: int
    embed_dim: int
    multipliers: tuple[int, ...]
    head_sizes: tuple[int, ...]
    num_rows: int
    num_parts: int
    end_token: int
    conv_width: int = 4
    eps: float = 1e-6

    def __post_init__(self) -> None:
        orders = len(self.multipliers) - 1
        if orders < 1 or len(self.head_sizes) % orders or self.embed_dim % len(self.head_sizes):
            raise UnsupportedModelError(
                f"n-grams of up to {len(self.multipliers)} tokens with {len(self.head_sizes)} heads of {self.embed_dim} numbers "
                "in all: heads must be as many for each order, and share the numbers evenly"
            )
        if sum(self.head_sizes) > self.num_rows or min(self.head_sizes) < 1:
            raise UnsupportedModelError(f"the heads' {sum(self.head_sizes)} rows do not fit a table of {self.num_rows}")
        if self.conv_width < 2:
            raise UnsupportedModelError(f"conv_width is {self.conv_width}; it must be at least 2")


@mixers.register("ngram")
class Ngram(Mixer):
    """y = v + silu(conv(norm(v))), v = sigmoid(signed root of key . query) value in each stream.

    Key and value are projected from the embeddings, the query is the normed stream.
    """

    Config = NgramConfig
    config: NgramConfig
    kind = "ngram"

    def __init__(self, config: NgramConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        wide, hidden = config.hidden_size, config.hidden_size // config.num_streams
        self.table = HostTable(config.num_rows, config.embed_dim // len(config.head_sizes), config.num_parts, dtype)
        self.key_proj = Linear(config.embed_dim, wide, ops, dtype)
        self.value_proj = Linear(config.embed_dim, hidden, ops, dtype)
        self.norm_key = GroupedRMSNorm(wide, config.eps, dtype, group_size=hidden)
        self.norm_query = GroupedRMSNorm(wide, config.eps, dtype, group_size=hidden)
        self.norm_conv = GroupedRMSNorm(wide, config.eps, dtype, group_size=hidden)
        self.conv_weight = empty_parameter(wide, config.conv_width, dtype=dtype)

    def specs(self) -> dict[str, Spec]:
        """The inputs that the convolution's oldest tap still reaches, and the token ids before a longest n-gram's last.

        Ids are stored plus one, so that the zeros of a fresh state mean that there is none.
        """
        reach = (self.config.conv_width - 1) * len(self.config.multipliers)
        conv = TensorSpec("conv", (reach, self.config.hidden_size), dtype_name(self.dtype))
        return {"state": StateSpec((conv, TensorSpec("tokens", (len(self.config.multipliers) - 1,), "int64")))}

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """What is added to the streams. x: [T, n D]. Returns [T, n D]."""
        cache = caches["state"]
        table = batch.states[cache.group]
        rows = torch.arange(len(x), device=x.device)
        tokens = self.ops.trailing(batch.input_ids + 1, rows, cache.tensors["tokens"], batch, table)  # [T, G]
        embedded = self.table(self._rows(tokens).flatten()).view(len(x), -1)
        gated = self._gated(x, embedded)
        weight = self._spread_taps()
        normed = self.norm_conv(gated)
        return gated + self.ops.short_conv(normed, weight, None, cache.tensors["conv"], batch, table, activation="silu")

    def _rows(self, tokens: Tensor) -> Tensor:
        """The table's row of each head. tokens: int64 [T, G], ids plus one, oldest first. Returns [T, H]."""
        config = self.config
        heads_per_order = len(config.head_sizes) // (len(config.multipliers) - 1)
        sizes = torch.tensor(config.head_sizes, device=tokens.device)
        firsts = sizes.cumsum(0) - sizes
        newest = tokens[:, -1] - 1
        mixed, reaches = newest * config.multipliers[0], torch.ones_like(newest, dtype=torch.bool)
        rows = []
        for back, (start, stop) in enumerate(pairwise(range(0, len(config.head_sizes) + 1, heads_per_order)), start=1):
            older = tokens[:, -1 - back] - 1
            # An end of text counts as one for all that is older, as the beginning does.
            reaches = reaches & (older >= 0) & (older != config.end_token)
            mixed = mixed ^ torch.where(reaches, older, config.end_token) * config.multipliers[back]
            rows.append(mixed[:, None].remainder(sizes[start:stop]) + firsts[start:stop])
        return torch.cat(rows, dim=-1)

    def _gated(self, x: Tensor, embedded: Tensor) -> Tensor:
        """Values weighed for each stream. x: [T, n D]; embedded: [T, E]. Returns [T, n D]."""
        num_streams = self.config.num_streams
        key = torch.unflatten(self.norm_key(self.key_proj(embedded)), -1, (num_streams, -1))
        query = torch.unflatten(self.norm_query(x), -1, (num_streams, -1))
        logit = (key * query).sum(-1, keepdim=True) / query.shape[-1] ** 0.5
        root = logit.abs().clamp_min(1e-6).sqrt() * logit.sign()
        return (root.sigmoid() * self.value_proj(embedded)[:, None]).flatten(1)

    def _spread_taps(self) -> Tensor:
        """The convolution's weights with zeros between its taps: [n D, (W - 1) G + 1]."""
        apart = len(self.config.multipliers)
        spread = self.conv_weight.new_zeros(len(self.conv_weight), (self.config.conv_width - 1) * apart + 1)
        spread[:, ::apart] = self.conv_weight
        return spread
