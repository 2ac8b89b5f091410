"""Weights that are stored quantised: which tensors on disk belong together, and the numbers that they stand for.

Owns the forms that are read, all of which become the model's dtype on load. Must not know configs, architectures or parameters.
`quantisation.py` chooses the form, `loader.py` hands it what the headers name.

Letters: E experts, R rows, C columns of a weight; G groups of 32 numbers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from hybridserve.errors import WeightsError
from hybridserve.models.shards import TensorEntry
from hybridserve.models.weights import Shape

_FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
#: What may stand after a weight's name in that of its scale. Both multiply: "inverse" is said from the view of the quantiser.
_SCALE_SUFFIXES = ("_scale_inv", "_scale")
#: Calibrated ranges of activations and caches, which stay in the model's dtype here.
_RANGES = re.compile(r".*(\.|_)(input_scale|output_scale|activation_scale|k_scale|v_scale|q_scale)")
#: Numbers that are widened to fp32 in one go.
_PART = 2**22
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_AGAIN = "take all files from one release"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor by the name and shape that it has when it isn't quantised, and the tensors on disk that stand for it."""

    values: str
    shape: Shape
    scale: str | None = None  # with one, the values are decoded by the quantisation


class Quantisation(Protocol):
    """One kind of quantised weights."""

    def describe(self) -> str:
        """What it is, in a few words."""
        ...

    def pair(self, entries: Mapping[str, TensorEntry], is_ignored: Callable[[str], bool]) -> dict[str, Stored]:
        """All tensors by the names that they would have without quantisation.

        Raises WeightsError naming file and tensor where a scale is missing, left over or misshapen, unless `is_ignored` tells
        that nobody wants that tensor.
        """
        ...

    def decode(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers that `values` with `scale` stand for, computed in fp32 and rounded once. Both on one device."""
        ...


@dataclass(frozen=True, slots=True)
class ScaledFloat:
    """Floats of 8 bits with a scale for each block of [rows, columns], or without `block` for each row, expert or tensor.

    Source: DeepSeek-V3 (arXiv 2412.19437, section 3.3), whose released code names the scales.
    """

    block: tuple[int, int] | None

    def describe(self) -> str:
        """What it is, in a few words."""
        return "fp8" if self.block is None else f"fp8 in blocks of {self.block[0]} x {self.block[1]}"

    def pair(self, entries: Mapping[str, TensorEntry], is_ignored: Callable[[str], bool]) -> dict[str, Stored]:
        """A weight of 8 bits goes with the scale of its own name, or with that of the table that it is a shard of."""
        found: dict[str, Stored] = {}
        for name, entry in entries.items():
            if is_ignored(name) or entry.dtype not in _FP8_DTYPES:
                found[name] = Stored(name, entry.shape)
                continue
            scale = next((one for one in _scale_names(name) if one in entries), None)
            if scale is None:
                raise _missing(name, entry, f"{name}{_SCALE_SUFFIXES[0]}")
            self._check(name, entry, scale, entries[scale])
            found[name] = Stored(name, entry.shape, scale)
        used = {one.scale for one in found.values()}
        for name in entries:
            if name in used or _RANGES.fullmatch(name):
                found.pop(name)
            elif not is_ignored(name) and (stem := _scaled_by(name, entries)) is not None:
                if not is_ignored(stem):
                    raise _left_over(name, entries[name], f"{stem} is not stored in 8 bits")
                found.pop(name)
        return found

    def _check(self, name: str, entry: TensorEntry, scale: str, scale_entry: TensorEntry) -> None:
        _check_scale_dtype(scale, scale_entry)
        if len(entry.shape) < 2:
            raise WeightsError(
                f"{name} in {entry.file.name} has 8 bits and one dimension; only matrices can be quantised; {_AGAIN}"
            )
        allowed = self._scale_shapes(entry.shape)
        if scale_entry.shape not in allowed:
            raise WeightsError(
                f"{scale} in {scale_entry.file.name} is {list(scale_entry.shape)}, but scales of a weight {list(entry.shape)} "
                f"({self.describe()}) are {' or '.join(str(list(one)) for one in allowed)}; {_AGAIN}"
            )

    def _scale_shapes(self, shape: Shape) -> list[Shape]:
        *lead, rows, columns = shape
        if self.block is not None:
            return [(*lead, -(-rows // self.block[0]), -(-columns // self.block[1])), (1,), ()]
        return [(1,), (), (*lead, rows, 1), (*lead, 1, 1), (*lead, rows), tuple(lead)]

    def decode(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """values: fp8 [..., R, C]; scale: one for each block, row, expert or tensor. Returns [..., R, C] in `dtype`."""
        rows, columns = values.shape[-2:]
        flat = values.reshape(-1, rows, columns)
        grid, (block_rows, block_columns) = self._grid(_as_fp32(scale), len(flat), rows, columns)
        out = torch.empty(flat.shape, dtype=dtype, device=values.device)
        step = max(1, _PART // columns)
        for i, matrix in enumerate(flat):
            for start in range(0, rows, step):
                part = _widened(matrix[start : start + step])
                at = torch.arange(start, start + len(part), device=values.device) // block_rows
                _scale_columns(part, grid[i][at], block_columns)
                out[i, start : start + step] = part
        return out.view(values.shape)

    def _grid(self, scale: Tensor, count: int, rows: int, columns: int) -> tuple[Tensor, tuple[int, int]]:
        """Scales of each matrix as [count, rows of blocks, columns of blocks], and the size of a block."""
        if scale.numel() == 1:
            return scale.view(1, 1, 1).expand(count, 1, 1), (rows, columns)
        if self.block is not None:
            return scale.view(count, *scale.shape[-2:]), self.block
        grid = scale.view(count, -1, 1)
        return grid, (1 if grid.shape[1] == rows else rows, columns)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Experts in floats of 4 bits, 32 of which share a power of two. `X_blocks` [E, R, G, 16] hold two numbers a byte, the low
    half first; `X_scales` [E, R, G] are exponents. They stand for `X` [E, C, R], C = 32 G: the 16-bit release has columns first.

    Source: OCP Microscaling Formats 1.0, section 5.3; names and order: published gpt-oss.
    """

    def describe(self) -> str:
        """What it is, in a few words."""
        return "mxfp4"

    def pair(self, entries: Mapping[str, TensorEntry], is_ignored: Callable[[str], bool]) -> dict[str, Stored]:
        """`X_blocks` with `X_scales`."""
        found: dict[str, Stored] = {}
        for name, entry in entries.items():
            if is_ignored(name) or not name.endswith(("_blocks", "_scales")):
                found[name] = Stored(name, entry.shape)
            elif name.endswith("_scales"):
                if name.removesuffix("_scales") + "_blocks" not in entries:
                    raise _left_over(name, entry, f"there is no {name.removesuffix('_scales')}_blocks")
            else:
                stem = name.removesuffix("_blocks")
                found[stem] = self._stored(stem, entry, entries)
        return found

    def _stored(self, stem: str, blocks: TensorEntry, entries: Mapping[str, TensorEntry]) -> Stored:
        name, scale = f"{stem}_blocks", f"{stem}_scales"
        if scale not in entries:
            raise _missing(name, blocks, scale)
        scales = entries[scale]
        for one, entry in ((name, blocks), (scale, scales)):
            if entry.dtype != "U8":
                raise WeightsError(f"{one} in {entry.file.name} is {entry.dtype}; 4-bit weights are stored as U8; {_AGAIN}")
        if len(blocks.shape) != 4 or blocks.shape[-1] != 16 or scales.shape != blocks.shape[:-1]:
            raise WeightsError(
                f"{name} in {blocks.file.name} is {list(blocks.shape)} and {scale} in {scales.file.name} {list(scales.shape)}; "
                f"wanted [experts, rows, groups, 16] and [experts, rows, groups]; {_AGAIN}"
            )
        num_experts, rows, groups, _ = blocks.shape
        return Stored(name, (num_experts, 32 * groups, rows), scale)

    def decode(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """values: uint8 [E, R, G, 16]; scale: uint8 [E, R, G]. Returns [E, C, R] in `dtype`, a view of [E, R, C]."""
        rows = values.reshape(-1, *values.shape[2:])  # [E R, G, 16]
        exponents = scale.reshape(len(rows), -1)
        out = torch.empty(len(rows), 32 * rows.shape[1], dtype=dtype, device=values.device)
        pairs = _fp4_pairs().to(values.device)
        step = max(1, _PART // out.shape[1])
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            numbers = pairs.index_select(0, part.flatten().int()).view(torch.float32).view(*part.shape[:2], 32)
            numbers.mul_(_as_fp32(exponents[start : start + step])[..., None])
            out[start : start + step] = numbers.flatten(1)
        return out.view(*values.shape[:2], -1).mT


def _scale_names(name: str) -> list[str]:
    whole = re.sub(r"\.shard_\d+\.weight$", ".weight", name)
    return [one + suffix for one in dict.fromkeys((name, whole)) for suffix in _SCALE_SUFFIXES]


def _scaled_by(name: str, entries: Mapping[str, TensorEntry]) -> str | None:
    """The weight that `name` would be the scale of."""
    stems = [name.removesuffix(suffix) for suffix in _SCALE_SUFFIXES if name.endswith(suffix)]
    return next((stem for stem in stems if stem in entries or stem.endswith(".weight")), None)


def _check_scale_dtype(name: str, entry: TensorEntry) -> None:
    if entry.dtype not in _SCALE_DTYPES:
        raise WeightsError(f"{name} in {entry.file.name} is {entry.dtype}; scales are {', '.join(_SCALE_DTYPES)}; {_AGAIN}")


def _missing(name: str, entry: TensorEntry, scale: str) -> WeightsError:
    return WeightsError(
        f"{name} in {entry.file.name} is quantised ({entry.dtype}), but its scale is nowhere: {scale} is missing. "
        "Download all shards of the release"
    )


def _left_over(name: str, entry: TensorEntry, why: str) -> WeightsError:
    return WeightsError(f"{name} in {entry.file.name} is a scale of nothing: {why}; {_AGAIN}")


def _as_fp32(scale: Tensor) -> Tensor:
    """Scales in fp32. Bytes are exponents of two, as in float8_e8m0fnu."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def _scale_columns(part: Tensor, scales: Tensor, width: int) -> None:
    """part: fp32 [r, C], multiplied in place by scales [r, ceil(C / width)]."""
    whole = part.shape[1] // width
    if whole:
        torch.unflatten(part[:, : whole * width], 1, (whole, width)).mul_(scales[:, :whole, None])
    if whole * width < part.shape[1]:
        part[:, whole * width :].mul_(scales[:, whole:])


def _widened(values: Tensor) -> Tensor:
    """fp8 [r, C] as fp32. On the CPU a table of pairs is several times as fast as the cast."""
    if values.device.type != "cpu" or values.shape[1] % 2 or not values.is_contiguous():
        return values.float()
    indices = values.view(torch.uint16).flatten().int()
    return _fp8_pairs(values.dtype).index_select(0, indices).view(torch.float32).view(values.shape)


@cache
def _fp8_pairs(dtype: torch.dtype) -> Tensor:
    """Two fp32 numbers, as one int64, for every two bytes of `dtype`: int64 [65536]."""
    pairs = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    return pairs.view(torch.uint8).view(dtype).float().view(torch.int64)


@cache
def _fp4_pairs() -> Tensor:
    """Two fp32 numbers, as one int64, for every byte of two 4-bit floats, the low half first: int64 [256]."""
    values = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
    codes = torch.arange(256)
    return torch.stack((values[codes & 15], values[codes >> 4]), dim=1).contiguous().view(torch.int64).flatten()
