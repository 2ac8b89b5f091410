"""Routes that tell about the server: models, limits, health, readiness, version, metrics.

Owns those small replies. Listed by `app.py`.
"""

import asyncio
import importlib.metadata
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from hybridserve import request as bounds
from hybridserve.engine.messages import ANSWER_LIMIT_S, EngineInfo, EngineStats
from hybridserve.engine.shape import MAX_DEPTH
from hybridserve.errors import HybridServeError
from hybridserve.server.connections import KEEP_ALIVE_S, MAX_HEADER_NBYTES
from hybridserve.server.fault import send_json
from hybridserve.server.openapi import openapi
from hybridserve.server.service import Service
from hybridserve.server.wire import MAX_MESSAGES, MAX_PROMPTS, MAX_SEQUENCES, MAX_VALUES

#: How long `/metrics` waits for the engine's numbers before it shows the last ones.
STATS_LIMIT_S = 2.0


class StatusRoutes:
    """Endpoints of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._version = importlib.metadata.version("hybridserve")

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /v1/models`: the names that the server was told to have, without paths."""
        names = (self._service.model_name, *self._service.settings.served_model_name[1:])
        await send_json(msgspec.json.encode({"object": "list", "data": [self._card(name) for name in names]}), send)

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /v1/models/{id}`."""
        self._service.check_model(scope["path_params"]["model_id"])
        await send_json(msgspec.json.encode(self._card(self._service.model_name)), send)

    async def limits(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /v1/limits`: every bound of a request, how memory is divided, and the features that are off with the reason."""
        info = self._service.client.info
        settings, places = self._service.settings, self._service.places
        reply = {
            "parameters": {name: {"min": low, "max": high} for name, (low, high) in bounds.LIMITS.items()},
            "max_model_len": info.max_model_len,
            "vocab_size": info.vocab_size,
            "max_num_seqs": info.max_num_seqs,
            "max_num_queued_reqs": info.max_num_queued_reqs,
            "max_prompts": MAX_PROMPTS,
            "max_sequences_per_request": MAX_SEQUENCES,
            "max_messages": MAX_MESSAGES,
            "max_values": MAX_VALUES,
            "max_depth": MAX_DEPTH,
            "max_stop_strings": bounds.MAX_STOP_STRINGS,
            "max_stop_string_chars": bounds.MAX_STOP_STRING_CHARS,
            "max_stop_token_ids": bounds.MAX_STOP_TOKEN_IDS,
            "max_logit_bias": bounds.MAX_LOGIT_BIAS,
            "max_cache_salt_chars": bounds.MAX_CACHE_SALT_CHARS,
            "max_cache_marks": bounds.MAX_CACHE_MARKS,
            "max_body_nbytes": settings.max_body_nbytes,
            "max_bodies_nbytes": settings.max_bodies_nbytes,
            "max_prompt_chars": info.max_model_len * self._service.tokenizer.max_token_chars,
            "request_timeout_s": settings.request_timeout_s,
            "max_places": places.total,
            "max_places_per_client": places.max_per_client,
            "max_connections": settings.max_connections,
            "client_share": settings.client_share,
            "max_header_nbytes": MAX_HEADER_NBYTES,
            "header_timeout_s": settings.header_timeout_s,
            "body_timeout_s": settings.body_timeout_s,
            "write_timeout_s": settings.write_timeout_s,
            "keep_alive_s": KEEP_ALIVE_S,
            "max_unread_nbytes": settings.max_unread_nbytes,
            "step_timeout_s": settings.step_timeout_s,
            "answer_timeout_s": ANSWER_LIMIT_S,
            "features_off": info.features_off,
            "memory": _memory(info),
            "backends": info.backends,
        }
        await send_json(msgspec.json.encode(reply), send)

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /health`: 200 while this process lives."""
        await send_json(b'{"status":"ok"}', send)

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /ready`: 200 when requests make progress, else 503 with what is the matter."""
        state = self._service.lifecycle.state(self._service.client)
        headers = [] if state == "ready" else [(b"retry-after", b"5")]
        await send_json(msgspec.json.encode({"status": state}), send, status=200 if state == "ready" else 503, headers=headers)

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /version`."""
        await send_json(msgspec.json.encode({"version": self._version}), send)

    async def openapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /openapi.json`."""
        await send_json(msgspec.json.encode(openapi(self._version)), send)

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /metrics` in Prometheus' text format."""
        body = self._service.metrics.render(await self._stats())
        headers = [
            (b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stats(self) -> EngineStats | None:
        try:
            async with asyncio.timeout(STATS_LIMIT_S):
                return await self._service.client.stats()
        except (HybridServeError, TimeoutError):
            return None

    def _card(self, name: str) -> dict[str, Any]:
        info = self._service.client.info
        return {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "hybridserve",
            "root": self._service.model_name,
            "parent": None,
            "max_model_len": info.max_model_len,
            "architecture": info.architecture,
            "layer_plan": info.layer_plan,
            "dtype": info.dtype,
            "num_parameters": info.num_parameters,
            "has_chat_template": self._service.template is not None,
        }


def _memory(info: EngineInfo) -> dict[str, Any]:
    """The division of memory in force, under the names that `hybridserve check-model --json` uses for the same figures."""
    return {
        "num_parameters": info.num_parameters,
        "weights_nbytes": info.weights_nbytes,
        "kv_nbytes_per_token": info.kv_nbytes_per_token,
        "state_nbytes_per_sequence": info.state_nbytes_per_sequence,
        "checkpoint_nbytes": sum(group.page_nbytes for group in info.groups if group.kind == "state"),
        "block_size": info.block_size,
        "match_unit": info.match_unit,
        "superpage_nbytes": info.superpage_nbytes,
        "num_superpages": info.num_superpages,
        "cache_nbytes": info.superpage_nbytes * info.num_superpages,
        "padding_percent": info.padding_percent,
        "groups": info.groups,
        "max_model_len": info.max_model_len,
        "users_at": info.users_at,
        "tokens_at": {length: users * int(length) for length, users in info.users_at.items()},
        "limit_at": info.limit_at,
    }
