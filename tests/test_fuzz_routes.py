"""Random requests to every route, over a real engine: extreme numbers, wrong types, depth, length, bad bytes, clients that leave.

Three thousand in the default suite, a hundred thousand under `slow`, in parts. None gets a 5xx but a 503 for a full server; an
error is OpenAI's object with a request id; a fixed request among them always gets the same answer; at the end nothing is left
open, held or running. A failing seed is in the test's name.
"""

import asyncio
import gc
import json
import random

import pytest

from hybridserve.config import EngineSettings, ServerSettings
from tests.core_client import CoreClient, demo_app

ENGINE = EngineSettings(
    model="demo", kv_cache_memory=2**22, max_num_seqs=4, max_num_queued_reqs=32, max_model_len=96, threads=1, block_size=16
)
SERVER = ServerSettings(max_body_nbytes=2**18, max_bodies_nbytes=2**21)
AT_ONCE = 6
#: A round is a number of requests that run at once, and the canary among them.
ROUND = 12
VOCAB = 1024

FLOATS = [
    *(0.0, -0.0, 0.5, 1.0, 1.5, 2.0, -2.0, 100.0, 1e-46, 1e-45, 1e-39, 1.2e-38, 2e-38, 1e-8, 5e-324, 1e-308, 1e38, 3.5e38, 1e308),
    *(float("nan"), float("inf"), -float("inf"), -1e-46, 0.001, 0.9999999999, 1.0000001, 1e-3),
]
INTS = [
    0,
    1,
    2,
    3,
    -1,
    5,
    20,
    21,
    64,
    96,
    97,
    128,
    1024,
    2**31 - 1,
    2**31,
    2**53,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    10**30,
    10**400,
]
IDS = [0, 1, 2, 3, 17, 255, 500, VOCAB - 1, VOCAB, -1, 2**31, 2**63, 10**20]
TEXTS = [
    *("", " ", "a", "hello there", "2 plus 2 is", "\x00", "\ud800", "\udfff\ud83d", "🎉", "e\u0301" * 30, "\u202e abc", "ﷺ" * 20),
    *("<|im_start|>system", "<|im_end|>", "</s>", "{{ messages }}", "{% for x in y %}", "a" * 300, " " * 5000, "\n" * 700),
    *("word " * 500, "\ufeff", "\u200b\u200d", "\x1b[31m", "null", "0", "-1", "[1, 2]", '{"a": 1}'),
]


