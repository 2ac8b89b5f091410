"""How far a model's loading is: a bar on a terminal, one line a stage in a log.

Owns those two. Called by the commands that start an engine.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("hybridserve")


@contextmanager
def loading_bar() -> Iterator[Callable[[str, float], None]]:
    """Give a function that takes a stage and a fraction from 0 to 1."""
    if not sys.stderr.isatty():
        yield _StageLog()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:24}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=1.0)
        yield lambda stage, fraction: progress.update(task, description=stage, completed=fraction)


class _StageLog:
    """Says what goes on, where a bar would be noise."""

    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, stage: str, _fraction: float) -> None:
        if stage != self._stage:
            self._stage = stage
            log.info("engine: %s", stage)
