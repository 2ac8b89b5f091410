"""What a client may make the server hold and do: bytes in flight, values decoded, characters tokenised, who waits for whom."""

import asyncio
import json
import random
import re
import threading
from types import SimpleNamespace

import msgspec
import pytest

from hybridserve.config import ServerSettings
from hybridserve.engine.chat import ChatTemplate
from hybridserve.errors import OverloadedError, RequestError
from hybridserve.server import json_shape, routes, wire
from hybridserve.server.app import create_app
from hybridserve.server.bodies import Bodies
from hybridserve.server.json_shape import Shape, shape_of
from hybridserve.server.lifecycle import Lifecycle
from hybridserve.server.places import ClientShareError
from hybridserve.server.prompts import chat_prompt
from hybridserve.server.wire import ChatMessage, ChatRequest
from hybridserve.server.workers import MAX_LONG_WAITING, SHORT_SIZE, Workers
from tests.fake_engine import FakeEngine, Script, make_info
from tests.test_fuzz_routes import call
from tests.test_server import TOKENIZER
from tests.test_text import CHATML

CONTEXT = 256
HEADERS = [(b"host", b"localhost")]
LONG = b"x" * (12 * 2**20)


def make_app(tokenizer=TOKENIZER, **settings):
    engine = FakeEngine(make_info(tokenizer.vocab_size, CONTEXT), lambda request: Script([1]))
    return create_app(engine, tokenizer, ServerSettings(**settings), "fake", lifecycle=Lifecycle())


def post(app, path, body):
    answer = asyncio.run(call(app, "POST", path, b"", HEADERS, body))
    return answer.status, json.loads(answer.body)


# What a body holds is known before it is decoded.


def slow_shape(value, depth=1):
    """Values and depth of a decoded text."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        shapes = [slow_shape(one, depth + 1) for one in inner]
        return 1 + sum(count for count, _ in shapes), max([depth, *(deep for _, deep in shapes)])
    return 1, depth - 1


def some_json(rng, depth=0):
    texts = ["", "a", ",", "[{", '"', "\\", '\\"', "\\\\", '\\\\"', "}]", "\n", "é", '",', '\\",[']
    if depth > 4 or rng.random() < 0.5:
        return rng.choice([*texts, 1, -2.5, None, True])
    many = range(rng.randint(1, 5))
    if rng.random() < 0.5:
        return [some_json(rng, depth + 1) for _ in many]
    return {rng.choice(texts) + str(index): some_json(rng, depth + 1) for index in many}


@pytest.mark.parametrize("piece", [1, 2, 7, 64, 2**18])
def test_values_and_depth_are_those_of_the_decoded_text_however_it_is_cut(piece, monkeypatch):
    monkeypatch.setattr(json_shape, "PIECE_NBYTES", piece)
    for seed in range(150 if piece > 2 else 40):
        rng = random.Random(seed)
        value = some_json(rng)
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        count, depth = slow_shape(value)
        found = shape_of(text)
        assert found.depth == depth, text
        lengths = [1 + len(piece) for piece in re.findall(rb'"((?:[^"\\]|\\.)*)"', text)]
        assert found.longest == max(lengths, default=0), text
        assert count <= found.num_values <= 2 * count + 1, text  # an object or list that is not empty has no comma less


def test_empty_lists_and_broken_text():
    assert shape_of(b"") == Shape(1, 0, 0)
    assert shape_of(b"[" * 1000).depth == 1000
    assert shape_of(b'["\\') == Shape(2, 1, 0)
    assert shape_of(b"\\" * 10) == Shape(1, 0, 0)


IDS = b"[" + b",".join([b"5"] * 3_000_000) + b"]"
NESTED = b"[" * 200_000 + b"]" * 200_000
ATTACKS = {
    "/v1/completions": {
        "ids": b'{"prompt":%s}' % IDS,
        "texts": b'{"prompt":[%s]}' % b",".join([b'"a"'] * 2_000_000),
        "text": b'{"prompt":"%s"}' % LONG,
        "bias": b'{"prompt":"a","logit_bias":{%s}}' % b",".join(b'"%d":1' % number for number in range(400_000)),
        "unknown": b'{"prompt":"a",%s}' % b",".join(b'"u%d":1' % number for number in range(400_000)),
        "unknown list": b'{"prompt":"a","mine":%s}' % IDS,
        "deep": b'{"prompt":"a","mine":%s}' % NESTED,
    },
    "/v1/chat/completions": {
        "parts": b'{"messages":[{"role":"user","content":[%s]}]}' % b",".join([b"{}"] * 3_000_000),
        "arguments": b'{"messages":[{"role":"user","content":"a","tool_calls":[{"function":{"name":"f","arguments":{"a":%s}}}]}]}'
        % IDS,
        "variables": b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":%s}}' % IDS,
    },
    "/tokenize": {"text": b'{"prompt":"%s"}' % LONG, "unknown": b'{"prompt":"a","mine":%s}' % IDS},
    "/detokenize": {"ids": b'{"tokens":%s}' % IDS},
    "/v1/cache/explain": {"ids": b'{"prompt":%s}' % IDS, "text": b'{"prompt":"%s"}' % LONG},
}
HELD = max(wire.MAX_VALUES + 4 * CONTEXT, wire.LOOP_NBYTES)


class Watch:
    """Notes every decoding, by bytes and values, with whether the event loop's thread did it."""

    def __init__(self, monkeypatch):
        self.on_loop, self.values = [0], [0]
        decode = msgspec.json.decode

        def watched(body, *arguments, **options):
            if threading.current_thread() is threading.main_thread():
                self.on_loop.append(len(body))
            self.values.append(shape_of(body).num_values)
            return decode(body, *arguments, **options)

        monkeypatch.setattr(msgspec.json, "decode", watched)


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, found in ATTACKS.items() for name in found])
def test_R5_no_large_body_is_decoded_on_the_event_loop_nor_more_values_than_allowed_anywhere(path, name, monkeypatch):
    watch = Watch(monkeypatch)
    tokenised = []
    encode = type(TOKENIZER).encode
    monkeypatch.setattr(
        type(TOKENIZER), "encode", lambda self, text, **options: tokenised.append(len(text)) or encode(self, text, **options)
    )
    status, reply = post(make_app(), path, ATTACKS[path][name])
    assert status == 400, reply
    assert max(watch.on_loop) <= wire.LOOP_NBYTES
    assert max(watch.values) <= HELD
    assert max(tokenised, default=0) <= CONTEXT * TOKENIZER.max_token_chars


