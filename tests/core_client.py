"""`EngineClient` over an engine in this process and event loop: what the server sees is a real engine, without a second process.

Owns the core and one queue per open request. Used by tests of the server that a scripted engine cannot answer.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx

from hybridserve.config import EngineSettings, ServerSettings
from hybridserve.engine.chat import ChatTemplate
from hybridserve.engine.child import exception_of
from hybridserve.engine.core import EngineCore
from hybridserve.engine.messages import EngineInfo, EngineStats, Fatal
from hybridserve.engine.text import Tokenizer
from hybridserve.engine.unread import Unread
from hybridserve.request import CacheHints, EngineRequest, Explanation, RequestOutput
from hybridserve.server.app import create_app
from tests.test_prefix_chat import DEMO

KEY = "the-test-key"


class CoreClient:
    """One engine. Steps are taken whenever the event loop comes by and there is work."""

    is_alive = True
    stalled_s = 0.0

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.info: EngineInfo = core.info
        self._queues: dict[str, asyncio.Queue[RequestOutput]] = {}
        self._running: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        return len(self._queues)

    async def submit(self, request: EngineRequest, unread: Unread | None = None) -> AsyncGenerator[RequestOutput, None]:
        queue = self._queues[request.request_id] = asyncio.Queue()
        refusal = self.core.add(request)
        if refusal is not None:
            del self._queues[request.request_id]
            raise exception_of(Fatal(refusal.error_type or "EngineError", refusal.error or ""))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        has_ended = False
        try:
            while not has_ended:
                output = await queue.get()
                has_ended = output.finish_reason is not None
                yield output
        finally:
            del self._queues[request.request_id]
            if not has_ended:
                self.core.abort([request.request_id])

    async def _run(self) -> None:
        while self.core.has_work:
            for output in self.core.step():
                if output.request_id in self._queues:
                    self._queues[output.request_id].put_nowait(output)
            self.core.check()
            await asyncio.sleep(0)

    async def stats(self) -> EngineStats:
        return self.core.stats()

    async def explain(self, prompt_token_ids: list[int], cache: CacheHints) -> Explanation:
        return self.core.explain(prompt_token_ids, cache)

    async def close(self, drain_s: float) -> None:
        self.is_alive = False


def demo_app(client: CoreClient, offered: ServerSettings, settings: EngineSettings, template: str | None = None):
    """The application that serves an engine with the demo model's texts."""
    tokenizer = Tokenizer.from_folder(DEMO)
    texts = {"special_tokens": tokenizer.special_tokens, "added_tokens": tokenizer.added_tokens}
    return create_app(
        client,
        tokenizer,
        offered,
        "demo",
        template=ChatTemplate(template, **texts) if template else ChatTemplate.from_folder(DEMO, **texts),
        sampling_defaults={"temperature": 0.0},
        is_caching_prefixes=settings.enable_prefix_caching,
    )


@asynccontextmanager
async def serving(settings: EngineSettings, template: str | None = None, **server: object):
    """An HTTP client of a server over a real engine, and the engine. Texts are the demo model's.

    The client has a key: what is explained is told in full only where the cache is shared with nobody.
    """
    offered = ServerSettings(**{"api_key": (KEY,), **server})
    core = EngineCore(settings)
    app = demo_app(CoreClient(core), offered, settings, template)
    transport = httpx.ASGITransport(app)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
        yield http, core