class Source:
    """Values from one random number generator."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def chance(self, probability):
        return self.rng.random() < probability

    def text(self):
        if self.chance(0.1):
            return "".join(chr(self.rng.choice([self.rng.randrange(0x80), self.rng.randrange(0x11000)])) for _ in range(12))
        return self.rng.choice(TEXTS)

    def number(self):
        if self.chance(0.1):
            return self.rng.uniform(-3, 3) * 10.0 ** self.rng.randint(-50, 50)
        return self.rng.choice(FLOATS if self.chance(0.6) else INTS)

    def ids(self):
        if self.chance(0.1):
            return [self.rng.choice(IDS) for _ in range(self.rng.choice([0, 1, 90, 97, 3000]))]
        return [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 60))]

    def anything(self, depth=0):
        """A value of any type."""
        kinds = [self.text, self.number, self.ids, lambda: None, lambda: self.chance(0.5)]
        if depth < 3:
            kinds += [self.nested, lambda: [self.anything(depth + 1) for _ in range(3)]]
            kinds += [lambda: {self.text(): self.anything(depth + 1) for _ in range(3)}]
        return self.rng.choice(kinds)()

    def nested(self):
        value = "x"
        for _ in range(self.rng.choice([2, 60, 400])):
            value = [value] if self.chance(0.5) else {"a": value}
        return value

    def message(self):
        message = {"role": self.rng.choice(["user", "assistant", "system", "tool", "developer", "user", self.text()])}
        content = [self.text, self.parts, lambda: None, self.anything]
        message["content"] = self.rng.choices(content, [8, 2, 1, 1])[0]()
        for name, make in (
            ("tool_calls", self.tool_calls),
            ("reasoning_content", self.text),
            ("reasoning", self.text),
            ("name", self.text),
            ("refusal", self.text),
            ("tool_call_id", self.anything),
            ("cache_control", lambda: {"type": self.rng.choice(["ephemeral", "other"])}),
        ):
            if self.chance(0.07):
                message[name] = make()
        return message

    def parts(self):
        kinds = ["text", "text", "input_text", "refusal", "image_url", self.text()]
        return [
            {"type": self.rng.choice(kinds), "text": self.text(), "refusal": self.text()} for _ in range(self.rng.randint(0, 4))
        ]

    def tool_calls(self):
        arguments = [lambda: '{"a": 1}', lambda: "", lambda: "[" * 5000, self.text, lambda: {"a": self.nested()}, self.anything]
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": self.rng.choice(arguments)()}}
        return self.rng.choice([[call], [call, call], [{"custom": {"name": "c", "input": self.text()}}], self.anything()])

    def messages(self):
        if self.chance(0.03):
            return [{"role": "user", "content": "x"}] * self.rng.choice([0, 500, 5000])
        return [self.message() for _ in range(self.rng.randint(1, 4))]

    def prompt(self):
        kinds = [self.text, self.ids, lambda: [self.text(), self.text()], lambda: [self.ids(), self.ids()], self.anything]
        return self.rng.choices(kinds, [6, 4, 1, 1, 1])[0]()

    def switch(self):
        return self.chance(0.5)

    def small(self):
        return self.rng.choice([0, 1, 1, 2, 3, 5])

    def bias(self):
        return {str(self.rng.choice(IDS)): self.rng.choice([self.number(), 0, 100, -100]) for _ in range(self.rng.randint(0, 5))}

    def sampling(self):
        """Fields of generations, each a function that makes a value that could be right."""
        rng = self.rng
        return {
            "temperature": lambda: rng.choice([self.number(), 0, 1.0, 1e-46, 1e-38]),
            "top_p": lambda: rng.choice([self.number(), 0.9, 1e-46]),
            "min_p": lambda: rng.choice([self.number(), 0.1]),
            "top_k": lambda: rng.choice([self.number(), 1, 5, -1]),
            "presence_penalty": self.number,
            "frequency_penalty": self.number,
            "repetition_penalty": lambda: rng.choice([self.number(), 0.001, 100.0]),
            "seed": self.number,
            "n": self.small,
            "min_tokens": self.small,
            "logit_bias": self.bias,
            "stop": lambda: rng.choice([self.text(), [self.text()] * self.small(), ["x"] * 40]),
            "stop_token_ids": lambda: rng.choice([self.ids()[:5], list(range(128)), list(range(VOCAB))]),
            "include_stop_str_in_output": self.switch,
            "ignore_eos": self.switch,
            "skip_special_tokens": self.switch,
            "spaces_between_special_tokens": self.switch,
            "add_special_tokens": self.switch,
            "prompt_logprobs": self.small,
            "stream": self.switch,
            "stream_options": lambda: {"include_usage": self.switch(), "continuous_usage_stats": self.switch()},
            "cache_salt": lambda: rng.choice([self.text(), "tenant"]),
            "return_token_ids": self.switch,
            "hybrid_xargs": lambda: {"explain": self.switch(), "cache": {"pin": self.switch(), "no_store": self.switch()}},
            "user": self.text,
            "tools": lambda: rng.choice([[], None, self.anything()]),
            "response_format": lambda: rng.choice([{"type": "text"}, {"type": "json_object"}, self.anything()]),
            "best_of": self.small,
            self.text(): self.anything,
        }

    def chat(self):
        return {
            "add_generation_prompt": self.switch,
            "continue_final_message": self.switch,
            "chat_template_kwargs": lambda: {self.text(): self.anything(), "enable_thinking": self.switch()},
            "reasoning_effort": self.text,
        }

    def body(self, path):
        """The JSON value for a route, most of its fields of the right type."""
        has_prompt = self.chance(0.5)
        if path == "/v1/completions":
            needed = {"prompt": self.prompt, "max_tokens": self.small}
            others = {**self.sampling(), "echo": self.switch, "logprobs": self.small, "split_special_tokens": self.switch}
        elif path == "/v1/chat/completions":
            needed = {"messages": self.messages, "max_tokens": self.small}
            others = {**self.sampling(), **self.chat(), "logprobs": self.switch, "top_logprobs": self.small}
            others["max_completion_tokens"] = self.small
        elif path == "/detokenize":
            needed, others = {"tokens": self.ids}, {}
        else:
            needed = {"prompt": self.prompt} if has_prompt else {"messages": self.messages}
            others = {**self.chat(), "add_special_tokens": self.switch, "return_token_strs": self.switch, "cache_salt": self.text}
        fields = {name: make() for name, make in needed.items() if self.chance(0.97)}
        fields |= {name: make() for name, make in others.items() if self.chance(0.12)}
        if self.chance(0.1):
            fields[self.rng.choice([*needed, *others])] = self.anything()
        if self.chance(0.1):
            fields["model"] = self.rng.choice(["demo", self.text(), None, 5])
        return fields

    def bytes(self, path):
        """A body: mostly JSON."""
        if self.chance(0.02):
            deep = self.rng.choice([10, 1000, 100_000])
            return self.rng.choice([b"[" * deep, b'{"prompt":' * deep, b"[" * deep + b"]" * deep])
        if self.chance(0.02):
            return b'{"prompt":[%s]}' % b",".join([b"5"] * self.rng.choice([100, 5000, 130_000]))
        if self.chance(0.01):
            return b"x" * (SERVER.max_body_nbytes + self.rng.choice([-1, 0, 1]))
        body = json.dumps(self.body(path)).encode()
        if self.chance(0.08):
            body = bytearray(body)
            for _ in range(self.rng.randint(1, 4)):
                body[self.rng.randrange(len(body))] = self.rng.randrange(256)
            body = bytes(body[: self.rng.choice([len(body), self.rng.randrange(len(body) + 1)])])
        return body

    def query(self):
        if self.chance(0.2):
            return bytes(self.rng.randrange(256) for _ in range(20))
        pairs = [
            (name, self.rng.choice(["2 plus", "[1,2,3]", "[", "true", "[[1]]", "%ff%00", "1e999", "null", '{"a":1}']))
            for name in self.rng.sample(["prompt", "messages", "cache_salt", "add_special_tokens", "model", "x"], 2)
        ]
        return "&".join(f"{name}={value}" for name, value in pairs).encode()

    def headers(self):
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        odd = [b"1", b"0", b"true", b"maybe", b"\xff\xfe", b"", b"9" * 5000]
        odd += [b"Basic !!!", b"Bearer \xe9", b"null", b"http://localhost"]
        names = (b"x-hybridserve-explain", b"x-request-id", b"content-length", b"authorization", b"origin", b"host")
        return [*headers, *((name, self.rng.choice(odd)) for name in names if self.chance(0.02))]


POSTS = ["/v1/completions"] * 5 + ["/v1/chat/completions"] * 5 + ["/tokenize", "/detokenize", "/v1/cache/explain"]
GETS = [
    "/v1/models",
    "/v1/models/demo",
    "/v1/models/\ud800",
    "/v1/limits",
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/openapi.json",
]
GETS += ["/", "/v1/cache/explain", "/v1/cache/explain", "/nowhere", "/v1/completions", "//", "/v1/models/" + "x" * 3000]


class Answer:
    """What one request got."""

    def __init__(self):
        self.status, self.headers, self.body, self.is_whole = 0, {}, b"", False


async def call(app, method, path, query, headers, body, leaves_after=None):
    """One request as a server hands it over. `leaves_after`: turns of the event loop after which the client has gone."""
    answer = Answer()
    pieces = [body[: len(body) // 2], body[len(body) // 2 :]]
    gone = asyncio.Event()

    async def receive():
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.start":
            answer.status, answer.headers = message["status"], dict(message["headers"])
        else:
            answer.body += message.get("body", b"")
            answer.is_whole = not message.get("more_body", False)

    async def leave():
        for _ in range(leaves_after):
            await asyncio.sleep(0)
        gone.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "root_path": "",
        "path": path,
        "raw_path": path.encode("utf-8", "replace"),
        "query_string": query,
        "headers": headers,
        "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 8000),
    }
    leaving = asyncio.create_task(leave()) if leaves_after is not None else None
    await app(scope, receive, send)
    if leaving is not None:
        leaving.cancel()
    return answer


def check(answer, what, *, left):
    """The promises about every answer. A client that has left may have got none."""
    if left and not answer.is_whole:
        return
    assert answer.is_whole, what
    assert answer.status < 500 or answer.status == 503, (what, answer.status, answer.body[:300])
    assert answer.headers.get(b"x-request-id"), what
    if answer.status >= 400:
        error = json.loads(answer.body)
        if "error" in error:
            assert error["error"]["message"], what
            assert set(error["error"]) == {"message", "type", "param", "code"}, what
        else:
            assert what[1] == "/ready", what
    elif answer.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        events = [line[6:] for line in answer.body.split(b"\n") if line.startswith(b"data: ")]
        told = [json.loads(event) for event in events if event != b"[DONE]"]
        failed = [event["error"] for event in told if "error" in event]
        assert all(error["type"] in ("overloaded_error", "invalid_request_error") for error in failed), (
            what,
            failed,
        )
        assert failed or events[-1] == b"[DONE]", what
    elif answer.headers[b"content-type"].startswith(b"application/json"):
        json.loads(answer.body)


CANARY = json.dumps(
    {"prompt": "2 plus 3 is", "max_tokens": 8, "temperature": 0, "logprobs": 2, "return_token_ids": True, "ignore_eos": True}
).encode()


def said(answer):
    assert answer.status == 200, answer.body
    (choice,) = json.loads(answer.body)["choices"]
    return choice["token_ids"], choice["text"]


async def fuzz(count, seed):
    """`count` requests. Returns how many got which status."""
    client = CoreClient(core())
    app = demo_app(client, SERVER, ENGINE)
    plain = [(b"host", b"localhost")]
    expected = said(await call(app, "POST", "/v1/completions", b"", plain, CANARY))
    source, statuses, sizes = Source(seed), {}, []
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number):
        is_post = source.chance(0.93)
        path = source.rng.choice(POSTS if is_post else GETS)
        body = source.bytes(path) if is_post else b""
        query = source.query() if path.endswith("explain") and not is_post else b""
        leaves_after = source.rng.randint(0, 40) if source.chance(0.05) else None
        headers = source.headers()
        method = ("POST" if is_post else "GET") if source.chance(0.98) else source.rng.choice(["PUT", "HEAD", "DELETE", "PATCH"])
        if method == "HEAD":
            method = "GET"
        what = (method, path, query, headers, body[:2000], f"seed {seed}, request {number}")
        async with gate:
            answer = await call(app, method, path, query, headers, body, leaves_after)
        check(answer, what, left=leaves_after is not None)
        statuses[answer.status] = statuses.get(answer.status, 0) + 1

    for start in range(0, count, ROUND):
        canary = call(app, "POST", "/v1/completions", b"", plain, CANARY)
        first, *_ = await asyncio.gather(canary, *(one(start + index) for index in range(ROUND)))
        assert said(first) == expected, f"the canary's answer differs among requests {start} to {start + ROUND} of seed {seed}"
        if start % (50 * ROUND) == 0:
            gc.collect()
            sizes.append(len(gc.get_objects()))
    await nothing_is_left(client)
    return statuses, sizes


async def nothing_is_left(client):
    for _ in range(1000):
        await asyncio.sleep(0)
    assert not client.num_open
    assert not client.core.has_work
    client.core.check()
    stats = client.core.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    client.core.clear_cache()
    stats = client.core.stats()
    assert (stats.blocks_used, stats.slots_used) == (0, 0)


def core():
    from hybridserve.engine.core import EngineCore

    return EngineCore(ENGINE)


def check_run(count, seed):
    statuses, sizes = asyncio.run(fuzz(count, seed))
    assert statuses[200] > count // 10, f"{statuses}: the fuzz must reach the engine"
    assert statuses[400] > count // 10, statuses
    middle = sizes[len(sizes) // 2]
    assert sizes[-1] < 1.1 * middle + 5000, f"objects that are held grow: {sizes}"


def test_I21_three_thousand_requests_of_all_kinds_harm_nobody():
    check_run(3000, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
def test_I21_a_hundred_thousand_requests_of_all_kinds_harm_nobody(part):
    check_run(5000, seed=1 + part)
