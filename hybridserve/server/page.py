"""The chat page at `/`: one static file with a content security policy that names its script and style by hash.

Owns reading and serving it. Must not know what the page does.
"""

import base64
import hashlib
import re
from importlib.resources import files

from starlette.types import Receive, Scope, Send


class Page:
    """The page, read once."""

    def __init__(self) -> None:
        html = files("hybridserve.server").joinpath("static/index.html").read_text(encoding="utf-8")
        script, style = (_hash_of(html, tag) for tag in ("script", "style"))
        policy = (
            f"default-src 'none'; connect-src 'self'; img-src data:; script-src {script}; style-src {style}; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self._body = html.encode()
        self._headers = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-length", str(len(self._body)).encode()),
            (b"content-security-policy", policy.encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cache-control", b"no-cache"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /`."""
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        body = b"" if scope["method"] == "HEAD" else self._body
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _hash_of(html: str, tag: str) -> str:
    content = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    assert content is not None, f"the page has no {tag}"
    return f"'sha256-{base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()}'"
