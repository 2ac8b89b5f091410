"""Limits that hold at the server, whatever the engine and the client do: connections, deadlines, readers, shares of places."""

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import msgspec
import pytest

from hybridserve.config import ServerSettings
from hybridserve.errors import OverloadedError
from hybridserve.server import connections, generation
from hybridserve.server.address import network_of
from hybridserve.server.app import create_app
from hybridserve.server.http import HttpServer
from hybridserve.server.lifecycle import Lifecycle
from hybridserve.server.places import ClientShareError, Places
from tests.fake_engine import FakeEngine, Script, make_info
from tests.test_server import IDS, TOKENIZER, wait_until

HANGS = Script(IDS, delay_s=60.0)


class Served:
    def __init__(self, port, engine, ended):
        self.address = ("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{port}"
        self.engine = engine
        self.ended = ended

    def connect(self, data=b"", source="127.0.0.1", receive_nbytes=None):
        one = socket.socket()
        if receive_nbytes is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_nbytes)
        one.bind((source, 0))
        one.settimeout(10)
        one.connect(self.address)
        one.sendall(data)
        return one


@contextmanager
def served(respond=lambda request: Script(IDS), max_model_len=256, **settings):
    """The server as `hybridserve serve` sets it up, over a scripted engine; nothing may be left open at the end."""
    chosen = ServerSettings(**settings)
    engine = FakeEngine(make_info(TOKENIZER.vocab_size, max_model_len), respond)
    lifecycle = Lifecycle()
    app = create_app(engine, TOKENIZER, chosen, "fake", lifecycle=lifecycle)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that replies wait here and not in the kernel
    server = HttpServer(app, chosen, last_writes_s=1, ended=lifecycle.ended)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Served(listener.getsockname()[1], engine, lifecycle.ended)
    finally:
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()
    assert engine.num_open == lifecycle.num_open == 0


def reply_of(one):
    """Status and error code of what is read until the server closes."""
    with one:
        data = b""
        while part := one.recv(65536):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def post(body, extra=b""):
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n%s\r\n" % (len(data), extra) + data


HALF_HEADERS = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: "
HALF_BODY = post({"prompt": "x"})[:-3]


@pytest.mark.parametrize(
    ("data", "limit"),
    [(b"", "header_timeout_s"), (HALF_HEADERS, "header_timeout_s"), (HALF_BODY, "body_timeout_s")],
)
def test_what_is_sent_by_halves_has_a_time_limit(data, limit):
    with served(header_timeout_s=0.3, body_timeout_s=0.3) as running:
        assert reply_of(running.connect(data)) == (408, limit)
        assert running.ended == {limit: 1}
        assert httpx.get(running.url + "/health").status_code == 200


