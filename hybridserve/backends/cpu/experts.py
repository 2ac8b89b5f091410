"""Mixtures of experts on the native kernel.

Owns the choice between the kernel and torch, and the mapping to the kernel's arguments. Must not know routers. Built by
`offer`.
"""

import math

import torch
from torch import Tensor

from hybridserve.backends.cpu.library import ACTIVATION_CODES, Library, covers, dense_rows, elements
from hybridserve.backends.cpu.linear import MAX_ROWS_BESIDE_BF16_HARDWARE, NativeLinear
from hybridserve.backends.ops import Activation
from hybridserve.backends.reference.linear import moe


class NativeMoe:
    """`ops.Moe`. Handed over to the reference, with the native product: element types other than fp32 and bf16, experts with
    strided rows, unknown activations, and on processors with bf16 instructions bf16 batches of more than 4 rows for each expert.

    A row's sums have one fixed order, so its result is the same bits alone and in any batch (but for that hand-over).
    """

    def __init__(self, library: Library, bf16_hardware: bool) -> None:
        self._kernel = library.kernel("hs_moe")
        self._linear = NativeLinear(library, bf16_hardware)
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
        up_bias, down_bias = biases or (None, None)
        if activation not in ACTIVATION_CODES or not self._takes(
            x, expert_ids, gate_up, down, expert_weights, up_bias, down_bias
        ):
            return moe(
                *(self._linear, x, expert_ids, expert_weights, gate_up, down),
                activation=activation,
                limit=limit,
                up_shift=up_shift,
                biases=biases,
            )
        x, ids, weights = dense_rows(x), expert_ids.contiguous(), expert_weights.contiguous()
        up_bias, down_bias = (None if bias is None else bias.contiguous() for bias in (up_bias, down_bias))
        out = x.new_empty(x.shape)
        num_experts, size, inner = down.shape
        self._kernel(
            *(*elements(x), x.stride(0), ids.data_ptr(), *elements(weights)),
            *(gate_up.data_ptr(), *gate_up.stride()[:2], down.data_ptr(), *down.stride()[:2], elements(down)[1]),
            *(*elements(up_bias), *elements(down_bias), out.data_ptr()),
            *(*ids.shape, num_experts, size, inner, gate_up.shape[1] != inner, ACTIVATION_CODES[activation]),
            *(math.inf if limit is None else limit, up_shift, torch.get_num_threads()),
        )
        return out

    def _takes(self, x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, *others: Tensor | None) -> bool:
        dense = gate_up.stride(2) == 1 and down.stride(2) == 1
        if not dense or not covers(x, gate_up, *others) or gate_up.dtype != down.dtype:
            return False
        bf16 = x.dtype == gate_up.dtype == torch.bfloat16
        many = ids.numel() > MAX_ROWS_BESIDE_BF16_HARDWARE * gate_up.shape[0]
        return not (self._bf16_hardware and bf16 and many)
