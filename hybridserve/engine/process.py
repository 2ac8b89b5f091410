"""The engine process: receives requests over a socket, steps the core, sends what each step produced.

Owns the child's side of the process border and its life: it dies with its parent. Must not know HTTP. Started by `client.py`
through `__main__.py`, with the settings as the first message and a pipe from the parent as standard input.
"""

import gc
import logging
import os
import signal
import sys
import threading
import time

import msgspec
import torch
import zmq

from hybridserve.config import EngineSettings
from hybridserve.engine.core import EngineCore
from hybridserve.engine.messages import (
    Abort,
    AskExplanation,
    AskStats,
    Explained,
    Fatal,
    FromEngine,
    Loading,
    Outputs,
    Shutdown,
    encoder,
    to_engine,
)
from hybridserve.errors import HybridServeError
from hybridserve.request import EngineRequest, RequestOutput

#: How long an engine that has work and cannot run any waits for messages before it looks again.
_IDLE_POLL_MS = 5
#: Loading messages are at least this far apart.
_PROGRESS_INTERVAL_S = 0.1


class EngineLoop:
    """The loop of the engine process, over one socket."""

    def __init__(self, socket: zmq.Socket[bytes], core: EngineCore) -> None:
        self._socket = socket
        self._core = core
        self._is_draining = False
        self._is_stopped = False

    def run(self) -> None:
        """Serve until told to stop."""
        while not self._is_stopped:
            outputs = self._receive(wait_ms=0 if self._core.has_work else None)
            if self._core.has_work and not self._is_stopped:
                stepped = self._core.step()
                outputs += stepped
                if not stepped and self._core.num_unfinished and not outputs:
                    outputs += self._receive(wait_ms=_IDLE_POLL_MS)
            if outputs:
                self._send(Outputs(outputs))
            if self._is_draining and not self._core.has_work:
                self._is_stopped = True

    def _receive(self, wait_ms: int | None) -> list[RequestOutput]:
        """Handle all messages that are there; with None wait for the first. Returns outputs that need no step."""
        outputs: list[RequestOutput] = []
        while not self._is_stopped and self._socket.poll(wait_ms):
            outputs += self._handle(self._socket.recv())
            wait_ms = 0
        return outputs

    def _handle(self, data: bytes) -> list[RequestOutput]:
        message = to_engine.decode(data)
        match message:
            case EngineRequest():
                refusal = self._core.add(message)
                return [refusal] if refusal is not None else []
            case Abort():
                return self._core.abort(message.request_ids)
            case AskStats():
                self._send(self._core.stats())
            case AskExplanation():
                explanation = self._core.explain(message.prompt_token_ids, message.cache)
                self._send(Explained(message.number, explanation))
            case Shutdown():
                self._is_draining = True
                self._is_stopped = not message.drain
        return []

    def _send(self, message: FromEngine) -> None:
        self._socket.send(encoder.encode(message))


def main(address: str) -> int:
    """Run an engine process. Returns its exit code."""
    # The parent decides when to end: a terminal's Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    # Fading states are full of denormal numbers, which cost up to a hundred times as much. Threads inherit it, so it comes first.
    torch.set_flush_denormal(True)
    logging.basicConfig(level=logging.INFO, format="engine: %(message)s")
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(address)
    settings = msgspec.msgpack.decode(socket.recv(), type=EngineSettings)
    try:
        core = EngineCore(settings, _Progress(socket))
        # What is alive now lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        socket.send(encoder.encode(core.info))
        EngineLoop(socket, core).run()
    except HybridServeError as error:
        socket.send(encoder.encode(Fatal(type(error).__name__, str(error))))
        return error.exit_code
    except Exception as error:
        logging.exception("the engine stops")
        socket.send(encoder.encode(Fatal(type(error).__name__, str(error))))
        return 70
    finally:
        socket.close()
        context.term()
    return 0


class _Progress:
    """Sends how far loading is: every stage, and within one not too often."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._stage = ""
        self._last = 0.0

    def __call__(self, stage: str, fraction: float) -> None:
        now = time.monotonic()
        if stage != self._stage or now - self._last >= _PROGRESS_INTERVAL_S or fraction >= 1.0:
            self._stage, self._last = stage, now
            self._socket.send(encoder.encode(Loading(stage, fraction)))


def _die_with_parent() -> None:
    """Standard input is a pipe that only the parent holds open: its end is the parent's."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)
