"""Encoding where only given spans of a text are control tokens, and the same characters elsewhere are plain text.

Owns a copy of a vocabulary that knows no control tokens, and stand-ins for those that are meant. Must not know templates. Used by
`text.py`.
"""

import bisect
import itertools
from collections.abc import Sequence

import tokenizers

from hybridserve.errors import RequestError

#: Characters that stand for a control token while a text is encoded: private ones, of which a text needs to lack three.
_STAND_INS = [chr(at) for at in range(0xFFF80, 0xFFF80 + 48)]


class EncodedText:
    """Token ids, and where each begins in the text; None for what the post-processor added."""

    def __init__(self, ids: list[int], starts: list[int | None]) -> None:
        self.ids = ids
        self._starts = starts
        self._reached = list(itertools.accumulate((-1 if start is None else start for start in starts), max))

    def token_at(self, position: int) -> int | None:
        """Number of the token that holds a character: the first, where several begin at one character."""
        at = bisect.bisect_right(self._reached, position) - 1
        return None if at < 0 or self._reached[at] < 0 else bisect.bisect_left(self._reached, self._reached[at])

    def char_at(self, index: int) -> int | None:
        return self._starts[index] if 0 <= index < len(self._starts) else None


class PlainText:
    """A vocabulary in which `control` and all special tokens are plain text."""

    def __init__(self, core: tokenizers.Tokenizer, control: Sequence[str]) -> None:
        self._core = tokenizers.Tokenizer.from_str(core.to_str())
        self._core.encode_special_tokens = True
        added = {token.content: token for token in core.get_added_tokens_decoder().values()}
        extra = [text for text in control if text in added and not added[text].special]
        self._core.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in extra])
        self._added = added
        self._id_of: dict[str, int] = {token.content: token_id for token_id, token in core.get_added_tokens_decoder().items()}
        self._refused = frozenset(self._id_of[text] for text in added if added[text].special or text in control)
        # A stand-in takes the space beside it where its token does.
        sides = [(False, False), (False, True), (True, False), (True, True)]
        stand_ins = [
            tokenizers.AddedToken(char, lstrip=left, rstrip=right, normalized=False, special=False)
            for char, (left, right) in zip(_STAND_INS, itertools.cycle(sides))
        ]
        self._core.add_tokens(stand_ins)
        self._kinds: dict[tuple[bool, bool], list[str]] = {side: [] for side in sides}
        for token in stand_ins:
            self._kinds[token.lstrip, token.rstrip].append(token.content)

    def encode(self, text: str, own: Sequence[tuple[int, int]], add_special_tokens: bool) -> EncodedText:
        """Encode `text`, whose only control tokens are the spans `own`. Raises RequestError where no stand-in is left."""
        encoded, refused = self._encode(text, own, (), add_special_tokens)
        if refused:  # some vocabularies find a control token among plain pieces, too: these are cut in two
            encoded, refused = self._encode(text, own, refused, add_special_tokens)
        if refused:
            raise RequestError("messages hold a control token's text that this vocabulary cannot write as text; leave it out")
        return encoded

    def _encode(
        self, text: str, own: Sequence[tuple[int, int]], cuts: Sequence[int], add_special_tokens: bool
    ) -> tuple[EncodedText, list[int]]:
        """The encoding with all of `own` replaced, cut before the characters `cuts`, and where plain text gave control tokens."""
        free = {kind: [char for char in chars if char not in text] for kind, chars in self._kinds.items()}
        if any(len(chars) < 2 for chars in free.values()):
            raise RequestError(f"the text holds the characters U+{ord(_STAND_INS[0]):X} and on; leave one of them out")
        cut = free[False, False][1]
        parts: list[str] = []
        meant: list[tuple[int, int, str | None]] = []  # where a stand-in is in the new text, in the old one, and for what
        marks = sorted([*((start, end) for start, end in own), *((at, at) for at in cuts)])
        end, size = 0, 0
        for start, stop in marks:
            token = text[start:stop]
            added = self._added.get(token)
            char = cut if start == stop else free[(added.lstrip, added.rstrip) if added is not None else (False, False)][0]
            parts += [text[end:start], char]
            size += start - end
            meant.append((size, start, token if start != stop else None))
            size, end = size + 1, stop
        changed = "".join([*parts, text[end:]])
        encoding = self._core.encode_batch([changed], add_special_tokens=add_special_tokens)[0]
        return self._read(encoding, meant)

    def _read(self, encoding: tokenizers.Encoding, meant: Sequence[tuple[int, int, str | None]]) -> tuple[EncodedText, list[int]]:
        """The encoding of the text itself, and places to cut it at where control tokens came out of plain text."""
        stand_ins = {self._core.token_to_id(char) for char in _STAND_INS}
        places = [place for place, _, _ in meant]
        shifts = [0, *itertools.accumulate(len(token or "") - 1 for _, _, token in meant)]
        ids: list[int] = []
        starts: list[int | None] = []
        refused: list[int] = []
        waiting = iter(meant)
        for token_id, (first, last), special in zip(encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True):
            if token_id in stand_ins:
                _, start, token = next(waiting)
                if token is not None:
                    ids.append(self._id_of[token])
                    starts.append(start)
                continue
            start = first + shifts[bisect.bisect_left(places, first)]
            is_added = special == 1 and first == last
            if token_id in self._refused and not is_added:
                refused.append(start + 1)
            ids.append(token_id)
            starts.append(None if is_added else start)
        return EncodedText(ids, starts), refused
