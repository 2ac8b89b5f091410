"""What was evicted, by key: so that a miss can be told from a first sight, and what would have been hit is learned from.

Owns the keys of evicted units and, with them, the checkpoints that hung there. Holds no page. `PrefixCache` is its only caller.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Final

from hybridserve.kv.entries import TOKEN_NBYTES, Lost
from hybridserve.kv.prefix import KEY_NBYTES, TextMatch, child_key

#: Units that are remembered.
_MOST: Final = 1 << 17


@dataclass(slots=True)
class Remembered:
    """What of a prompt was known once, behind what is known."""

    num_units: int  # whole units behind the known ones
    lost: Lost | None  # the deepest checkpoint that the prompt would have resumed from


class Ghosts:
    """Evicted units in the order in which they were first evicted; the oldest are forgotten."""

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._of: dict[bytes, Sequence[Lost]] = {}

    def add(self, keys: bytes | bytearray, start: int, lost: Iterable[Lost]) -> None:
        """Remember the units of `keys`, the first of which begins `start` tokens from the start of its prompt."""
        units = [bytes(keys[at : at + KEY_NBYTES]) for at in range(0, len(keys), KEY_NBYTES)]
        self._of.update(zip(units, repeat(())))
        for one in lost:
            key = units[(one.depth - start) // self._unit - 1]
            self._of[key] = (*self._of[key], one)
        for key in list(islice(self._of, max(0, len(self._of) - _MOST))):
            del self._of[key]

    def forget(self, keys: bytes) -> None:
        """Forget units by key."""
        for at in range(0, len(keys), KEY_NBYTES):
            self._of.pop(keys[at : at + KEY_NBYTES], None)

    def recall(self, key: bytes, text: TextMatch, position: int, limit: int) -> Remembered:
        """What of a prompt was known once: from `position`, where it resumes, up to `limit` tokens.

        `key` is that of the whole units that are known now.
        """
        deepest: Lost | None = None
        for run in text.path:
            for one in run.lost:
                is_deeper = position < one.position <= limit and (deepest is None or one.position > deepest.position)
                if is_deeper and _is_on_way(one, text.data):
                    deepest = one
        at, num_units, step = text.depth * TOKEN_NBYTES, 0, self._unit * TOKEN_NBYTES
        while self._of and at + step <= len(text.data):
            key = child_key(key, text.data[at : at + step])
            lost = self._of.get(key)
            if lost is None:
                break
            at, num_units = at + step, num_units + 1
            for one in lost:
                is_deeper = deepest is None or one.position > deepest.position
                if is_deeper and one.position <= limit and _is_on_way(one, text.data):
                    deepest = one
        return Remembered(num_units, deepest)


def _is_on_way(lost: Lost, data: bytes) -> bool:
    return lost.depth * TOKEN_NBYTES <= len(data) and data.startswith(lost.tail, lost.depth * TOKEN_NBYTES)
