"""Attention of grouped heads to the tokens that an index of pooled keys chooses (Qwen3.8-Flash-Next's QSA).

Owns the joining of the two. Must not know pools, models or the scheduler. Built by architectures by the name
"indexed_attention". Source: published `Qwen4ExpTextAttention`.

Letters: T rows, D hidden, Hq query heads, K head dim.
"""

import torch
from torch import Tensor

from hybridserve.backends.ops import Ops
from hybridserve.batch import Batch, LayerCaches
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import Spec
from hybridserve.mixers.attention import Attention, AttentionConfig
from hybridserve.mixers.base import mixers
from hybridserve.mixers.index import IndexConfig, MeanPoolIndex


class IndexedAttentionConfig(AttentionConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attention with an index of means of `index.group` keys. Window, softcap and sinks are not published with an index."""

    index: IndexConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None or self.softcap is not None or self.sinks:
            raise UnsupportedModelError("attention with an index has neither window, softcap nor sinks; leave them out")
        if self.index.group < 2:
            raise UnsupportedModelError(f"an index of means has groups of {self.index.group} tokens; it must be at least 2")


@mixers.register("indexed_attention")
class IndexedAttention(Attention):
    """Causal attention that reads only the tokens an index names."""

    Config = IndexedAttentionConfig
    config: IndexedAttentionConfig
    kind = "indexed_attention"

    def __init__(self, config: IndexedAttentionConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        self.indexer = MeanPoolIndex(config.index, ops, dtype)

    def specs(self) -> dict[str, Spec]:
        """Key and value of each token, and the caches of the index."""
        return {**super().specs(), **self.indexer.specs()}

    def attend(self, q: Tensor, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """What queries find among the chosen tokens. q: [T, Hq, K]; x: [T, D]. Returns [T, Hq, K]."""
        chosen = self.indexer.select(x, x, batch, caches)
        cache = caches["kv"]
        table = batch.paged[cache.group]
        return self.ops.selected_attention(q, cache.tensors["k"], cache.tensors["v"], chosen, batch, table, scale=self.scale)
