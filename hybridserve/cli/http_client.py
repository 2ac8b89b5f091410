"""A small HTTP/1.1 client that streams: enough for `chat --url` and `bench serve`, light enough not to be what is measured.

Owns connections to one server, one request each. Must not know what replies mean beyond OpenAI's error object.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from hybridserve.errors import EngineError, OverloadedError, RequestError, UsageError

_MAX_LINE_NBYTES = 16 * 2**20


class Endpoint:
    """One OpenAI-compatible server, by its base URL."""

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        """Raises UsageError for what is no HTTP URL."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{base_url!r} is no HTTP URL; write it like http://127.0.0.1:8000")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        path = parts.path.rstrip("/")
        self._path = path.removesuffix("/v1")
        self._headers = f"Host: {parts.netloc}\r\nConnection: close\r\n"
        if api_key is not None:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    async def get(self, path: str) -> dict[str, Any]:
        """A JSON object. Raises like `events`."""
        async with self._exchange("GET", path, b"") as lines:
            return _object(b"".join([line async for line in lines]))

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Post `body` and yield the events of the streamed reply.

        Raises UsageError when the server cannot be reached, RequestError, OverloadedError or EngineError for what it refuses
        or when the stream ends without `[DONE]`.
        """
        is_done = False
        async with self._exchange("POST", path, json.dumps(body).encode()) as lines:
            async for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    is_done = True
                    break
                event = _object(data)
                if "error" in event:
                    raise EngineError(_message(event))
                yield event
        if not is_done:
            raise EngineError("the stream ended before the reply did")

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncGenerator[AsyncGenerator[bytes, None], None]:
        """Send a request; give the lines of a successful reply's body."""
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=_MAX_LINE_NBYTES)
        except OSError as error:
            raise UsageError(f"{self._host}:{self._port} cannot be reached: {error}; is the server up?") from error
        try:
            head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n"
            writer.write((head + "Content-Type: application/json\r\n\r\n").encode() + body)
            status, headers = await _read_head(reader)
            lines = _lines(_body(reader, headers))
            if status != 200:
                raise _refusal(status, b"".join([line async for line in lines]))
            yield lines
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise EngineError(f"the connection broke: {error}") from error
        finally:
            writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.rstrip().split(b"\r\n")
    headers = dict(line.lower().split(b":", 1) for line in lines)
    return int(first.split()[1]), {name: value.strip() for name, value in headers.items()}


async def _body(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> AsyncGenerator[bytes, None]:
    """The body in the pieces it arrives in, whichever of HTTP's three ways tells its end."""
    if headers.get(b"transfer-encoding") == b"chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif b"content-length" in headers:
        yield await reader.readexactly(int(headers[b"content-length"]))
    else:
        while part := await reader.read(2**16):
            yield part


async def _lines(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise EngineError(f"the server sent no JSON: {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise EngineError(f"the server sent {type(value).__name__}; an object was expected")
    return value


def _refusal(status: int, body: bytes) -> Exception:
    try:
        message = _message(_object(body))
    except EngineError:
        message = f"HTTP status {status}"
    if status in (429, 503):
        return OverloadedError(message)
    return EngineError(message) if status >= 500 else RequestError(message)


def _message(event: dict[str, Any]) -> str:
    error = event.get("error")
    return str(error.get("message")) if isinstance(error, dict) else str(error)
