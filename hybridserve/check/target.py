"""The machine that a model is checked for: this one, or one that is only named.

Owns the table of known devices and their memory. Must not know models. Called by `checker.py`.
"""

import re
from dataclasses import dataclass

import torch

from hybridserve.check.report import Finding, warned
from hybridserve.config import format_nbytes
from hybridserve.engine.sizing import choose_device, free_nbytes
from hybridserve.errors import UsageError

MIB = 2**20

#: Memory as the vendor's driver reports it, which is what programs can get at, not the number on the box.
CUDA_DEVICES: dict[str, int] = {
    "b200": 183_359 * MIB,
    "h200": 143_771 * MIB,
    "h100": 81_559 * MIB,
    "mi300x": 196_592 * MIB,
    "a100": 81_920 * MIB,
    "a100-80gb": 81_920 * MIB,
    "a100-40gb": 40_960 * MIB,
    "l40s": 46_068 * MIB,
    "rtx5090": 32_607 * MIB,
    "rtx4090": 24_564 * MIB,
    "l4": 23_034 * MIB,
    "t4": 15_360 * MIB,
}
#: Kinds of devices on which hybridserve's tests and benchmarks have run.
PROVEN_KINDS = frozenset({"cpu"})


@dataclass(frozen=True)
class Target:
    """A device and the bytes that weights and caches may take there."""

    name: str  # as the user wrote it: "cpu", "cuda:h200"
    device: torch.device
    memory_nbytes: int
    is_here: bool
    source: str  # where memory_nbytes comes from, for the report
    count: int = 1  # how many of them the user has; figures are of one


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
    several = re.fullmatch(r"(\d{1,4})x(.+)", model)
    count, model = (int(several[1]), several[2]) if several else (1, model)
    total = CUDA_DEVICES.get(model.lower().replace("_", "-")) if kind == "cuda" else None
    if total is None or count < 1:
        raise UsageError(f"--device {name!r} is not known; known: {_known_names()}. For another one give cuda with --memory")
    source = f"all of a {model.upper()}" if memory_nbytes is None else "given"
    return Target(name, torch.device("cuda"), memory_nbytes or total, False, source, count)


def check_target(target: Target) -> list[Finding]:
    """What a plan for this device leaves open: nothing for one that hybridserve has run on."""
    findings = []
    if target.device.type not in PROVEN_KINDS:
        findings.append(
            warned(
                "target.unproven",
                f"no release of hybridserve has been run on {target.device.type} yet: memory is counted as exactly as for any "
                "device, but that the model runs there, and how fast, has not been seen",
                "run check-model with --run on such a device before you depend on it",
            )
        )
    if target.count > 1:
        findings.append(
            warned(
                "target.several",
                f"{target.count} devices have {format_nbytes(target.count * target.memory_nbytes)} together, but this release "
                "serves a model from one device: all figures are of one",
                "serve a copy of the model on each",
            )
        )
    return findings


def _known_names() -> str:
    return ", ".join(["cpu", "cuda", *(f"cuda:{name}" for name in CUDA_DEVICES), "several as in cuda:4xh100"])
