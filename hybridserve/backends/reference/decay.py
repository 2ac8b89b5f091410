"""Products of rows of a chunk under decay, in forms that no decay can overflow.

Owns the pairwise scores. Must not know sequences or states. Called by `recurrence.py`.

Letters beside those of `ops.py`: M chunks, C rows in a chunk. G is the sum of log decays from the chunk's start up to
and including a row, in fp64: differences of sums, once rounded, would lose the small decays that follow a large one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

#: Below it a factor is 0 in fp32 anyway; keeps sums finite when a layer gives -inf to forget everything.
MIN_LOG_DECAY = -200.0
#: A state that fades ends in denormal numbers, which cost many processors a hundred times as much as others. What is smaller
#: than this is set to zero before: its products with numbers of ordinary size are normal, and no fp32 sum shows the difference.
NEGLIGIBLE = 2.0**-100
_NEGLIGIBLE_LOG = -70.0
#: Rows of the parts in which per-channel decays are compared pair by pair.
PART = 16


def summed(log_decay: Tensor) -> Tensor:
    """G of every row. log_decay: [M, H, C, *]. Returns the same shape, fp64."""
    return log_decay.clamp(min=MIN_LOG_DECAY).double().cumsum(2)


def factor(log_factor: Tensor) -> Tensor:
    """exp in fp32 of a log decay or of a difference of their sums, at most 0; zero where negligible. Any shape."""
    # An exponential that underflows takes as long as one that gives a denormal number.
    return drop_negligible(log_factor.float().clamp(min=_NEGLIGIBLE_LOG).exp_())


def drop_negligible(x: Tensor) -> Tensor:
    """Zero what is smaller than NEGLIGIBLE, in place; NaN stays. Any shape, fp32. Returns x."""
    return torch.hardshrink(x, NEGLIGIBLE, out=x)


def pair_scores(lefts: Sequence[Tensor], k: Tensor, sums: Tensor) -> list[Tensor]:
    """sum over c of left_ic k_jc exp(G_ic - G_jc) for j <= i, zero for j > i, for each of `lefts`.

    Each left, k: [M, H, C, K]; sums: [M, H, C, 1] (per head) or [M, H, C, K] (per channel). Returns [M, H, C, C] each.
    """
    return _per_head(lefts, k, sums) if sums.shape[-1] == 1 else _per_channel(lefts, k, sums)


def _per_head(lefts: Sequence[Tensor], k: Tensor, sums: Tensor) -> list[Tensor]:
    """`pair_scores` with sums: [M, H, C, 1]: the decay leaves the product."""
    between = sums - sums.mT  # [M, H, C, C]
    later = torch.ones(between.shape[-2:], dtype=torch.bool, device=k.device).triu(1)
    decays = factor(between.masked_fill_(later, -torch.inf))
    return [(left @ k.mT).mul_(decays) for left in lefts]


def _per_channel(lefts: Sequence[Tensor], k: Tensor, sums: Tensor) -> list[Tensor]:
    """`pair_scores` with sums: [M, H, C, K], C a multiple of PART.

    Within a part pair by pair; between parts relative to the sum at the end of the part before, so that the exponents
    of both factors are at most 0.
    """
    num_rows = k.shape[-2]
    scores = [left.new_zeros(*left.shape[:-1], num_rows) for left in lefts]
    for first in range(0, num_rows, PART):
        part = slice(first, first + PART)
        if first:
            at = sums[..., first - 1 : first, :]
            to_part = factor(sums[..., part, :] - at)
            before = (k[..., :first, :] * factor(at - sums[..., :first, :])).mT
            for score, left in zip(scores, lefts, strict=True):
                score[..., part, :first] = (left[..., part, :] * to_part) @ before
        for j in range(first, first + PART):
            rest = slice(j, first + PART)
            faded = k[..., j : j + 1, :] * factor(sums[..., rest, :] - sums[..., j : j + 1, :])
            for score, left in zip(scores, lefts, strict=True):
                score[..., rest, j] = (left[..., rest, :] * faded).sum(-1)
    return scores
