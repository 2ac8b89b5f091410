"""A chat template tried out in a process of its own, which is ended when it takes too long or too much.

Owns starting that process and what its end means; the chats are `rendering.py`'s. Must not know weights. Called by `checker.py`.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hybridserve.check.rendering import LIMIT_S, Job, Rendering
from hybridserve.errors import UnsafeContentError, WeightsError

#: Seconds that the child may take beside rendering: starting Python, mostly, on a machine that is busy.
_START_S = 20.0


def render(folder: Path, special_tokens: Mapping[str, str]) -> Rendering:
    """Try the chat template out. Raises UnsafeContentError if it takes too long, too much memory, or breaks out."""
    job = Job(folder=str(folder), special_tokens=dict(special_tokens))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hybridserve.check.rendering"],
            input=msgspec.json.encode(job),
            capture_output=True,
            timeout=LIMIT_S + _START_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _misbehaves(f"it does not end within {LIMIT_S:g} seconds") from error
    try:
        rendering = msgspec.json.decode(done.stdout, type=Rendering)
    except msgspec.DecodeError as error:
        raise _misbehaves(
            f"its process ended with status {done.returncode}: more than {LIMIT_S:g} seconds or too much memory"
        ) from error
    if rendering.syntax_error is not None:
        raise WeightsError(f"{rendering.syntax_error}; fetch the file again, or repair it")
    unsafe = next((case for case in rendering.cases if case.outcome == "unsafe"), None)
    if unsafe is not None:
        raise _misbehaves(f"rendering {unsafe.name} gives {unsafe.text!r:.300}")
    return rendering


def _misbehaves(how: str) -> UnsafeContentError:
    return UnsafeContentError(
        f"the chat template misbehaves in its sandbox: {how}; do not serve it: take the template from the model's publisher"
    )
