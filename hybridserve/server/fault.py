"""Errors as clients see them: OpenAI's error object, its status and headers.

Owns that shape. An error that nobody raised on purpose is logged with its traceback and told as a plain 500, since its text
could hold a path or another user's words.
"""

import asyncio
import logging
import math

import msgspec
from starlette.types import Send

from hybridserve.errors import HybridServeError, OverloadedError, RequestError

#: What ends a request from outside and is no failure of it.
ENDINGS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)

log = logging.getLogger("hybridserve.server")


def told(error: BaseException) -> HybridServeError:
    """The error to tell: the same when it was raised on purpose, else a plain one, and the real one goes to the log."""
    if isinstance(error, HybridServeError):
        return error
    log.error("an unexpected error ended a request", exc_info=error)
    return HybridServeError("internal error; the server's log has the details")


def error_body(error: HybridServeError) -> bytes:
    """OpenAI's error object as JSON."""
    param = error.param if isinstance(error, RequestError) else None
    code = error.code if error.code is not None else str(error.status)
    told = {"message": _whole(str(error)), "type": error.kind, "param": param and _whole(param), "code": code}
    return msgspec.json.encode({"error": told})


def _whole(text: str) -> str:
    """A text that repeats what a client sent, without halves of characters, which no JSON in UTF-8 holds."""
    return text.encode("utf-8", "replace").decode()


def error_headers(error: HybridServeError) -> list[tuple[bytes, bytes]]:
    """Headers that tell a client when to come back, or how to authenticate."""
    if isinstance(error, OverloadedError):
        retry_ms = round(error.retry_after_s * 1000)
        return [
            (b"retry-after", str(math.ceil(error.retry_after_s)).encode()),
            (b"retry-after-ms", str(retry_ms).encode()),
        ]
    if error.status == 503:
        return [(b"retry-after", b"5")]
    if error.status == 401:
        return [(b"www-authenticate", b'Basic realm="hybridserve"')]
    return []


async def send_error(error: HybridServeError, send: Send) -> None:
    """Answer a request, of which nothing has been sent, with an error."""
    await send_json(error_body(error), send, status=error.status, headers=error_headers(error))


async def send_json(body: bytes, send: Send, *, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Answer with a whole JSON body."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                *(headers or []),
            ],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})
