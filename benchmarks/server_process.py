"""A real `hybridserve serve` process on a free port, for benchmarks that measure what clients feel.

Owns the process and the times at which it said something. Must not know what is asked of it.
"""

import os
import signal
import subprocess
import sys
import time
from types import TracebackType

_COMMAND = "import sys; from hybridserve.cli import main; sys.exit(main())"
_EXIT_TIMEOUT_S = 60


class ServerProcess:
    """`hybridserve serve MODEL --port 0 ...`, up when the context is entered and gone when it is left."""

    def __init__(self, model: str, *flags: str, environment: dict[str, str] | None = None) -> None:
        self.lines: list[tuple[float, str]] = []  # seconds since the start, and what was logged then
        self.url = ""
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, "serve", model, "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    @property
    def ready_s(self) -> float:
        """Seconds from the start of the process until it said that it listens."""
        return self.lines[-1][0]

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> "ServerProcess":
        assert self._process.stderr is not None, "it is a pipe"
        for line in self._process.stderr:
            self.lines.append((time.perf_counter() - self.started, line.rstrip()))
            if "ready: " in line:
                self.url = line.partition("ready: ")[2].split()[0]
                return self
        raise SystemExit("the server did not start:\n" + "\n".join(line for _, line in self.lines))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.send_signal(signal.SIGTERM)
        # What it still says must be read, or it waits for us.
        self._process.communicate(timeout=_EXIT_TIMEOUT_S)
