"""A compiled chat template: messages into the text that the model was trained on, in Jinja's sandbox.

Owns the environment that templates run in and what can be learnt of one by looking at its syntax. Must not know tokens,
processes or limits: a template is foreign code, so all of this runs in the child process of `render_process.py` alone.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.exceptions import SecurityError

from hybridserve.errors import ModelError, RequestError

Message: TypeAlias = dict[str, Any]

_TAIL_MARK = "~hybridserve-tail-4f1c~ "


class Template:
    """A template's source, compiled. Renders as transformers' `apply_chat_template` does."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile `source`. Raises ModelError when it is no template."""
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        try:
            tree = _ENVIRONMENT.parse(source)
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not valid: line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError, OverflowError, ValueError) as error:
            raise ModelError(f"the chat template cannot be compiled: {type(error).__name__}: {str(error)[:200]}") from error
        #: Attributes that it reads and whole strings that it compares with or looks up, such as roles and names of fields.
        self.names = frozenset(
            [node.attr for node in tree.find_all(jinja2.nodes.Getattr)]
            + [node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)]
        )

    def run(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of messages that have the shape this template reads. Raises whatever the template raises.

        With `continue_final_message` the text ends inside the last message, for the model to go on from there.
        """
        chat = list(messages)
        tail = _mark_tail(chat) if continue_final_message else ""
        text = self._template.render(
            {
                **self.special_tokens,
                **(variables or {}),
                "messages": chat,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_mark(text, tail) if continue_final_message else text


class _Generation(jinja2.ext.Extension):
    """The `generation` block, which marks the model's words for training, stands for what is in it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance's attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's mutable namespace without private names."""

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a template may not set {name[:64]!r} on a namespace")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which the models never saw."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(template: str) -> str:
    return datetime.now().strftime(template)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace, dict=_make_dict
    )
    return environment


_ENVIRONMENT = _make_environment()


def _mark_tail(chat: list[Message]) -> str:
    """Append a mark to the last message's text, in place; returns that text, the last part's where it has several."""
    content = chat[-1].get("content") if chat else None
    text, parts = content, None
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        text, parts = content[-1].get("text"), content
    if not isinstance(text, str):
        raise RequestError(
            "continue_final_message is true, but the last message has no content to continue",
            param="continue_final_message",
        )
    marked: object = text + _TAIL_MARK
    if parts is not None:
        marked = [*parts[:-1], {**parts[-1], "text": marked}]
    chat[-1] = {**chat[-1], "content": marked}
    return text


def _cut_at_mark(text: str, tail: str) -> str:
    """The rendering up to the mark. Where the template took the mark's own space, it would have taken the content's."""
    position = text.rfind(_TAIL_MARK.rstrip())
    if position < 0 or tail.strip() not in text:
        raise RequestError(
            "continue_final_message is true, but the model's template changes the last message; start a new reply",
            param="continue_final_message",
        )
    return text[:position] if text.startswith(_TAIL_MARK, position) else text[:position].rstrip()
