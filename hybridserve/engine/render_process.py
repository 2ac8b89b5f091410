"""The child process that renders chats, bounded in time and memory: the box of `serve`, `generate` and `check-model` alike.

Owns the bounds and the loop. A template is foreign code: Jinja's sandbox stops forbidden access, but no long loop and no large
text. Started by `chat.py`; it has no environment, no file of its own to write, and ends with its parent.
"""

import contextlib
import math
import resource
import signal
import socket

import jinja2
import jinja2.exceptions
import msgspec

from hybridserve.engine.render_job import READY, Job, Opened, Opening, Refused, Reply, receive, send
from hybridserve.engine.rendering import Renderer
from hybridserve.engine.template import Template
from hybridserve.errors import ModelError, RequestError

#: Bytes of address space.
MAX_NBYTES = 2**30
#: Seconds of processor time for what is found out of a template before any chat.
MAX_OPENING_CPU_S = 1
#: Seconds of processor time for one job, should the parent be gone and nobody end the process.
MAX_JOB_CPU_S = 60
_MAX_ERROR_CHARS = 500
_UNSAFE = (jinja2.exceptions.SecurityError, OverflowError, MemoryError, RecursionError)


def main() -> None:
    """Answer an opening, then jobs, until the other side ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the parent's matter
    channel = socket.socket(fileno=0)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_NBYTES, MAX_NBYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, OSError):
        send(channel, READY)
        renderer = _open(channel)
        while renderer is not None:
            raw = receive(channel)
            _bound_cpu(MAX_JOB_CPU_S)
            send(channel, _encoded(_answer(renderer, raw)))


def _open(channel: socket.socket) -> Renderer | None:
    opening = msgspec.json.decode(receive(channel), type=Opening)
    _bound_cpu(MAX_OPENING_CPU_S)
    try:
        wanted = _wants_too_much(opening)
        if wanted is not None:
            send(channel, msgspec.json.encode(Opened(error=wanted, is_unsafe=True)))
            return None
        renderer = Renderer(opening.source, special_tokens=opening.special_tokens, added_tokens=opening.added_tokens)
    except ModelError as error:
        send(channel, msgspec.json.encode(Opened(error=str(error))))
        return None
    send(channel, msgspec.json.encode(Opened(control=list(renderer.control.texts))))
    return renderer


def _wants_too_much(opening: Opening) -> str | None:
    """What the template does that it may not, on one word of a user. Raises ModelError when it is none."""
    template = Template(opening.source, opening.special_tokens)
    try:
        template.run([{"role": "user", "content": "Hello."}])
    except _UNSAFE as error:
        return _detail(error)
    except Exception:  # it may want other messages
        return None
    return None


def _answer(renderer: Renderer, raw: bytes) -> Reply:
    try:
        job = msgspec.json.decode(raw, type=Job)
        return Reply(placed=renderer.chat(job, raw.decode()).placed())
    except RequestError as error:
        return Reply(refused=Refused(kind="request", message=str(error), param=error.param))
    except _UNSAFE as error:
        return Reply(refused=Refused(kind="unsafe", message=_detail(error)))
    except Exception as error:  # foreign code: it may fail in any way
        is_refusal = isinstance(error, jinja2.TemplateError) and not isinstance(error, jinja2.UndefinedError)
        return Reply(refused=Refused(kind="refused" if is_refusal else "failed", message=_detail(error)))


def _encoded(reply: Reply) -> bytes:
    try:
        return msgspec.json.encode(reply)
    except (ValueError, MemoryError) as error:  # half a surrogate pair, which no text may have
        return msgspec.json.encode(Reply(refused=Refused(kind="failed", message=_detail(error))))


def _detail(error: BaseException) -> str:
    return str(error)[:_MAX_ERROR_CHARS].encode(errors="replace").decode() or type(error).__name__


def _bound_cpu(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime + seconds), hard))


if __name__ == "__main__":
    main()
