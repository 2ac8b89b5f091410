"""A model's chat template as the server and `LLM` use it: every rendering happens in a child process with bounds.

Owns those processes: they start when needed, stay warm, and are ended when they take too long. Must not know token ids; what runs
in the process is `render_process.py`'s. Called in worker threads, and by `check/`.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from hybridserve.config import child_environment
from hybridserve.engine.generation_config import read_json
from hybridserve.engine.render_job import READY, Job, Opened, Opening, Placed, Refused, Reply, receive, send
from hybridserve.errors import ModelError, OverloadedError, RequestError, UnsafeContentError

Message: TypeAlias = dict[str, Any]

#: Seconds that one chat may take, with all that is found out of its rendering.
RENDER_LIMIT_S = 10.0
#: Seconds that a process may take to start, on a machine that is busy.
START_LIMIT_S = 30.0
#: Processes that are kept warm.
MAX_IDLE = 2
#: Bytes of a template's source.
MAX_SOURCE_NBYTES = 4 * 2**20
#: Bytes of a reply, beside some times those of the chat.
_REPLY_NBYTES, _REPLY_TIMES = 16 * 2**20, 16
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from hybridserve.engine.render_process import main; main()"


class TemplateError(RequestError):
    """The template gives no text for a chat. `kind`: it refuses (`refused`), breaks (`failed`) or wants too much (`unsafe`)."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message, param="messages")
        self.kind = kind


class RenderedChat(NamedTuple):
    """A chat's text. Positions are characters of it."""

    text: str
    own: Sequence[tuple[int, int]] | None  # where control tokens of the template's own lie; None where all that look so are
    control: tuple[str, ...]  # texts of control tokens; where `own` is not None, any other occurrence is plain text
    boundaries: Sequence[int] = ()  # where a chat with the same beginning is likely to part
    marks: Sequence[int] = ()  # where the messages end that were marked
    #: From the end of the first question to that of the last answer before the last message.
    history: tuple[int, int] | None = None


class ChatTemplate:
    """A chat template. Renders as transformers' `apply_chat_template` does, but that messages write no control tokens."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        added_tokens: Mapping[str, bool] | None = None,
    ) -> None:
        """`added_tokens` are the vocabulary's, each with whether it is special.

        Raises ModelError when `source` is no template, UnsafeContentError when it takes too long or too much already.
        """
        self.source = source
        self._opening = msgspec.json.encode(
            Opening(source=source, special_tokens=dict(special_tokens or {}), added_tokens=dict(added_tokens or {}))
        )
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        process = self._start()
        self.control = process.control
        self._put_back(process)

    @classmethod
    def from_folder(
        cls, folder: str | Path, *, special_tokens: Mapping[str, str], added_tokens: Mapping[str, bool]
    ) -> "ChatTemplate | None":
        """Read `chat_template.jinja`, else the one in `tokenizer_config.json`; None when the model has neither."""
        source = read_source(Path(folder))
        return None if source is None else cls(source, special_tokens=special_tokens, added_tokens=added_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        marked: Sequence[int] = (),
        places: bool = False,
        limit_s: float = RENDER_LIMIT_S,
    ) -> RenderedChat:
        """Render a chat. `variables` are the request's `chat_template_kwargs`, `marked` numbers of messages.

        `places` says whether boundaries, marks and history are wanted. With `continue_final_message` the text ends in the last
        message. Raises TemplateError when the template gives no text, RequestError for what is wrong with the chat itself.
        """
        job = Job(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=None if tools is None else [dict(tool) for tool in tools],
            variables=dict(variables or {}),
            marked=list(marked),
            places=places,
        )
        placed = self._ask(job, limit_s)
        return RenderedChat(placed.text, placed.own, self.control, placed.boundaries, placed.marks, placed.history)

    def message_at(self, messages: Sequence[Message], position: int, **options: Any) -> int | None:
        """Number of the message that a character of the rendering with the same `options` belongs to; None behind the last."""
        return self._ask(Job(messages=list(messages), find=position, **options), RENDER_LIMIT_S).message

    def close(self) -> None:
        """End the processes. A later rendering starts a new one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def __del__(self) -> None:
        if "_lock" in self.__dict__:  # not where the constructor failed
            self.close()

    def _ask(self, job: Job, limit_s: float) -> Placed:
        try:
            body = msgspec.json.encode(job)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"messages are no JSON: {str(error)[:200]}; send texts, numbers, lists and objects", param="messages"
            ) from error
        process = self._take()
        try:
            reply = process.ask(body, time.monotonic() + limit_s)
        except TimeoutError:
            process.end()
            raise TemplateError(
                "unsafe", f"the chat template takes longer than {limit_s:g} s for these messages; shorten the chat"
            ) from None
        except (OSError, EOFError, msgspec.DecodeError) as error:
            process.end()
            raise TemplateError(
                "unsafe", "the chat template's process ended: these messages take it too much memory; shorten the chat"
            ) from error
        except BaseException:
            process.end()  # an answer that nobody read would be the next chat's
            raise
        if reply.refused is not None and reply.refused.kind == "unsafe":
            process.end()  # its memory is in pieces
        else:
            self._put_back(process)
        if reply.placed is None:
            raise _refusal(reply.refused)
        return reply.placed

    def _take(self) -> "_Process":
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                return self._start()
            if process.is_alive():
                return process
            process.end()

    def _start(self) -> "_Process":
        process = _Process()
        try:
            process.open(self._opening)
        except BaseException:
            process.end()
            raise
        return process

    def _put_back(self, process: "_Process") -> None:
        with self._lock:
            keeps = len(self._idle) < MAX_IDLE
            if keeps:
                self._idle.append(process)
        if not keeps:
            process.end()


