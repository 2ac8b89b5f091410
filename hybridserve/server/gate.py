"""What every request passes before its route: a request id, the key, the origin; and what every error becomes after it.

Owns authentication and the error border, as one pure ASGI middleware (a middleware that wraps the response hides disconnects).
Must not know routes beyond the public ones. Built by `app.py`.
"""

import logging
import os
import re
import time
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridserve.config import ServerSettings
from hybridserve.errors import HybridServeError, OverloadedError, PayloadTooLargeError, RequestError
from hybridserve.server.bodies import BODY, Bodies
from hybridserve.server.fault import ENDINGS, send_error, told
from hybridserve.server.hosts import HostNames, name_of
from hybridserve.server.keys import Keys
from hybridserve.server.metrics import Metrics
from hybridserve.server.places import CLIENT

#: Routes that need no key: a probe or a load balancer has none.
PUBLIC_PATHS = frozenset({"/health", "/ready", "/version"})
#: Where routes find the salt of the caller's part of the prefix cache.
TENANT_SALT = "hybridserve.tenant_salt"
#: Digits of a Content-Length; more are no size that a body could have.
_MAX_LENGTH_DIGITS = 18
#: Refusals of one kind are logged at most so often.
REFUSALS_EVERY_S = 10.0
#: A client's own request id is taken over when it looks like one.
_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)

log = logging.getLogger("hybridserve.server")


class OriginError(RequestError):
    """A browser sent this request for a page of another site."""

    status = 403
    kind = "permission_error"
    code = "origin_not_allowed"


class HostError(RequestError):
    """The request is for a name that is not this server's."""

    status = 403
    kind = "permission_error"
    code = "host_not_allowed"


class Gate:
    """Middleware around all routes."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings, metrics: Metrics) -> None:
        self._app = app
        self._keys = Keys(settings.api_key, share_cache=settings.share_cache_between_keys)
        # Who has a key has it from us; without keys, the name is all that tells a browser's page of another site.
        checks_names = not settings.api_key or bool(settings.allowed_hosts)
        self._names = HostNames(settings.host, settings.allowed_hosts) if checks_names else None
        self._allowed_origins = frozenset(settings.allowed_origins)
        self._max_body_nbytes = settings.max_body_nbytes
        self._bodies = Bodies(
            max_nbytes=settings.max_bodies_nbytes,
            client_share=settings.client_share,
            max_body_nbytes=settings.max_body_nbytes,
        )
        self._metrics = metrics
        self._refusals = _Repeats()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        request_id = _request_id(headers.get(b"x-request-id", ""))
        has_started = False
        body = scope[BODY] = self._bodies.of(receive, scope)

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                self._metrics.responses[str(message["status"])] += 1
                added = [(b"x-request-id", request_id.encode())]
                if message["status"] >= 400 and scope["method"] == "POST" and not body.is_complete:
                    added.append((b"connection", b"close"))  # what is left of the body is not waited for
                message["headers"] = [*message["headers"], *added]
            await send(message)

        try:
            self._check(scope, headers)
            await self._app(scope, body.receive, send_with_id)
        except ENDINGS:
            raise
        except BaseException as error:  # a panic of compiled code, such as the tokenizer's, is no Exception
            fault = told(error)
            self._note(fault, request_id)
            if not has_started:
                await send_error(fault, send_with_id)
        finally:
            body.release()

    def _check(self, scope: Scope, headers: dict[bytes, str]) -> None:
        scope[TENANT_SALT] = ""
        if scope["path"] not in PUBLIC_PATHS:
            self._check_host(scope, headers.get(b"host", ""))
            scope[CLIENT], scope[TENANT_SALT] = self._keys.tenant_of(headers)
        origin = headers.get(b"origin")
        if origin is not None and scope["method"] not in ("GET", "HEAD"):
            self._check_origin(origin, headers.get(b"host", ""))
        length = headers.get(b"content-length", "0")
        if not length.isdecimal() or len(length) > _MAX_LENGTH_DIGITS or int(length) > self._max_body_nbytes:
            raise too_large(self._max_body_nbytes)

    def _check_host(self, scope: Scope, host: str) -> None:
        reached_at = str((scope.get("server") or ("",))[0])
        if self._names is not None and host and not self._names.are_ours(host, reached_at):
            raise HostError(
                f"this server does not answer to the name {name_of(host)[:128]!r}; call it by its address, or allow the name "
                "with --allowed-hosts"
            )

    def _check_origin(self, origin: str, host: str) -> None:
        is_same = bool(host) and origin.partition("://")[2] == host
        if not is_same and not self._allowed_origins & {origin, "*"}:
            raise OriginError(f"pages of {origin[:128]!r} may not call this server; allow them with --allowed-origins")

    def _note(self, fault: HybridServeError, request_id: str) -> None:
        if isinstance(fault, OverloadedError):
            self._metrics.rejected[fault.code or "overloaded"] += 1
        if fault.status < 500:
            return
        num_left_out = self._refusals.admit(fault.code) if fault.status == 503 else 0
        if num_left_out is not None:
            more = f" (and {num_left_out} more like it since the last line)" if num_left_out else ""
            log.warning("request %s ended with %d: %s%s", request_id, fault.status, fault, more)


class _Repeats:
    """Tells which refusals to log: they come in bursts, of which one line in a while says enough. Metrics count them all."""

    def __init__(self) -> None:
        self._told: dict[str | None, float] = {}  # by error code: when the last line was written
        self._num_left_out: Counter[str | None] = Counter()

    def admit(self, code: str | None) -> int | None:
        """None for a refusal to leave out; else how many were left out before it."""
        now = time.monotonic()
        if now - self._told.get(code, -REFUSALS_EVERY_S) < REFUSALS_EVERY_S:
            self._num_left_out[code] += 1
            return None
        self._told[code] = now
        return self._num_left_out.pop(code, 0)


async def read_body(receive: Receive, limit: int) -> bytes:
    """A request's whole body. Raises PayloadTooLargeError beyond `limit` bytes, RequestError when the client leaves."""
    parts = []
    total = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the client left before the body was complete")
        part = message.get("body", b"")
        total += len(part)
        if total > limit:
            raise too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body is larger than {limit} bytes; send less or raise --max-body-nbytes")


def _request_id(given: str) -> str:
    return given if _REQUEST_ID.fullmatch(given) else os.urandom(12).hex()
