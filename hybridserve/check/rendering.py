"""The child process in which a chat template is tried out, with bounds on its time and memory.

Owns the chats that are tried and what crosses the pipe. Must not know anything of a model beside its template. Run by
`sandbox.py` as `python -m hybridserve.check.rendering`: Jinja's sandbox stops forbidden access, but not a long loop.
"""

import resource
import sys
from typing import Literal

import jinja2
import msgspec

from hybridserve.engine.chat import ChatTemplate, Message
from hybridserve.errors import ModelError, RequestError

#: Seconds of processor time for all renderings together.
LIMIT_S = 2.0
#: Bytes of address space.
MAX_NBYTES = 2**30
MAX_TEXT_CHARS = 2**16
#: What the model says in the chat whose end is looked at.
ANSWER = "hybridserve-answer-7c1e"
SYSTEM = "hybridserve-system-7c1e"
TOOL = "hybridserve_tool_7c1e"

_USER: Message = {"role": "user", "content": "Hello."}
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


class Job(msgspec.Struct, frozen=True):
    """What to render."""

    folder: str
    special_tokens: dict[str, str]


class Case(msgspec.Struct, frozen=True):
    """One chat and what became of it. `text` is the rendering, or the error."""

    name: str
    outcome: Literal["rendered", "refused", "failed", "unsafe"]
    text: str


class Rendering(msgspec.Struct, frozen=True):
    """All chats; without cases, the model has no template, or one that is none."""

    cases: list[Case]
    source: str = ""
    syntax_error: str | None = None

    def text_of(self, name: str) -> str | None:
        """The rendering of a case, or None if it was not rendered."""
        return next((case.text for case in self.cases if case.name == name and case.outcome == "rendered"), None)


def try_out(job: Job) -> Rendering:
    """Render every chat."""
    try:
        template = ChatTemplate.from_folder(job.folder, special_tokens=job.special_tokens)
    except ModelError as error:
        return Rendering([], syntax_error=str(error))
    if template is None:
        return Rendering([])
    chats: list[tuple[str, list[Message], bool, bool]] = [
        ("user", [_USER], True, False),
        ("answer", [_USER, _ANSWER], False, False),
        ("turns", [_USER, _ANSWER, _USER], True, False),
        ("system", [{"role": "system", "content": SYSTEM}, _USER], True, False),
        ("tools", [_USER], True, True),
    ]
    return Rendering([_render(template, *chat) for chat in chats], source=template.source[: 16 * MAX_TEXT_CHARS])


def _render(template: ChatTemplate, name: str, messages: list[Message], prompt: bool, tools: bool) -> Case:
    try:
        text = template.render(messages, add_generation_prompt=prompt, tools=_TOOLS if tools else None, limit_s=LIMIT_S)
    except RequestError as error:
        cause = error.__cause__
        if isinstance(cause, jinja2.exceptions.SecurityError | OverflowError | MemoryError | RecursionError):
            return Case(name, "unsafe", str(error))
        is_refusal = isinstance(cause, jinja2.TemplateError) and not isinstance(cause, jinja2.UndefinedError)
        return Case(name, "refused" if is_refusal else "failed", str(error))
    return Case(name, "rendered", text[:MAX_TEXT_CHARS])


def main() -> None:
    """Read a job from standard input, write what became of it to standard output."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_NBYTES, MAX_NBYTES))
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime + LIMIT_S) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    sys.stdout.buffer.write(msgspec.json.encode(try_out(job)))


if __name__ == "__main__":
    main()
