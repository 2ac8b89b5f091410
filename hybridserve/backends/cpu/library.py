"""The compiled library as Python functions: the C signatures, and what every wrapper needs to call them.

Owns the list of C functions with their argument types and the codes of dtypes and activations. Must not know shapes or
operations. The wrappers beside it take a `Library`; `offer` loads it.
"""

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hybridserve.backends.ops import Activation
from hybridserve.errors import MissingDependencyError

#: A C function: pointers, sizes, strides and scalars in, arrays written in place.
Kernel: TypeAlias = Callable[..., Any]

_ARGUMENT: "Mapping[str, type[ctypes._SimpleCData[Any]]]" = {
    "p": ctypes.c_void_p,
    "n": ctypes.c_int64,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
}

#: C functions by name, one letter for each argument: p pointer, n int64, i int32, f float. Groups are for the eye.
_SIGNATURES = {
    "hs_linear": "pni pni p p nnn i",
    "hs_head_linear": "pinn pinn pi nnnn i",
    "hs_recurrence": "pinn pinn pinn pinni pinn pn pi pppp nn nnnn fii",
    "hs_selective_scan": "pin pin pin pin p pn p pppp nn nn i",
    "hs_short_conv": "pin pi pi pin p pppp nn nn ii",
    "hs_paged_attention": "pinn pnnn pnnn i pnn ppn nnnn fnf pi pi i",
    "hs_index_select": "pinn pin pinn pnnn ppn nnn p i",
    "hs_selected_attention": "pinn pnnn pnnn i pnn pn ppn nnnn f pi i",
    "hs_kv_write": "pin pinn pnnn i",
    "hs_rms_norm": "pinn pi fi p nnn i",
    "hs_gated_rms_norm": "pinn pinn pi fnii p nnn i",
    "hs_first_outside": "p nnn",
    "hs_first_block_outside": "p nnnn pp nn",
    "hs_moe": "pin p pi pnn pnn i pi pi p nnnnn iiff i",
}

#: Functions that return a number; all others write what they find.
_ANSWERING = frozenset({"hs_first_outside", "hs_first_block_outside"})

#: The codes that kernels take for element types; what is not here they do not read.
IS_BF16: Mapping[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1}

#: Codes of the activation functions in activation.h.
ACTIVATION_CODES: Mapping[Activation, int] = {
    "identity": 0,
    "silu": 1,
    "sigmoid": 2,
    "gelu": 3,
    "gelu_tanh": 4,
    "relu2": 5,
    "quick_gelu": 6,
}


class Library:
    """A loaded library. `kernel(name)` gives a C function. Raises MissingDependencyError if it is none."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise MissingDependencyError(f"the native kernels cannot be loaded: {error}; delete {path}") from error
        missing = [name for name in _SIGNATURES if not hasattr(self._library, name)]
        if missing:
            raise MissingDependencyError(f"the native kernels lack {', '.join(missing)}; delete {path}")

    def kernel(self, name: str) -> Kernel:
        """The C function of that name, ready to be called with plain integers, floats and data pointers."""
        function = self._library[name]
        function.argtypes = [_ARGUMENT[letter] for letter in _SIGNATURES[name].replace(" ", "")]
        function.restype = ctypes.c_int64 if name in _ANSWERING else None
        return function


class Unbuilt(Library):
    """A library that is not compiled yet: it tells which operations there will be, and none of them can be called."""

    def __init__(self) -> None:
        pass

    def kernel(self, name: str) -> Kernel:
        """A function that raises MissingDependencyError."""

        def missing(*arguments: object) -> None:
            raise MissingDependencyError(f"{name} is not compiled: this choice of backends is a plan; load the model to use it")

        return missing


def covers(*tensors: Tensor | None) -> bool:
    """Whether each tensor (None passes) has an element type that the kernels read: fp32 or bf16."""
    return {tensor.dtype for tensor in tensors if tensor is not None} <= IS_BF16.keys()


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor itself if its last dimension is dense, as kernels need; a copy otherwise."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def elements(tensor: Tensor | None) -> tuple[int | None, int]:
    """A dense tensor as kernels take it: address (null for None) and code of the element type."""
    return (None, 0) if tensor is None else (tensor.data_ptr(), IS_BF16[tensor.dtype])


def heads(tensor: Tensor) -> tuple[int, int, int, int]:
    """A [T, H, ...] tensor as kernels take it: address, element type, strides of rows and heads."""
    row, head = tensor.stride()[:2]
    return tensor.data_ptr(), IS_BF16[tensor.dtype], row, head
