"""Between text and token ids: the tokenizer of a model folder and the incremental way back.

Owns encoding, decoding and the stop strings of one sequence's text. Must not know requests, chats or tensors. `server/`
and `llm.py` make one `Tokenizer` per model and one `Detokenizer` per sequence. Built on the `tokenizers` package alone:
importing transformers takes seconds.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from hybridserve.engine.byte_level import BYTE_OF_CHAR
from hybridserve.engine.chat import RenderedChat
from hybridserve.engine.control import ControlTexts
from hybridserve.engine.generation_config import model_vocab_size, read_json, token_ids
from hybridserve.engine.plain_text import PlainText
from hybridserve.engine.vocabulary import read_vocabulary

#: Tokens that the window decoder keeps back at most, waiting for a character or a run of bytes to end.
MAX_PENDING_TOKENS = 16
#: Characters without a token that a position may be followed by.
MAX_SKIPPED_CHARS = 16
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """One model's tokenizer, as the files of its vocabulary define it.

    As in transformers, the post-processor of the file alone decides about a BOS token; truncation or padding that the
    file asks for are not applied.
    """

    def __init__(
        self, core: tokenizers.Tokenizer, *, special_tokens: Mapping[str, str], eos_token_ids: Sequence[int] = ()
    ) -> None:
        core.no_truncation()
        core.no_padding()
        self._core = core
        self.special_tokens = dict(special_tokens)  # name in templates ("bos_token") -> text
        self.eos_token_ids = tuple(eos_token_ids)
        self._special_ids = frozenset(token_id for token_id, token in core.get_added_tokens_decoder().items() if token.special)
        self._is_byte_level = _is_byte_level(core)
        self._bytes = _ByteTable(core)
        self._plain_text: dict[tuple[str, ...], PlainText] = {}  # by the control tokens that it takes for text

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Read the vocabulary and the files beside it. Raises ModelError when it is missing or not readable."""
        special = _special_tokens(Path(folder))
        core = read_vocabulary(Path(folder), special)
        known = [text for text in special.values() if core.token_to_id(text) is not None]
        core.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in known])
        return cls(core, special_tokens=special, eos_token_ids=_eos_token_ids(Path(folder), core, special))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may have more rows."""
        return int(self._core.get_vocab_size(with_added_tokens=True))

    @cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest token; a longer text than N times this has more than N tokens,
        but where a vocabulary drops characters.
        """
        longest = max(map(len, self._core.get_vocab(with_added_tokens=True)), default=1)
        return max(longest, 1)

    @property
    def bos_token_id(self) -> int | None:
        text = self.special_tokens.get("bos_token")
        return None if text is None else self._core.token_to_id(text)

    @property
    def added_tokens(self) -> dict[str, bool]:
        """Texts that are one token wherever they stand, and whether each is a special token."""
        return {token.content: bool(token.special) for token in self._core.get_added_tokens_decoder().values()}

    def encode(self, text: str, *, add_special_tokens: bool = True, control: Sequence[str] | None = None) -> list[int]:
        """Token ids of `text`, with the BOS or EOS that the model's post-processor adds unless told otherwise.

        Where `control` is given, these tokens and all special ones are plain text where `text` holds theirs.
        """
        if control is not None:
            return list(self._plain(control).encode(text, (), add_special_tokens).ids)
        return list(self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def encode_chat(
        self, chat: RenderedChat, positions: Iterable[int] = (), *, add_special_tokens: bool = False
    ) -> tuple[list[int], dict[int, int]]:
        """Token ids of a rendered chat, and by character position the number of tokens that end at or before it.

        Control tokens are where the template wrote them; text in a message that looks like one is plain text.
        """
        own = self._own(chat)
        if own is None:
            return self.encode_at(chat.text, positions, add_special_tokens=add_special_tokens)
        encoded = self._plain(chat.control).encode(chat.text, own, add_special_tokens)
        return encoded.ids, _found(positions, len(chat.text), len(encoded.ids), encoded.token_at)

    def encode_at(
        self, text: str, positions: Iterable[int], *, add_special_tokens: bool = True
    ) -> tuple[list[int], dict[int, int]]:
        """Token ids of `text`, and by character position the number of tokens that end at or before it."""
        # the batch form lets other threads run meanwhile, which the single one does not
        encoding = self._core.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        ids = list(encoding.ids)
        return ids, _found(positions, len(text), len(ids), encoding.char_to_token)

    def char_in_chat(self, chat: RenderedChat, index: int, *, add_special_tokens: bool = False) -> int | None:
        """Character of a rendered chat at which its token number `index` begins; None where that token is not of the text."""
        own = self._own(chat)
        if own is None:
            return self.char_at(chat.text, index, add_special_tokens=add_special_tokens)
        return self._plain(chat.control).encode(chat.text, own, add_special_tokens).char_at(index)

    def _own(self, chat: RenderedChat) -> Sequence[tuple[int, int]] | None:
        """Where a chat's own control tokens are; None where it has no others, normalised or not."""
        if chat.own is not None or not chat.control or not self._plain(chat.control).looks_at_normalised_text:
            return chat.own
        return ControlTexts(chat.control).find(chat.text)

    def prepare(self, control: Sequence[str]) -> None:
        """Make now what the first text with one of these tokens in it would wait for."""
        self._plain(control)

    def _plain(self, control: Sequence[str]) -> PlainText:
        key = tuple(control)
        if key not in self._plain_text:
            self._plain_text[key] = PlainText(self._core, key)
        return self._plain_text[key]

    def char_at(self, text: str, index: int, *, add_special_tokens: bool = True) -> int | None:
        """Character of `text` at which its token number `index` begins; None where that token is not of the text."""
        chars = self._core.encode_batch([text], add_special_tokens=add_special_tokens)[0].token_to_chars(index)
        return None if chars is None else int(chars[0])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of all `ids` at once. Ids beyond the vocabulary have no text."""
        return str(self._core.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for within a text; part of a character, perhaps."""
        if self._is_byte_level:
            return self._bytes[token_id]
        name = self._core.id_to_token(token_id)
        if name is None:
            return b""
        if match := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(match[1], 16)])
        anchor = self._core.encode("a", add_special_tokens=False).ids[-1:]
        start = self._core.decode(anchor, skip_special_tokens=False)
        return str(self._core.decode([*anchor, token_id], skip_special_tokens=False))[len(start) :].encode()

    def token_text(self, token_id: int) -> str:
        """A token's text for people and for keys: unique also where it is no whole character (`bytes:\\xe2\\x96`)."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def stream(self, *, skip_special_tokens: bool) -> "TextStream":
        """A fresh incremental decoder of one sequence."""
        skipped: frozenset[int] = self._special_ids if skip_special_tokens else frozenset()
        return _ByteStream(self._bytes, skipped) if self._is_byte_level else _WindowStream(self._core, skipped)


class TextStream(Protocol):
    """Turns the tokens of one sequence into text, one after another; what they gave joins to the one-shot decode."""

    def feed(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """The text of one sequence, in the pieces a stream may send, ended by the first stop string.

    Keeps back split characters and what could be the start of a stop string, never more. `stop` is not searched in the
    text of the first `min_tokens` tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._stream = tokenizer.stream(skip_special_tokens=skip_special_tokens)
        self._stops = [_StopString(text) for text in stop]
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._held = ""  # text that may turn out to begin a stop string
        self.num_tokens = 0  # tokens whose text counts: those up to the stop string
        self.stop_string: str | None = None  # the one that ended the text

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is certain after these tokens. Tokens after a stop string are ignored and not counted."""
        feed = self._stream.feed
        if not self._stops:
            self.num_tokens += len(token_ids)
            return "".join(map(feed, token_ids))
        parts = []
        for token_id in token_ids:
            if self.stop_string is not None:
                break
            self.num_tokens += 1
            text = feed(token_id)
            parts.append(self._search(text) if self.num_tokens > self._min_tokens else text)
        return "".join(parts)

    def finish(self) -> str:
        """What was still kept back, once no more tokens come."""
        if self.stop_string is not None:
            return ""
        tail = self._stream.flush()
        if self._stops and self.num_tokens > self._min_tokens:
            tail = self._search(tail)
        held, self._held = self._held, ""
        return tail + held

    def _search(self, text: str) -> str:
        """Append `text`; return what can no longer belong to a stop string, or what precedes the complete one."""
        start = len(self._held)
        buffer = self._held + text
        for position in range(start, len(buffer)):
            char = buffer[position]
            ended = [stop for stop in self._stops if stop.advance(char)]
            if ended:
                first = max(ended, key=lambda stop: len(stop.text))
                self.stop_string = first.text
                self._held = ""
                end = position + 1
                return buffer[: end if self._include_stop else end - len(first.text)]
        keep = max(stop.matched for stop in self._stops)
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return buffer[:cut]


class _StopString:
    """One stop string and how much of it the text so far ends with (Knuth, Morris and Pratt's automaton)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)
        size = 0
        for position in range(1, len(text)):
            while size and text[size] != text[position]:
                size = self._fallback[size - 1]
            size += text[size] == text[position]
            self._fallback[position] = size

    def advance(self, char: str) -> bool:
        """Take one character; True when it completes the string."""
        while self.matched and self.text[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        if self.text[self.matched] == char:
            self.matched += 1
        return self.matched == len(self.text)


class _ByteTable(dict[int, bytes]):
    """Bytes of each token of a byte-level vocabulary, filled as tokens turn up."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._core = core

    def __missing__(self, token_id: int) -> bytes:
        name = self._core.id_to_token(token_id) or ""
        try:
            raw = bytes(map(BYTE_OF_CHAR.__getitem__, name))
        except KeyError:  # an added token with characters that no byte is written as: it stands for itself
            raw = name.encode()
        self[token_id] = raw
        return raw


class _ByteStream:
    """`TextStream` of a byte-level vocabulary: a table and an incremental UTF-8 decoder."""

    def __init__(self, table: _ByteTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._decode(self._table[token_id])

    def flush(self) -> str:
        return self._decode(b"", True)


class _WindowStream:
    """`TextStream` of any other vocabulary: the last tokens with the new ones, less those without.

    A run of byte tokens becomes text as a whole, so it is kept back until it ends, but `MAX_PENDING_TOKENS` at most.
    """

    def __init__(self, core: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._core = core
        self._skipped = skipped
        self._context: list[int] = []  # sent tokens before the pending ones
        self._context_text = ""
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        name = None if token_id in self._skipped else self._core.id_to_token(token_id)
        if name is None:
            return ""
        self._pending.append(token_id)
        if _BYTE_TOKEN.fullmatch(name) is None:
            text = self._text(self._pending)
            if text and not text.endswith(_REPLACEMENT):
                return self._send(len(self._pending), text)
        return "" if len(self._pending) < MAX_PENDING_TOKENS else self._send_whole_characters()

    def flush(self) -> str:
        return self._send(len(self._pending), self._text(self._pending)) if self._pending else ""

    def _text(self, ids: list[int]) -> str:
        both = self._core.decode(self._context + ids, skip_special_tokens=False)
        if both.startswith(self._context_text):
            return str(both[len(self._context_text) :])
        return str(self._core.decode(ids, skip_special_tokens=False))

    def _send_whole_characters(self) -> str:
        count = len(self._pending)
        for size in range(count, count - 4, -1):  # a character has four bytes at most
            text = self._text(self._pending[:size])
            if not text.endswith(_REPLACEMENT):
                return self._send(size, text)
        return self._send(count, self._text(self._pending))

    def _send(self, size: int, text: str) -> str:
        self._context, self._pending = self._pending[:size], self._pending[size:]
        self._context_text = self._core.decode(self._context, skip_special_tokens=False)
        return text


def _found(positions: Iterable[int], num_chars: int, num_tokens: int, token_at: Callable[[int], int | None]) -> dict[int, int]:
    """Numbers of tokens that end at or before characters, where that can be told."""
    found = {}
    for position in positions:
        # Characters that are in no token (a normaliser took them) count with the token behind them.
        near = range(position, min(position + MAX_SKIPPED_CHARS, num_chars))
        index = next((index for at in near if (index := token_at(at)) is not None), None)
        found[position] = num_tokens if index is None and position + MAX_SKIPPED_CHARS >= num_chars else index
    return {position: index for position, index in found.items() if index is not None}


def _is_byte_level(core: tokenizers.Tokenizer) -> bool:
    """Whether the decoder is the byte-level one alone, so that a table of bytes says all."""
    decoder: dict[str, Any] = json.loads(core.decoder.__getstate__()) if core.decoder else {"type": "none"}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [step["type"] for step in steps] == ["ByteLevel"]


def _special_tokens(folder: Path) -> dict[str, str]:
    """Named special tokens (`bos_token`, ...) and their text; the tokenizer's config wins over the older map."""
    found = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_json(folder / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def _eos_token_ids(folder: Path, core: tokenizers.Tokenizer, special: Mapping[str, str]) -> tuple[int, ...]:
    """Where text ends: the generation config's ids (else the model config's), and the tokenizer's own EOS.

    Ids that the model hasn't are left out: it can give none of them. `check-model` names them.
    """
    config = read_json(folder / "config.json")
    ids = token_ids(read_json(folder / "generation_config.json").get("eos_token_id"))
    ids = ids or token_ids(config.get("eos_token_id"))
    if not ids and isinstance(config.get("text_config"), dict):
        ids = token_ids(config["text_config"].get("eos_token_id"))
    own = core.token_to_id(special["eos_token"]) if "eos_token" in special else None
    size = model_vocab_size(folder)
    return tuple(dict.fromkeys(one for one in [*ids, *([] if own is None else [own])] if one < size))
