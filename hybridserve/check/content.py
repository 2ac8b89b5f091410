"""Files and templates that could harm: what is never run, and a chat template tried out in a process of its own.

Owns what counts as unsafe. Must not know weights. Called by `checker.py`.
"""

import subprocess
import sys
from collections.abc import Mapping

import msgspec

from hybridserve.check.rendering import LIMIT_S, Job, Rendering
from hybridserve.check.report import Finding, failed, passed, warned
from hybridserve.check.source import Source
from hybridserve.engine.generation_config import read_json
from hybridserve.errors import HybridServeError, UnsafeContentError, WeightsError
from hybridserve.models.source import PICKLE_SUFFIXES

#: Seconds that the child may take beside rendering: starting Python, mostly, on a machine that is busy.
_START_S = 20.0


def check_files(source: Source) -> list[Finding]:
    """Pickles and code that come with the model and are left alone."""
    return [_check_pickles(source), _check_code(source)]


def _check_pickles(source: Source) -> Finding:
    pickles = sorted(name for name in source.files if name.endswith(PICKLE_SUFFIXES))
    if not pickles:
        return passed("content.pickles", "none")
    others = f" and {len(pickles) - 1} more" if len(pickles) > 1 else ""
    if source.has_weights and not any(name.endswith(".safetensors") for name in source.files):
        return failed(
            "content.pickles",
            UnsafeContentError(
                f"the weights are only there as a pickle ({pickles[0]}{others}), which can run code when it is opened and is "
                "never read; convert them to safetensors, or take a release that has them"
            ),
        )
    return warned(
        "content.pickles",
        f"{pickles[0]}{others} could run code when opened; pickles are never read, the safetensors are used",
        "delete them",
    )


def _check_code(source: Source) -> Finding:
    named = []
    for name in ("config.json", "tokenizer_config.json"):
        content = source.folder.config if name == "config.json" else _json(source, name)
        if content.get("auto_map") is not None:
            named.append(f"{name} names code of the model's own (auto_map)")
    code = sorted(name for name in source.files if name.endswith(".py"))
    if code:
        named.append(f"{len(code)} Python files come with it ({code[0]})")
    if not named:
        return passed("content.code", "the model brings no code of its own")
    return warned("content.code", f"{'; '.join(named)}; none of it is ever run", "delete it, if the results are as expected")


def _json(source: Source, name: str) -> Mapping[str, object]:
    """A JSON file of the model; nothing where it has none or it is broken, which others report."""
    try:
        return read_json(source.folder.path / name) if source.has_weights else {}
    except HybridServeError:
        return {}


def render(source: Source, special_tokens: Mapping[str, str]) -> Rendering:
    """Try the chat template out. Raises UnsafeContentError if it takes too long, too much memory, or breaks out."""
    job = Job(folder=str(source.folder.path), special_tokens=dict(special_tokens))
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
