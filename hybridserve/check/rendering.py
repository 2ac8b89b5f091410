"""A chat template tried out on a few chats, in the box that it is served in.

Owns the chats and what their renderings mean. Must not know anything of a model beside its template and vocabulary. Called by
`checker.py`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from hybridserve.engine.chat import ChatTemplate, Message, TemplateError, read_source
from hybridserve.errors import ModelError, RequestError, UnsafeContentError, WeightsError

#: Seconds that one rendering may take.
LIMIT_S = 4.0
#: What is said in the chats, to be looked for in their renderings.
USER = "hybridserve-user-7c1e"
ANSWER = "hybridserve-answer-7c1e"
SYSTEM = "hybridserve-system-7c1e"
TOOL = "hybridserve_tool_7c1e"

_USER: Message = {"role": "user", "content": USER}
_ANSWER: Message = {"role": "assistant", "content": ANSWER}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Looks something up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]
_CHATS: tuple[tuple[str, list[Message], bool, bool], ...] = (
    ("user", [_USER], True, False),
    ("answer", [_USER, _ANSWER], False, False),
    ("turns", [_USER, _ANSWER, _USER], True, False),
    ("system", [{"role": "system", "content": SYSTEM}, _USER], True, False),
    ("tools", [_USER], True, True),
)


class Case(NamedTuple):
    """One chat and what became of it. `text` is the rendering, or the error."""

    name: str
    outcome: Literal["rendered", "refused"]
    text: str


class Rendering(NamedTuple):
    """All chats; without cases, the model has no template."""

    cases: Sequence[Case] = ()
    source: str = ""

    def text_of(self, name: str) -> str | None:
        """The rendering of a case, or None if it was not rendered."""
        return next((case.text for case in self.cases if case.name == name and case.outcome == "rendered"), None)


def render(folder: Path, special_tokens: Mapping[str, str], added_tokens: Mapping[str, bool]) -> Rendering:
    """Try the chat template out.

    Raises WeightsError if it is none, UnsafeContentError if it takes too long, too much memory, or tries to break out.
    """
    try:
        source = read_source(folder)
        if source is None:
            return Rendering()
        template = ChatTemplate(source, special_tokens=special_tokens, added_tokens=added_tokens)
    except UnsafeContentError:
        raise
    except ModelError as error:
        raise WeightsError(f"{error}; fetch the file again, or repair it") from error
    try:
        return Rendering([_render(template, *chat) for chat in _CHATS], source)
    finally:
        template.close()


def _render(template: ChatTemplate, name: str, messages: list[Message], prompt: bool, tools: bool) -> Case:
    try:
        text = template.render(messages, add_generation_prompt=prompt, tools=_TOOLS if tools else None, limit_s=LIMIT_S).text
    except TemplateError as error:
        if error.kind == "unsafe":
            raise UnsafeContentError(
                f"the chat template misbehaves in its sandbox: rendering {name} is unsafe: {str(error)!r:.300}; do not serve it: "
                "take the template from the model's publisher"
            ) from error
        return Case(name, "refused", str(error))
    except RequestError as error:
        return Case(name, "refused", str(error))
    return Case(name, "rendered", text)
