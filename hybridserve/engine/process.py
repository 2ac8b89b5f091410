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

log = logging.getLogger(__name__)

#: How long an engine that has work and cannot run any waits for messages before it looks again.
_IDLE_POLL_MS = 5
#: While steps produce nothing to tell, as those of a long prompt, they are reported so often.
_REPORT_STEPS_S = 1.0
#: Loading messages are at least this far apart.
_PROGRESS_INTERVAL_S = 0.1


class EngineLoop:
    """The loop of the engine process, over one socket."""

    def __init__(self, socket: zmq.Socket[bytes], core: EngineCore) -> None:
        self._socket = socket
        self._core = core
        self._is_draining = False
        self._is_stopped = False
        self._last_report = time.monotonic()

    def run(self) -> None:
        """Serve until told to stop."""
        while not self._is_stopped:
            outputs = self._receive(wait_ms=0 if self._core.has_work else None)
            if self._core.has_work and not self._is_stopped:
                num_steps = self._core.num_steps
                outputs += self._core.step()
                # A pass may end without output: only where there was none, and nothing else to do, is there time to wait.
                if self._core.num_steps == num_steps and self._core.num_unfinished and not outputs:
                    outputs += self._receive(wait_ms=_IDLE_POLL_MS)
            now = time.monotonic()
            if outputs or (self._core.has_work and now - self._last_report >= _REPORT_STEPS_S):
                self._last_report = now
                self._send(Outputs(outputs, self._core.num_steps))
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
        try:
            message = to_engine.decode(data)
        except msgspec.MsgspecError as error:
            return _refuse_unreadable(data, error)
        match message:
            case EngineRequest():
                return self._add(message)
            case Abort():
                return self._core.abort(message.request_ids)
            case AskStats():
                self._send(self._core.stats())
            case AskExplanation():
                self._explain(message)
            case Shutdown():
                self._is_draining = True
                self._is_stopped = not message.drain
        return []

    def _add(self, request: EngineRequest) -> list[RequestOutput]:
        try:
            refusal = self._core.add(request)
        except Exception as error:
            log.exception("a request could not be added")
            return [_failure(request.request_id, f"the engine could not take this request ({type(error).__name__})")]
        return [refusal] if refusal is not None else []

    def _explain(self, asked: AskExplanation) -> None:
        explanation = None
        try:
            explanation = self._core.explain(asked.prompt_token_ids, asked.cache)
        except Exception:
            log.exception("a prompt of %d tokens could not be explained", len(asked.prompt_token_ids))
        self._send(Explained(asked.number, explanation))

    def _send(self, message: FromEngine) -> None:
        self._socket.send(encoder.encode(message))


class _Named(msgspec.Struct, tag="add"):
    """A request of which only the name is read."""

    request_id: str


def _refuse_unreadable(data: bytes, error: Exception) -> list[RequestOutput]:
    """The refusal of a message that is none of ours; nothing where it does not even say which request it is."""
    log.error("a message of %d bytes cannot be read and is left out: %s", len(data), error)
    try:
        request_id = msgspec.msgpack.decode(data, type=_Named).request_id
    except msgspec.MsgspecError:
        return []
    return [_failure(request_id, "the engine could not read this request")]


def _failure(request_id: str, message: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason="error", error=message, error_type="EngineError")


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
