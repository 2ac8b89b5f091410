"""The arena as tensors: the only place of `kv/` that holds any.

Owns the bytes. Gives each layer strided views of its caches, indexed by block or slot, and copies pages when told to. Knows
nothing of requests, references or policies. Built by `engine/runner.py` from a `CachePlan`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybridserve.batch import Cache, LayerCaches
from hybridserve.kv.arena import CachePlan, GroupPlan, TensorPlace
from hybridserve.kv.coordinator import BlockCopy


class Storage:
    """One allocation of `plan.nbytes`. Views share its memory; an offset needs 64 bits."""

    def __init__(self, plan: CachePlan, device: torch.device) -> None:
        self._arena = _zeroed(plan.nbytes, device)
        self._plan = plan
        self._pages = [
            self._arena.as_strided((plan.num_superpages * group.pages_per_superpage, group.page_nbytes), (group.page_nbytes, 1))
            for group in plan.groups
        ]

    @property
    def nbytes(self) -> int:
        return self._arena.numel()

    def flip_bits(self) -> None:
        """Flip the same bit of every byte, in place (a hook for tests of corrupted entries)."""
        self._arena.bitwise_xor_(0x10)

    def layer_caches(self, num_layers: int) -> list[LayerCaches]:
        """Every layer's caches by spec name; an empty mapping for a layer that needs none."""
        views: list[dict[str, dict[str, Tensor]]] = [{} for _ in range(num_layers)]
        groups: list[dict[str, int]] = [{} for _ in range(num_layers)]
        for group in self._plan.groups:
            for place in group.places:
                views[place.layer].setdefault(place.spec_name, {})[place.tensor_name] = self._view(group, place)
                groups[place.layer][place.spec_name] = group.index
        return [
            {name: Cache(groups[layer][name], tensors) for name, tensors in by_name.items()}
            for layer, by_name in enumerate(views)
        ]

    def _view(self, group: GroupPlan, place: TensorPlace) -> Tensor:
        """[num_pages, *place.shape] with one page's bytes between neighbours."""
        dtype: torch.dtype = getattr(torch, place.dtype)
        itemsize = dtype.itemsize
        shape = (self._plan.num_superpages * group.pages_per_superpage, *place.shape)
        inner = torch.empty(place.shape, device="meta").stride()
        return self._arena.view(dtype).as_strided(shape, (group.page_nbytes // itemsize, *inner), place.offset_nbytes // itemsize)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole pages. Sources and targets are distinct pages, so their order does not matter."""
        by_group: dict[int, list[BlockCopy]] = {}
        for copy in copies:
            by_group.setdefault(copy.group, []).append(copy)
        for index, members in by_group.items():
            pages = self._pages[index]
            sources = torch.tensor([copy.source for copy in members], device=pages.device)
            targets = torch.tensor([copy.target for copy in members], device=pages.device)
            pages[targets] = pages[sources]


def _zeroed(nbytes: int, device: torch.device) -> Tensor:
    """uint8 [nbytes] of zeros. On the CPU they come from fresh anonymous memory: pages that are never used cost nothing."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(nbytes, np.uint8))
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)