def test_a_kept_connection_has_the_limit_again():
    with served(header_timeout_s=0.3) as running:
        one = running.connect(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert one.recv(4096).startswith(b"HTTP/1.1 200")
        one.sendall(b"\r\n")  # not even a request, but it is not idle either
        assert reply_of(one) == (408, "header_timeout_s")


MANY_HEADERS = b"".join(b"x%d: aaaaaaaaaa\r\n" % number for number in range(5000)) + b"\r\n"


@pytest.mark.parametrize("headers", [b"x: " + b"a" * connections.MAX_HEADER_NBYTES, MANY_HEADERS])
def test_headers_are_bounded_in_bytes(headers):
    with served() as running:
        one = running.connect()
        with contextlib.suppress(OSError):  # it may close before it has taken all
            one.sendall(b"GET /health HTTP/1.1\r\n" + headers)
        wait_until(lambda: running.ended["header_nbytes"] == 1)
        one.close()


def test_headers_that_come_in_parts_count_once():
    lines = [b"x%d: " % number + b"a" * 4000 + b"\r\n" for number in range(10)]
    with served() as running:
        one = running.connect(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"".join(lines[:5]))
        time.sleep(0.2)  # so that the server reads them apart
        one.sendall(b"".join(lines[5:]) + b"\r\n")
        assert one.recv(4096).startswith(b"HTTP/1.1 200")
        one.close()


def test_connections_are_bounded_in_all_and_per_address():
    with served(max_connections=5, client_share=0.4) as running:
        first = [running.connect(HALF_HEADERS) for _ in range(2)]
        assert reply_of(running.connect()) == (503, "client_share")
        others = [running.connect(HALF_HEADERS, source=f"127.0.0.{number}") for number in (2, 2, 3)]
        assert reply_of(running.connect(source="127.0.0.4")) == (503, "max_connections")
        first.pop().close()
        wait_until(lambda: try_health(running) == 200)
        for one in first + others:
            one.close()


def try_health(running):
    try:
        return httpx.get(running.url + "/health").status_code
    except httpx.HTTPError:
        return 0


def test_what_is_no_http_is_counted_and_not_logged(caplog):
    caplog.set_level(logging.DEBUG)
    with served() as running:
        for _ in range(5):
            assert reply_of(running.connect(b"\x16\x03\x01 nonsense\r\n\r\n")) == (400, "no_http")
        assert running.ended == {"no_http": 5}
        assert (
            'limits_reached_total{engine="0",limit="no_http",model_name="fake"} 5.0' in httpx.get(running.url + "/metrics").text
        )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("stream", [True, False])
def test_I34_a_client_that_never_reads_is_let_go(stream):
    body = {"prompt": [[1]] * 4, "max_tokens": 300, "logprobs": 20, "stream": stream}
    with served(lambda request: Script(IDS[:1] * 300, step=100), max_model_len=1024, write_timeout_s=0.4) as running:
        one = running.connect(post(body), receive_nbytes=4096)
        wait_until(lambda: len(running.engine.submitted) == 4)
        wait_until(lambda: running.ended == {"write_timeout_s": 1})
        wait_until(lambda: running.engine.num_open == 0)
        assert len(running.engine.aborted) == (4 if stream else 0)
        one.close()


def test_a_client_that_reads_slowly_gets_everything():
    body = {"prompt": "x", "max_tokens": 300, "logprobs": 20, "stream": True}
    with served(lambda request: Script(IDS[:1] * 300, step=50), max_model_len=1024, write_timeout_s=0.4) as running:
        one = running.connect(post(body, b"connection: close\r\n"), receive_nbytes=4096)
        data = b""
        while part := one.recv(16384):
            data += part
            if len(data) % 7 == 0:
                threading.Event().wait(0.002)
        assert b"data: [DONE]" in data
        assert running.ended == {}


@pytest.fixture
def no_grace(monkeypatch):
    monkeypatch.setattr(generation, "DEADLINE_GRACE_S", 0.05)


def test_I34_deadlines_hold_whatever_the_engine_does(no_grace):
    with served(lambda request: HANGS, request_timeout_s=0.2) as running:
        whole = httpx.post(running.url + "/v1/completions", json={"prompt": "x", "n": 9, "temperature": 1})
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "timeout")
        streamed = httpx.post(running.url + "/v1/completions", json={"prompt": "x", "stream": True})
        assert (streamed.status_code, streamed.json()["error"]["code"]) == (504, "timeout")
        assert 'finished_reason="timeout"' in httpx.get(running.url + "/metrics").text
        assert set(running.engine.aborted) == {request.request_id for request in running.engine.submitted}
        assert all(0 < request.deadline_s <= 0.2 for request in running.engine.submitted)


