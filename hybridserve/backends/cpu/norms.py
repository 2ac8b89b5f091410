"""RMS norms on native kernels.

Owns the mapping of their tensors to the kernels' arguments. Must not know which layer norms what. Built by `offer`.
"""

import torch
from torch import Tensor

from hybridserve.backends.cpu.library import ACTIVATION_CODES, IS_BF16, Kernel, Library, covers, elements
from hybridserve.backends.ops import Activation
from hybridserve.backends.reference import norms as reference


class NativeNorms:
    """`ops.RmsNorm` and `ops.GatedRmsNorm`, handed over to the reference for element types other than fp32 and bf16.

    A row's result never depends on its neighbours.
    """

    def __init__(self, library: Library) -> None:
        self._plain: Kernel = library.kernel("hs_rms_norm")
        self._gated: Kernel = library.kernel("hs_gated_rms_norm")

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, *, zero_centred: bool = False) -> Tensor:
        """See `ops.RmsNorm`. x: [..., D]; weight: [D] or None. Returns [..., D] in x's dtype."""
        if not covers(x, weight):
            return reference.rms_norm(x, weight, eps, zero_centred=zero_centred)
        rows, outer_stride, inner_stride, outer, inner = _in_two(x)
        if weight is not None:
            weight = weight.contiguous()
        out = x.new_empty(x.shape)
        self._plain(
            *(rows.data_ptr(), IS_BF16[x.dtype], outer_stride, inner_stride, *elements(weight), eps, zero_centred),
            *(out.data_ptr(), outer, inner, x.shape[-1], torch.get_num_threads()),
        )
        return out

    def gated_rms_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        eps: float,
        *,
        group_size: int,
        norm_first: bool,
        activation: Activation,
    ) -> Tensor:
        """See `ops.GatedRmsNorm`. x, gate: [..., D]; weight: [D] or None. Returns [..., D] in gate's dtype."""
        if not covers(x, gate, weight):
            return reference.gated_rms_norm(
                x, gate, weight, eps, group_size=group_size, norm_first=norm_first, activation=activation
            )
        if x.shape != gate.shape:
            raise ValueError(f"x is {tuple(x.shape)} and its gate {tuple(gate.shape)}; they must have one shape")
        rows, x_outer, x_inner, outer, inner = _in_two(x)
        gates, gate_outer, gate_inner, _, _ = _in_two(gate)
        if weight is not None:
            weight = weight.contiguous()
        out = gate.new_empty(gate.shape)
        self._gated(
            *(rows.data_ptr(), IS_BF16[x.dtype], x_outer, x_inner),
            *(gates.data_ptr(), IS_BF16[gate.dtype], gate_outer, gate_inner),
            *(*elements(weight), eps, group_size, norm_first, ACTIVATION_CODES[activation]),
            *(out.data_ptr(), outer, inner, x.shape[-1], torch.get_num_threads()),
        )
        return out


def _in_two(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """x: [..., D] as rows in two dimensions: the tensor that holds them, strides of outer and inner rows, their numbers.

    A copy only if x is not dense in the last dimension, or has more than three and no uniform stride.
    """
    if x.dim() > 3:
        x = x.reshape(-1, x.shape[-1])
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 3:
        outer, inner, _ = x.stride()
        return x, outer, inner, x.shape[0], x.shape[1]
    if x.dim() == 2:
        return x, x.stride(0), 0, x.shape[0], 1
    return x, 0, 0, 1, 1
