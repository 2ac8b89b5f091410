"""The names that a server answers to: without them a page of another site could have its own name lead here (DNS rebinding).

Owns that question alone. Must not know routes. The gate asks for every request to a server without keys.
"""

import ipaddress
import re
import socket
from collections.abc import Sequence

_PORT = re.compile(r":\d*\Z")


class HostNames:
    """Loopback names, the address bound, the machine's own names, and those that a setting adds; `*` adds all."""

    def __init__(self, bound: str, allowed: Sequence[str]) -> None:
        machine = socket.gethostname()
        names = ["localhost", bound, machine, machine.partition(".")[0], f"{machine.partition('.')[0]}.local", *allowed]
        self._names = frozenset(name_of(name) for name in names if name)
        self._takes_all = "*" in allowed
        self._takes_addresses = _is_unspecified(bound)

    def are_ours(self, host: str, reached_at: str) -> bool:
        """Whether `host`, as the Host header says it, is a name of this server. `reached_at`: the connection's own address.

        An address is nobody's name that could lead elsewhere tomorrow: bound to all addresses, the server answers to any.
        """
        name = name_of(host)
        if self._takes_all or name in self._names or name.endswith(".localhost"):
            return True
        address = _address(name)
        return address is not None and (self._takes_addresses or address.is_loopback or address == _address(reached_at))


def name_of(host: str) -> str:
    """The name in a Host header: without port and brackets, in lower case."""
    host = host.strip().lower()
    if match := re.fullmatch(r"\[([^\]]*)\](:\d*)?", host):
        return match[1]
    if host.count(":") > 1:
        return host  # an IPv6 address as settings write it
    return _PORT.sub("", host).removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None


def _is_unspecified(bound: str) -> bool:
    address = _address(bound)
    return not bound or (address is not None and address.is_unspecified)
