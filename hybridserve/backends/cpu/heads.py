"""Products of each head with a matrix of its own, on native kernels.

Owns the choice between the kernel for weights stored by inputs and that of `linear.py` for those stored by outputs. Must not
know layers. Built by `offer`.
"""

import torch
from torch import Tensor

from hybridserve.backends.cpu.library import Library, covers, dense_rows, elements, heads
from hybridserve.backends.cpu.linear import MAX_ROWS_BESIDE_BF16_HARDWARE, NativeLinear
from hybridserve.backends.reference.linear import head_linear


class NativeHeadLinear:
    """`ops.HeadLinear`. Handed over to the reference: element types other than fp32 and bf16, and on processors with bf16
    instructions bf16 products of more than 4 rows, as in `NativeLinear`.

    The sum behind an output has one fixed order whatever the number of rows.
    """

    def __init__(self, library: Library, bf16_hardware: bool) -> None:
        self._kernel = library.kernel("hs_head_linear")
        self._linear = NativeLinear(library, bf16_hardware)
        self._bf16_hardware = bf16_hardware

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `ops.HeadLinear`. x: [T, H, in]; weight: [H, out, in]. Returns [T, H, out] in x's dtype."""
        if x.shape[1:] != (weight.shape[0], weight.shape[2]):
            raise ValueError(f"x {tuple(x.shape)} does not fit weights {tuple(weight.shape)}: heads and inputs must be equal")
        is_torchs = self._bf16_hardware and len(x) > MAX_ROWS_BESIDE_BF16_HARDWARE and x.dtype == torch.bfloat16
        if not covers(x, weight) or is_torchs:
            return head_linear(x, weight)
        x = dense_rows(x)
        if weight.stride(1) == 1:
            return self._by_inputs(x, weight.mT)
        weight = dense_rows(weight)
        return torch.stack([self._linear(x[:, head], weight[head], None) for head in range(len(weight))], dim=1)

    def _by_inputs(self, x: Tensor, weight: Tensor) -> Tensor:
        """x: [T, H, in]; weight: [H, in, out], dense in the last dimension. Returns [T, H, out]."""
        num_heads, size_in, size_out = weight.shape
        out = x.new_empty(len(x), num_heads, size_out)
        self._kernel(
            *(*heads(x), *elements(weight), weight.stride(0), weight.stride(1), *elements(out)),
            *(len(x), num_heads, size_out, size_in, torch.get_num_threads()),
        )
        return out