class _Process:
    """One render process and the socket to it."""

    def __init__(self) -> None:
        self.control: tuple[str, ...] = ()
        self._channel, theirs = socket.socketpair()
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        with theirs:
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-I", "-c", _START, path],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=child_environment(),
                    start_new_session=True,  # signals of a terminal are the parent's matter
                )
            except OSError as error:
                self._channel.close()
                raise OverloadedError(
                    f"no process for chat templates starts: {error.strerror}; free memory or processes"
                ) from error

    def open(self, opening: bytes) -> None:
        """Hand the template over. Raises ModelError or UnsafeContentError."""
        try:
            receive(self._channel, len(READY), time.monotonic() + START_LIMIT_S)
        except (OSError, EOFError) as error:
            raise OverloadedError(
                f"no process for chat templates starts within {START_LIMIT_S:g} s; free memory or processes"
            ) from error
        try:
            deadline = time.monotonic() + START_LIMIT_S
            send(self._channel, opening, deadline)
            opened = msgspec.json.decode(receive(self._channel, len(opening) + _REPLY_NBYTES, deadline), type=Opened)
        except (OSError, EOFError, msgspec.DecodeError) as error:
            raise _misbehaves("it takes too long or too much memory on a few words") from error
        if opened.is_unsafe:
            raise _misbehaves(f"rendering one word is unsafe: {opened.error}")
        if opened.error is not None:
            raise ModelError(opened.error)
        self.control = tuple(opened.control)

    def ask(self, body: bytes, deadline: float) -> Reply:
        """One job and its reply. Raises TimeoutError, OSError, EOFError and DecodeError, after which it is of no use."""
        send(self._channel, body, deadline)
        reply = receive(self._channel, _REPLY_TIMES * len(body) + _REPLY_NBYTES, deadline)
        return msgspec.json.decode(reply, type=Reply)

    def is_alive(self) -> bool:
        return self._child.poll() is None

    def end(self) -> None:
        self._channel.close()
        self._child.kill()
        self._child.wait()


def _misbehaves(how: str) -> UnsafeContentError:
    return UnsafeContentError(
        f"the chat template misbehaves in its sandbox: {how}; do not serve it: take the template from the model's publisher"
    )


def read_source(folder: Path) -> str | None:
    """A model folder's default template. Raises ModelError for what is no text."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        if file.stat().st_size > MAX_SOURCE_NBYTES:
            raise ModelError(f"{file.name} has {file.stat().st_size} bytes; a template has at most {MAX_SOURCE_NBYTES}")
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{file.name} is not UTF-8: {error}; fetch it again") from error
    entry = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(entry, list):
        entry = _named_templates(entry).get("default")
    if entry is not None and not isinstance(entry, str):
        raise ModelError(f"chat_template in tokenizer_config.json is {type(entry).__name__}; it must be text")
    return entry


def _named_templates(entries: Sequence[Any]) -> dict[Any, Any]:
    found = {}
    for number, entry in enumerate(entries):
        if not (isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)):
            raise ModelError(
                f"chat_template[{number}] in tokenizer_config.json has no name and template; each entry must have both, as texts"
            )
        found[entry["name"]] = entry["template"]
    return found


def _refusal(refused: Refused | None) -> RequestError:
    assert refused is not None, "a reply has one or the other"
    if refused.kind == "request":
        return RequestError(refused.message, param=refused.param)
    verb = {"refused": "refuses these messages", "failed": "fails on these messages"}.get(
        refused.kind, "takes too much for these messages"
    )
    return TemplateError(refused.kind, f"the chat template {verb}: {refused.message}")
