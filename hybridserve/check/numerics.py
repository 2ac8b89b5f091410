"""The numerics section: in what precision the model runs, and whether every index fits its type.

Owns these findings. Must not know backends. Called by `checker.py`.
"""

from collections.abc import Iterable

from hybridserve.check.report import Finding, LayerRun, Memory, failed, passed
from hybridserve.config import EngineSettings
from hybridserve.engine.sizing import longest_chunk
from hybridserve.errors import UnsupportedModelError
from hybridserve.models import CausalLM

#: Tables of blocks, slots, rows and lengths are int32; offsets within caches are int64.
MAX_INT32 = 2**31 - 1


def check_numerics(model: CausalLM, runs: list[LayerRun], memory: Memory, settings: EngineSettings) -> list[Finding]:
    """Precision of weights and caches, quantisation, and the guard of indices."""
    dtype = str(model.dtype).removeprefix("torch.")
    chosen = "as told" if settings.dtype != "auto" else "the config's own"
    own = _names(name.rpartition(".")[2] for name, p in model.named_parameters() if p.dtype != model.dtype)
    kept = _names(f"{t.name} ({t.dtype})" for run in runs for t in run.caches if t.dtype != dtype)
    findings = [
        passed("numerics.dtype", f"{dtype}, {chosen}"),
        passed("numerics.fp32", f"in a precision of their own: weights {own}; caches {kept}"),
        passed("numerics.quantisation", _quantisation(model, dtype)),
    ]
    return [*findings, _check_indices(model, memory, settings)]


def _check_indices(model: CausalLM, memory: Memory, settings: EngineSettings) -> Finding:
    pages = max((memory.num_superpages * group.pages_per_superpage for group in memory.groups), default=0)
    counts = {
        "tokens of one sequence": memory.max_model_len or settings.max_model_len or model.info.max_positions,
        "rows of one pass": longest_chunk(settings),
        "pages of one group": pages,
    }
    for what, count in counts.items():
        if count > MAX_INT32:
            error = UnsupportedModelError(
                f"{count:,} {what} do not fit the 32-bit tables, which count to {MAX_INT32:,}; lower "
                "--max-model-len, --max-num-batched-tokens or --kv-cache-memory"
            )
            return failed("numerics.indices", error)
    listed = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    return passed("numerics.indices", f"{listed}: all within 32 bits; offsets into caches have 64")


def _quantisation(model: CausalLM, dtype: str) -> str:
    if model.quantisation is None:
        return "none"
    return f"{model.quantisation.describe()} on disk; all arithmetic is on {dtype} weights, decoded on load"


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))) or "none"
