"""Places for sequences: how many the server takes at once, and how many of them one client may hold.

Owns these counts. A call takes a place before anything is computed for it, so that a full server says so at once, and one for
each sequence that it runs at the same time as soon as their number is known. Must not know routes or texts. Made by `app.py`.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Scope

from hybridserve.errors import OverloadedError
from hybridserve.server.address import network_of

#: Where the gate leaves a name of the key that a request came with, the same for every way of sending it.
CLIENT = "hybridserve.client"


class ClientShareError(OverloadedError):
    """This client holds all that one client may hold, while there may be room for others."""

    code = "client_share"


class Places:
    """Who holds how many places."""

    def __init__(self, total: int, client_share: float, max_at_once: int) -> None:
        """`max_at_once`: how many sequences of one call run at the same time; the others of it wait for those."""
        self.total = total
        self.max_per_client = max(1, int(total * client_share))
        self._max_at_once = max_at_once
        self._num_held = 0
        self._by_client: Counter[str] = Counter()

    @contextmanager
    def hold(self, client: str) -> Iterator["Held"]:
        """Hold one place, and more after `Held.widen`, until the end. Raises OverloadedError when there is none."""
        held = Held(self, client)
        try:
            held.widen(1)
            yield held
        finally:
            self._give_back(client, held.count)

    def take(self, client: str, count: int) -> None:
        """Take places for a client, all or none. Raises OverloadedError."""
        if self._num_held + count > self.total:
            raise OverloadedError(
                f"{self._num_held} of {self.total} places are taken and this request needs {count}; try again later"
            )
        if self._by_client[client] + count > self.max_per_client:
            held = self._by_client[client]
            raise ClientShareError(
                f"this client holds {held} places and needs {count} more; one client may hold {self.max_per_client} "
                "(--client-share); wait for some of its requests to end"
            )
        self._num_held += count
        self._by_client[client] += count

    def _give_back(self, client: str, count: int) -> None:
        self._num_held -= count
        self._by_client[client] -= count
        if not self._by_client[client]:
            del self._by_client[client]

    def at_once(self, num_sequences: int) -> int:
        """How many of a call's sequences run at the same time."""
        return min(num_sequences, self._max_at_once, self.max_per_client)


class Held:
    """The places of one call."""

    def __init__(self, places: Places, client: str) -> None:
        self._places = places
        self._client = client
        self.count = 0

    def widen(self, num_sequences: int) -> None:
        """Hold what a call of so many sequences needs. Raises OverloadedError."""
        more = self._places.at_once(num_sequences) - self.count
        if more > 0:
            self._places.take(self._client, more)
            self.count += more


def client_of(scope: Scope) -> str:
    """Whose request this is: that of the key which the gate has found, or, on a server without keys, of an address."""
    named = str(scope.get(CLIENT, ""))
    return named or (network_of(scope["client"][0]) if scope.get("client") else "unknown")
