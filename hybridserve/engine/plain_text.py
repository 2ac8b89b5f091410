"""Encoding where only given spans of a text are control tokens, and the same characters elsewhere are plain text.

Owns a copy of a vocabulary that knows no control tokens, and stand-ins for those that are meant. Must not know templates. Used by
`text.py`.
"""

import bisect
import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import tokenizers

from hybridserve.errors import RequestError

#: Random private-use characters of a stand-in: nobody can write one without knowing it, and none is ever told.
_STAND_IN_CHARS = 12

#: Whether a token takes the space to its left and right.
_Flags: TypeAlias = tuple[bool, bool]


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


class _Piece(NamedTuple):
    """A stand-in in the changed text: where, where what it stands for begins, and what that is; None where it only cuts."""

    at: int
    start: int
    token: str | None


class PlainText:
    """A vocabulary in which `control` and all special tokens are plain text."""

    def __init__(self, core: tokenizers.Tokenizer, control: Sequence[str]) -> None:
        self._core = core
        decoder = core.get_added_tokens_decoder()
        self._added = {token.content: token for token in decoder.values()}
        self._id_of: dict[str, int] = {token.content: token_id for token_id, token in decoder.items()}
        meant = [text for text, token in self._added.items() if token.special or text in control]
        self._control_ids = frozenset(self._id_of[text] for text in meant)
        self._blind = tokenizers.Tokenizer.from_str(core.to_str())
        self._blind.encode_special_tokens = True
        self._blind.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in meant])
        # A stand-in takes the space beside it where its token does.
        kinds = sorted({_flags(self._added[text]) for text in meant})
        self._stand_ins = {flags: _random_text() for flags in kinds}
        self._cut = _random_text()
        self._blind.add_tokens([_token(text, flags) for flags, text in self._stand_ins.items()])
        self._blind.add_tokens([_token(self._cut, (False, False))])
        self._stand_in_ids = frozenset(self._blind.token_to_id(text) for text in (*self._stand_ins.values(), self._cut))

    @property
    def looks_at_normalised_text(self) -> bool:
        """Whether a text may hold a control token that is seen only once it is normalised."""
        normalised = any(self._added[text].normalized for text, token_id in self._id_of.items() if token_id in self._control_ids)
        return normalised and self._core.normalizer is not None

    def encode(self, text: str, own: Sequence[tuple[int, int]], add_special_tokens: bool) -> EncodedText:
        """Encode `text`, whose only control tokens are among the spans `own`. Raises RequestError where it cannot be written."""
        whole = self._core.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        found, foreign = self._control_in(whole, own)
        if not foreign:
            return _as_it_is(whole)
        ours = [span for span in own if span in found]
        encoded, refused = self._encode(text, ours, (), add_special_tokens)
        if refused:  # some vocabularies find a control token among plain pieces, too: these are cut in two
            encoded, refused = self._encode(text, ours, refused, add_special_tokens)
        if refused:
            raise RequestError("the text has a control token's text that this vocabulary cannot write as text; leave it out")
        return encoded

    def _control_in(
        self, encoding: tokenizers.Encoding, own: Sequence[tuple[int, int]]
    ) -> tuple[set[tuple[int, int]], list[tuple[int, int]]]:
        """Spans of `own` that are control tokens in an encoding, and the places of other control tokens in it."""
        starts = [start for start, _ in own]
        found, foreign = set(), []
        for token_id, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id not in self._control_ids or first == last:
                continue
            at = bisect.bisect_left(starts, last) - 1  # the last span that begins before the token ends
            if at >= 0 and own[at][1] > first:
                found.add(own[at])
            else:
                foreign.append((first, last))
        return found, foreign

    def _encode(
        self, text: str, own: Sequence[tuple[int, int]], cuts: Sequence[int], add_special_tokens: bool
    ) -> tuple[EncodedText, list[int]]:
        """The encoding with all of `own` replaced, cut before the characters `cuts`, and where plain text gave control tokens."""
        parts: list[str] = []
        pieces: list[_Piece] = []
        end, size = 0, 0
        for start, stop in sorted([*own, *((at, at) for at in cuts)]):
            token = text[start:stop]
            stand_in = self._stand_ins[_flags(self._added[token])] if token else self._cut
            parts += [text[end:start], stand_in]
            size += start - end
            pieces.append(_Piece(size, start, token or None))
            size, end = size + len(stand_in), stop
        changed = "".join([*parts, text[end:]])
        encoding = self._blind.encode_batch([changed], add_special_tokens=add_special_tokens)[0]
        return self._read(encoding, pieces)

    def _read(self, encoding: tokenizers.Encoding, pieces: Sequence[_Piece]) -> tuple[EncodedText, list[int]]:
        """The encoding of the text itself, and places to cut it at where control tokens came out of plain text."""
        places = [piece.at for piece in pieces]
        shifts = [0, *itertools.accumulate(len(piece.token or "") - _STAND_IN_CHARS for piece in pieces)]
        ids: list[int] = []
        starts: list[int | None] = []
        refused: list[int] = []
        waiting = list(reversed(pieces))
        for token_id, (first, last), special in zip(encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True):
            if token_id in self._stand_in_ids:
                piece = waiting.pop()
                if piece.token is not None:
                    ids.append(self._id_of[piece.token])
                    starts.append(piece.start)
                continue
            start = first + shifts[bisect.bisect_left(places, first)]
            is_added = special == 1 and first == last
            if token_id in self._control_ids and not is_added:
                refused.append(start + 1)
            ids.append(token_id)
            starts.append(None if is_added else start)
        assert not waiting, "a stand-in is a token wherever it stands"
        return EncodedText(ids, starts), refused


def _as_it_is(encoding: tokenizers.Encoding) -> EncodedText:
    marks = zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
    return EncodedText(
        list(encoding.ids), [None if special == 1 and first == last else first for (first, last), special in marks]
    )


def _flags(token: tokenizers.AddedToken) -> _Flags:
    return bool(token.lstrip), bool(token.rstrip)


def _token(text: str, flags: _Flags) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, lstrip=flags[0], rstrip=flags[1], normalized=False, special=False)


def _random_text() -> str:
    drawn = os.urandom(2 * _STAND_IN_CHARS)
    return "".join(chr(0xF0000 + int.from_bytes(drawn[at : at + 2]) % 0xFFF0) for at in range(0, len(drawn), 2))
