"""A server without keys answers to its own names alone, so that no other site's name can lead a browser here."""

import asyncio
import socket

import httpx
import pytest

from hybridserve.config import ServerSettings
from hybridserve.server.app import create_app
from hybridserve.server.hosts import HostNames
from tests.fake_engine import FakeEngine, Script, make_info
from tests.test_server import TOKENIZER

MACHINE = socket.gethostname()


@pytest.mark.parametrize(
    ("bound", "host", "is_ours"),
    [
        ("127.0.0.1", "localhost:8000", True),
        ("127.0.0.1", "LOCALHOST.", True),
        ("127.0.0.1", "app.localhost:1", True),
        ("127.0.0.1", "127.0.0.5:80", True),
        ("127.0.0.1", "[::1]:8000", True),
        ("127.0.0.1", MACHINE, True),
        ("127.0.0.1", "10.1.2.3", True),  # the connection's own address
        ("127.0.0.1", "10.1.2.4", False),
        ("127.0.0.1", "evil.com", False),
        ("127.0.0.1", "evil.com:8000", False),
        ("127.0.0.1", "localhost.evil.com", False),
        ("127.0.0.1", "127.0.0.1.evil.com", False),
        ("127.0.0.1", "notlocalhost", False),
        ("127.0.0.1", "[::1].evil.com", False),
        ("0.0.0.0", "10.1.2.4:8000", True),
        ("::", "[fd00::7]:8000", True),
        ("0.0.0.0", "evil.com", False),
        ("box.lan", "box.lan:8000", True),
        ("fd00::7", "[fd00::7]:8000", True),
    ],
)
def test_names(bound, host, is_ours):
    assert HostNames(bound, ()).are_ours(host, "10.1.2.3") is is_ours


def test_a_setting_adds_names():
    assert HostNames("127.0.0.1", ["proxy.example"]).are_ours("Proxy.Example:443", "")
    assert not HostNames("127.0.0.1", ["proxy.example"]).are_ours("other.example", "")
    assert HostNames("127.0.0.1", ["*"]).are_ours("any.example", "")


def statuses(calls, **settings):
    engine = FakeEngine(make_info(TOKENIZER.vocab_size, 256), lambda request: Script([1]))
    app = create_app(engine, TOKENIZER, ServerSettings(**settings), "fake")

    async def main():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            return [(await http.request(method, path, headers=headers)).status_code for method, path, headers in calls]

    return asyncio.run(main())


FOREIGN = {"host": "evil.com", "origin": "http://evil.com"}


def test_another_name_is_refused_on_every_route_but_probes():
    paths = ["/v1/models", "/v1/limits", "/metrics", "/openapi.json", "/version", "/v1/cache/explain?prompt=a", "/", "/nowhere"]
    found = statuses([("GET", path, FOREIGN) for path in paths])
    assert found == [403, 403, 403, 403, 200, 403, 403, 403]
    assert statuses([("POST", "/v1/completions", FOREIGN)]) == [403]
    assert statuses([("GET", "/health", FOREIGN), ("GET", "/ready", FOREIGN)]) == [200, 200]


def test_an_origin_that_names_nobody_is_not_the_same_as_a_missing_host():
    assert statuses([("POST", "/tokenize", {"origin": "null", "host": ""})]) == [403]


def test_with_keys_or_allowed_names_other_names_are_served():
    keyed = {**FOREIGN, "authorization": "Bearer k"}
    assert statuses([("GET", "/v1/models", keyed)], api_key=("k",)) == [200]
    assert statuses([("GET", "/v1/models", FOREIGN)], allowed_hosts=("evil.com",)) == [200]
