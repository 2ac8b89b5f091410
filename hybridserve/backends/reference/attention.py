"""Paged attention in plain torch, and the write of its entries.

Owns `kv_write` and `paged_attention` of the reference backend. Must not know layers or pools. Sequences with one row go
together, grouped by length; longer ones go one by one, cut so that no mask or score matrix grows with the square of the
text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridserve.batch import Batch, PagedTable

#: Bytes of a mask or score matrix, and of the keys and values gathered at once for decode.
TEMPORARY_NBYTES = 64 * 2**20
#: How much longer than on average a group of decode rows may be padded.
PADDING_FACTOR = 1.25
#: With a window, rows are cut to about its length, so that each part sees little that its rows do not; but to no fewer.
MIN_WINDOW_ROWS = 64


@dataclass(frozen=True)
class Span:
    """One sequence's rows and the tokens that they see."""

    sequence: int
    row: int  # the first of its rows in the batch
    num_rows: int
    first: int  # position of the first token that any row sees
    end: int  # position after the last

    @property
    def num_tokens(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Scores:
    """What happens to scores between the two products."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [Hq]

    @property
    def plain(self) -> bool:
        """Whether torch's fused attention computes them."""
        return self.softcap is None and self.sinks is None


def kv_write(values: Mapping[str, Tensor], cache: Mapping[str, Tensor], table: PagedTable) -> None:
    """See `ops.KvWrite`. values[name]: [T, ...]; cache[name]: [B, block_size, ...], in place."""
    blocks = table.kv_index // table.block_size
    offsets = table.kv_index % table.block_size
    for name, entries in values.items():
        cache[name][blocks, offsets] = entries.to(cache[name].dtype)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    table: PagedTable,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `ops.PagedAttention`. q: [T, Hq, K]; k_cache: [B, block_size, Hk, K]; v_cache: [B, block_size, Hk, V].

    sinks: [Hq]. Returns [T, Hq, V] in q's dtype. Entries outside what a row sees are never read: they may be stale or NaN.
    """
    scores = Scores(scale, window, softcap, sinks)
    out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
    spans = list(spans_of(batch, window))
    token_nbytes = (k_cache[0, 0].numel() + v_cache[0, 0].numel()) * q.element_size()
    for group in decode_groups([span for span in spans if span.num_rows == 1], token_nbytes):
        rows = torch.tensor([span.row for span in group], device=q.device)
        out[rows] = _attend_decode(q[rows], k_cache, v_cache, group, table, scores)
    for span in spans:
        if span.num_rows > 1:
            k, v = (gather_entries(cache, [span], table, q.dtype)[0] for cache in (k_cache, v_cache))
            rows_here = slice(span.row, span.row + span.num_rows)
            _attend_rows(q[rows_here], k, v, span, scores, out[rows_here])
    return out


def spans_of(batch: Batch, window: int | None) -> Iterator[Span]:
    """The span of every sequence."""
    for sequence, end in enumerate(batch.kv_lens_host):
        row, row_end = batch.cu_seqlens_host[sequence : sequence + 2]
        first = 0 if window is None else max(0, end - (row_end - row) + 1 - window)
        yield Span(sequence, row, row_end - row, first, end)


def decode_groups(spans: Sequence[Span], token_nbytes: int) -> Iterator[list[Span]]:
    """Spans of similar length together, so that padding to the longest stays small and what is gathered bounded."""
    group: list[Span] = []
    seen = 0
    for span in sorted(spans, key=lambda span: span.num_tokens):
        padded = (len(group) + 1) * span.num_tokens
        if group and (padded > PADDING_FACTOR * (seen + span.num_tokens) or padded * token_nbytes > TEMPORARY_NBYTES):
            yield group
            group, seen = [], 0
        group.append(span)
        seen += span.num_tokens
    if group:
        yield group


def gather_entries(cache: Tensor, spans: Sequence[Span], table: PagedTable, dtype: torch.dtype) -> Tensor:
    """Entries of the tokens of each span. cache: [B, block_size, Hk, D]. Returns [S, L, Hk, D], L that of the longest.

    Beyond a span's end its last token is repeated, so that nothing is read which nobody wrote.
    """
    length = max(span.num_tokens for span in spans)
    sequences, first, end = torch.tensor([(s.sequence, s.first, s.end) for s in spans], device=cache.device).T
    positions = torch.arange(length, device=cache.device) + first[:, None]
    positions = torch.minimum(positions, end[:, None] - 1)  # [S, L]
    blocks = table.block_tables[sequences].long().gather(1, positions // table.block_size)
    return cache[blocks, positions % table.block_size].to(dtype)


def _attend_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, group: Sequence[Span], table: PagedTable, scores: Scores
) -> Tensor:
    """Rows of sequences with one row each. q: [S, Hq, K]; caches as in `paged_attention`. Returns [S, Hq, V]."""
    k, v = (gather_entries(cache, group, table, q.dtype).transpose(1, 2) for cache in (k_cache, v_cache))  # [S, Hk, L, D]
    num_tokens = torch.tensor([span.num_tokens for span in group], device=q.device)
    seen = torch.arange(k.shape[2], device=q.device) < num_tokens[:, None]  # [S, L]
    # Query heads that share a key head are its rows: keys and values are not repeated.
    grouped = q.view(len(q), k.shape[1], -1, q.shape[-1])
    return _attend(grouped, k, v, seen[:, None, None, :], scores).flatten(1, 2)


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, span: Span, scores: Scores, out: Tensor) -> None:
    """Rows of one sequence. q: [n, Hq, K]; k: [L, Hk, K]; v: [L, Hk, V]; out: [n, Hq, V], in place."""
    num_rows = len(q)
    fused = scores.plain and k.shape[-1] == v.shape[-1]
    if fused and _needs_no_mask(q, span, scores):
        qh, kh, vh = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        y = F.scaled_dot_product_attention(qh, kh, vh, is_causal=True, scale=scores.scale, enable_gqa=True)
        out.copy_(y[0].transpose(0, 1))
        return
    # What has a number per row and token: the mask, one for each head of a group, or the scores of all heads.
    num_matrices = q.shape[1] // k.shape[1] if fused else q.shape[1]
    part = max(1, TEMPORARY_NBYTES // (4 * num_matrices * span.num_tokens))
    if scores.window is not None:
        part = min(part, max(scores.window, MIN_WINDOW_ROWS))
    for start in range(0, num_rows, part):
        stop = min(start + part, num_rows)
        last = span.num_tokens - num_rows + stop  # tokens up to the last row's own, counted from span.first
        first = 0 if scores.window is None else max(0, last - (stop - start) + 1 - scores.window)
        seen = _seen(stop - start, last - first, scores.window, q.device)
        out[start:stop] = attend_part(q[start:stop], k[first:last], v[first:last], seen, scores)


def _needs_no_mask(q: Tensor, span: Span, scores: Scores) -> bool:
    """Whether torch's own causal form does: all of the prompt is here, and a fused kernel takes it. q: [n, Hq, K]."""
    if span.num_rows < span.num_tokens or (scores.window is not None and scores.window < span.num_rows):
        return False
    # On CUDA other dtypes and sizes would get a score matrix of the whole prompt.
    return q.device.type == "cpu" or (q.dtype.itemsize == 2 and q.shape[-1] <= 256)


def _seen(num_rows: int, num_tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Which tokens each row sees when the last row's own token is the last. Returns bool [num_rows, num_tokens]."""
    own = torch.arange(num_tokens - num_rows, num_tokens, device=device)[:, None]
    tokens = torch.arange(num_tokens, device=device)
    seen = tokens <= own
    return seen if window is None else seen & (tokens > own - window)


def attend_part(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scores: Scores) -> Tensor:
    """Some rows of one sequence. q: [n, Hq, K]; k: [L, Hk, K]; v: [L, Hk, V]; seen: [n, L]. Returns [n, Hq, V]."""
    num_rows = len(q)
    grouped = q.reshape(num_rows, k.shape[1], -1, q.shape[-1]).permute(1, 2, 0, 3)  # [Hk, G, n, K]
    mask = seen.repeat(grouped.shape[1], 1)  # [G n, L]
    y = _attend(grouped.flatten(1, 2)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], mask, scores)
    return y.view(k.shape[1], -1, num_rows, v.shape[-1]).permute(2, 0, 1, 3).flatten(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scores: Scores) -> Tensor:
    """Attention of R query rows to each key head. q: [S, Hk, R, K]; k: [S, Hk, L, K]; v: [S, Hk, L, V]; seen: bool,
    broadcast to [S, Hk, R, L]. The R rows are query heads, or query heads times rows. Returns [S, Hk, R, V] in q's
    dtype.
    """
    if scores.plain:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scores.scale)
    logits = q.float() @ k.float().mT * scores.scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    logits = logits.masked_fill(~seen, -torch.inf)
    if scores.sinks is not None:
        per_key_head = scores.sinks.float().view(q.shape[1], -1)  # [Hk, G]
        rows = per_key_head.repeat_interleave(q.shape[2] // per_key_head.shape[1], dim=1)
        sink = rows[None, :, :, None].expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, sink), dim=-1)
    weights = logits.softmax(-1)[..., : k.shape[2]]
    return (weights @ v.float()).to(q.dtype)
