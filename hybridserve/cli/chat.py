"""`hybridserve chat MODEL` or `--url URL`: a conversation in the terminal.

Owns the loop of reading and printing. In-process, the reply takes the server's own path (`server/chats.py`) without HTTP.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from hybridserve.cli.flags import Sources, add_config, add_settings
from hybridserve.cli.generate import add_sampling, sampling_of
from hybridserve.cli.http_client import Endpoint
from hybridserve.cli.progress import loading_bar
from hybridserve.config import EngineSettings
from hybridserve.errors import HybridServeError, RequestError, UsageError

if TYPE_CHECKING:
    from hybridserve.server.service import Service

_HELP = "/new starts over, /quit or Ctrl-D ends, Ctrl-C stops an answer"


class Answerer(Protocol):
    """Who answers: a server or an engine of our own."""

    def answer(self, messages: list[dict[str, Any]]) -> AsyncGenerator[str, None]:
        """Pieces of the reply. Afterwards `summary` says what it cost."""
        ...

    @property
    def summary(self) -> str: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the engine, the server to talk to, and the sampling."""
    parser.add_argument("--url", help="talk to a running server instead of loading a model")
    parser.add_argument("--api-key", help="the server's key")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    add_sampling(parser)
    add_settings(parser, EngineSettings, positional="model")
    add_config(parser)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the end of input."""
    try:
        asyncio.run(_talk(arguments))
    except KeyboardInterrupt:
        print()
    return 0


async def _talk(arguments: argparse.Namespace) -> None:
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    if arguments.url is not None:
        endpoint = Endpoint(arguments.url, api_key=arguments.api_key)
        model = (await endpoint.get("/v1/models"))["data"][0]["id"]
        sampling = {name: value for name, value in sampling_of(arguments, {}).items() if value not in (None, ())}
        await _converse(_Remote(endpoint, {"model": model, **sampling}), messages, model)
        return
    if arguments.model is None:
        raise UsageError("name a model to load, or a running server with --url")
    engine = Sources(arguments).settings(EngineSettings)
    service, defaults = await _load(engine)
    try:
        await _converse(_Local(service, sampling_of(arguments, defaults)), messages, engine.model)
    finally:
        await service.client.close(0.0)
        service.workers.close()


async def _converse(answerer: Answerer, start: list[dict[str, Any]], name: str) -> None:
    """Read, answer, repeat. An answer that fails takes its question with it."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"{name}: {_HELP}", file=sys.stderr)
    messages = list(start)
    while (text := await asyncio.to_thread(_read, "> " if is_terminal else "")) is not None:
        if text == "/quit":
            return
        if text == "/new":
            messages = list(start)
        elif text.startswith("/"):
            print(f"unknown command {text.split()[0]}; {_HELP}", file=sys.stderr)
        if not text or text.startswith("/"):
            continue
        messages.append({"role": "user", "content": text})
        reply = await _print_answer(answerer, messages)
        if reply:
            messages.append({"role": "assistant", "content": reply})
        else:
            messages.pop()
        if is_terminal:
            print(answerer.summary, file=sys.stderr)


async def _print_answer(answerer: Answerer, messages: list[dict[str, Any]]) -> str:
    parts = []
    try:
        async with aclosing(answerer.answer(messages)) as pieces:
            async for piece in pieces:
                parts.append(piece)
                print(piece, end="", flush=True)
    except HybridServeError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return ""
    print()
    return "".join(parts)


def _read(prompt: str) -> str | None:
    try:
        return input(prompt).strip()
    except EOFError:
        return None


class _Remote:
    """Answers by a running server."""

    def __init__(self, endpoint: Endpoint, fields: dict[str, Any]) -> None:
        self._endpoint = endpoint
        self._fields = fields
        self.summary = ""

    async def answer(self, messages: list[dict[str, Any]]) -> AsyncGenerator[str, None]:
        start = time.monotonic()
        body = {**self._fields, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        async with aclosing(self._endpoint.events("/v1/chat/completions", body)) as events:
            async for event in events:
                for choice in event.get("choices", []):
                    if text := choice["delta"].get("content"):
                        yield text
                if usage := event.get("usage"):
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                    self.summary = _summary(usage["completion_tokens"], usage["prompt_tokens"], cached, start)


class _Local:
    """Answers by an engine of our own."""

    def __init__(self, service: "Service", sampling: dict[str, object]) -> None:
        from hybridserve.server.call import CallIds

        self._service = service
        self._sampling = sampling
        self._ids = CallIds()
        self.summary = ""

    async def answer(self, messages: list[dict[str, Any]]) -> AsyncGenerator[str, None]:
        import msgspec

        from hybridserve.server.call import Arrived
        from hybridserve.server.chats import chat_call
        from hybridserve.server.wire import ChatRequest

        start = time.monotonic()
        try:
            request = msgspec.convert({**self._sampling, "messages": messages}, ChatRequest)
        except msgspec.ValidationError as error:
            raise RequestError(str(error)) from error
        call = await chat_call(self._service, request, Arrived(self._ids.next(), start, explains=False, tenant_salt=""))
        (choice,) = call.choices
        async with aclosing(choice.deltas(self._service.client)) as deltas:
            async for delta in deltas:
                yield delta.text
        self.summary = _summary(choice.num_tokens, len(choice.prompt.token_ids), choice.num_cached_tokens, start)


async def _load(engine: EngineSettings) -> "tuple[Service, dict[str, float | int]]":
    """An engine process with what stands between it and text."""
    from hybridserve.cli.folder import text_folder
    from hybridserve.config import ServerSettings
    from hybridserve.engine.chat import ChatTemplate
    from hybridserve.engine.client import start_engine
    from hybridserve.engine.generation_config import read_sampling_defaults
    from hybridserve.engine.text import Tokenizer
    from hybridserve.server.lifecycle import Lifecycle
    from hybridserve.server.metrics import Metrics
    from hybridserve.server.places import Places
    from hybridserve.server.service import Service
    from hybridserve.server.workers import Workers

    folder = text_folder(engine.tokenizer or engine.model)
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, special_tokens=tokenizer.special_tokens, added_tokens=tokenizer.added_tokens)
    if template is None:
        raise UsageError("this model has no chat template; use hybridserve generate")
    defaults = read_sampling_defaults(text_folder(engine.model)).items()
    with loading_bar() as show:
        client = await start_engine(engine, show)
    service = Service(
        client=client,
        tokenizer=tokenizer,
        template=template,
        settings=ServerSettings(),
        model_name=engine.model,
        aliases=(),
        sampling_defaults=defaults,
        is_caching_prefixes=engine.enable_prefix_caching,
        workers=Workers(),
        lifecycle=Lifecycle(),
        places=Places(client.info.max_num_seqs, 1.0, client.info.max_num_seqs),
        metrics=Metrics(engine.model, client.info),
        created=int(time.time()),
    )
    return service, defaults


def _summary(num_new: int, num_prompt: int, num_cached: int, start: float) -> str:
    seconds = max(time.monotonic() - start, 1e-9)
    return f"[{num_new} tokens, {num_new / seconds:.1f} tokens/s, {num_cached} of {num_prompt} prompt tokens cached]"
