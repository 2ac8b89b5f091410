"""RMS norms on native kernels.

Owns the mapping of their tensors to the kernels' arguments. Must not know which layer norms what. Built by `offer`.
"""

import torch
from torch import Tensor

from hybridserve.backends.cpu.library import ACTIVATION_CODES, Kernel, Library, covers, dense_rows, elements
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
        rows = _in_three(x)
        if weight is not None:
            weight = weight.contiguous()
        out = x.new_empty(x.shape)
        self._plain(
            *(*elements(rows), rows.stride(0), rows.stride(1), *elements(weight), eps, zero_centred, out.data_ptr()),
            *rows.shape,
            torch.get_num_threads(),
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
        rows, gates = _in_three(x), _in_three(gate)
        if weight is not None:
            weight = weight.contiguous()
        out = gate.new_empty(gate.shape)
        self._gated(
            *(*elements(rows), rows.stride(0), rows.stride(1)),
            *(*elements(gates), gates.stride(0), gates.stride(1)),
            *(*elements(weight), eps, group_size, norm_first, ACTIVATION_CODES[activation], out.data_ptr()),
            *rows.shape,
            torch.get_num_threads(),
        )
        return out


def _in_three(x: Tensor) -> Tensor:
    """x: [..., D] as [outer, inner, D], dense in the last dimension; a view where the strides allow."""
    if x.dim() == 3:
        return dense_rows(x)
    if x.dim() == 2:
        return dense_rows(x).unsqueeze(1)
    return dense_rows(x.reshape(1, -1, x.shape[-1]))
