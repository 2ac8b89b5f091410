"""The compiled library as Python functions: the C signatures, and what every wrapper needs to call them.

Owns the list of C functions with their argument types and the codes of dtypes and activations. Must not know shapes or
operations. The wrappers beside it take a `Library`; `offer` loads it.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

#: A C function: pointers, sizes, strides and scalars in, arrays written in place.
Kernel: TypeAlias = Callable[..., None]

_ARGUMENT = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}

#: C functions by name, one letter for each argument: p pointer, n int64, i int32, f float.
_SIGNATURES = {
    "hs_linear": "pni pni p p nnn i",
    "hs_recurrence": "pinn pinn pinn pinni pinn pn pi pppp nn nnnn fii",
}

_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}


class Library:
    """A loaded library. `kernel(name)` gives a C function."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def kernel(self, name: str) -> Kernel:
        """The C function of that name, ready to be called with plain integers, floats and data pointers."""
        function = self._library[name]
        function.argtypes = [_ARGUMENT[letter] for letter in _SIGNATURES[name].replace(" ", "")]
        function.restype = None
        return function


def covers(*tensors: Tensor | None) -> bool:
    """Whether each tensor (None passes) has an element type that the kernels read: fp32 or bf16."""
    return all(tensor is None or tensor.dtype in _IS_BF16 for tensor in tensors)


def is_bf16(tensor: Tensor) -> int:
    """The code that kernels take for an element type: 1 for bf16, 0 for fp32."""
    return _IS_BF16[tensor.dtype]


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor itself if its last dimension is dense, as kernels need; a copy otherwise."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def pointer(tensor: Tensor | None) -> int | None:
    """Address of the first element, or null for None."""
    return None if tensor is None else tensor.data_ptr()
