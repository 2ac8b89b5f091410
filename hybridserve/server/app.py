"""The ASGI application: routes, the gate around them, and nothing else.

Owns the list of routes. Must not know how any is answered. Called by `run.py` and by tests.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from hybridserve.config import ServerSettings
from hybridserve.engine.chat import ChatTemplate
from hybridserve.engine.messages import EngineClient
from hybridserve.engine.text import Tokenizer
from hybridserve.errors import HybridServeError, NotFoundError, RequestError
from hybridserve.server.fault import error_body
from hybridserve.server.gate import Gate
from hybridserve.server.lifecycle import Lifecycle
from hybridserve.server.metrics import Metrics
from hybridserve.server.page import Page
from hybridserve.server.places import Places
from hybridserve.server.routes import EXPLAIN_HEADER, Endpoint, Routes
from hybridserve.server.service import Service
from hybridserve.server.status import StatusRoutes
from hybridserve.server.workers import Workers


class MethodError(RequestError):
    """The route exists, but not with this method."""

    status = 405
    code = "method_not_allowed"


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    model_name: str,
    *,
    aliases: Sequence[str] = (),
    template: ChatTemplate | None = None,
    sampling_defaults: Mapping[str, Any] | None = None,
    is_caching_prefixes: bool = True,
    lifecycle: Lifecycle | None = None,
) -> FastAPI:
    """The application that serves one engine. Its port should be bound only once the engine is ready.

    `aliases` are other names that requests may give for the model; `sampling_defaults` are the model's own
    (generation_config.json). `lifecycle` is shared with whoever drains the server.
    """
    lifecycle = lifecycle or Lifecycle()
    metrics = Metrics(model_name, client.info, lifecycle.ended)
    _ = tokenizer.max_token_chars  # reads the whole vocabulary: better now than in the first request
    service = Service(
        client=client,
        tokenizer=tokenizer,
        template=template,
        settings=settings,
        model_name=model_name,
        aliases=tuple(aliases),
        sampling_defaults=dict(sampling_defaults or {}),
        is_caching_prefixes=is_caching_prefixes,
        workers=Workers(),
        lifecycle=lifecycle,
        places=Places(
            client.info.max_num_seqs + client.info.max_num_queued_reqs, settings.client_share, client.info.max_num_seqs
        ),
        metrics=metrics,
        created=int(time.time()),
    )
    # The routes are ASGI endpoints of our own, so the document at /openapi.json is ours too.
    app = FastAPI(routes=_routes(service), docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_middleware(
        Gate,
        settings=settings,
        metrics=metrics,
    )
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id", EXPLAIN_HEADER.decode()],
            expose_headers=["x-request-id", "x-hybridserve-ignored", "retry-after"],
        )
    return app


def _routes(service: Service) -> list[BaseRoute]:
    routes, status = Routes(service), StatusRoutes(service)
    posts: dict[str, Endpoint] = {
        "/v1/completions": routes.completions,
        "/v1/chat/completions": routes.chat_completions,
        "/tokenize": routes.tokenize,
        "/detokenize": routes.detokenize,
        "/v1/cache/explain": routes.explain,
    }
    gets: dict[str, Endpoint] = {
        "/v1/models": status.models,
        "/v1/models/{model_id:path}": status.model,
        "/v1/limits": status.limits,
        "/v1/cache/explain": routes.explain,
        "/health": status.health,
        "/ready": status.ready,
        "/version": status.version,
        "/metrics": status.metrics,
        "/openapi.json": status.openapi,
    }
    if service.settings.ui:
        gets["/"] = Page()
    return [
        *(Route(path, _Raw(endpoint), methods=["POST"]) for path, endpoint in posts.items()),
        *(Route(path, _Raw(endpoint), methods=["GET"]) for path, endpoint in gets.items()),
    ]


class _Raw:
    """An ASGI endpoint as an object, since a route wraps plain functions into request and response."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint(scope, receive, send)


async def _routing_error(request: Request, error: Exception) -> Response:
    """Errors of the router itself, in the shape of all others."""
    assert isinstance(error, HTTPException), "registered for it alone"
    path = request.scope["path"][:128]  # `request.url` would decode the query, which may be no text
    fault: HybridServeError
    if error.status_code == 405:
        fault = MethodError(f"{path} does not take {request.method}; see /openapi.json")
    else:
        fault = NotFoundError(f"there is no route {path}; see /openapi.json", code="route_not_found")
    return Response(error_body(fault), fault.status, headers=error.headers, media_type="application/json")
