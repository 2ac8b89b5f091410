"""Addresses: whether a server may listen on one, the socket, its URL, and what counts as one client.

Owns those four. Must not know HTTP. Called by `run.py`.
"""

import ipaddress
import socket

from hybridserve.config import ServerSettings
from hybridserve.errors import UsageError

_BACKLOG = 2048


def check_exposure(settings: ServerSettings) -> None:
    """Raise UsageError when others could reach a server that asks for no key."""
    if settings.api_key or settings.allow_open_bind or _is_loopback(settings.host):
        return
    raise UsageError(
        f"--host {settings.host} lets other machines in, and there is no --api-key; give one, or say --allow-open-bind"
    )


def bind(settings: ServerSettings) -> socket.socket:
    """A listening socket on the settings' address. Raises UsageError when that is taken or not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--host {settings.host!r}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {settings.host}:{settings.port}: {error}; stop what runs there or choose another --port"
        ) from error
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket, *, is_tls: bool) -> str:
    """The URL that a listening socket is reached at."""
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{host}:{port}"


def network_of(address: str) -> str:
    """What counts as one client of an address: itself, or for IPv6 the /64 that one customer is given."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
