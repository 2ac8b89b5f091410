"""A bar while a model loads: on a terminal only.

Owns the bar. Called by the commands that start an engine.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def loading_bar() -> Iterator[Callable[[str, float], None]]:
    """Give a function that takes a stage and a fraction from 0 to 1."""
    if not sys.stderr.isatty():
        yield _say_nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:24}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=1.0)
        yield lambda stage, fraction: progress.update(task, description=stage, completed=fraction)


def _say_nothing(_stage: str, _fraction: float) -> None:
    """For logs and pipes, where a bar is noise."""
