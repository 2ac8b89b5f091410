"""The gated delta rule and the scan of Mamba-2 on the native kernel.

Owns the mapping of their tensors to the kernel's arguments. Must not know layers or pools. Built by `offer`.
"""

import torch
from torch import Tensor

from hybridserve.backends.cpu.bounds import Bounds
from hybridserve.backends.cpu.library import Kernel, Library, covers, dense_rows, elements, heads
from hybridserve.backends.reference import recurrence as reference
from hybridserve.batch import Batch, StateTable


class NativeRecurrence:
    """`ops.DeltaRule` and `ops.LinearScan`, handed over to the reference for element types other than fp32 and bf16 and
    for states that are not fp32 or not dense within a slot.

    Row after row, every state row by the same arithmetic: results are the same bits however the rows are cut into passes
    and whatever the batch neighbours are.
    """

    def __init__(self, library: Library) -> None:
        self._kernel: Kernel = library.kernel("hs_recurrence")
        self._bounds = Bounds(library)

    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        state: Tensor,
        batch: Batch,
        table: StateTable,
        *,
        scale: float,
        qk_l2norm: bool,
    ) -> Tensor:
        """See `ops.DeltaRule`. q, k: [T, Hk, K]; v: [T, Hv, V]; log_decay: [T, Hv] or [T, Hv, K]; beta: [T, Hv]; state:
        [L, Hv, V, K] fp32, in place. Returns [T, Hv, V] in v's dtype.
        """
        if not _takes(state, q, k, v, log_decay, beta):
            return reference.delta_rule(q, k, v, log_decay, beta, state, batch, table, scale=scale, qk_l2norm=qk_l2norm)
        out = v.new_empty(v.shape)
        self._run(q, k, v, log_decay, beta, state, out, batch, table, scale, qk_l2norm)
        return out

    def linear_scan(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, batch: Batch, table: StateTable
    ) -> Tensor:
        """See `ops.LinearScan`. q, k: [T, G, N]; v: [T, H, P]; log_decay: [T, H]; state: [L, H, P, N] fp32, in place.

        Returns [T, H, P] fp32.
        """
        if not _takes(state, q, k, v, log_decay):
            return reference.linear_scan(q, k, v, log_decay, state, batch, table)
        out = torch.empty(v.shape, dtype=torch.float32)
        self._run(q, k, v, log_decay, None, state, out, batch, table, 1.0, False)
        return out

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        state: Tensor,
        out: Tensor,
        batch: Batch,
        table: StateTable,
        scale: float,
        qk_l2norm: bool,
    ) -> None:
        """Run the kernel; shapes as in the two operations, out: [T, Hv, V], written."""
        q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
        per_channel = log_decay.dim() == 3
        if per_channel:
            log_decay = dense_rows(log_decay)
        _, num_heads, value_size, key_size = state.shape
        if v.shape[1:] != (num_heads, value_size) or not q.shape[2] == k.shape[2] == key_size:
            raise ValueError(
                f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit states {tuple(state.shape[1:])}"
            )
        self._kernel(
            *(*heads(q), *heads(k), *heads(v), *heads(log_decay), per_channel),
            *((None, 0, 0, 0) if beta is None else heads(beta)),
            *(state.data_ptr(), state.stride(0), *elements(out)),
            *self._bounds.state_arguments(batch, table, len(state)),
            *(q.shape[1], num_heads, key_size, value_size),
            *(scale, qk_l2norm, torch.get_num_threads()),
        )


def _takes(state: Tensor, *rows: Tensor) -> bool:
    return covers(*rows) and state.dtype == torch.float32 and state[0].is_contiguous()
