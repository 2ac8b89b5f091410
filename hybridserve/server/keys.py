"""API keys: whether a request has one of them, and the part of the prefix cache that belongs to whoever has it.

Owns authentication. Must not know routes. The gate asks for every request.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hybridserve.errors import AuthenticationError
from hybridserve.request import TENANT_MARK

_PURPOSE = b"hybridserve cache salt 1"


class Tenant(NamedTuple):
    """Whoever has one key."""

    name: str  # the same for every way of sending the key; nothing on a server without keys
    salt: str  # of its part of the prefix cache; nothing where all share one


class Keys:
    """The keys of a server; with none, everybody may call it and all share one part of the cache."""

    def __init__(self, keys: Sequence[str], *, share_cache: bool) -> None:
        """`share_cache`: requests of all keys find each other's prefixes."""
        self._tenants = [(hashlib.sha256(key.encode()).digest(), "" if share_cache else tenant_salt(key)) for key in keys]

    def tenant_of(self, headers: Mapping[bytes, str]) -> Tenant:
        """Who calls. Raises AuthenticationError for a key that is missing or wrong."""
        if not self._tenants:
            return Tenant("", "")
        scheme, _, given = headers.get(b"authorization", "").partition(" ")
        if scheme.lower() == "basic":  # what browsers send for the chat page; any user name
            given = _password(given)
        given = given.strip()
        digest = hashlib.sha256(given.encode()).digest()
        # All are compared, so that the time does not tell which one it was.
        found = [Tenant(known.hex(), salt) for known, salt in self._tenants if hmac.compare_digest(digest, known)]
        if not given or not found:
            said = "the API key is wrong" if given else "an API key is needed"
            raise AuthenticationError(f"{said}; send it as 'Authorization: Bearer KEY'")
        return found[0]


def tenant_salt(key: str) -> str:
    """The salt of requests with this key: HMAC-SHA256 with the key (RFC 2104), marked as no caller can mark a salt."""
    return TENANT_MARK + hmac.new(key.encode(), _PURPOSE, hashlib.sha256).hexdigest()


def _password(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode("utf-8", "replace").partition(":")[2]
    except binascii.Error:
        return ""