def test_I34_a_deadline_in_a_stream_is_an_event(no_grace):
    some = Script(IDS, delay_s=0.08)
    with served(lambda request: some, request_timeout_s=0.3) as running:
        reply = httpx.post(running.url + "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 200})
        assert reply.status_code == 200
        assert json.loads(reply.text.split("data: ")[-1])["error"]["code"] == "timeout"
        assert "[DONE]" not in reply.text


def test_sequences_wait_for_others_of_their_request_and_count_once():
    with served() as running:
        body = {"prompt": "x", "n": 100, "temperature": 1, "max_tokens": 1}
        for stream in (False, True):
            reply = httpx.post(running.url + "/v1/completions", json={**body, "stream": stream})
            assert reply.status_code == 200
        assert len(running.engine.submitted) == 200


def test_I34_one_client_leaves_places_for_others():
    # The engine runs 8 and lets 16 wait: 24 places, of which one client may hold 12.
    hold = {"prompt": "x", "n": 8, "temperature": 1, "stream": True}
    with served(lambda request: HANGS) as running:
        first = running.connect(post(hold))
        wait_until(lambda: running.engine.num_open == 8)
        greedy = httpx.post(running.url + "/v1/completions", json=hold)
        assert (greedy.status_code, greedy.json()["error"]["code"]) == (503, "client_share")
        assert int(greedy.headers["retry-after"]) >= 1
        other = running.connect(post(hold), source="127.0.0.2")
        wait_until(lambda: running.engine.num_open == 16)
        for one in (first, other):
            one.close()
        wait_until(lambda: running.engine.num_open == 0)


def test_keys_are_clients_of_their_own():
    hold = {"prompt": "x", "n": 8, "temperature": 1, "stream": True}
    with served(lambda request: HANGS, api_key=("one", "two")) as running:
        first = running.connect(post(hold, b"authorization: Bearer one\r\n"))
        wait_until(lambda: running.engine.num_open == 8)
        same = httpx.post(running.url + "/v1/completions", json=hold, auth=("anybody", "one"))
        assert same.json()["error"]["code"] == "client_share"
        second = running.connect(post(hold, b"authorization: Bearer two\r\n"))
        wait_until(lambda: running.engine.num_open == 16)
        for one in (first, second):
            one.close()
        wait_until(lambda: running.engine.num_open == 0)


def test_a_full_server_says_so_before_it_reads_a_body():
    with served(lambda request: HANGS, client_share=1.0) as running:
        held = [running.connect(post({"prompt": "x", "n": 8, "temperature": 1, "stream": True})) for _ in range(3)]
        wait_until(lambda: running.engine.num_open == 24)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000000\r\nconnection: close\r\n\r\n{"
        assert reply_of(running.connect(head)) == (503, "overloaded")
        for one in held:
            one.close()
        wait_until(lambda: running.engine.num_open == 0)


def test_a_burst_of_refusals_is_one_line_and_all_are_counted(caplog):
    with served() as running:
        running.engine.refuses = OverloadedError("full; try again later")
        for _ in range(20):
            assert httpx.post(running.url + "/v1/completions", json={"prompt": "x"}).status_code == 503
        metrics = httpx.get(running.url + "/metrics").text
    assert 'admission_rejections_total{engine="0",model_name="fake",reason="overloaded"} 20.0' in metrics
    assert caplog.text.count("full; try again later") == 1


def test_places_are_taken_all_or_none_and_given_back():
    places = Places(10, 0.6, max_at_once=4)
    with places.hold("a") as first:
        first.widen(100)
        assert first.count == 4
        with places.hold("a") as second:
            with pytest.raises(ClientShareError, match="one client may hold 6"):
                second.widen(3)
            assert second.count == 1
            with places.hold("b") as third:
                third.widen(4)
                with places.hold("c") as fourth, pytest.raises(OverloadedError, match="10 of 10 places"):
                    fourth.widen(2)
    with places.hold("b") as alone:
        alone.widen(4)
    assert not places._by_client
    assert places._num_held == 0


def test_a_customers_ipv6_network_is_one_client():
    assert network_of("2001:db8::1") == network_of("2001:db8::2:3")
    assert network_of("2001:db8::1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") != network_of("10.0.0.2")


def test_every_limit_of_the_settings_is_told():
    with served() as running:
        told = httpx.get(running.url + "/v1/limits").json()
    names = {field.name for field in msgspec.structs.fields(ServerSettings)}
    limits = {name for name in names if name.startswith("max_") or name.endswith(("_s", "_share", "_nbytes"))}
    assert limits - {"drain_timeout_s"} <= set(told)
    assert told["max_places_per_client"] == told["max_places"] // 2
