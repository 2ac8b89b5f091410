"""One engine process as its parent holds it: the process, the socket to it, and the private folder of that socket.

Owns these three from start to removal. Must not know requests: messages are `client.py`'s matter. A child that has been started
and not told to load is a spare: its imports, which take most of the time until an engine is ready, are done or under way.
"""

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

import hybridserve.errors as errors
from hybridserve.config import EngineSettings
from hybridserve.engine.messages import EngineInfo, Fatal, FromEngine, Loading, ToEngine, encoder, from_engine
from hybridserve.errors import EngineDeadError, HybridServeError

#: Told the stage of loading and how much of it is done, from 0 to 1.
OnProgress = Callable[[str, float], None]

ENGINE_COMMAND = (sys.executable, "-m", "hybridserve.engine")
#: An engine that says nothing for so long while it loads hangs: kernels compile in a minute, and weights report each tensor.
LOAD_SILENCE_S = 900.0
#: How long a killed process may take to be gone. The kernel may hold it in a call; nothing waits for it longer.
_GONE_S = 10.0


class Child:
    """A started engine process. Made by `spawn_child`; `end` must be called once, whatever happened."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, folder: Path) -> None:
        self._process = process
        self._socket = socket
        self._folder = folder

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def load(self, settings: EngineSettings, on_progress: OnProgress | None) -> EngineInfo:
        """Have it load a model, and wait until it is ready. Raises the error that it reports, or EngineDeadError."""
        # Not awaited: it is sent once the process has connected, and a process that ends before never does.
        self._socket.send(msgspec.msgpack.encode(settings))
        while True:
            message = from_engine.decode(await self._next_while_loading())
            if isinstance(message, EngineInfo):
                return message
            if isinstance(message, Fatal):
                raise exception_of(message)
            if isinstance(message, Loading) and on_progress is not None:
                on_progress(message.stage, message.fraction)

    async def _next_while_loading(self) -> bytes:
        exited = asyncio.create_task(self.exited())
        received = asyncio.ensure_future(self._socket.recv())
        try:
            await asyncio.wait({received, exited}, timeout=LOAD_SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if not received.done() and exited.done() and await self._socket.poll(0):
                await received  # the process ended, and its last words are still in the socket
            if received.done():
                return received.result()
            if exited.done():
                raise EngineDeadError(f"the engine process ended with exit code {self._process.returncode} while it was starting")
            raise EngineDeadError(f"the engine process said nothing for {LOAD_SILENCE_S:.0f} s while it was starting")
        finally:
            received.cancel()
            exited.cancel()

    def send(self, message: ToEngine) -> int:
        """Send a message. With no high-water mark this is done at once. Returns its bytes."""
        data = encoder.encode(message)
        self._socket.send(data)
        return len(data)

    async def receive(self) -> FromEngine:
        """The next message. Raises msgspec's errors for one that is none."""
        return from_engine.decode(await self._socket.recv())

    async def exited(self) -> None:
        """Wait until the process has ended."""
        await self._process.wait()

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> None:
        """Kill what still runs, close the socket and remove its folder."""
        if self.is_running:
            self.kill()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.exited(), _GONE_S)
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


async def spawn_child(context: zmq.asyncio.Context, command: Sequence[str] = ENGINE_COMMAND) -> Child:
    """Start an engine process, which waits for `Child.load`. Raises OSError or ZMQError, and leaves nothing behind then."""
    # Each process has a folder of its own that only this user may enter: ZMQ itself asks nobody who they are, and programs that
    # clean up temporary files may have removed an older one.
    folder = Path(tempfile.mkdtemp(prefix="hybridserve-"))
    socket: zmq.asyncio.Socket | None = None
    try:
        address = f"ipc://{folder / 'engine.sock'}"
        socket = context.socket(zmq.PAIR)
        # Neither side may block on the other: what is open is bounded by admission, not by the socket.
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        # A spinning OpenMP thread takes a core from the server; it must be set before torch is imported.
        environment = {**os.environ, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}
        process = await asyncio.create_subprocess_exec(*command, address, stdin=asyncio.subprocess.PIPE, env=environment)
    except BaseException:
        if socket is not None:
            socket.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Child(process, socket, folder)


def exception_of(fatal: Fatal) -> HybridServeError:
    """The exception that the engine process raised, by its class's name; any other class becomes EngineDeadError."""
    kind = getattr(errors, fatal.error, None)
    if isinstance(kind, type) and issubclass(kind, HybridServeError):
        return kind(fatal.message)
    return EngineDeadError(f"{fatal.error}: {fatal.message}")
