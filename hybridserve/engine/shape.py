"""The shape in which a template reads messages: parts or one text, null or empty, arguments as objects or as text.

Owns finding that shape out, by rendering probes, and bringing messages into it. Must not know tokens. Runs in the child process
of `render_process.py`.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from hybridserve.engine.template import Message, Template
from hybridserve.errors import RequestError

#: How a role's content is read: as one text, as a list of parts, or as either.
ContentFormat: TypeAlias = Literal["text", "parts", "both"]

#: Levels of lists and objects that a tool call's arguments, and each of a request's variables, may have.
MAX_DEPTH = 100
#: What joins text parts for a template that reads no parts of any role.
DEFAULT_SEPARATOR = "\n"
_MAX_SEPARATOR_CHARS = 16
_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
_SYSTEM_ROLES = ("system", "developer")
_ONE, _TWO = "Qvx7kone", "Zwj3ktwo"
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
_PROBES: dict[str, Callable[[Any], list[Message]]] = {
    "user": lambda content: [{"role": "user", "content": content}],
    "system": lambda content: [{"role": "system", "content": content}, {"role": "user", "content": "u"}],
    "assistant": lambda content: [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": "u"},
    ],
    "tool": lambda content: [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": content},
    ],
}


@dataclass(frozen=True)
class Remedies:
    """Changes to a chat that the template does not take as it is."""

    blank_content: bool = False  # absent content is an empty text
    text_arguments: bool = False  # arguments stay the JSON text that they came as
    merged_system: bool = False  # all system and developer messages are one, at the beginning


@dataclass(frozen=True)
class Shape:
    """How one template reads messages."""

    formats: Mapping[str, ContentFormat] = field(default_factory=dict)
    separator: str = DEFAULT_SEPARATOR
    names: frozenset[str] = frozenset()

    def apply(self, messages: Sequence[Message], remedies: Remedies) -> list[Message]:
        """The messages in this shape. Raises RequestError for arguments that nest too deep."""
        chat = [self._message(message, index, remedies) for index, message in enumerate(messages)]
        return self._merged(chat) if remedies.merged_system else chat

    def _message(self, message: Message, index: int, remedies: Remedies) -> Message:
        # Beside content, null means left out, as clients send it.
        plain = {key: value for key, value in message.items() if value is not None or key == "content"}
        if remedies.blank_content and plain.get("content") is None:
            plain["content"] = ""
        if plain.get("role") == "developer" and "developer" not in self.names:
            plain["role"] = "system"
        plain["content"] = self._content(plain.get("role"), plain.get("content"))
        if "content" not in message and plain["content"] is None:
            del plain["content"]
        if isinstance(calls := plain.get("tool_calls"), list):
            plain["tool_calls"] = [_call(call, index, remedies) for call in calls]
        return self._with_reasoning(plain)

    def _content(self, role: object, content: Any) -> Any:
        read = self.formats.get(role if isinstance(role, str) else "user", self.formats.get("user", "text"))
        if isinstance(content, str) and read == "parts":
            return [{"type": "text", "text": content}]
        return self.joined(content) if isinstance(content, list) and read == "text" else content

    def joined(self, content: Any) -> Any:
        """Text parts as one text; anything else as it is."""
        texts = (
            [part.get("text") if isinstance(part, dict) else None for part in content] if isinstance(content, list) else [None]
        )
        return content if None in texts else self.separator.join(map(str, texts))

    def _with_reasoning(self, plain: Message) -> Message:
        """Reasoning under the name that the template reads, where that is not the one it came under."""
        given = next((name for name in _REASONING_NAMES if name in plain), None)
        if given is None or given in self.names:
            return plain
        read = next((name for name in _REASONING_NAMES if name in self.names), "reasoning_content")
        return {**plain, read: plain[given]}

    def _merged(self, chat: list[Message]) -> list[Message]:
        system = [message for message in chat if message.get("role") in _SYSTEM_ROLES]
        others = [message for message in chat if message.get("role") not in _SYSTEM_ROLES]
        text = "\n\n".join(str(self.joined(message.get("content")) or "") for message in system)
        return [{**system[0], "content": self._content(system[0].get("role"), text)}, *others] if system else chat


def applicable(messages: Sequence[Message]) -> Iterator[Remedies]:
    """Remedies that change this chat, those that change least first."""
    blank = any(message.get("content") is None for message in messages)
    called = any(message.get("tool_calls") for message in messages)
    late = any(message.get("role") in _SYSTEM_ROLES for message in messages[1:])
    choices = itertools.product(*([False, True] if can else [False] for can in (late, called, blank)))
    for late_now, called_now, blank_now in itertools.islice(choices, 1, None):
        yield Remedies(blank_content=blank_now, text_arguments=called_now, merged_system=late_now)


def find_shape(template: Template) -> Shape:
    """Render probes of every role with one text and with two parts, and see what becomes of them."""
    formats: dict[str, ContentFormat] = {}
    separators = []
    for role, probe in _PROBES.items():
        found, separator = _format_of(template, probe)
        formats[role] = found
        separators += [] if separator is None else [separator]
    formats["developer"] = formats["system"]
    return Shape(formats, separators[0] if separators else DEFAULT_SEPARATOR, template.names)


def _format_of(template: Template, probe: Callable[[Any], list[Message]]) -> tuple[ContentFormat, str | None]:
    """How a role's content is read, and what the template itself puts between two parts."""
    parts = _render(template, probe([{"type": "text", "text": _ONE}, {"type": "text", "text": _TWO}]))
    start, end = (parts.find(_ONE), parts.find(_TWO)) if parts is not None else (-1, -1)
    if parts is None or not 0 <= start < end:
        return "text", None
    separator = parts[start + len(_ONE) : end]
    if "type" in separator or len(separator) > _MAX_SEPARATOR_CHARS:  # a list, printed as Python writes it
        return "text", None
    whole = _render(template, probe(_ONE))
    return "both" if whole is not None and _ONE in whole else "parts", separator


def _render(template: Template, messages: list[Message]) -> str | None:
    try:
        return template.run(messages)
    except Exception:  # foreign code: it may fail in any way
        return None


def _call(call: Any, index: int, remedies: Remedies) -> Any:
    """A tool call whose arguments are an object, where they are the text of one."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if remedies.text_arguments:
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        arguments = _parsed(arguments, index)
    if nests_too_deep(arguments):
        raise _too_deep(index)
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(arguments: str, index: int) -> Any:
    """The object that the text stands for; a text that is none stays as it is, since a model may have written it."""
    try:
        value = msgspec.json.decode(arguments)
    except RecursionError:
        raise _too_deep(index) from None
    except (msgspec.DecodeError, ValueError):
        return arguments
    return value if isinstance(value, dict) else arguments


def nests_too_deep(value: Any) -> bool:
    """Whether lists and objects have more than `MAX_DEPTH` levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child for one in level if isinstance(one, dict | list) for child in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True


def _too_deep(index: int) -> RequestError:
    return RequestError(
        f"messages[{index}] has a tool call whose arguments nest deeper than {MAX_DEPTH} levels; flatten them",
        param=f"messages[{index}].tool_calls",
    )
