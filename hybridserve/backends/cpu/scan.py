"""Mamba's selective scan on the native kernel.

Owns the mapping of its tensors to the kernel's arguments. Must not know layers or pools. Built by `offer`.
"""

import torch
from torch import Tensor

from hybridserve.backends.cpu.bounds import Bounds
from hybridserve.backends.cpu.library import Kernel, Library, covers, dense_rows, elements
from hybridserve.backends.reference.selective_scan import selective_scan
from hybridserve.batch import Batch, StateTable


class NativeSelectiveScan:
    """`ops.SelectiveScan`, handed over to the reference for element types other than fp32 and bf16 and for states that are not
    fp32 or not dense within a slot.

    Row after row, every channel by the same arithmetic: results are the same bits however the rows are cut into passes and
    whatever the batch neighbours are.
    """

    def __init__(self, library: Library) -> None:
        self._kernel: Kernel = library.kernel("hs_selective_scan")
        self._bounds = Bounds(library)

    def __call__(
        self, x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, state: Tensor, batch: Batch, table: StateTable
    ) -> Tensor:
        """See `ops.SelectiveScan`. x, dt: [T, C]; A: [C, N]; b, c: [T, N]; state: [L, C, N] fp32, in place.

        Returns [T, C] fp32.
        """
        if not covers(x, dt, b, c) or state.dtype != torch.float32 or not state[0].is_contiguous():
            return selective_scan(x, dt, A, b, c, state, batch, table)
        channels, size = state.shape[1:]
        if not (x.shape[1] == dt.shape[1] == A.shape[0] == channels and b.shape[1] == c.shape[1] == A.shape[1] == size):
            raise ValueError(f"x {tuple(x.shape)} and b {tuple(b.shape)} do not fit states {tuple(state.shape[1:])}")
        x, dt, b, c = dense_rows(x), dense_rows(dt), dense_rows(b), dense_rows(c)
        rates = A.float().contiguous()
        out = torch.empty(x.shape, dtype=torch.float32)
        self._kernel(
            *(argument for rows in (x, dt, b, c) for argument in (*elements(rows), rows.stride(0))),
            *(rates.data_ptr(), state.data_ptr(), state.stride(0), out.data_ptr()),
            *self._bounds.state_arguments(batch, table, len(state)),
            *(channels, size, torch.get_num_threads()),
        )
        return out
