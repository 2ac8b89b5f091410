"""Paged attention and the write of its entries on native kernels.

Owns the mapping of their tensors to the kernels' arguments. Must not know layers or pools. Built by `offer`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridserve.backends.cpu.bounds import EVERYTHING, Bounds
from hybridserve.backends.cpu.library import Kernel, Library, covers, dense_rows, elements, heads
from hybridserve.backends.reference import attention as reference
from hybridserve.backends.reference import indexed
from hybridserve.batch import Batch, PagedTable


class NativeAttention:
    """`ops.PagedAttention`, `ops.SelectedAttention` and `ops.KvWrite`. Handed over to the reference: element types other than
    fp32 and bf16, keys and values of different types, and caches that are not dense in the last dimension.

    Keys are cut into segments at fixed positions and merged in order, so a row's result is the same bits in decode,
    prefill and verification, alone and in any batch, with any number of threads.
    """

    def __init__(self, library: Library) -> None:
        self._attend: Kernel = library.kernel("hs_paged_attention")
        self._attend_selected: Kernel = library.kernel("hs_selected_attention")
        self._write: Kernel = library.kernel("hs_kv_write")
        self._bounds = Bounds(library)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        table: PagedTable,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `ops.PagedAttention`. q: [T, Hq, K]; k_cache: [B, block_size, Hk, K]; v_cache: [B, block_size, Hk, V];
        sinks: [Hq]. Returns [T, Hq, V] in q's dtype.
        """
        if not _takes(q, k_cache, v_cache, sinks):
            return reference.paged_attention(
                q, k_cache, v_cache, batch, table, scale=scale, window=window, softcap=softcap, sinks=sinks
            )
        seen = EVERYTHING if window is None else window
        self._bounds.check_blocks(table, batch, len(k_cache), seen)
        q = dense_rows(q)
        sinks = None if sinks is None else sinks.contiguous()
        out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
        tables = dense_rows(table.block_tables)
        self._attend(
            *heads(q),
            *(k_cache.data_ptr(), *k_cache.stride()[:3]),
            *(v_cache.data_ptr(), *v_cache.stride()[:3], elements(k_cache)[1]),
            *(tables.data_ptr(), tables.stride(0), table.block_size),
            *(batch.cu_seqlens.data_ptr(), batch.kv_lens.data_ptr(), batch.num_sequences),
            *(q.shape[1], k_cache.shape[2], k_cache.shape[3], v_cache.shape[3]),
            *(scale, seen, softcap or 0.0),
            *(*elements(sinks), *elements(out), torch.get_num_threads()),
        )
        return out

    def selected_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, selected: Tensor, batch: Batch, table: PagedTable, *, scale: float
    ) -> Tensor:
        """See `ops.SelectedAttention`. q: [T, Hq, K]; k_cache: [B, block_size, Hk, K]; v_cache: [B, block_size, Hk, V];
        selected: int32 [T, N]. Returns [T, Hq, V] in q's dtype.
        """
        if not _takes(q, k_cache, v_cache, None) or selected.dtype != torch.int32:
            return indexed.selected_attention(q, k_cache, v_cache, selected, batch, table, scale=scale)
        self._bounds.check_blocks(table, batch, len(k_cache), EVERYTHING)
        q, selected = dense_rows(q), selected.contiguous()
        out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
        tables = dense_rows(table.block_tables)
        self._attend_selected(
            *heads(q),
            *(k_cache.data_ptr(), *k_cache.stride()[:3]),
            *(v_cache.data_ptr(), *v_cache.stride()[:3], elements(k_cache)[1]),
            *(tables.data_ptr(), tables.stride(0), table.block_size),
            *(selected.data_ptr(), selected.shape[1]),
            *(batch.cu_seqlens.data_ptr(), batch.kv_lens.data_ptr(), batch.num_sequences),
            *(q.shape[1], k_cache.shape[2], k_cache.shape[3], v_cache.shape[3]),
            *(scale, *elements(out), torch.get_num_threads()),
        )
        return out

    def kv_write(self, values: Mapping[str, Tensor], cache: Mapping[str, Tensor], table: PagedTable) -> None:
        """See `ops.KvWrite`. values[name]: [T, ...]; cache[name]: [B, block_size, ...], in place."""
        for name, entries in values.items():
            stored = cache[name]
            self._bounds.check_entries(name, table, entries, stored)
            if covers(entries, stored) and stored[0, 0].is_contiguous():
                self._write_one(entries, stored, table)
            else:
                reference.kv_write({name: entries}, {name: stored}, table)

    def _write_one(self, entries: Tensor, stored: Tensor, table: PagedTable) -> None:
        """entries: [T, ...]; stored: [B, block_size, ...], in place."""
        rows = entries.flatten(1) if entries.dim() > 1 else entries.unsqueeze(1)
        rows = dense_rows(rows)
        self._write(
            *(*elements(rows), rows.stride(0)),
            *(*elements(stored), stored.stride(0), stored.stride(1)),
            *(table.kv_index.data_ptr(), table.block_size, rows.shape[0], rows.shape[1]),
            torch.get_num_threads(),
        )


def _takes(q: Tensor, k_cache: Tensor, v_cache: Tensor, sinks: Tensor | None) -> bool:
    dense = k_cache.stride(3) == 1 and v_cache.stride(3) == 1
    return dense and covers(q, k_cache, sinks) and k_cache.dtype == v_cache.dtype
