"""Linear layers on the native product kernel.

Owns the choice between the kernel and torch for a number of rows. Must not know where weights come from. Built by `offer`.
"""

import torch
from torch import Tensor

from hybridserve.backends.cpu.library import IS_BF16, Library
from hybridserve.backends.reference.linear import linear

#: With bf16 instructions, the most rows for which reading the weights outweighs the arithmetic, so that the kernel wins.
MAX_ROWS_BESIDE_BF16_HARDWARE = 4


class NativeLinear:
    """`ops.Linear`. Handed over to the reference: element types other than fp32 and bf16, and weights with strided rows.

    The sum behind an output has one fixed order whatever the number of rows, so a row's result is the same bits alone and in
    any batch. The exception: on processors with bf16 instructions, bf16 products of more than 4 rows go to torch, which is
    faster there and whose sums do depend on the number of rows.
    """

    def __init__(self, library: Library, bf16_hardware: bool) -> None:
        self._kernel = library.kernel("hs_linear")
        self._bf16_hardware = bf16_hardware

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y = x weight^T + bias. x: [..., in]; weight: [out, in]; bias: [out] or None. Returns [..., out] in x's dtype.

        Raises ValueError if x's last dimension is not the weight's.
        """
        shape, (size_out, size_in) = x.shape, weight.shape
        if shape[-1] != size_in:
            raise ValueError(f"x has {shape[-1]} entries in a row and the weight takes {size_in}; they must be equal")
        rows = x if len(shape) == 2 else x.reshape(-1, size_in)
        if not self._takes(rows, weight, bias):
            return linear(x, weight, bias)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        if bias is not None:
            bias = bias.to(weight.dtype).contiguous()
        out = x.new_empty((*shape[:-1], size_out))
        # Small models feel every microsecond here, so nothing is computed twice or unpacked.
        self._kernel(
            rows.data_ptr(),
            rows.stride(0),
            IS_BF16[x.dtype],
            weight.data_ptr(),
            weight.stride(0),
            IS_BF16[weight.dtype],
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            len(rows),
            size_out,
            size_in,
            torch.get_num_threads(),
        )
        return out

    def _takes(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        if rows.dtype not in IS_BF16 or weight.dtype not in IS_BF16 or weight.stride(1) != 1:
            return False
        if bias is not None and bias.dtype not in IS_BF16:
            return False
        if not self._bf16_hardware or len(rows) <= MAX_ROWS_BESIDE_BF16_HARDWARE:
            return True
        return not rows.dtype == weight.dtype == torch.bfloat16
