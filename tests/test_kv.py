"""The division of memory: plans against figures worked out by hand, and storage against the plan."""

import numpy as np
import pytest
import torch

from hybridserve.errors import DoesNotFitError
from hybridserve.kv.arena import MAX_ROUNDING, Arena, plan_cache, superpage_nbytes
from hybridserve.kv.coordinator import BlockCopy
from hybridserve.kv.pool import PagePool
from hybridserve.kv.spec import PagedSpec, StateSpec, TensorSpec
from hybridserve.kv.storage import Storage
from tests.simulation import LAYOUTS


def kv(heads, dim, dtype="bfloat16", window=None):
    return PagedSpec((TensorSpec("k", (heads, dim), dtype), TensorSpec("v", (heads, dim), dtype)), window=window)


def test_a_gated_delta_hybrid_divides_as_worked_out_by_hand():
    # 24 layers: 18 states of conv 3 x 6144 bf16 and 16 x 128 x 128 fp32, 6 caches of 2 heads x 256.
    state = StateSpec((TensorSpec("conv", (3, 6144), "bfloat16"), TensorSpec("recurrent", (16, 128, 128), "float32")))
    layers = [{"kv": kv(2, 256)} if i % 4 == 3 else {"state": state} for i in range(24)]
    plan = plan_cache(layers, 2**32)
    assert plan.kv_nbytes_per_token == 12_288
    assert plan.state_nbytes_per_sequence == 19_537_920
    assert plan.superpage_nbytes == 100 * 196_608  # a slot is 99.4 blocks, so it becomes 100
    assert {g.kind: g.pages_per_superpage for g in plan.groups} == {"state": 1, "paged": 100}
    assert 0.6 < plan.padding_percent < 0.7
    assert plan.match_unit == 16


def test_a_short_conv_hybrid_rounds_nothing():
    conv = StateSpec((TensorSpec("conv", (2, 1024), "bfloat16"),))
    plan = plan_cache([{"state": conv}] * 10 + [{"kv": kv(8, 64)}] * 6, 2**30)
    assert {g.kind: g.pages_per_superpage for g in plan.groups} == {"state": 24, "paged": 5}
    assert plan.padding_percent == 0.0


@pytest.mark.parametrize("pages", [[4096, 300_032, 70_016], [64, 64_000], [1 << 20], [192, 320, 448]])
def test_superpages_hold_whole_pages_with_little_rounding(pages):
    size = superpage_nbytes(pages)
    for page in pages:
        count = size // page
        assert size % count == 0
        assert size / count <= page * (1 + MAX_ROUNDING)


def test_users_and_longest_sequence_agree_with_a_count_by_hand():
    plan = plan_cache([{"kv": kv(1, 8)}, {"state": StateSpec((TensorSpec("s", (128,), "float32"),))}], 40 * 512)
    # a block is 16 x 2 x 8 x 2 = 512 bytes, a slot 512 bytes: one superpage each
    assert plan.superpage_nbytes == 512
    assert plan.users_at(16) == 20
    assert plan.users_at(17) == 13
    assert plan.longest_sequence(10_000) == 39 * 16


def test_too_little_memory_is_refused_with_numbers():
    with pytest.raises(DoesNotFitError, match="less than one superpage of 512"):
        plan_cache([{"kv": kv(1, 8)}], 100)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_cover_every_page_without_overlap(layout):
    """Fill each view of each page with a number of its own; nothing may overwrite anything else."""
    layers = LAYOUTS[layout]
    plan = plan_cache(layers, 6 * plan_cache(layers, 2**40).superpage_nbytes)
    storage = Storage(plan, torch.device("cpu"))
    arena, pools = Arena(plan.num_superpages), []
    pools = [PagePool(group, arena) for group in plan.groups]
    taken = []
    while any(list(taken_now := [(pool, pool.take()) for pool in pools])) and any(page is not None for _, page in taken_now):
        taken += [(pool.group.index, page) for pool, page in taken_now if page is not None]
    views = [
        (cache.group, tensor)
        for caches in storage.layer_caches(len(layers))
        for cache in caches.values()
        for tensor in cache.tensors.values()
    ]
    number = 0
    for group, page in taken:
        for owner, tensor in views:
            if owner == group:
                number += 1
                tensor[page] = number
    number = 0
    for group, page in taken:
        for owner, tensor in views:
            if owner == group:
                number += 1
                assert (tensor[page] == number).all()
    assert number > 0
    assert storage.nbytes == plan.nbytes


def test_copies_move_whole_pages_of_all_layers():
    layers = LAYOUTS["attention+state"]
    plan = plan_cache(layers, 4 * plan_cache(layers, 2**40).superpage_nbytes)
    storage = Storage(plan, torch.device("cpu"))
    caches = storage.layer_caches(len(layers))
    group = next(g for g in plan.groups if g.is_paged)
    for layer in group.layers:
        for tensor in caches[layer]["kv"].tensors.values():
            tensor[1] = float(layer + 1)
    storage.copy([BlockCopy(group.index, 1, 0), BlockCopy(group.index, 1, 2)])
    for layer in group.layers:
        for tensor in caches[layer]["kv"].tensors.values():
            assert (tensor[:3] == layer + 1).all()


def test_offsets_beyond_32_bits_are_addressed(monkeypatch):
    """A plan of many GiB whose last page is written: untouched pages of the arena cost nothing."""
    layers = LAYOUTS["attention+state"]
    plan = plan_cache(layers, 6 * 2**30)
    storage = Storage(plan, torch.device("cpu"))
    state = next(c for caches in storage.layer_caches(len(layers)) for name, c in caches.items() if name == "state")
    tensor = state.tensors["s"]
    assert tensor.stride(0) * (len(tensor) - 1) * 4 > 2**32
    tensor[-1] = 3.0
    assert float(tensor[-1].sum()) == 3.0 * tensor[-1].numel()
    assert float(tensor[0].sum()) == 0.0


def test_dtypes_and_sizes_of_specs_are_checked():
    with pytest.raises(ValueError, match="float12"):
        TensorSpec("k", (1,), "float12")
    with pytest.raises(ValueError, match="positive"):
        TensorSpec("k", (0,), "float32")
    with pytest.raises(ValueError, match="repeat"):
        StateSpec((TensorSpec("a", (1,), "float32"), TensorSpec("a", (1,), "float32")))
    assert kv(2, 256).entry_nbytes == 2 * 2 * 256 * 2
    assert np.dtype(np.float32).itemsize * 4 == TensorSpec("k", (4,), "float32").nbytes