def test_a_text_that_cannot_fit_is_refused_with_the_numbers_before_it_is_tokenised():
    limit = CONTEXT * TOKENIZER.max_token_chars
    app = make_app()
    for path, fields in (("/v1/completions", {"max_tokens": 1}), ("/tokenize", {}), ("/v1/cache/explain", {})):
        status, reply = post(app, path, json.dumps({"prompt": "x" * (limit + 1), **fields}).encode())
        error = reply["error"]
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
        assert str(limit) in error["message"]
        assert str(limit + 1) in error["message"]
    for char in "x🎉":  # at its longest in JSON, too
        status, reply = post(app, "/tokenize", json.dumps({"prompt": char * limit}).encode())
        assert status == 200, reply


def test_more_ids_than_the_context_are_refused_before_they_are_looked_at():
    ids = [10**9] * (CONTEXT + 1)
    for path, body in (
        ("/v1/completions", {"prompt": [ids]}),
        ("/v1/completions", {"prompt": ids}),
        ("/detokenize", {"tokens": ids}),
    ):
        status, reply = post(make_app(), path, json.dumps(body).encode())
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")


# A panic of the tokenizer is an error like others.


class Panic(BaseException):
    """As the exceptions of compiled code are: no Exception."""


class Panics:
    """A tokenizer that fails on every text."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, text, **options):
        raise Panic(text)

    def decode(self, ids, **options):
        raise Panic(ids)

    token_text = decode


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "my secret"}),
        ("/tokenize", {"prompt": "my secret"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/cache/explain", {"prompt": "my secret"}),
    ],
)
def test_a_panic_of_compiled_code_ends_as_an_error_object_and_is_counted(path, body):
    app = make_app(Panics(TOKENIZER))

    async def both():
        failed = await call(app, "POST", path, b"", HEADERS, json.dumps(body).encode())
        return failed, await call(app, "GET", "/metrics", b"", HEADERS, b"")

    failed, metrics = asyncio.run(both())
    assert failed.status == 500
    assert failed.headers[b"content-type"] == b"application/json"
    assert failed.headers[b"x-request-id"]
    error = json.loads(failed.body)["error"]
    assert (error["type"], error["code"]) == ("server_error", "500")
    assert "secret" not in error["message"]
    assert b'status="500"} 1' in metrics.body or b'code="500"} 1' in metrics.body


def test_what_ends_a_request_from_outside_is_not_taken_for_a_failure():
    async def scenario():
        task = asyncio.create_task(call(make_app(), "POST", "/tokenize", b"", HEADERS, b""))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


# Long work does not hold up short work, and who does not get a turn comes again.


def test_short_texts_do_not_wait_for_long_ones():
    async def scenario():
        workers, blocked = Workers(), threading.Event()
        long = [asyncio.create_task(workers.run(blocked.wait, size=SHORT_SIZE + 1)) for _ in range(MAX_LONG_WAITING)]
        await asyncio.sleep(0)
        assert await workers.run(lambda: 5, size=SHORT_SIZE) == 5
        assert await workers.decode(lambda: 5) == 5
        with pytest.raises(OverloadedError) as caught:
            await workers.run(lambda: 5, size=SHORT_SIZE + 1)
        assert caught.value.status == 503
        assert caught.value.retry_after_s >= 1
        blocked.set()
        await asyncio.gather(*long)
        assert await workers.run(lambda: 5, size=SHORT_SIZE + 1) == 5
        workers.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}),
    ],
)
@pytest.mark.parametrize(("num_tokens", "builds"), [(2, 0), (3, 1)])
def test_a_reply_of_many_logprobs_is_built_off_the_event_loop(path, given, num_tokens, builds, monkeypatch):
    built, build = [], Workers.build

    async def noting(workers, job):
        built.append(job)
        return await build(workers, job)

    monkeypatch.setattr(Workers, "build", noting)
    monkeypatch.setattr(routes, "LOOP_LOGPROBS", 2)
    engine = FakeEngine(make_info(TOKENIZER.vocab_size, CONTEXT), lambda request: Script([1] * num_tokens))
    template = ChatTemplate(CHATML, special_tokens=TOKENIZER.special_tokens, added_tokens=TOKENIZER.added_tokens)
    app = create_app(engine, TOKENIZER, ServerSettings(), "fake", template=template, lifecycle=Lifecycle())
    status, body = post(app, path, json.dumps({**given, "max_tokens": num_tokens}).encode())
    assert (status, len(built)) == (200, builds)
    assert body["choices"][0]["logprobs"]


LONG_TEXT = "x " * SHORT_SIZE


@pytest.mark.parametrize(
    "said",
    [
        {"reasoning_content": LONG_TEXT},
        {"tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"a": LONG_TEXT})}}]},
        {"tool_calls": [{"function": {"name": "f", "arguments": {"a": LONG_TEXT}}}]},
        {"content": [{"type": "text", "text": LONG_TEXT}]},
    ],
)
def test_a_long_chat_is_rendered_as_long_wherever_its_text_stands(said):
    sizes = []

    class Noting(Workers):
        async def run(self, job, *, size=0):
            sizes.append(size)
            raise OverloadedError("no turn")

    async def scenario():
        messages = msgspec.convert([{"role": "assistant", "content": "", **said}], list[ChatMessage])
        service = SimpleNamespace(template=object(), is_caching_prefixes=False, workers=Noting())
        with pytest.raises(OverloadedError):
            await chat_prompt(service, ChatRequest(messages=messages), messages)

    asyncio.run(scenario())
    assert sizes[0] > SHORT_SIZE


def test_a_text_whose_turn_does_not_come_is_a_503_and_one_that_takes_too_long_a_400():
    async def scenario():
        workers, blocked, ran = Workers(num_threads=1, limit_s=0.05), threading.Event(), []
        first = asyncio.create_task(workers.run(blocked.wait))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="waited longer"):
            await workers.run(lambda: ran.append(1))
        with pytest.raises(RequestError, match="took longer"):
            await first
        blocked.set()
        await workers.run(lambda: None)
        assert not ran, "nobody waits for it any more"
        workers.close()

    asyncio.run(scenario())


def test_a_job_that_nobody_waits_for_keeps_its_place_until_its_thread_is_free():
    async def scenario():
        workers, blocked = Workers(num_threads=1, max_waiting=1), threading.Event()
        first = asyncio.create_task(workers.run(blocked.wait))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        with pytest.raises(OverloadedError):
            await workers.run(lambda: None)
        blocked.set()
        for _ in range(1000):
            try:
                return await workers.run(lambda: None)
            except OverloadedError:
                await asyncio.sleep(0.001)
        raise AssertionError("the place did not come back")

    asyncio.run(scenario())


# Bodies: how many bytes in all.


def pieces_of(*sizes):
    messages = [
        {"type": "http.request", "body": b"x" * size, "more_body": index + 1 < len(sizes)} for index, size in enumerate(sizes)
    ]

    async def receive():
        if messages:
            return messages.pop(0)
        return await asyncio.Future()

    return receive


def test_R16_bytes_of_all_bodies_together_are_bounded_and_given_back():
    async def scenario():
        bodies = Bodies(max_nbytes=100)
        first, second = bodies.of(pieces_of(60, 1), {}), bodies.of(pieces_of(50), {})
        await first.receive()
        with pytest.raises(OverloadedError, match="60 bytes"):
            await second.receive()
        second.release()
        assert bodies.num_nbytes == 60
        first.release()
        assert bodies.num_nbytes == 0
        third = bodies.of(pieces_of(100), {})
        await third.receive()
        assert third.is_complete

    asyncio.run(scenario())


def test_R16_one_clients_bodies_leave_room_for_those_of_others():
    async def scenario():
        bodies = Bodies(max_nbytes=100, client_share=0.5, max_body_nbytes=10)
        one, other = {"client": ("192.0.2.1", 1)}, {"client": ("192.0.2.2", 1)}
        slow = [bodies.of(pieces_of(10, 1), one) for _ in range(8)]
        came = await asyncio.gather(*(body.receive() for body in slow), return_exceptions=True)
        refused = [error for error in came if isinstance(error, ClientShareError)]
        assert len(refused) == 3
        assert "--client-share" in str(refused[0])
        await bodies.of(pieces_of(50), other).receive()
        slow[0].release()
        slow[0].release()
        assert bodies.num_nbytes == 90
        await bodies.of(pieces_of(10), one).receive()

    asyncio.run(scenario())


def test_R16_a_share_is_never_smaller_than_one_body():
    async def scenario():
        bodies = Bodies(max_nbytes=100, client_share=0.1, max_body_nbytes=40)
        await bodies.of(pieces_of(40), {}).receive()

    asyncio.run(scenario())


def test_R16_a_body_counts_until_it_is_decoded_and_no_longer():
    async def scenario():
        engine = FakeEngine(make_info(TOKENIZER.vocab_size, CONTEXT), lambda request: Script([1], delay_s=60.0))
        app = create_app(engine, TOKENIZER, ServerSettings(max_bodies_nbytes=1000), "fake", lifecycle=Lifecycle())
        body = json.dumps({"prompt": "x" * 30, "max_tokens": 1, "user": "y" * 700}).encode()
        slow = asyncio.create_task(call(app, "POST", "/v1/completions", b"", HEADERS, body))
        while not engine.submitted:
            await asyncio.sleep(0.001)
        answer = await call(app, "POST", "/tokenize", b"", HEADERS, body)
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        assert answer.status == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("padding", [0, 2**16])
def test_the_bound_on_depth_is_one_for_small_and_large_bodies(padding):
    app = make_app()
    for depth, expected in ((90, 200), (101, 400)):
        given = {"prompt": "x", "user": json.loads("[" * depth + "]" * depth), "metadata": ["y" * 16] * (padding // 16)}
        status, body = post(app, "/tokenize", json.dumps(given).encode())
        assert status == expected
        assert ("deeper than 100 levels" in str(body)) == (expected == 400)


def test_R16_the_server_refuses_more_bodies_than_it_may_hold_and_takes_them_later():
    app = make_app(max_bodies_nbytes=1000)
    assert post(app, "/tokenize", json.dumps({"prompt": "x" * 2000}).encode())[0] == 503
    assert post(app, "/tokenize", json.dumps({"prompt": "x" * 900}).encode())[0] == 200
    assert post(app, "/tokenize", json.dumps({"prompt": "x" * 900}).encode())[0] == 200


def test_an_error_that_repeats_half_a_character_is_still_an_error_object():
    answer = asyncio.run(call(make_app(), "GET", "/v1/models/\ud800", b"", HEADERS, b""))
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (404, "model_not_found")
