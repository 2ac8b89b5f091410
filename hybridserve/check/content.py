"""Files that could harm: pickles, and code of the model's own. Nothing of either is ever opened.

Owns what counts as such. Must not know weights or templates (`rendering.py`). Called by `checker.py`.
"""

from collections.abc import Mapping

from hybridserve.check.report import Finding, failed, passed, warned
from hybridserve.check.source import Source
from hybridserve.engine.generation_config import read_json
from hybridserve.errors import HybridServeError, UnsafeContentError
from hybridserve.models.source import PICKLE_SUFFIXES


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
