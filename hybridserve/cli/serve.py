"""`hybridserve serve MODEL`: an engine process and an HTTP server in front of it.

Owns putting them together and the start-up log. How the server lives is `server/run.py`'s matter.
"""

import argparse
import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

from hybridserve import __version__
from hybridserve.cli.flags import Sources, add_config, add_settings, changed
from hybridserve.cli.folder import names_of, text_folder
from hybridserve.cli.progress import loading_bar
from hybridserve.cli.report import describe
from hybridserve.config import EngineSettings, ServerSettings
from hybridserve.errors import UsageError
from hybridserve.origin import vocabulary_file

if TYPE_CHECKING:
    from fastapi import FastAPI

    from hybridserve.engine.chat import ChatTemplate
    from hybridserve.engine.generation_config import SamplingDefaults
    from hybridserve.engine.messages import EngineClient
    from hybridserve.engine.text import Tokenizer
    from hybridserve.server.lifecycle import Lifecycle
    from hybridserve.server.run import Launch

    _Text: TypeAlias = tuple[Tokenizer, ChatTemplate | None, SamplingDefaults]

log = logging.getLogger("hybridserve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the engine and of the server."""
    add_settings(parser, EngineSettings, positional="model")
    add_settings(parser, ServerSettings)
    add_config(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    sources = Sources(arguments)
    engine, server = sources.settings(EngineSettings), sources.settings(ServerSettings)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    log.info("hybridserve %s: %s", __version__, ", ".join(f"{name}={value!r}" for name, value in changed(engine).items()))
    from hybridserve.server.run import serve  # first what the engine process needs: its start takes longest

    parts = Parts(engine, server)
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(serve(parts.launch()))
    return 0


class Parts:
    """What goes between engine and clients. Read in a thread of its own while the engine loads."""

    def __init__(self, engine: EngineSettings, server: ServerSettings) -> None:
        """Raises UsageError or ModelError for what can be seen at once."""
        self._engine = engine
        self._server = server
        self._text_folder = text_folder(engine.tokenizer or engine.model)
        if vocabulary_file(self._text_folder) is None:
            raise UsageError(
                f"there is no vocabulary, such as a tokenizer.json, with {engine.model!r}; name a folder that has one with "
                "--tokenizer"
            )
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="hybridserve-read")
        self._reading: Future[_Text] | None = None

    def launch(self) -> "Launch":
        """The server's make-up for `server/run.py`."""
        from hybridserve.server.run import Launch

        return Launch(self._server, self._start_engine, self._make_app, self._tell)

    async def _start_engine(self) -> "EngineClient":
        from hybridserve.engine.client import Supervision, start_engine

        supervision = Supervision(step_timeout_s=self._server.step_timeout_s, keeps_spare=self._server.spare_engine)
        with loading_bar() as show:
            # Reading waits for the spawn: its imports would hold that up, and the engine's own take longer than it.
            return await start_engine(self._engine, show, self._begin_reading, supervision)

    def _begin_reading(self) -> None:
        self._reading = self._reader.submit(self._read)

    def _read(self) -> "_Text":
        import hybridserve.server.app
        import hybridserve.server.http  # noqa: F401 - imports that take a good part of a second
        from hybridserve.engine.chat import ChatTemplate
        from hybridserve.engine.generation_config import read_sampling_defaults
        from hybridserve.engine.text import Tokenizer

        tokenizer = Tokenizer.from_folder(self._text_folder)
        template = ChatTemplate.from_folder(
            self._text_folder, special_tokens=tokenizer.special_tokens, added_tokens=tokenizer.added_tokens
        )
        tokenizer.prepare(template.control if template is not None else ())
        return tokenizer, template, read_sampling_defaults(text_folder(self._engine.model))

    def _make_app(self, client: "EngineClient", lifecycle: "Lifecycle") -> "FastAPI":
        from hybridserve.server.app import create_app

        assert self._reading is not None, "the engine was started first"
        name, aliases = names_of(self._engine.model, self._server.served_model_name)
        tokenizer, template, defaults = self._reading.result()
        return create_app(
            client,
            tokenizer,
            self._server,
            name,
            aliases=aliases,
            template=template,
            sampling_defaults=defaults.items(),
            is_caching_prefixes=self._engine.enable_prefix_caching,
            lifecycle=lifecycle,
        )

    def _tell(self, client: "EngineClient", address: str) -> None:
        for line in describe(client.info):
            log.info("%s", line)
        key = "a key is needed" if self._server.api_key else "no key is needed"
        name, _ = names_of(self._engine.model, self._server.served_model_name)
        log.info("ready: %s as %r, %s", address, name, key)


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loops where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
