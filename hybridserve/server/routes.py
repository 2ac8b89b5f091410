"""The generation and text routes as raw ASGI endpoints: read, check, run, answer.

Owns the order of these steps. Must not know what a reply holds. Listed by `app.py`.
"""

import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from hybridserve.engine.unread import Unread
from hybridserve.errors import RequestError
from hybridserve.server.bodies import BODY
from hybridserve.server.call import Arrived, CallIds
from hybridserve.server.chats import ChatEvents, chat_call, chat_reply
from hybridserve.server.completions import CompletionEvents, completion_call, completion_reply
from hybridserve.server.fault import send_json
from hybridserve.server.gate import TENANT_SALT, read_body
from hybridserve.server.generation import Choice, Delta, collect_all
from hybridserve.server.places import Held, client_of
from hybridserve.server.prompts import (
    Prompt,
    cache_hints,
    chat_prompt,
    check_num_chars,
    check_num_ids,
    checked_ids,
    completion_prompts,
    control_of,
    located,
    max_tokens_for,
)
from hybridserve.server.replies import DetokenizeReply, TokenizeReply
from hybridserve.server.service import Service
from hybridserve.server.stream import Events, send_stream, until_disconnect
from hybridserve.server.wire import (
    LOOP_NBYTES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ExplainRequest,
    R,
    TokenizeRequest,
    check_depth,
    check_shape,
    read,
)

Endpoint: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Asks for an explanation of the prefix hit in the reply.
EXPLAIN_HEADER = b"x-hybridserve-explain"
_SWITCH = {b"": False, b"0": False, b"false": False, b"1": True, b"true": True}
#: Replies with log-probabilities of so many tokens are built on the event loop, larger ones in a thread.
LOOP_LOGPROBS = 256
#: Names of unknown fields that were logged; more are not remembered.
_MAX_LOGGED_NAMES = 256

log = logging.getLogger("hybridserve.server")


