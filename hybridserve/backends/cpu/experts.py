"""Mixtures of experts on the native kernel.

Owns the choice between the kernel and torch, and the mapping to the kernel's arguments. Must not know routers. Built by
`offer`.
"""

import torch
from torch import Tensor

from hybridserve.backends.cpu.library import ACTIVATION_CODES, Library, covers, dense_rows, elements
from hybridserve.backends.cpu.linear import MAX_ROWS_BESIDE_BF16_HARDWARE
from hybridserve.backends.ops import Activation
from hybridserve.backends.reference.linear import linear, moe


class NativeMoe:
    """`ops.Moe`. Handed over to the reference: element types other than fp32 and bf16, experts with strided rows, without a
    gate, with biases or bounds, and on processors with bf16 instructions bf16 batches with more than 4 rows for each expert.

    A row's sums have one fixed order, so its result is the same bits alone and in any batch (but for that hand-over).
    """

    def __init__(self, library: Library, bf16_hardware: bool) -> None:
        self._kernel = library.kernel("hs_moe")
        self._bf16_hardware = bf16_hardware

    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *,
        activation: Activation,
        limit: float | None = None,
        up_shift: float = 0.0,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `ops.Moe`. x: [T, D]; expert_ids: int64 [T, k]; expert_weights: [T, k]; gate_up: [E, 2I, D] or [E, I, D];
        down: [E, D, I]; biases: [E, 2I or I] and [E, D]. Returns [T, D] in x's dtype.
        """
        plain = limit is None and not up_shift and biases is None and activation in ACTIVATION_CODES
        if not plain or not self._takes(x, expert_ids, expert_weights, gate_up, down):
            return moe(
                *(linear, x, expert_ids, expert_weights, gate_up, down),
                activation=activation,
                limit=limit,
                up_shift=up_shift,
                biases=biases,
            )
        x = dense_rows(x)
        expert_ids, expert_weights = expert_ids.contiguous(), expert_weights.contiguous()
        out = x.new_empty(x.shape)
        num_experts, size, inner = down.shape
        self._kernel(
            *(*elements(x), x.stride(0), expert_ids.data_ptr(), *elements(expert_weights)),
            *(gate_up.data_ptr(), *gate_up.stride()[:2], down.data_ptr(), *down.stride()[:2], elements(down)[1]),
            *(out.data_ptr(), *expert_ids.shape, num_experts, size, inner),
            *(ACTIVATION_CODES[activation], torch.get_num_threads()),
        )
        return out

    def _takes(self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> bool:
        dense = gate_up.stride(2) == 1 and down.stride(2) == 1
        gated = gate_up.shape[1] == 2 * down.shape[2]
        if not dense or not gated or not covers(x, weights, gate_up, down) or gate_up.dtype != down.dtype:
            return False
        bf16 = x.dtype == gate_up.dtype == torch.bfloat16
        many = ids.numel() > MAX_ROWS_BESIDE_BF16_HARDWARE * gate_up.shape[0]
        return not (self._bf16_hardware and bf16 and many)
