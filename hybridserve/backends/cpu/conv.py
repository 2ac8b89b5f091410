"""Short convolutions on the native kernel.

Owns the mapping of their tensors to the kernel's arguments. Must not know layers or pools. Built by `offer`.
"""

import torch
from torch import Tensor

from hybridserve.backends.cpu.bounds import Bounds
from hybridserve.backends.cpu.library import Library, covers, dense_rows, elements
from hybridserve.backends.ops import Activation
from hybridserve.backends.reference import conv as reference
from hybridserve.batch import Batch, StateTable


class NativeShortConv:
    """`ops.ShortConv` of any width. Handed over to the reference: element types other than fp32 and bf16, activations
    other than silu and identity, and windows that are not dense within a slot.

    A row's result is the same bits however its sequence is cut into passes, and whatever its neighbours are.
    """

    def __init__(self, library: Library) -> None:
        self._kernel = library.kernel("hs_short_conv")
        self._bounds = Bounds(library)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        window: Tensor,
        batch: Batch,
        table: StateTable,
        *,
        activation: Activation,
    ) -> Tensor:
        """See `ops.ShortConv`. x: [T, C]; weight: [C, W]; bias: [C] or None; window: [L, W - 1, C], in place.

        Returns [T, C] in x's dtype.
        """
        known = activation in ("silu", "identity") and covers(x, weight, bias, window)
        if not known or not window[0].is_contiguous():
            return reference.short_conv(x, weight, bias, window, batch, table, activation=activation)
        x, weight = dense_rows(x), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        out = x.new_empty(x.shape)
        channels, width = weight.shape
        self._kernel(
            *(*elements(x), x.stride(0), *elements(weight), *elements(bias)),
            *(*elements(window), window.stride(0), out.data_ptr()),
            *self._bounds.state_arguments(batch, table, len(window)),
            *(channels, width, activation == "silu", torch.get_num_threads()),
        )
        return out
