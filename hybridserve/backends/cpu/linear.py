"""Linear layers on the native product kernel.

Owns the choice between the kernel and torch for a number of rows. Must not know where weights come from. Built by `offer`.
"""

import torch
from torch import Tensor

from hybridserve.backends.cpu.library import Library, covers, dense_rows, elements, is_bf16
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
        """y = x weight^T + bias. x: [..., in]; weight: [out, in]; bias: [out] or None. Returns [..., out] in x's dtype."""
        size_out, size_in = weight.shape
        rows = x.reshape(-1, size_in) if x.dim() != 2 else x
        if not self._takes(rows, weight, bias):
            return linear(x, weight, bias)
        rows = dense_rows(rows)
        if bias is not None:
            bias = bias.to(weight.dtype).contiguous()
        out = x.new_empty(*x.shape[:-1], size_out)
        self._kernel(
            *(rows.data_ptr(), rows.stride(0), is_bf16(rows)),
            *(weight.data_ptr(), weight.stride(0), is_bf16(weight)),
            *(elements(bias)[0], out.data_ptr()),
            *(rows.shape[0], size_out, size_in, torch.get_num_threads()),
        )
        return out

    def _takes(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        if not covers(rows, weight, bias) or weight.stride(1) != 1:
            return False
        both_bf16 = rows.dtype == weight.dtype == torch.bfloat16
        return not (self._bf16_hardware and both_bf16 and rows.shape[0] > MAX_ROWS_BESIDE_BF16_HARDWARE)
