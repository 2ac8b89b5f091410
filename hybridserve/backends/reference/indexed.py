"""Attention to chosen tokens in plain torch: scoring an index, choosing its best entries, attending to what they name.

Owns `index_select` and `selected_attention` of the reference backend. Must not know layers or pools. Sequences go one by one; the
rows of a long one are cut so that no matrix grows with the square of the text. Ties go to the lower entry, so that a choice does
not depend on how torch sorts.
"""

import torch
from torch import Tensor

from hybridserve.backends.reference.attention import (
    TEMPORARY_NBYTES,
    Scores,
    Span,
    attend_part,
    gather_entries,
    spans_of,
)
from hybridserve.batch import Batch, PagedTable


def index_select(
    q: Tensor, weights: Tensor | None, k_cache: Tensor, batch: Batch, table: PagedTable, *, num_selected: int
) -> Tensor:
    """See `ops.IndexSelect`. q: [T, H, K]; weights: [T, H] or None; k_cache: [B, block_size // n, K].

    Returns int32 [T, num_selected].
    """
    tokens_per_entry = table.block_size // k_cache.shape[1]
    out = torch.full((len(q), num_selected), -1, dtype=torch.int32, device=q.device)
    for span in spans_of(batch, None):
        num_entries = span.end // tokens_per_entry
        if num_entries == 0:
            continue
        keys = _entries(k_cache, span.sequence, num_entries, table)
        part = max(1, TEMPORARY_NBYTES // (4 * q.shape[1] * num_entries))
        for start in range(0, span.num_rows, part):
            stop = min(start + part, span.num_rows)
            positions = torch.arange(span.end - span.num_rows + start, span.end - span.num_rows + stop, device=q.device)
            visible = torch.arange(num_entries, device=q.device) < ((positions + 1) // tokens_per_entry)[:, None]
            rows = slice(span.row + start, span.row + stop)
            chosen = visible
            if num_entries > num_selected:
                scores = _scores(q[rows], None if weights is None else weights[rows], keys)
                chosen = best(scores.masked_fill_(~visible, -torch.inf), num_selected) & visible
            row, entry = chosen.nonzero(as_tuple=True)
            place = chosen.cumsum(-1)[row, entry] - 1
            out[rows][row, place] = entry.int()
    return out


def _entries(cache: Tensor, sequence: int, num_entries: int, table: PagedTable) -> Tensor:
    """The first entries of a sequence in fp32. cache: [B, entries of a block, K]. Returns [num_entries, K]."""
    entries = torch.arange(num_entries, device=cache.device)
    blocks = table.block_tables[sequence].long()[entries // cache.shape[1]]
    return cache[blocks, entries % cache.shape[1]].float()


def _scores(q: Tensor, weights: Tensor | None, keys: Tensor) -> Tensor:
    """Score of every entry for each row, fp32. q: [n, H, K]; weights: [n, H] or None; keys: [L, K] fp32. Returns [n, L]."""
    each = (q.float() @ keys.mT).relu_()
    return each.sum(1) if weights is None else (weights.float().unsqueeze(1) @ each).squeeze(1)


def best(scores: Tensor, count: int) -> Tensor:
    """Which `count` scores of each row are the highest, the lower index first among equal ones. scores: [n, L], count <= L.

    Returns bool [n, L].
    """
    least = scores.topk(count, dim=-1, sorted=True).values[:, -1:]
    above, equal = scores > least, scores == least
    return above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def selected_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, selected: Tensor, batch: Batch, table: PagedTable, *, scale: float
) -> Tensor:
    """See `ops.SelectedAttention`. q: [T, Hq, K]; k_cache: [B, block_size, Hk, K]; v_cache: [B, block_size, Hk, V]; selected:
    int32 [T, N]. Returns [T, Hq, V] in q's dtype.
    """
    scores = Scores(scale, None, None, None)
    out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
    for span in spans_of(batch, None):
        rows = slice(span.row, span.row + span.num_rows)
        if span.num_rows == 1:
            out[rows] = _attend_one(q[rows], k_cache, v_cache, selected[span.row], span, table, scores)
        else:
            k, v = (gather_entries(cache, [span], table, q.dtype)[0] for cache in (k_cache, v_cache))
            _attend_many(q[rows], k, v, selected[rows], scores, out[rows])
    return out


def _attend_one(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, selected: Tensor, span: Span, table: PagedTable, scores: Scores
) -> Tensor:
    """The one row of a sequence: only what is named is read. q: [1, Hq, K]; selected: [N]. Returns [1, Hq, V]."""
    tokens = selected[selected >= 0].long()
    blocks = table.block_tables[span.sequence].long()[tokens // table.block_size]
    k, v = (cache[blocks, tokens % table.block_size].to(q.dtype) for cache in (k_cache, v_cache))
    return attend_part(q, k, v, torch.ones(1, len(tokens), dtype=torch.bool, device=q.device), scores)


def _attend_many(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, scores: Scores, out: Tensor) -> None:
    """Rows of one sequence, by a mask over its tokens. q: [n, Hq, K]; k: [L, Hk, K]; v: [L, Hk, V]; selected: [n, N]; out:
    [n, Hq, V], in place.
    """
    part = max(1, TEMPORARY_NBYTES // (4 * q.shape[1] * len(k)))
    for start in range(0, len(q), part):
        here = slice(start, start + part)
        named = selected[here].long()
        # Names of nothing go to one token more than there are.
        seen = torch.zeros(len(named), len(k) + 1, dtype=torch.bool, device=q.device)
        seen.scatter_(1, named.masked_fill(named < 0, len(k)), True)
        out[here] = attend_part(q[here], k, v, seen[:, :-1], scores)
