"""Which control tokens of a rendered chat the template wrote, and which only stand in somebody's message.

Owns their search and the marks that tell the two apart. A mark is a character that no text of the chat has. It breaks every
control token's text inside a message before the template runs, is found again in what was rendered, and is taken out there. Must
not know token ids. Marks are set in the child process of `render_process.py`.
"""

import bisect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from hybridserve.engine.template import Message
from hybridserve.errors import RequestError

#: Private-use characters to choose the mark from.
_MARKS = range(0xE000, 0xF900)
#: Kinds of control tokens in answers that are tried one by one for what the template makes of them.
_MAX_TRIED = 8


class Span(NamedTuple):
    """Characters of the rendering, from `start` to before `end`."""

    start: int
    end: int


class ControlTexts:
    """The texts of a vocabulary's control tokens, and a search for them: leftmost first, then longest."""

    def __init__(self, texts: Collection[str]) -> None:
        self.texts = tuple(sorted(text for text in texts if text))
        self._pattern = re.compile(_trie(self.texts)) if self.texts else None
        self._all = "\0".join(self.texts)
        self._longest = max(map(len, self.texts), default=0)
        pieces = {text[:at] for text in self.texts for at in range(1, len(text))}
        self._beginnings = frozenset(piece for piece in pieces if not _is_word(piece))
        pieces = {text[at:] for text in self.texts for at in range(1, len(text))}
        self._ends = frozenset(piece for piece in pieces if not _is_word(piece))

    def find(self, text: str) -> list[Span]:
        return [] if self._pattern is None else [Span(*match.span()) for match in self._pattern.finditer(text)]

    def kinds(self, text: str) -> set[str]:
        """The control tokens whose text `text` holds."""
        return set() if self._pattern is None else set(self._pattern.findall(text))

    def broken(self, text: str, mark: str, *, spared: Collection[str] = ()) -> str:
        """`text` with a mark inside every control token's text but the spared ones, and inside a piece of one at either end."""
        if self._pattern is None:
            return text

        def break_one(match: re.Match[str]) -> str:
            whole = match[0]
            if whole in spared:
                return whole
            return whole[0] + mark + whole[1:] if len(whole) > 1 else mark + whole + mark

        is_broken = False
        # One may lie inside another, and is whole still when the outer one is broken.
        while not is_broken:
            text = self._pattern.sub(break_one, text)
            is_broken = all(len(match[0]) == 1 or match[0] in spared for match in self._pattern.finditer(text))
        return self._with_open_ends(text, mark)

    def _with_open_ends(self, text: str, mark: str) -> str:
        """Break pieces that could become whole beside other text."""
        sizes = range(min(self._longest - 1, len(text)), 0, -1)
        if end := next((size for size in sizes if text[-size:] in self._beginnings), 0):
            at = len(text) - end + 1
            text = text[:at] + mark + text[at:]
        if start := next((size for size in sizes if text[:size] in self._ends), 0):
            text = text[: start - 1] + mark + text[start - 1 :]
        if text and mark not in text and len(text) < self._longest and not _is_word(text) and text in self._all:
            text = text[0] + mark + text[1:]
        return text


class Guard:
    """The marks of one chat."""

    def __init__(self, control: ControlTexts, known_text: str) -> None:
        """`known_text` is all text that goes into the rendering, escapes included; the mark is in none of it."""
        self.control = control
        escapes = known_text.lower()
        char = next((chr(at) for at in _MARKS if chr(at) not in known_text and f"\\u{at:04x}" not in escapes), None)
        if char is None:
            raise RequestError(f"messages hold all {len(_MARKS)} private-use characters; leave one of them out", param="messages")
        self.mark = char
        self._found = re.compile(f"{self.mark}|\\\\u{ord(self.mark):04x}", re.IGNORECASE)

    def messages(self, messages: Sequence[Message], spared: Collection[str] = ()) -> list[Message]:
        """The messages with all text marked; `spared` are control tokens that answers may hold unbroken."""
        return [self._message(message, spared if message.get("role") == "assistant" else ()) for message in messages]

    def value(self, value: Any, spared: Collection[str] = ()) -> Any:
        """Any JSON value with all its strings marked, names of fields included."""
        if isinstance(value, str):
            return self.control.broken(value, self.mark, spared=spared)
        if isinstance(value, Mapping):
            return {self.value(key, spared): self.value(one, spared) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(one, spared) for one in value]
        return value

    def cleaned(self, text: str) -> tuple[str, list[int]]:
        """A rendering without marks, and the positions where they were."""
        parts, positions, end, size = [], [], 0, 0
        for match in self._found.finditer(text):
            parts.append(text[end : match.start()])
            size += match.start() - end
            end = match.end()
            positions.append(size)
        return "".join([*parts, text[end:]]), positions

    def _message(self, message: Message, spared: Collection[str]) -> Message:
        role = message.get("role")
        marked = {key: self.value(value, spared) for key, value in message.items() if key != "role"}
        # A role is a piece of a control token in many templates; only a whole one is none of a role's business.
        return {"role": self.value(role) if isinstance(role, str) and self.control.find(role) else role, **marked}


