"""Indexes: which tokens of its sequence a row attends to, by scores of small keys that have a cache of their own.

Owns the parameters, specs and mathematics of the three published kinds: a key per token (DeepSeek-V3.2, GLM-5), the mean of a
few raw keys (QSA of Qwen3.8-Flash-Next) and a learned pool of a few keys (KPool of GLM-5.3-Flash). Must not know pools, models
or what is attended to. Called by `indexed_mla.py` and `indexed_attention.py`.

A pooled key is written when its group of tokens is full. The rows of the group that is still open are a state, so that any
chunk, hit or preemption may end inside a group; a row sees those tokens without an index.

Letters: T rows, D hidden, H index heads, K index dim, Q the row that queries come from, N tokens named, n tokens of a group.
"""

from dataclasses import replace

import msgspec
import torch
from torch import Tensor, nn

from hybridserve.backends.ops import Ops
from hybridserve.batch import Batch, LayerCaches
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import PagedSpec, Spec, StateSpec, TensorSpec
from hybridserve.mixers.base import dtype_name, empty_parameter
from hybridserve.mixers.linear import Linear
from hybridserve.mixers.norm import LayerNorm, RMSNorm
from hybridserve.mixers.rotary import Rotary, RotaryConfig


class IndexConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shapes. `budget`: tokens that an index names; with groups, those of the open group come on top.

    `query_size` is that of the row that queries are projected from. `rotary` turns the first part of queries and keys; a pooled
    key turns at its group's first position.
    """

    hidden_size: int
    query_size: int
    num_heads: int
    head_dim: int
    budget: int
    group: int = 1
    rotary: RotaryConfig | None = None
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.budget % self.group or self.budget < 1:
            raise UnsupportedModelError(
                f"an index names {self.budget} tokens in groups of {self.group}; it must be a whole number of groups"
            )
        if self.rotary is not None and self.rotary.rotary_dim > self.head_dim:
            raise UnsupportedModelError(
                f"rotary_dim is {self.rotary.rotary_dim}; it must not exceed the index's head_dim, which is {self.head_dim}"
            )


class Index(nn.Module):
    """Scores cached keys against a row's queries and names the tokens of the best. A subclass makes queries and keys."""

    def __init__(self, config: IndexConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.dtype = dtype
        self.rotary = None if config.rotary is None else Rotary(config.rotary)

    def specs(self) -> dict[str, Spec]:
        """The caches that this index adds to its layer's, by name."""
        key = TensorSpec("k", (self.config.head_dim,), dtype_name(self.dtype))
        return {"index": PagedSpec((key,), tokens_per_entry=self.config.group)}

    def queries(self, x: Tensor, query_row: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Queries [T, H, K] and the weights of their scores [T, H], or None. x: [T, D]; query_row: [T, Q]."""
        raise NotImplementedError

    def write(self, x: Tensor, batch: Batch, caches: LayerCaches) -> None:
        """Store the keys that the rows complete. x: [T, D]."""
        raise NotImplementedError

    def select(self, x: Tensor, query_row: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Positions that each row attends to, -1 for none, its own group's among them. x: [T, D]; query_row: [T, Q].

        Writes the caches that `specs` named. Returns int32 [T, N].
        """
        self.write(x, batch, caches)
        q, weights = self.queries(x, query_row, batch)
        cache = caches["index"]
        entries = self.ops.index_select(
            q,
            weights,
            cache.tensors["k"],
            batch,
            batch.paged[cache.group],
            num_selected=self.config.budget // self.config.group,
        )
        return entries if self.config.group == 1 else tokens_of(entries, batch.positions, self.config.group)

    def _write_groups(self, keys: Tensor, closing: Tensor, batch: Batch, caches: LayerCaches) -> None:
        """Store pooled keys. keys: [R, K], of the groups that rows `closing` [R] complete."""
        cache = caches["index"]
        table, group = batch.paged[cache.group], self.config.group
        entries = replace(table, kv_index=table.kv_index[closing] // group, block_size=table.block_size // group)
        self.ops.kv_write({"k": keys}, cache.tensors, entries)


class TokenIndex(Index):
    """One normed key per token. Source: DeepSeek-V3.2 (arXiv 2512.02556), published `DeepseekV32Indexer`."""

    def __init__(self, config: IndexConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        self.wq_b = Linear(config.query_size, config.num_heads * config.head_dim, ops, dtype)
        self.wk = Linear(config.hidden_size, config.head_dim, ops, dtype)
        self.k_norm = LayerNorm(config.head_dim, config.eps, dtype)
        self.weights_proj = Linear(config.hidden_size, config.num_heads, ops, dtype)

    def queries(self, x: Tensor, query_row: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """x: [T, D]; query_row: [T, Q]. Returns [T, H, K] and [T, H]."""
        q = torch.unflatten(self.wq_b(query_row), -1, (-1, self.config.head_dim))
        if self.rotary is not None:
            self.rotary.turn(q, batch)
        return q, self.weights_proj(x)

    def write(self, x: Tensor, batch: Batch, caches: LayerCaches) -> None:
        """Store the rows' own keys. x: [T, D]."""
        cache = caches["index"]
        k = self.k_norm(self.wk(x))
        if self.rotary is not None:
            self.rotary.turn(k.unsqueeze(1), batch)
        self.ops.kv_write({"k": k}, cache.tensors, batch.paged[cache.group])


class LearnedPoolIndex(TokenIndex):
    """One key per group: its tokens' keys, weighted channel by channel by a softmax over the group of learned gates.

    Source: published `Glm5NextTextIndexer`, the KPool of GLM-5.3-Flash.
    """

    def __init__(self, config: IndexConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        self.index_kpool_compress_gate = empty_parameter(config.head_dim, config.hidden_size, dtype=dtype)
        self.index_kpool_compress_ape = empty_parameter(config.group, config.head_dim, dtype=dtype)

    def specs(self) -> dict[str, Spec]:
        """A pooled key for every group, and the keys and gates of the last n - 1 tokens."""
        rows = TensorSpec("rows", (self.config.group - 1, 2 * self.config.head_dim), dtype_name(self.dtype))
        return {**super().specs(), "open": StateSpec((rows,))}

    def write(self, x: Tensor, batch: Batch, caches: LayerCaches) -> None:
        """Store the keys of the groups that end here. x: [T, D]."""
        rows = torch.cat((self.k_norm(self.wk(x)), self.ops.linear(x, self.index_kpool_compress_gate, None)), dim=-1)
        cache, closing = caches["open"], closing_rows(batch, self.config.group)
        groups = self.ops.trailing(rows, closing, cache.tensors["rows"], batch, batch.states[cache.group])  # [R, n, 2K]
        keys, gates = groups.chunk(2, dim=-1)
        shares = (gates.float() + self.index_kpool_compress_ape.float()).softmax(dim=1).to(keys.dtype)
        self._write_groups((shares * keys).sum(1), closing, batch, caches)


class MeanPoolIndex(Index):
    """One key per group: the mean of its tokens' raw keys, normed and turned at the group's first position.

    Source: published `Qwen4ExpTextQSAIndexer`.
    """

    def __init__(self, config: IndexConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        self.index_qk_proj = Linear(config.hidden_size, (config.num_heads + 1) * config.head_dim, ops, dtype)
        self.q_layernorm = RMSNorm(config.head_dim, config.eps, ops, dtype, zero_centred=True)
        self.k_layernorm = RMSNorm(config.head_dim, config.eps, ops, dtype, zero_centred=True)

    def specs(self) -> dict[str, Spec]:
        """A pooled key for every group, and the raw keys of the last n - 1 tokens."""
        rows = TensorSpec("rows", (self.config.group - 1, self.config.head_dim), dtype_name(self.dtype))
        return {**super().specs(), "open": StateSpec((rows,))}

    def queries(self, x: Tensor, query_row: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """x: [T, D]; query_row is x. Returns [T, H, K] and None: all heads count alike."""
        inner = self.config.num_heads * self.config.head_dim
        q = self.ops.linear(query_row, self.index_qk_proj.weight[:inner], None)
        q = self.q_layernorm(torch.unflatten(q, -1, (-1, self.config.head_dim)))
        if self.rotary is not None:
            self.rotary.turn(q, batch)
        return q, None

    def write(self, x: Tensor, batch: Batch, caches: LayerCaches) -> None:
        """Store the keys of the groups that end here. x: [T, D]."""
        raw = self.ops.linear(x, self.index_qk_proj.weight[-self.config.head_dim :], None)
        cache, closing = caches["open"], closing_rows(batch, self.config.group)
        groups = self.ops.trailing(raw, closing, cache.tensors["rows"], batch, batch.states[cache.group])  # [R, n, K]
        keys = self.k_layernorm(groups.float().mean(1).to(raw.dtype))
        if self.rotary is not None:
            self.rotary.turn_at(keys.unsqueeze(1), batch.positions[closing] - (self.config.group - 1))
        self._write_groups(keys, closing, batch, caches)


def closing_rows(batch: Batch, group: int) -> Tensor:
    """Rows whose token is the last of its group of `group` tokens. Returns int64 [R], ascending."""
    key = ("closing rows", group)
    if key not in batch.derived:
        rows = [
            row
            for start, stop, end in zip(batch.cu_seqlens_host, batch.cu_seqlens_host[1:], batch.kv_lens_host, strict=False)
            for row in range(start + (stop - start - end - 1) % group, stop, group)
        ]
        batch.derived[key] = (torch.tensor(rows, dtype=torch.int64, device=batch.positions.device),)
    return batch.derived[key][0]


def tokens_of(entries: Tensor, positions: Tensor, group: int) -> Tensor:
    """The tokens of chosen groups, and behind them those of the row's own open group. entries: int32 [T, E], -1 for none;
    positions: [T]. Returns int32 [T, E n + n - 1].
    """
    offsets = torch.arange(group, dtype=torch.int32, device=entries.device)
    chosen = torch.where(entries[..., None] < 0, -1, entries[..., None] * group + offsets).flatten(-2)
    own = positions.int()[:, None]
    tail = (own + 1) // group * group + offsets[:-1]
    return torch.cat((chosen, tail.masked_fill(tail > own, -1)), dim=-1)
