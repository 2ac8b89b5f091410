"""Chat templates: a list of messages into the text that the model was trained on.

Owns the sandbox that templates run in, and rendering; where messages lie in the text is found by `turns.py`. Must not know
requests or tokens. Called by `server/` and `llm.py`, in a worker thread: a template is foreign code with a time limit.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
from jinja2.exceptions import SecurityError

from hybridserve.engine.generation_config import read_json
from hybridserve.errors import ModelError, RequestError

Message: TypeAlias = dict[str, Any]

#: Seconds that one rendering may take.
RENDER_LIMIT_S = 10.0
#: Characters that a string may reach by repetition inside a template.
MAX_REPEATED_CHARS = 2**20

_DEADLINE = "_render_deadline"
_MAX_ERROR_CHARS = 500
_TAIL_MARK = "~hybridserve-tail-4f1c~ "
#: What `chat_template_kwargs` may not set, beside the special tokens and names that begin with an underscore.
_RENDERER_NAMES = frozenset(
    [
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("tokenize", "tokenizer", "template", "conversation", "conversations", "return_tensors", "return_dict"),
        *("self", "raise_exception", "strftime_now", "namespace", "dict", "range"),
    ]
)


class ChatTemplate:
    """A model's chat template, compiled once. Renders as transformers' `apply_chat_template` does."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile `source`. Raises ModelError when it is no template."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not valid: line {error.lineno}: {error.message}") from error
        self._knows_developer = "developer" in source

    @classmethod
    def from_folder(cls, folder: str | Path, *, special_tokens: Mapping[str, str]) -> "ChatTemplate | None":
        """Read `chat_template.jinja`, else the one in `tokenizer_config.json`; None when the model has neither."""
        file = Path(folder) / "chat_template.jinja"
        if file.is_file():
            return cls(file.read_text(encoding="utf-8"), special_tokens=special_tokens)
        entry = read_json(Path(folder) / "tokenizer_config.json").get("chat_template")
        if isinstance(entry, list):
            entry = {named["name"]: named["template"] for named in entry}.get("default")
        if entry is None:
            return None
        if not isinstance(entry, str):
            raise ModelError(f"chat_template in tokenizer_config.json is {type(entry).__name__}; it must be text")
        return cls(entry, special_tokens=special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        limit_s: float = RENDER_LIMIT_S,
    ) -> str:
        """Text of a chat. `variables` are the request's `chat_template_kwargs`.

        With `continue_final_message` the text ends inside the last message, for the model to go on from there. Raises
        RequestError with the template's own message when it refuses the chat.
        """
        self._check_variables(variables or {})
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "add_generation_prompt and continue_final_message are both true; the reply is either new or continued",
                param="continue_final_message",
            )
        chat = [self._plain(message) for message in messages]
        tail = _mark_tail(chat) if continue_final_message else ""
        text = self._run(chat, add_generation_prompt, tools, variables or {}, time.monotonic() + limit_s)
        return _cut_at_mark(text, tail) if continue_final_message else text

    def _run(
        self,
        chat: list[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        deadline: float,
    ) -> str:
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": chat,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    _DEADLINE: deadline,
                }
            )
        except Exception as error:  # foreign code: it may fail in any way
            detail = str(error)[:_MAX_ERROR_CHARS] or type(error).__name__
            raise RequestError(f"the chat template refuses these messages: {detail}", param="messages") from error

    def _plain(self, message: Message) -> Message:
        """A message as templates expect it: no nulls, reasoning under its usual names, a role that they know."""
        plain = {key: value for key, value in message.items() if value is not None}
        if plain.get("role") == "developer" and not self._knows_developer:
            plain["role"] = "system"
        reasoning = next((plain[key] for key in ("reasoning_content", "thinking", "reasoning") if key in plain), None)
        return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if name in _RENDERER_NAMES or name in self._special_tokens or name.startswith("_"):
                raise RequestError(
                    f"chat_template_kwargs sets {name[:64]!r}, which belongs to the renderer; use another name",
                    param="chat_template_kwargs",
                )


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


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a deadline at every call and a cap on repeated text."""

    intercepted_binops = frozenset({"*", "**"})

    def call(
        __self,  # noqa: N805 - jinja2's own names keep keyword arguments of the called function free
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if time.monotonic() > __context[_DEADLINE]:
            raise SecurityError("it takes too long; shorten the chat")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("a template may not use powers")
        size = len(left) * right if isinstance(left, str | list | tuple) and isinstance(right, int) else 0
        size = len(right) * left if isinstance(right, str | list | tuple) and isinstance(left, int) else size
        if size > MAX_REPEATED_CHARS:
            raise SecurityError(f"it repeats something to {size} characters; at most {MAX_REPEATED_CHARS}")
        return super().call_binop(context, operator, left, right)


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


def _make_environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace, dict=_make_dict
    )
    return environment


_ENVIRONMENT = _make_environment()


def _mark_tail(chat: list[Message]) -> str:
    """Append a mark to the last message's content, in place; returns that content."""
    content = chat[-1].get("content") if chat else None
    if not isinstance(content, str):
        raise RequestError(
            "continue_final_message is true, but the last message has no content to continue",
            param="continue_final_message",
        )
    chat[-1] = {**chat[-1], "content": content + _TAIL_MARK}
    return content


def _cut_at_mark(text: str, tail: str) -> str:
    """The rendering up to the mark. Where the template took the mark's own space, it would have taken the content's."""
    position = text.rfind(_TAIL_MARK.rstrip())
    if position < 0 or tail.strip() not in text:
        raise RequestError(
            "continue_final_message is true, but the model's template changes the last message; start a new reply",
            param="continue_final_message",
        )
    return text[:position] if text.startswith(_TAIL_MARK, position) else text[:position].rstrip()
