"""What a layer stores between tokens, as data: paged caches that grow and states of fixed size.

Owns the two spec classes and their byte arithmetic. Must not know tensors, pools or models. Mixers return specs; the arena
plan, the pools, storage, `check-model` and the docs are derived from them. Integers and names only: no torch.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

DTYPE_NBYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor of a spec: the shape of a single entry (or state) and its dtype by torch's name.

    `initial`, of states only, names the mixer's parameter, of this shape, that a fresh sequence starts from; None means zeros.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    initial: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NBYTES:
            raise ValueError(f"tensor {self.name!r} has dtype {self.dtype!r}; known: {', '.join(DTYPE_NBYTES)}")
        if any(size <= 0 for size in self.shape):
            raise ValueError(f"tensor {self.name!r} has shape {self.shape}; every size must be positive")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PagedSpec:
    """A cache that grows with the text: every tensor has one entry for `tokens_per_entry` tokens.

    `window` says that only the last `window` tokens, the current one included, are ever read; older blocks are given back.
    """

    tensors: tuple[TensorSpec, ...]
    tokens_per_entry: int = 1
    window: int | None = None

    def __post_init__(self) -> None:
        _check_names(self.tensors)
        learned = [tensor.name for tensor in self.tensors if tensor.initial is not None]
        if learned:
            raise ValueError(
                f"tensors {learned} of a paged spec have `initial`; a fresh text has no entry, only states may have it"
            )
        if self.tokens_per_entry < 1:
            raise ValueError(f"tokens_per_entry is {self.tokens_per_entry}; it must be at least 1")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1, or None for no window")

    @property
    def entry_nbytes(self) -> int:
        """Bytes of one entry of one layer."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state of fixed size for each sequence, whatever its length.

    A fresh sequence starts from zeros, or, where a tensor has `initial`, from a slot that is filled once when weights are loaded.
    """

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        _check_names(self.tensors)

    @property
    def is_learned(self) -> bool:
        """Whether fresh sequences start from parameters. Such a group has one slot more, which holds them and never changes."""
        return any(tensor.initial is not None for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of one state of one layer."""
        return sum(tensor.nbytes for tensor in self.tensors)


Spec: TypeAlias = PagedSpec | StateSpec


def _check_names(tensors: tuple[TensorSpec, ...]) -> None:
    names = [tensor.name for tensor in tensors]
    if not names:
        raise ValueError("a spec needs at least one tensor; a layer without a cache returns no spec at all")
    if len(set(names)) != len(names):
        raise ValueError(f"tensor names {names} repeat; each needs its own")
