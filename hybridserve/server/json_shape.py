"""How many values a JSON text holds and how deep they lie, found out without making any of them.

Owns that count. A decoder makes all values in one call that holds the interpreter's lock, so that neither the event loop nor
another thread runs meanwhile: what is too much must be known before. Called by `wire.py` for every body.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Bytes that are looked at in one go, about a millisecond of work.
PIECE_NBYTES = 2**18
_QUOTE, _BACKSLASH, _COMMA, _LIST, _LIST_END, _OBJECT, _OBJECT_END = b'"\\,[]{}'


class Shape(NamedTuple):
    """Of a JSON text."""

    num_values: int  # at least as many as there are, keys not counted
    depth: int
    longest: int  # bytes of the longest string, as it is written, with one quote


def shape_of(text: bytes) -> Shape:
    """Count values and depth. Exact up to where `text` stops being JSON; a decoder goes no further than that."""
    num_values, deepest, depth, longest, border = 1, 0, 0, 0, 0
    is_inside, num_backslashes = False, 0
    for start in range(0, len(text), PIECE_NBYTES):
        piece = np.frombuffer(text, np.uint8, min(PIECE_NBYTES, len(text) - start), start)
        quotes, num_backslashes = _string_borders(piece, num_backslashes)
        if len(quotes):
            lengths = np.diff(quotes + start, prepend=border)[0 if is_inside else 1 :: 2]  # at the quotes that end one
            longest = max(longest, int(lengths.max(initial=0)))
            border = start + int(quotes[-1])
        marks = np.flatnonzero((piece == _COMMA) | ((piece | 0x20) == _OBJECT) | ((piece | 0x20) == _OBJECT_END))
        outside = (np.searchsorted(quotes, marks) % 2 == 1) == is_inside
        found = piece[marks[outside]]
        is_inside ^= bool(len(quotes) % 2)
        opens = (found == _LIST) | (found == _OBJECT)
        steps = opens.astype(np.int64) - ((found == _LIST_END) | (found == _OBJECT_END))
        num_values += int(np.count_nonzero(found == _COMMA)) + int(np.count_nonzero(opens))
        if len(steps):
            depths = depth + np.cumsum(steps)
            deepest, depth = max(deepest, int(depths.max())), int(depths[-1])
    return Shape(num_values, deepest, longest)


def _string_borders(piece: NDArray[np.uint8], before: int) -> tuple[NDArray[np.intp], int]:
    """Positions of quotes that no backslash takes away, and the number of backslashes at the end.

    `before` is how many there were just before the piece.
    """
    others = np.flatnonzero(piece != _BACKSLASH)
    quotes = np.flatnonzero(piece == _QUOTE)
    order = np.searchsorted(others, quotes)  # a quote is one of the others
    previous = np.where(order > 0, others[order - 1], -1 - before)
    borders = quotes[(quotes - previous) % 2 == 1]
    end = len(piece) - 1 - int(others[-1]) if len(others) else len(piece) + before
    return borders, end
