"""The bodies of all requests at once: how many bytes are held.

Owns that count. Must not know routes. The gate hands every request's `receive` through here.
"""

from starlette.types import Message, Receive

from hybridserve.errors import OverloadedError


class Bodies:
    """Bytes of bodies that have come and whose requests have not ended."""

    def __init__(self, *, max_nbytes: int) -> None:
        self.num_nbytes = 0
        self._max_nbytes = max_nbytes

    def of(self, receive: Receive) -> "Body":
        """The body of one request."""
        return Body(self, receive)

    def take(self, nbytes: int) -> None:
        """Count what has come. Raises OverloadedError when it is too much in all."""
        if self.num_nbytes + nbytes > self._max_nbytes:
            raise OverloadedError(
                f"open requests have {self.num_nbytes} bytes of bodies; at most {self._max_nbytes} (--max-bodies-nbytes); "
                "try again soon"
            )
        self.num_nbytes += nbytes

    def give_back(self, nbytes: int) -> None:
        self.num_nbytes -= nbytes


class Body:
    """One request's body. `is_complete` also where the client has left."""

    def __init__(self, bodies: Bodies, receive: Receive) -> None:
        self.is_complete = False
        self._bodies = bodies
        self._receive = receive
        self._num_nbytes = 0

    async def receive(self) -> Message:
        """ASGI's receive. Raises OverloadedError when all bodies together become too large."""
        message = await self._receive()
        nbytes = len(message.get("body", b""))
        self._bodies.take(nbytes)
        self._num_nbytes += nbytes
        self.is_complete = self.is_complete or not message.get("more_body", False)
        return message

    def release(self) -> None:
        """The request has ended."""
        self._bodies.give_back(self._num_nbytes)
        self._num_nbytes = 0
