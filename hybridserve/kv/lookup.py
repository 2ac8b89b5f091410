"""What of a prompt is cached, and from where it can be resumed.

Owns the rule of a hit: a position at which every group can go on. Reads the index and changes nothing in it. `PrefixCache` and
`KVCacheCoordinator` ask.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hybridserve.kv.arena import CachePlan
from hybridserve.kv.entries import NO_BLOCK, TOKEN_NBYTES, Checkpoint
from hybridserve.kv.explanation import Findings
from hybridserve.kv.ghosts import Ghosts, Remembered
from hybridserve.kv.prefix import PrefixIndex, TextMatch


@dataclass(slots=True)
class Match:
    """What of a prompt is cached. `num_tokens` can be resumed from; `text_tokens` of text are known, states or not."""

    num_tokens: int
    text_tokens: int
    group_tokens: Mapping[int, int]  # by group: how far that group alone could resume
    text: TextMatch | None
    checkpoint: Checkpoint | None
    limited_by_window: bool = False
    gives_way: bool = False  # whether what is known could be resumed from and is not, for want of memory
    past: Remembered | None = None  # what was known once, when that was first asked for

    @classmethod
    def nothing(cls) -> "Match":
        """No prefix is known, or none may be used."""
        return cls(0, 0, {}, None, None)

    def without_hit(self) -> "Match":
        """The same knowledge of the text, but nothing is resumed from: memory does not hold both the hit and what follows."""
        return replace(self, num_tokens=0, checkpoint=None, gives_way=True)


class Lookup:
    """Lookups in one index."""

    def __init__(self, plan: CachePlan, index: PrefixIndex, ghosts: Ghosts) -> None:
        self._plan = plan
        self._index = index
        self._ghosts = ghosts
        self._unit = plan.match_unit

    def match(self, tokens: NDArray[np.int32], salt: str) -> Match:
        """The longest position at which every group can resume this prompt, at most its length - 1."""
        plan = self._plan
        data = tokens.astype("<i4", copy=False).tobytes()
        text = self._index.match_text(self._index.known_root(salt), data)
        limit = len(tokens) - 1
        known = min(text.num_tokens, limit) if plan.paged else limit
        reach = {group.index: known for group in plan.groups}
        if not plan.states:
            position = min(text.num_tokens, limit)
            while position > 0 and not self._has_text(text, position, None):
                position = (position - 1) // self._unit * self._unit
            reach |= {group.index: position for group in plan.paged if group.window is not None}
            return Match(position, text.num_tokens, reach, text, None, limited_by_window=position < known)
        position, deepest, found = 0, 0, None
        for checkpoint in self._index.checkpoints_on(text.path, data, text.depth, limit):
            deepest = max(deepest, checkpoint.position)
            if self._has_text(text, checkpoint.position, checkpoint):
                position, found = checkpoint.position, checkpoint
                break
        reach |= {group.index: deepest for group in plan.states}
        if position < deepest:
            reach |= {group.index: position for group in plan.paged if group.window is not None}
        return Match(position, text.num_tokens, reach, text, found, limited_by_window=position < deepest)

    def _has_text(self, text: TextMatch, position: int, checkpoint: Checkpoint | None) -> bool:
        """Whether every paged group has the entries that a token at `position` looks at."""
        if position % self._unit and NO_BLOCK in self.partial_blocks(text, position, checkpoint):
            return False
        whole = position // self._unit
        for order, group in enumerate(self._plan.paged):
            # A full group's blocks go from the end on, so that the last one implies those before it.
            first = max(whole - 1, 0) if group.window is None else max(0, position - group.window + 1) // self._unit
            if any(NO_BLOCK in part for _, part in self.blocks(text, order, first, whole)):
                return False
        return True

    def blocks(self, text: TextMatch, order: int, first: int, end: int) -> "Iterator[tuple[int, array[int]]]":
        """Blocks of a paged group for units `first` to `end` of a known text, by run: the first unit's number, and the blocks."""
        for run in reversed(text.path):
            start = run.start // self._unit
            if start < end:
                at = max(first - start, 0)
                part = run.blocks[order][at : end - start]
                if part:
                    yield start + at, part
            if start <= first:
                return

    def partial_blocks(self, text: TextMatch, position: int, checkpoint: Checkpoint | None) -> Sequence[int]:
        """Blocks that hold the entries of the unit that `position` lies inside."""
        if checkpoint is not None:
            return checkpoint.blocks
        whole = position // self._unit
        if (whole + 1) * self._unit > text.depth:
            return text.tail_blocks
        return [part[0] for order in range(len(self._plan.paged)) for _, part in self.blocks(text, order, whole, whole + 1)]

    def findings(self, tokens: NDArray[np.int32], match: Match) -> Findings:
        """What a match says about the tokens that it did not reach."""
        text = match.text
        if text is None:
            return Findings(0, 0, 0, {}, False, False, False)
        last = text.path[-1]
        point = last.points.get(text.depth)
        past = self.recall(match, text)
        return Findings(
            num_hit=match.num_tokens,
            num_text=match.text_tokens if self._plan.paged else match.num_tokens,
            num_known=max(match.text_tokens, text.depth + past.num_units * self._unit),
            group_tokens=match.group_tokens,
            state_was_evicted=past.lost is not None or match.gives_way,
            limited_by_window=match.limited_by_window,
            has_siblings=text.depth < last.end or (point is not None and bool(point.edges)),
        )

    def recall(self, match: Match, text: TextMatch) -> Remembered:
        """What of a prompt was known once, behind what it resumes from."""
        if match.past is None:
            key = self._index.last_key(text.path[-1], text.depth)
            match.past = self._ghosts.recall(key, text, match.num_tokens, len(text.data) // TOKEN_NBYTES - 1)
        return match.past