class Written(NamedTuple):
    """A rendering and the control tokens in it that are the template's own; None where all that look like one are."""

    text: str
    own: list[Span] | None


#: Renders messages and what else goes into the text (`tools`, `variables`). Raises whatever the template raises.
Run: TypeAlias = Callable[[Sequence[Message], Mapping[str, Any]], str]


def render_guarded(guard: Guard, messages: Sequence[Message], others: Mapping[str, Any], plain: str | None, run: Run) -> Written:
    """Render a chat and tell the template's own control tokens from those in messages.

    `plain` is the chat's rendering as it is, or None where the template refuses it. Where the template reads a tag in an answer,
    as it does to take thinking out of history, that tag keeps its meaning there. Raises what `run` raises.
    """
    marked, marked_others = guard.messages(messages), guard.value(others)
    if plain is not None and marked == list(messages) and marked_others == others:
        return Written(plain, None)
    text, positions = guard.cleaned(run(marked, marked_others))
    if plain is not None and text != plain:
        spared = _read_in_answers(guard, messages, others, plain, run)
        if spared:
            text, positions = guard.cleaned(run(guard.messages(messages, spared), marked_others))
    spans = guard.control.find(text)
    own = [span for span in spans if not _is_broken(span, positions)]
    return Written(text, None if text == plain and len(own) == len(spans) else own)


def _read_in_answers(guard: Guard, messages: Sequence[Message], others: Mapping[str, Any], plain: str, run: Run) -> set[str]:
    """Control tokens in answers that change the rest of the rendering when they alone are broken."""
    answers = [str(message) for message in messages if message.get("role") == "assistant"]
    kinds = sorted(set().union(*map(guard.control.kinds, answers)))[:_MAX_TRIED]
    found = set()
    for kind in kinds:
        marked = guard.messages(messages, set(kinds) - {kind})
        chat = [new if old.get("role") == "assistant" else old for new, old in zip(marked, messages, strict=True)]
        if guard.cleaned(run(chat, others))[0] != plain:
            found.add(kind)
    return found


def _is_broken(span: Span, positions: Sequence[int]) -> bool:
    """Whether marks say that this is a message's text: one inside, or around a single character."""
    if span.end - span.start == 1:
        after = bisect.bisect_left(positions, span.end)
        return after > 0 and positions[after - 1] == span.start and after < len(positions) and positions[after] == span.end
    at = bisect.bisect_right(positions, span.start)
    return at < len(positions) and positions[at] < span.end


def _is_word(piece: str) -> bool:
    return all(char.isalnum() or char.isspace() or char == "_" for char in piece)


def _trie(texts: Sequence[str]) -> str:
    """A pattern for any of `texts`, the longest where several match, which reads each character once."""
    if len(texts) == 1:
        return re.escape(texts[0])
    first, last = min(texts), max(texts)
    prefix = first[: next((at for at, char in enumerate(first) if last[at : at + 1] != char), len(first))]
    rest = sorted({text[len(prefix) :] for text in texts})
    groups: dict[str, list[str]] = {}
    for text in rest:
        groups.setdefault(text[:1], []).append(text)
    optional = groups.pop("", None) is not None
    choices = "|".join(_trie(group) for group in groups.values())
    return re.escape(prefix) + (f"(?:{choices})" + ("?" if optional else "") if choices else "")
