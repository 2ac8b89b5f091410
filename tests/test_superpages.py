"""Superpages: every group's pages tile them exactly and aligned, whatever the sizes; else groups would overlap each other."""

import random

import pytest
import torch

from hybridserve.kv.arena import ALIGN_NBYTES, MAX_ROUNDING, pages_within, plan_cache, superpage_nbytes
from hybridserve.kv.spec import PagedSpec, StateSpec, TensorSpec
from hybridserve.kv.storage import Storage

#: Pages of Qwen3.8-Flash-Next: no multiple of the smallest is divided by all of them once they are rounded as little as can be.
FLASH_NEXT = [115_458_048, 184_384, 393_216, 12_288, 9_216]


def check(pages: list[int], *, rounded: bool) -> None:
    size = superpage_nbytes(pages)
    for page in pages:
        count = pages_within(size, page)
        assert size % count == 0
        assert size // count >= page
        assert size // count % ALIGN_NBYTES == 0
        assert not rounded or size / count <= page * (1 + MAX_ROUNDING)
    assert size // pages_within(size, min(pages)) == min(pages)


@pytest.mark.parametrize("pages", [FLASH_NEXT, [64], [64, 64], [4096, 300_032, 70_016], [147_619_840, 180_224, 16_896, 11_264]])
def test_pages_tile_a_superpage_with_little_rounding(pages: list[int]) -> None:
    check(pages, rounded=True)


def test_pages_of_any_size_tile_a_superpage() -> None:
    """Among random sizes are those that no superpage within bounds suits: they waste more, and still never overlap."""
    generator = random.Random(3)
    for _ in range(60):
        pages = [ALIGN_NBYTES * generator.randint(1, 4000) for _ in range(generator.randint(1, 5))]
        check(pages, rounded=False)


def test_the_last_page_of_a_superpage_ends_where_the_next_superpage_begins() -> None:
    """Fill the first superpage of one group and the second of another: neither may change the other."""
    ring = StateSpec((TensorSpec("conv", (9, 80), "bfloat16"), TensorSpec("tokens", (2,), "int64")))
    layers = [
        {"kv": PagedSpec((TensorSpec("k", (1, 16), "bfloat16"),))},
        {"index": PagedSpec((TensorSpec("k", (3,), "bfloat16"),), tokens_per_entry=4)},
        {"state": StateSpec((TensorSpec("h", (61, 97), "float32"),)), "ring": ring},
    ]
    plan = plan_cache(layers, 12 * plan_cache(layers, 2**40).superpage_nbytes)  # few, so that bfloat16 can tell them apart
    assert plan.num_superpages == 12
    storage = Storage(plan, torch.device("cpu"))
    caches = storage.layer_caches(len(layers))
    views = {
        place.tensor_name + place.spec_name: (group, caches[place.layer][place.spec_name].tensors[place.tensor_name])
        for group in plan.groups
        for place in group.places
    }
    turns = list(views.values())
    for superpage in range(plan.num_superpages):
        group, _ = turns[superpage % len(turns)]
        for other, tensor in turns:
            if other is group:
                tensor[superpage * group.pages_per_superpage : (superpage + 1) * group.pages_per_superpage] = superpage + 1
    for superpage in range(plan.num_superpages):
        group, _ = turns[superpage % len(turns)]
        for other, tensor in turns:
            if other is group:
                held = tensor[superpage * group.pages_per_superpage : (superpage + 1) * group.pages_per_superpage]
                assert (held == superpage + 1).all()
