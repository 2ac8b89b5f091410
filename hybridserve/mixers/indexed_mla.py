"""Latent attention to the tokens that an index chooses (DeepSeek-V3.2, GLM-5, GLM-5.3-Flash).

Owns the joining of the two and the sharing of a choice by layers. Must not know pools, models or the scheduler. Built by
architectures by the name "indexed_mla". Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1; sharing arXiv 2603.12201.

Letters: T rows, D hidden, H heads, R latent rank, P rotary part, N tokens chosen.
"""

from typing import Literal

import torch
from torch import Tensor

from hybridserve.backends.ops import Ops
from hybridserve.batch import Batch, LayerCaches
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import Spec
from hybridserve.mixers.base import mixers
from hybridserve.mixers.index import IndexConfig, LearnedPoolIndex, TokenIndex
from hybridserve.mixers.mla import MLA, MLAConfig

#: Key of `Batch.derived` under which a layer leaves its choice for the layers after it.
_CHOICE = "tokens chosen by the last index"


class IndexedMLAConfig(MLAConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latent attention with an index: of one key per token, or of one learned key per group.

    `index` None: the layer has none and attends to what the last layer with one has chosen.
    """

    index: IndexConfig | None = None
    pooling: Literal["none", "learned"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.index is not None and (self.index.group > 1) != (self.pooling == "learned"):
            raise UnsupportedModelError(f"an index with groups of {self.index.group} tokens and pooling {self.pooling!r}")


@mixers.register("indexed_mla")
class IndexedMLA(MLA):
    """Latent attention that reads only the tokens an index names."""

    Config = IndexedMLAConfig
    config: IndexedMLAConfig
    kind = "indexed_mla"

    def __init__(self, config: IndexedMLAConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        kind = LearnedPoolIndex if config.pooling == "learned" else TokenIndex
        self.indexer = None if config.index is None else kind(config.index, ops, dtype)

    def specs(self) -> dict[str, Spec]:
        """The latent entries and the caches of the index, if the layer has one."""
        return {**super().specs(), **({} if self.indexer is None else self.indexer.specs())}

    def attend(self, q: Tensor, x: Tensor, query_row: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """What queries find among the chosen tokens. q: [T, H, R + P]; x: [T, D]. Returns [T, H, R]."""
        if self.indexer is not None:
            batch.derived[_CHOICE] = (self.indexer.select(x, query_row, batch, caches),)
        (chosen,) = batch.derived[_CHOICE]
        cache = caches["kv"]
        entries = cache.tensors["latent"].unsqueeze(2)
        values = entries[..., : self.config.kv_rank]
        return self.ops.selected_attention(q, entries, values, chosen, batch, batch.paged[cache.group], scale=self.scale)
