"""The choice by an index on the native kernel.

Owns the mapping of its tensors to the kernel's arguments. Must not know layers or pools. Built by `offer`.
"""

import torch
from torch import Tensor

from hybridserve.backends.cpu.bounds import EVERYTHING, Bounds
from hybridserve.backends.cpu.library import Library, covers, dense_rows, elements, heads
from hybridserve.backends.reference import indexed as reference
from hybridserve.batch import Batch, PagedTable


class NativeIndexSelect:
    """`ops.IndexSelect`. Handed over to the reference: element types other than fp32 and bf16, and keys that are not dense.

    A row's scores are the same bits in any pass and batch, so its choice is the same.
    """

    def __init__(self, library: Library) -> None:
        self._kernel = library.kernel("hs_index_select")
        self._bounds = Bounds(library)

    def __call__(
        self, q: Tensor, weights: Tensor | None, k_cache: Tensor, batch: Batch, table: PagedTable, *, num_selected: int
    ) -> Tensor:
        """See `ops.IndexSelect`. q: [T, H, K]; weights: [T, H] or None; k_cache: [B, block_size // n, K].

        Returns int32 [T, num_selected].
        """
        if not covers(q, weights, k_cache) or k_cache.stride(2) != 1:
            return reference.index_select(q, weights, k_cache, batch, table, num_selected=num_selected)
        q = dense_rows(q)
        weights = None if weights is None else dense_rows(weights)
        self._bounds.check_blocks(table, batch, len(k_cache), EVERYTHING)
        tables = dense_rows(table.block_tables)
        per_block = k_cache.shape[1]
        out = torch.empty(len(q), num_selected, dtype=torch.int32)
        self._kernel(
            *(*heads(q), *elements(weights), 0 if weights is None else weights.stride(0)),
            *(*elements(k_cache), k_cache.stride(0), k_cache.stride(1)),
            *(tables.data_ptr(), tables.stride(0), per_block, table.block_size // per_block),
            *(batch.cu_seqlens.data_ptr(), batch.kv_lens.data_ptr(), batch.num_sequences),
            *(q.shape[1], q.shape[2], num_selected, out.data_ptr(), torch.get_num_threads()),
        )
        return out
