"""What crosses the socket between a server and its render process: messages in, text out, as JSON with a length before it.

Owns those types and their framing. Must not know templates: the server's side imports no Jinja.
"""

import socket
import struct
import time
from typing import Any, Literal

import msgspec

#: Bytes of one frame that the child takes.
MAX_FRAME_NBYTES = 2**28
#: The child's first frame: it has started, and what follows is the template's time.
READY = b"ready"


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """The first message: the template."""

    source: str
    special_tokens: dict[str, str] = {}
    added_tokens: dict[str, bool] = {}


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """Its answer: what the template is found to be."""

    control: list[str] = []  # texts of the control tokens that messages cannot write
    error: str | None = None
    is_unsafe: bool = False  # whether the error is that it wants too much


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One chat to render."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = {}
    marked: list[int] = []  # numbers of messages whose ends are wanted
    places: bool = False  # whether positions for the prefix cache are wanted
    find: int | None = None  # a character whose message is wanted


class Placed(msgspec.Struct, kw_only=True):
    """A rendering. Positions are characters of it, spans end before their second one."""

    text: str
    own: list[tuple[int, int]] | None = None  # control tokens of the template's own; None where all are
    boundaries: list[int] = []
    marks: list[int] = []
    history: tuple[int, int] | None = None
    message: int | None = None


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no rendering: the template says so (`refused`), breaks or wants too much, or the `request` is wrong."""

    kind: Literal["refused", "failed", "unsafe", "request"]
    message: str
    param: str | None = None


class Reply(msgspec.Struct, frozen=True):
    """What a job becomes."""

    placed: Placed | None = None
    refused: Refused | None = None


def send(channel: socket.socket, body: bytes, deadline: float | None = None) -> None:
    """Write one frame. Raises TimeoutError at `deadline`, on the clock of time.monotonic, and OSError."""
    _limit(channel, deadline)
    channel.sendall(struct.pack("<Q", len(body)) + body)


def receive(channel: socket.socket, max_nbytes: int = MAX_FRAME_NBYTES, deadline: float | None = None) -> bytes:
    """Read one frame. Raises TimeoutError, OSError, and EOFError when the other side is gone or sends more than `max_nbytes`."""
    (size,) = struct.unpack("<Q", _read(channel, 8, deadline))
    if size > max_nbytes:
        raise EOFError(f"a frame of {size} bytes; at most {max_nbytes}")
    return _read(channel, size, deadline)


def _read(channel: socket.socket, size: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        _limit(channel, deadline)
        part = channel.recv(min(size - len(parts), 2**20))
        if not part:
            raise EOFError("the other side has ended")
        parts += part
    return bytes(parts)


def _limit(channel: socket.socket, deadline: float | None) -> None:
    if deadline is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        channel.settimeout(left)
