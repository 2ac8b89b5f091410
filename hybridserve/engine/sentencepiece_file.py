"""A vocabulary as SentencePiece stores it: pieces with scores, and how text is normalised, in a protocol buffer.

Owns reading that file and the tokenizer that it means. Must not know chats. Called by `vocabulary.py`. Source: the published
`sentencepiece_model.proto`; Kudo and Richardson 2018 (arXiv 1808.06226).
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from hybridserve.errors import ModelError, UnsupportedModelError

_SPACE = "▁"
#: Score of pieces that text never becomes.
_NEVER = -1e9

#: Whether a space is put before a text: before each part between special tokens, before the first one, or never.
Prefix: TypeAlias = Literal["always", "first", "never"]
_Value: TypeAlias = int | bytes


class _Kind(IntEnum):
    """Types of pieces."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Piece(NamedTuple):
    text: str
    score: float
    kind: _Kind


class _File(NamedTuple):
    """What the file says, as far as it matters here."""

    pieces: list[_Piece]
    is_unigram: bool
    has_byte_fallback: bool
    has_prefix: bool
    removes_spaces: bool


def read_sentencepiece(path: Path, prefix: Prefix | None) -> tokenizers.Tokenizer:
    """The tokenizer of a file; `prefix` overrides where a space is put before text.

    Control pieces become special tokens. Raises UnsupportedModelError for models that are not read, ModelError for a broken file.
    """
    file = _read(path)
    unknown = next((index for index, piece in enumerate(file.pieces) if piece.kind == _Kind.UNKNOWN), None)
    if unknown is None:
        raise ModelError(f"{path.name} has no unknown piece; fetch the file again")
    try:
        model = _unigram(file, unknown) if file.is_unigram else _bpe(file, unknown)
        core = tokenizers.Tokenizer(model)
        scheme = prefix or ("always" if file.has_prefix else "never")
        core.normalizer = _normaliser(file, scheme)
    except Exception as error:  # the package raises bare Exception for any fault in what it is given
        raise ModelError(f"{path.name} holds no usable vocabulary: {error}; fetch the file again") from error
    if scheme == "first":
        core.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if scheme != "never" else steps)
    of_kind = {kind: [piece.text for piece in file.pieces if piece.kind == kind] for kind in _Kind}
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in of_kind[_Kind.CONTROL]])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in of_kind[_Kind.USER_DEFINED]])
    return core


def _unigram(file: _File, unknown: int) -> models.Unigram:
    scored = [(piece.text, piece.score if piece.kind in (_Kind.NORMAL, _Kind.UNKNOWN) else _NEVER) for piece in file.pieces]
    return models.Unigram(scored, unknown, file.has_byte_fallback)


def _bpe(file: _File, unknown: int) -> models.BPE:
    vocab = {piece.text: index for index, piece in enumerate(file.pieces)}
    usable = {piece.text: (-piece.score, index) for index, piece in enumerate(file.pieces) if piece.kind == _Kind.NORMAL}
    merges: list[tuple[str, str]] = []
    for text in sorted(usable, key=usable.__getitem__):
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        pairs = [(left, right) for left, right in pairs if left in usable and right in usable]
        merges += sorted(pairs, key=lambda pair: (usable[pair[0]], usable[pair[1]]))
    return models.BPE(
        vocab=vocab,
        merges=merges,
        unk_token=file.pieces[unknown].text,
        fuse_unk=True,
        byte_fallback=file.has_byte_fallback,
    )


def _normaliser(file: _File, scheme: Prefix) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if file.removes_spaces:
        steps += [normalizers.Replace(tokenizers.Regex(" {2,}"), " "), normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), "")]
    if scheme == "always":
        steps.append(normalizers.Prepend(_SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def _read(path: Path) -> _File:
    """Read the fields that matter; numbers are those of the published schema."""
    try:
        pieces: list[_Piece] = []
        trainer: dict[int, _Value] = {}
        normaliser: dict[int, _Value] = {}
        for number, value in _fields(path.read_bytes()):
            if number == 1 and isinstance(value, bytes):
                pieces.append(_piece(dict(_fields(value))))
            elif number == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
            elif number == 3 and isinstance(value, bytes):
                normaliser = dict(_fields(value))
    except (ValueError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise ModelError(f"{path.name} is no SentencePiece model: {error}; fetch the file again") from error
    kind = trainer.get(3, 1)
    if kind not in (1, 2) or trainer.get(24):
        raise UnsupportedModelError(
            f"{path.name} is a SentencePiece model of type {kind!r}; unigram (1) and BPE (2) with spaces before words are "
            "read: put a tokenizer.json beside it"
        )
    if normaliser.get(2):
        raise UnsupportedModelError(
            f"{path.name} changes characters ({_name(normaliser)}), which is not offered, since readers of that table differ; "
            "put a tokenizer.json beside it"
        )
    return _File(
        pieces,
        is_unigram=kind == 1,
        has_byte_fallback=bool(trainer.get(35, 0)),
        has_prefix=bool(normaliser.get(3, 1)),
        removes_spaces=bool(normaliser.get(4, 1)),
    )


def _name(normaliser: dict[int, _Value]) -> str:
    name = normaliser.get(1, b"")
    return name.decode(errors="replace")[:60] if isinstance(name, bytes) else "unnamed"


def _piece(fields: dict[int, _Value]) -> _Piece:
    text, score, kind = fields.get(1, b""), fields.get(2, b"\0\0\0\0"), fields.get(3, 1)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(kind, int):
        raise ValueError("a piece has fields of other types")
    return _Piece(text.decode(), struct.unpack("<f", score)[0], _Kind(kind))


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """Fields of one message: their numbers, and whole numbers, or bytes of whatever else they are."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + size > len(data):
            raise ValueError(f"a field of {size} bytes at byte {at} of {len(data)}")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"a number without an end at byte {at}")
