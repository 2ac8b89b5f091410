"""A template with all that is known of it: chats in, their text out, with what matters to tokens and to the prefix cache.

Owns the choice of a chat's shape and what is told of a rendering. Must not know token ids. Runs in the child process of
`render_process.py`, and directly in tests.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.exceptions

from hybridserve.engine.control import ControlTexts, Guard, Written, render_guarded
from hybridserve.engine.render_job import Job, Placed
from hybridserve.engine.shape import MAX_DEPTH, Remedies, applicable, find_shape, nests_too_deep
from hybridserve.engine.template import Message, Template
from hybridserve.engine.turns import Turns
from hybridserve.errors import RequestError

#: What `chat_template_kwargs` may not set, beside the special tokens and names that begin with an underscore.
_RENDERER_NAMES = frozenset(
    [
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("tokenize", "tokenizer", "template", "conversation", "conversations", "return_tensors", "return_dict"),
        *("self", "raise_exception", "strftime_now", "namespace", "dict", "range"),
    ]
)
#: A chat whose rendering shows which control tokens a template writes around messages.
_OWN_TEXT = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"})


class Renderer:
    """One template, ready to render."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        added_tokens: Mapping[str, bool] | None = None,
    ) -> None:
        """`added_tokens` are the vocabulary's, each with whether it is special. Raises ModelError for what is no template."""
        self.template = Template(source, special_tokens)
        self.shape = find_shape(self.template)
        added = added_tokens or {}
        # Some vocabularies do not call the tokens special that their templates put around messages.
        own_text = self._own_text()
        self.control = ControlTexts([text for text, is_special in added.items() if is_special or text in own_text])

    def chat(self, job: Job, raw: str | None = None) -> "Chat":
        """Render a chat. `raw` is all its text, as it came. Raises RequestError, or what the template raises."""
        self._check_variables(job.variables)
        if job.continue_final_message and job.add_generation_prompt:
            raise RequestError(
                "add_generation_prompt and continue_final_message are both true; the reply is either new or continued",
                param="continue_final_message",
            )
        return Chat(self, job, raw if raw is not None else repr(job))

    def run(self, job: Job, messages: Sequence[Message], remedies: Remedies) -> str:
        """Text of messages with a job's tools and variables. Raises what the template raises."""
        return self.template.run(
            self.shape.apply(messages, remedies),
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
            tools=job.tools,
            variables=job.variables,
        )

    def _own_text(self) -> str:
        for chat in ([*_OWN_TEXT, _OWN_TEXT[1]], [*_OWN_TEXT[1:], _OWN_TEXT[1]], [_OWN_TEXT[1]]):
            try:
                return self.run(Job(messages=[], add_generation_prompt=False), chat, Remedies())
            except Exception:  # foreign code: it may fail in any way
                continue
        return ""

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        for name, value in variables.items():
            if nests_too_deep(value):
                raise RequestError(
                    f"chat_template_kwargs: {name[:64]!r} nests deeper than {MAX_DEPTH} levels; flatten it",
                    param="chat_template_kwargs",
                )
            if name in _RENDERER_NAMES or name in self.template.special_tokens or name.startswith("_"):
                raise RequestError(
                    f"chat_template_kwargs sets {name[:64]!r}, which belongs to the renderer; use another name",
                    param="chat_template_kwargs",
                )


class Chat:
    """One chat, rendered."""

    def __init__(self, renderer: Renderer, job: Job, raw: str) -> None:
        self._renderer = renderer
        self._job = job
        self._remedies, self._written = self._render(raw)
        self.turns = Turns(
            job.messages,
            self._written.text,
            self._variation,
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
        )

    def placed(self) -> Placed:
        """What the job wants to know of the rendering."""
        job, turns = self._job, self.turns
        own = self._written.own
        placed = Placed(text=self._written.text, own=None if own is None else [(span.start, span.end) for span in own])
        if job.find is not None:
            placed.message = turns.message_at(job.find)
        if job.places:
            placed.boundaries = list(turns.boundaries())
            placed.marks = [turns.end_of(index) for index in job.marked]
            placed.history = turns.history()
        return placed

    def _render(self, raw: str) -> tuple[Remedies, Written]:
        """The rendering with the fewest changes to the chat that the template takes, as `applicable` orders them."""
        job = self._job
        options = [Remedies(), *applicable(job.messages)]
        first = self._try(options[0])
        if isinstance(first, str) and not _shows_python(job.messages, first):
            return options[0], self._guarded(options[0], first, raw)
        results = [(options[0], first)]
        for remedies in options[1:]:
            if isinstance(first, str) and remedies.merged_system:
                continue  # the template takes these messages where they are
            results.append((remedies, result := self._try(remedies)))
            if isinstance(result, str) and not _shows_python(job.messages, result):
                break
        rendered = [(remedies, text) for remedies, text in results if isinstance(text, str)]
        if rendered:
            remedies, plain = min(rendered, key=lambda one: _shows_python(job.messages, one[1]))
            return remedies, self._guarded(remedies, plain, raw)
        assert isinstance(first, Exception), "it is no text"
        try:  # it may refuse just the control token in a message, which it will not see
            return options[0], self._guarded(options[0], None, raw)
        except Exception:
            raise first from None

    def _try(self, remedies: Remedies) -> str | Exception:
        try:
            return self._renderer.run(self._job, self._job.messages, remedies)
        except (MemoryError, RecursionError, jinja2.exceptions.SecurityError, RequestError):
            raise
        except Exception as error:  # foreign code: it may fail in any way
            return error

    def _guarded(self, remedies: Remedies, plain: str | None, raw: str) -> Written:
        job, renderer = self._job, self._renderer
        guard = Guard(renderer.control, raw + renderer.template.source + "".join(renderer.template.special_tokens.values()))

        def run(messages: Sequence[Message], others: Mapping[str, Any]) -> str:
            return renderer.template.run(
                messages,
                add_generation_prompt=job.add_generation_prompt,
                continue_final_message=job.continue_final_message,
                **others,
            )

        shaped = renderer.shape.apply(job.messages, remedies)
        return render_guarded(guard, shaped, {"tools": job.tools, "variables": job.variables}, plain, run)

    def _variation(self, chat: Sequence[Message], generates: bool, continues: bool) -> str | None:
        job = Job(
            messages=[],
            add_generation_prompt=generates,
            continue_final_message=continues,
            tools=self._job.tools,
            variables=self._job.variables,
        )
        try:
            return self._renderer.run(job, chat, self._remedies)
        except Exception:  # foreign code, and only a guess at where chats may part
            return None


def _shows_python(messages: Sequence[Message], text: str) -> int:
    """How often a rendering may show a null or an object of a chat as Python writes it; 0 where the chat has none."""
    has_null = any(message.get("content") is None for message in messages)
    calls = any(message.get("tool_calls") for message in messages)
    return (text.count("None") if has_null else 0) + (text.count("{'") if calls else 0)
