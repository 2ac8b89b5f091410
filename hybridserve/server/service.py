"""What every route needs, made once per app.

Owns nothing but the bundle: the engine's client, the texts' tools, the settings and the counters. Built by `app.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridserve.config import ServerSettings
from hybridserve.engine.chat import ChatTemplate
from hybridserve.engine.messages import EngineClient
from hybridserve.engine.text import Tokenizer
from hybridserve.errors import NotFoundError
from hybridserve.server.lifecycle import Lifecycle
from hybridserve.server.metrics import Metrics
from hybridserve.server.places import Places
from hybridserve.server.workers import Workers


@dataclass(frozen=True)
class Service:
    """One served model."""

    client: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None
    settings: ServerSettings
    model_name: str
    aliases: tuple[str, ...]
    sampling_defaults: Mapping[str, Any]
    is_caching_prefixes: bool
    workers: Workers
    lifecycle: Lifecycle
    places: Places
    metrics: Metrics
    created: int  # seconds since 1970

    def check_model(self, name: str | None) -> None:
        """Raise NotFoundError when a request names another model."""
        if name is not None and name not in (self.model_name, *self.aliases):
            raise NotFoundError(
                f"the model {name[:128]!r} does not exist here; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )
