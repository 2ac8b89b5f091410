"""The machine that a model is checked for: this one, or one that is only named.

Owns the table of known devices and their memory. Must not know models. Called by `checker.py`.
"""

from dataclasses import dataclass

import torch

from hybridserve.engine.sizing import choose_device, free_nbytes
from hybridserve.errors import UsageError

MIB = 2**20

#: Memory as the vendor's driver reports it, which is what programs can get at, not the number on the box.
CUDA_DEVICES: dict[str, int] = {
    "h200": 143_771 * MIB,
    "h100": 81_559 * MIB,
    "a100": 81_920 * MIB,
    "a100-80gb": 81_920 * MIB,
    "a100-40gb": 40_960 * MIB,
    "l40s": 46_068 * MIB,
    "rtx4090": 24_564 * MIB,
}


@dataclass(frozen=True)
class Target:
    """A device and the bytes that weights and caches may take there."""

    name: str  # as the user wrote it: "cpu", "cuda:h200"
    device: torch.device
    memory_nbytes: int
    is_here: bool
    source: str  # where memory_nbytes comes from, for the report


def find_target(name: str, memory_nbytes: int | None) -> Target:
    """The target of `--device` and `--memory`. Raises UsageError for a name that is not known, or a device that is not here."""
    kind, separator, model = name.partition(":")
    if separator:
        return _named(name, kind, model, memory_nbytes)
    if memory_nbytes is not None and kind == "cuda" and not torch.cuda.is_available():
        return Target(name, torch.device("cuda"), memory_nbytes, False, "given")
    if kind not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {name!r} is not known; known: {_known_names()}")
    device = choose_device(kind)
    if memory_nbytes is not None:
        return Target(str(device), device, memory_nbytes, True, "given")
    return Target(str(device), device, free_nbytes(device), True, "free on this machine now")


def _named(name: str, kind: str, model: str, memory_nbytes: int | None) -> Target:
    total = CUDA_DEVICES.get(model.lower().replace("_", "-")) if kind == "cuda" else None
    if total is None:
        raise UsageError(f"--device {name!r} is not known; known: {_known_names()}. For another one give cuda with --memory")
    source = f"all of a {model.upper()}" if memory_nbytes is None else "given"
    return Target(name, torch.device("cuda"), memory_nbytes or total, False, source)


def _known_names() -> str:
    return ", ".join(["cpu", "cuda", *(f"cuda:{name}" for name in CUDA_DEVICES)])