class IgnoredFields:
    """Tells about fields that mean nothing here: in a header each time, in the log once per name."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def headers(self, names: list[str]) -> list[tuple[bytes, bytes]]:
        if not names:
            return []
        shown = [ascii(name[:64])[1:-1].replace(",", "") for name in names]
        new = [name for name in shown if name not in self._logged]
        if new and len(self._logged) < _MAX_LOGGED_NAMES:
            self._logged.update(new)
            log.warning("a client sent fields that mean nothing here: %s", ", ".join(new))
        return [(b"x-hybridserve-ignored", ", ".join(shown).encode("ascii"))]


class Routes:
    """Endpoints of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ids = CallIds()
        self._ignored = IgnoredFields()

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /v1/completions`."""
        with self._places(scope) as held:
            await self._completion(scope, receive, send, held)

    async def _completion(self, scope: Scope, receive: Receive, send: Send, held: Held) -> None:
        arrived, service = self._arrived(scope), self._service
        request, unknown = await self._read(scope, CompletionRequest, await self._body(receive))
        service.check_model(request.model)
        headers = self._ignored.headers(unknown)
        with service.lifecycle.call(service.client):
            call = await completion_call(service, request, arrived)
            held.widen(len(call.choices))
            if request.stream:
                events = CompletionEvents(service.tokenizer, request, call)
                await self._stream(call.choices, events, receive, send, headers, held.count)
                return
            async with until_disconnect(receive):
                wholes = await collect_all(call.choices, service.client, held.count)
                build = functools.partial(completion_reply, service.tokenizer, request, call, wholes)
                await send_json(await self._built(build, call.choices, wholes), send, headers=headers)

    async def chat_completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /v1/chat/completions`."""
        with self._places(scope) as held:
            await self._chat(scope, receive, send, held)

    async def _chat(self, scope: Scope, receive: Receive, send: Send, held: Held) -> None:
        arrived, service = self._arrived(scope), self._service
        request, unknown = await self._read(scope, ChatRequest, await self._body(receive))
        service.check_model(request.model)
        headers = self._ignored.headers(unknown)
        with service.lifecycle.call(service.client):
            call = await chat_call(service, request, arrived)
            held.widen(len(call.choices))
            if request.stream:
                events = ChatEvents(service.tokenizer, request, call)
                await self._stream(call.choices, events, receive, send, headers, held.count)
                return
            async with until_disconnect(receive):
                wholes = await collect_all(call.choices, service.client, held.count)
                build = functools.partial(chat_reply, service.tokenizer, request, call, wholes)
                await send_json(await self._built(build, call.choices, wholes), send, headers=headers)

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /tokenize`: ids of a prompt, or of a chat as it would be sent to the model."""
        service = self._service
        request, unknown = await self._read(scope, TokenizeRequest, await self._body(receive))
        service.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if request.messages is not None:
            ids = (await chat_prompt(service, request, request.messages)).token_ids
        else:
            text, add_special = request.prompt or "", request.add_special_tokens is not False
            check_num_chars(service, len(text), "prompt")
            control = control_of(service, request.split_special_tokens)
            ids = await service.workers.run(
                lambda: service.tokenizer.encode(text, add_special_tokens=add_special, control=control), size=len(text)
            )

        def reply() -> bytes:
            texts = [service.tokenizer.token_text(token_id) for token_id in ids] if request.return_token_strs else None
            return msgspec.json.encode(TokenizeReply(len(ids), service.client.info.max_model_len, ids, texts))

        await send_json(await service.workers.run(reply, size=len(ids)), send, headers=self._ignored.headers(unknown))

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /detokenize`: the text of token ids, special tokens included."""
        service = self._service
        request, unknown = await self._read(scope, DetokenizeRequest, await self._body(receive))
        service.check_model(request.model)
        check_num_ids(service, len(request.tokens), "tokens")
        ids = checked_ids(service, request.tokens, "tokens") if request.tokens else []
        text = await service.workers.run(lambda: service.tokenizer.decode(ids, skip_special_tokens=False), size=len(ids))
        await send_json(msgspec.json.encode(DetokenizeReply(text)), send, headers=self._ignored.headers(unknown))

    async def explain(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET` or `POST /v1/cache/explain`: what a prompt would hit now and why not more, without running it."""
        service = self._service
        data = await self._body(receive) if scope["method"] == "POST" else _query_as_json(scope)
        request, unknown = await self._read(scope, ExplainRequest, data)
        service.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        prompt = await self._prompt_to_explain(request)
        max_tokens_for(service, prompt, None, None, "max_tokens", "prompt" if request.messages is None else "messages")
        hints = cache_hints(CompletionRequest(prompt="", cache_salt=request.cache_salt), prompt, scope[TENANT_SALT])
        with self._places(scope), service.lifecycle.call(service.client):
            explanation = await located(service, prompt, await service.client.explain(prompt.token_ids, hints))
        await send_json(msgspec.json.encode(explanation), send, headers=self._ignored.headers(unknown))

    async def _prompt_to_explain(self, request: ExplainRequest) -> Prompt:
        if request.messages is not None:
            chat = ChatRequest(
                messages=request.messages,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                chat_template_kwargs=request.chat_template_kwargs,
                reasoning_effort=request.reasoning_effort,
                add_special_tokens=request.add_special_tokens,
            )
            return await chat_prompt(self._service, chat, request.messages)
        given: str | list[str | int | list[int]] = (
            list(request.prompt) if isinstance(request.prompt, list) else request.prompt or ""
        )
        completion = CompletionRequest(
            prompt=given, add_special_tokens=request.add_special_tokens, split_special_tokens=request.split_special_tokens
        )
        (prompt,) = await completion_prompts(self._service, completion)
        return prompt

    def _places(self, scope: Scope) -> AbstractContextManager[Held]:
        return self._service.places.hold(client_of(scope))

    async def _stream(
        self,
        choices: Sequence[Choice],
        events: Events,
        receive: Receive,
        send: Send,
        headers: list[tuple[bytes, bytes]],
        max_at_once: int,
    ) -> None:
        unread = Unread(self._service.settings.max_unread_nbytes)
        try:
            await send_stream(choices, self._service.client, events, receive, send, headers, unread, max_at_once)
        finally:
            if unread.was_full:
                self._service.lifecycle.ended["max_unread_nbytes"] += 1

    async def _built(self, build: Callable[[], msgspec.Struct], choices: Sequence[Choice], wholes: Sequence[Delta]) -> bytes:
        """A whole reply as JSON; one of many log-probabilities is built and encoded in a thread."""
        count = sum(len(whole.logprobs) for whole in wholes) + sum(len(choice.prompt_logprobs or ()) for choice in choices)
        if count <= LOOP_LOGPROBS:
            return msgspec.json.encode(build())
        return await self._service.workers.build(lambda: msgspec.json.encode(build()))

    def _arrived(self, scope: Scope) -> Arrived:
        return Arrived(self._ids.next(), time.monotonic(), _wants_explanation(scope), scope[TENANT_SALT])

    async def _read(self, scope: Scope, kind: type[R], body: bytes) -> tuple[R, list[str]]:
        """See `read`. What is large is counted first, and decoded in a thread. After that the body's bytes count no longer."""
        request, unknown = await self._decode(kind, body)
        scope[BODY].release()
        return request, unknown

    async def _decode(self, kind: type[R], body: bytes) -> tuple[R, list[str]]:
        if len(body) <= LOOP_NBYTES:
            check_depth(body)
            return read(kind, body)
        max_model_len = self._service.client.info.max_model_len
        max_chars = max_model_len * self._service.tokenizer.max_token_chars

        def read_large() -> tuple[R, list[str]]:
            check_shape(kind, body, max_model_len=max_model_len, max_chars=max_chars)
            return read(kind, body)

        return await self._service.workers.decode(read_large)

    async def _body(self, receive: Receive) -> bytes:
        return await read_body(receive, self._service.settings.max_body_nbytes)


def _wants_explanation(scope: Scope) -> bool:
    """Whether the header asks for what `hybrid_xargs.explain` asks for: for clients that cannot add fields to a body."""
    given = next((value for name, value in scope["headers"] if name == EXPLAIN_HEADER), b"").strip().lower()
    if given not in _SWITCH:
        raise RequestError(f"X-Hybridserve-Explain is {ascii(given[:64])[2:-1]}; send 1, or leave it out")
    return _SWITCH[given]


def _query_as_json(scope: Scope) -> bytes:
    """The query of a GET as the body of a POST: all but texts, and a `prompt` of token ids, are JSON in it."""
    found = dict(parse_qsl(scope["query_string"].decode("latin-1")))
    parts = [msgspec.json.encode(name) + b":" + _query_value(name, value) for name, value in found.items()]
    return b"{" + b",".join(parts) + b"}"


def _query_value(name: str, value: str) -> bytes:
    is_text = name in ("model", "cache_salt", "reasoning_effort") or (name == "prompt" and not value.startswith("["))
    return msgspec.json.encode(value) if is_text else value.encode()
