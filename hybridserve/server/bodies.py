"""The bodies of all requests at once: how many bytes are held, and how many of them are one client's.

Owns these counts. Must not know routes. The gate hands every request's `receive` through here; a route says through the scope
that it has decoded its body.
"""

from collections import Counter

from starlette.types import Message, Receive, Scope

from hybridserve.errors import OverloadedError
from hybridserve.server.places import ClientShareError, client_of

#: Where the gate leaves the `Body` of a request.
BODY = "hybridserve.body"


class Bodies:
    """Bytes of bodies that have come and are not decoded yet."""

    def __init__(self, *, max_nbytes: int, client_share: float = 1.0, max_body_nbytes: int = 0) -> None:
        """One client may hold its share of `max_nbytes`, and one body of `max_body_nbytes` in any case."""
        self.num_nbytes = 0
        self._max_nbytes = max_nbytes
        self._max_per_client = max(int(max_nbytes * client_share), max_body_nbytes)
        self._by_client: Counter[str] = Counter()

    def of(self, receive: Receive, scope: Scope) -> "Body":
        """The body of one request. Whose it is, the scope has to say by the time it is read."""
        return Body(self, receive, scope)

    def take(self, client: str, nbytes: int) -> None:
        """Count what has come. Raises OverloadedError when it is too much in all or of this client."""
        if self.num_nbytes + nbytes > self._max_nbytes:
            raise OverloadedError(
                f"open requests have {self.num_nbytes} bytes of bodies; at most {self._max_nbytes} (--max-bodies-nbytes); "
                "try again soon"
            )
        if self._by_client[client] + nbytes > self._max_per_client:
            raise ClientShareError(
                f"this client's open requests have {self._by_client[client]} bytes of bodies; at most {self._max_per_client} "
                "of one client (--client-share of --max-bodies-nbytes); send fewer at once"
            )
        self.num_nbytes += nbytes
        self._by_client[client] += nbytes

    def give_back(self, client: str, nbytes: int) -> None:
        self.num_nbytes -= nbytes
        self._by_client[client] -= nbytes
        if not self._by_client[client]:
            del self._by_client[client]


class Body:
    """One request's body. `is_complete` also where the client has left."""

    def __init__(self, bodies: Bodies, receive: Receive, scope: Scope) -> None:
        self.is_complete = False
        self._bodies = bodies
        self._receive = receive
        self._scope = scope
        self._client = ""
        self._num_nbytes = 0

    async def receive(self) -> Message:
        """ASGI's receive. Raises OverloadedError when all bodies together, or those of this client, become too large."""
        message = await self._receive()
        if nbytes := len(message.get("body", b"")):
            self._client = self._client or client_of(self._scope)
            self._bodies.take(self._client, nbytes)
            self._num_nbytes += nbytes
        self.is_complete = self.is_complete or not message.get("more_body", False)
        return message

    def release(self) -> None:
        """The body is decoded, or its request has ended. The second call of it does nothing."""
        if self._num_nbytes:
            self._bodies.give_back(self._client, self._num_nbytes)
        self._num_nbytes = 0
