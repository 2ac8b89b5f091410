"""`/openapi.json`, made from the same types that read requests and write replies.

Owns the list of documented operations. Called by `status.py`.
"""

from typing import Any, NamedTuple

import msgspec

from hybridserve.request import Explanation
from hybridserve.server.replies import ChatCompletion, Completion, DetokenizeReply, TokenizeReply
from hybridserve.server.wire import ChatRequest, CompletionRequest, DetokenizeRequest, ExplainRequest, TokenizeRequest


class Fault(msgspec.Struct):
    """What every error body holds."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    """Body of every answer that is not 200."""

    error: Fault


class _Operation(NamedTuple):
    path: str
    summary: str
    request: type[msgspec.Struct] | None = None
    reply: type[msgspec.Struct] | None = None
    is_stream: bool = False
    reply_type: str = "application/json"


_OPERATIONS = (
    _Operation("/v1/completions", "Continue text or token ids", CompletionRequest, Completion, True),
    _Operation("/v1/chat/completions", "Answer a list of messages", ChatRequest, ChatCompletion, True),
    _Operation("/tokenize", "Token ids of a prompt or a chat", TokenizeRequest, TokenizeReply),
    _Operation("/detokenize", "Text of token ids", DetokenizeRequest, DetokenizeReply),
    _Operation("/v1/cache/explain", "What a prompt would hit, and why not more", ExplainRequest, Explanation),
    _Operation("/v1/models", "The served model"),
    _Operation("/v1/limits", "Bounds of every field, and features that are off"),
    _Operation("/health", "Whether the process lives"),
    _Operation("/ready", "Whether requests make progress"),
    _Operation("/version", "The server's version"),
    _Operation("/metrics", "Prometheus metrics", reply_type="text/plain"),
)
_EXPLAIN = {
    "name": "X-Hybridserve-Explain",
    "in": "header",
    "required": False,
    "description": "1 adds cache_explanation to each choice: what of the prompt was reused, and why not more",
    "schema": {"type": "string", "enum": ["0", "1"]},
}
_FAULTS = {"400": "The request is wrong", "401": "The key is missing or wrong", "503": "Full, draining or without an engine"}


def openapi(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    types: list[type[msgspec.Struct]] = [ErrorReply]
    for operation in _OPERATIONS:
        types += [kind for kind in (operation.request, operation.reply) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in _OPERATIONS:
        method = "get" if operation.request is None else "post"
        paths[operation.path] = {method: _describe(operation, schema_of)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "hybridserve", "version": version},
        "paths": paths,
        "components": {
            "schemas": dict(components),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _describe(operation: _Operation, schema_of: dict[type[msgspec.Struct], dict[str, Any]]) -> dict[str, Any]:
    reply: dict[str, Any] = {"type": "string" if operation.reply_type == "text/plain" else "object"}
    content = {operation.reply_type: {"schema": schema_of[operation.reply] if operation.reply else reply}}
    if operation.is_stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "Success", "content": content}}
    fault = {"application/json": {"schema": schema_of[ErrorReply]}}
    for status, text in _FAULTS.items():
        responses[status] = {"description": text, "content": fault}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.is_stream:
        described["parameters"] = [_EXPLAIN]
    if operation.request is not None:
        body = {"application/json": {"schema": schema_of[operation.request]}}
        described["requestBody"] = {"required": True, "content": body}
    return described
