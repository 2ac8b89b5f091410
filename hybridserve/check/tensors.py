"""The tensors section: what is on disk against what the model's modules want, and a scan of the values.

Owns these findings; the matching is `models/weights.py`'s, as at load. Called by `checker.py`.
"""

import re
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from hybridserve.check.report import Finding, failed, passed, warned
from hybridserve.check.source import Entries
from hybridserve.config import format_nbytes
from hybridserve.errors import WeightsError
from hybridserve.models import CausalLM
from hybridserve.models.loader import MatchedWeights, check_stated, match_weights
from hybridserve.models.shards import read_tensors

#: Elements looked at in one go: a copy of them is made.
_SCAN_ELEMENTS = 2**24
_SHOWN = 6
#: Values of a matrix that are looked at without being asked to.
_SAMPLED = 256
#: Dtypes that torch compares with zero as numbers.
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


def check_tensors(model: CausalLM, entries: Entries) -> list[Finding]:
    """That every parameter is filled and every tensor used. Raises WeightsError with what is missing, extra or misshapen."""
    matched = match_weights(model, entries)
    check_stated(model, matched)
    used = {piece.tensor for piece in matched.pieces}
    num_parameters = sum(1 for _ in model.parameters())
    findings = [passed("tensors", f"{len(used)} tensors fill all {num_parameters} parameters; no other shape, none missing")]
    read = {name for one in used for name in (matched.stored[one].values, matched.stored[one].scale)}
    left = [name for name in entries if name not in read]
    if left:
        findings.append(
            passed("tensors.unused", f"{len(left)} tensors are left alone, as known not to be needed: {_families(left)}")
        )
    findings += _check_quantised(model, matched)
    tied = "the head is the embedding's table" if model.lm_head is None else "head and embedding have a table each"
    findings.append(passed("tensors.tied", tied))
    return findings


def find_match(model: CausalLM, entries: Entries) -> MatchedWeights | None:
    """Which tensor fills which parameter, or None if they do not fit: `check_tensors` tells why."""
    try:
        return match_weights(model, entries)
    except WeightsError:
        return None


def _check_quantised(model: CausalLM, matched: MatchedWeights) -> list[Finding]:
    """What is decoded on load."""
    quantised = matched.quantised()
    if not quantised or model.quantisation is None:
        return []
    dtypes = Counter(matched.entries[one.values].dtype for one in quantised.values())
    listed = ", ".join(f"{count} x {dtype}" for dtype, count in dtypes.most_common())
    nbytes = sum(map(matched.nbytes, quantised))
    dtype = str(model.dtype).removeprefix("torch.")
    text = f"{model.quantisation.describe()}: {listed} with their scales, {format_nbytes(nbytes)} on disk, become {dtype} on load"
    return [passed("tensors.quantised", text)]


def scan_values(entries: Entries) -> Finding:
    """Look at every value for NaN and infinity, and for weights that are nothing but zeros."""
    bad, empty, num_matrices = [], [], 0
    for name, tensor in read_tensors(entries):
        if count := _count_bad(tensor):
            bad.append(f"{name} ({count:,})")
        if tensor.dim() > 1:
            num_matrices += 1
            if not _has_values(tensor):
                empty.append(name)
    if bad:
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        error = WeightsError(
            f"NaN or infinite values in {', '.join(bad[:_SHOWN])}{more}, the number of them in brackets; download the files "
            "again, and if it stays ask the model's publisher"
        )
        return failed("tensors.values", error)
    if empty and len(empty) == num_matrices:
        return failed("tensors.values", all_zero(len(empty)))
    if empty:
        return warned(
            "tensors.values",
            f"all {len(entries)} tensors are finite, but {len(empty)} of {num_matrices} matrices hold zeros alone: "
            f"{', '.join(empty[:_SHOWN])}",
            "compare the files with those of the release, unless parts of the model were emptied on purpose",
        )
    return passed("tensors.values", f"all {len(entries)} tensors are finite")


def check_not_empty(entries: Entries) -> None:
    """Look at a few values of each matrix that is stored as floats. Raises WeightsError if all that was seen is zero."""
    matrices = {name: one for name, one in entries.items() if len(one.shape) > 1 and one.nbytes and one.dtype in FLOAT_DTYPES}
    for _, tensor in read_tensors(matrices):
        middle = tensor[tensor.shape[0] // 2].reshape(-1)
        if _has_values(middle[:_SAMPLED]):
            return
    if matrices:
        raise all_zero(len(matrices))


def all_zero(num_matrices: int) -> WeightsError:
    """The error for weights that nobody trained."""
    return WeightsError(
        f"all {num_matrices} matrices hold zeros alone, so every answer would be the same token; the files were made but never "
        "filled: download them again, or ask the model's publisher"
    )


def _has_values(tensor: Tensor) -> bool:
    """Whether anything in it is not zero. tensor: any shape."""
    flat = tensor.reshape(-1)
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        flat = flat.view(torch.uint8) & 0x7F  # without the sign
    return any(bool(flat[start : start + _SCAN_ELEMENTS].ne(0).any()) for start in range(0, flat.numel(), _SCAN_ELEMENTS))


def _count_bad(tensor: Tensor) -> int:
    """Values that are NaN or infinite. tensor: any shape."""
    if not tensor.dtype.is_floating_point:
        return 0
    flat = tensor.reshape(-1)
    parts = (flat[start : start + _SCAN_ELEMENTS] for start in range(0, flat.numel(), _SCAN_ELEMENTS))
    return sum(int((~torch.isfinite(part.float())).sum()) for part in parts)


def _families(names: Iterable[str]) -> str:
    """First parts of names with how many have them: `mtp.* (12)`."""
    counts = Counter(re.split(r"\.\d+\.|\.", name)[0] for name in names)
    return ", ".join(f"{family}.* ({count})" for family, count in counts.most_common(_SHOWN))
