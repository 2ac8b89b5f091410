"""The generation and text routes as raw ASGI endpoints: read, check, run, answer.

Owns the order of these steps. Must not know what a reply holds. Listed by `app.py`.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from hybridserve.errors import RequestError
from hybridserve.server.call import CallIds
from hybridserve.server.chats import ChatEvents, chat_call, chat_reply
from hybridserve.server.completions import CompletionEvents, completion_call, completion_reply
from hybridserve.server.fault import send_json
from hybridserve.server.gate import read_body
from hybridserve.server.generation import collect_all
from hybridserve.server.prompts import cache_hints, chat_prompt, checked_ids, completion_prompts
from hybridserve.server.replies import DetokenizeReply, TokenizeReply
from hybridserve.server.service import Service
from hybridserve.server.stream import send_stream, until_disconnect
from hybridserve.server.wire import ChatRequest, CompletionRequest, DetokenizeRequest, ExplainRequest, TokenizeRequest, read

Endpoint: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

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
        arrival = time.monotonic()
        service = self._service
        request, unknown = read(CompletionRequest, await self._body(receive))
        service.check_model(request.model)
        headers = self._ignored.headers(unknown)
        with service.lifecycle.call(service.client):
            call = await completion_call(service, request, call_id=self._ids.next(), arrival=arrival)
            if request.stream:
                events = CompletionEvents(service.tokenizer, request, call)
                await send_stream(call.choices, service.client, events, receive, send, headers)
                return
            async with until_disconnect(receive):
                wholes = await collect_all(call.choices, service.client, service.client.info.max_num_seqs)
                reply = completion_reply(service.tokenizer, request, call, wholes)
                await send_json(msgspec.json.encode(reply), send, headers=headers)

    async def chat_completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /v1/chat/completions`."""
        arrival = time.monotonic()
        service = self._service
        request, unknown = read(ChatRequest, await self._body(receive))
        service.check_model(request.model)
        headers = self._ignored.headers(unknown)
        with service.lifecycle.call(service.client):
            call = await chat_call(service, request, call_id=self._ids.next(), arrival=arrival)
            if request.stream:
                events = ChatEvents(service.tokenizer, request, call)
                await send_stream(call.choices, service.client, events, receive, send, headers)
                return
            async with until_disconnect(receive):
                wholes = await collect_all(call.choices, service.client, service.client.info.max_num_seqs)
                reply = chat_reply(service.tokenizer, request, call, wholes)
                await send_json(msgspec.json.encode(reply), send, headers=headers)

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /tokenize`: ids of a prompt, or of a chat as it would be sent to the model."""
        service = self._service
        request, unknown = read(TokenizeRequest, await self._body(receive))
        service.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if request.messages is not None:
            ids = (await chat_prompt(service, request, request.messages)).token_ids
        else:
            text, add_special = request.prompt or "", request.add_special_tokens is not False
            ids = await service.workers.run(lambda: service.tokenizer.encode(text, add_special_tokens=add_special))
        texts = [service.tokenizer.token_text(token_id) for token_id in ids] if request.return_token_strs else None
        reply = TokenizeReply(len(ids), service.client.info.max_model_len, ids, texts)
        await send_json(msgspec.json.encode(reply), send, headers=self._ignored.headers(unknown))

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /detokenize`: the text of token ids, special tokens included."""
        service = self._service
        request, unknown = read(DetokenizeRequest, await self._body(receive))
        service.check_model(request.model)
        ids = checked_ids(service, request.tokens, "tokens") if request.tokens else []
        text = await service.workers.run(lambda: service.tokenizer.decode(ids, skip_special_tokens=False))
        await send_json(msgspec.json.encode(DetokenizeReply(text)), send, headers=self._ignored.headers(unknown))

    async def explain(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET` or `POST /v1/cache/explain`: what a prompt would hit now and why not more, without running it."""
        service = self._service
        data = await self._body(receive) if scope["method"] == "POST" else _query_as_json(scope)
        request, unknown = read(ExplainRequest, data)
        service.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if request.messages is not None:
            chat = ChatRequest(messages=request.messages, chat_template_kwargs=request.chat_template_kwargs)
            prompt = await chat_prompt(service, chat, request.messages)
        else:
            given: str | list[str | int | list[int]] = (
                list(request.prompt) if isinstance(request.prompt, list) else request.prompt or ""
            )
            (prompt,) = await completion_prompts(service, CompletionRequest(prompt=given))
        hints = cache_hints(CompletionRequest(prompt="", cache_salt=request.cache_salt), prompt)
        explanation = await service.client.explain(prompt.token_ids, hints)
        await send_json(msgspec.json.encode(explanation), send, headers=self._ignored.headers(unknown))

    async def _body(self, receive: Receive) -> bytes:
        return await read_body(receive, self._service.settings.max_body_nbytes)


def _query_as_json(scope: Scope) -> bytes:
    """The query of a GET as the body of a POST: `messages`, and a `prompt` of token ids, are JSON in it."""
    found = dict(parse_qsl(scope["query_string"].decode("latin-1")))
    parts = [msgspec.json.encode(name) + b":" + _query_value(name, value) for name, value in found.items()]
    return b"{" + b",".join(parts) + b"}"


def _query_value(name: str, value: str) -> bytes:
    is_json = name in ("messages", "chat_template_kwargs") or (name == "prompt" and value.startswith("["))
    return value.encode() if is_json else msgspec.json.encode(value)
