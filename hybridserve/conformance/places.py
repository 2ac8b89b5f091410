"""Checks of where a layer reads and writes: its own slots and entries, and nothing beside them.

Each check takes a built mixer with its parameters filled and raises `ConformanceError`. Called through `checks.py`.
"""

import math
import mmap
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from hybridserve.batch import Cache
from hybridserve.conformance.batches import Rows, block_size_for, blocks_for
from hybridserve.conformance.bench import Bench, is_same, rows_of, run_whole
from hybridserve.conformance.tolerance import FP32, Tolerance, require
from hybridserve.kv.arena import plan_cache
from hybridserve.kv.spec import DTYPE_NBYTES, Spec, StateSpec
from hybridserve.kv.storage import Storage
from hybridserve.mixers.base import Mixer

#: Superpages that a sequence of two pages fits in, whatever their number in a superpage.
_SUPERPAGES = 2
#: Linux's flag for addresses without memory behind them, which Python names from 3.13 on; elsewhere they cost nothing either.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


def check_slots(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """A pass reads start slots and writes write slots; all else stays, bit by bit (I4, I5, R11)."""
    context, num_rows = 6, 11
    x = rows_of(mixer, num_rows)
    blocks = (blocks_for(num_rows), blocks_for(num_rows, 20), blocks_for(num_rows, 40))
    expected, state = run_whole(mixer, x)
    bench = Bench(mixer)
    for shared in blocks:
        bench.run_chunks(x[:context], [context], 3, shared)
    before = bench.snapshot()
    # Two sequences start from one shared slot and write to their own; a third starts there too and writes nothing.
    length = num_rows - context
    writes: tuple[tuple[tuple[int, int], ...], ...] = (((length - 1, 7),), ((length - 1, 9),), ())
    sequences = [Rows(length, context, 3, w, b) for w, b in zip(writes, blocks, strict=True)]
    y = bench.run(x[context:].repeat(3, 1), sequences)
    for rows in torch.split(y, length):
        tolerance.check(rows, expected[context:], f"{length} rows started from a shared slot")
    for slot in (7, 9):
        tolerance.check_states(bench.state(slot), state, f"{length} rows from slot 3 to slot {slot}")
    _check_untouched(bench, before, {7, 9}, f"three sequences of {length} rows from slot 3 to 7, 9 and nowhere")


def _check_untouched(bench: Bench, before: dict[str, Tensor], written: Iterable[int], what: str) -> None:
    """All slots but those written hold what they held, bit by bit."""
    for name, pool in bench.pools().items():
        if bench.is_state(name):
            named = set(written)
            changed = [i for i in range(len(pool)) if i not in named and not is_same(pool[i], before[name][i])]
            require(not changed, f"{what}: slots {changed} of {name} have changed, which the pass did not name")


def check_entries(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """A pass writes the entries of its own tokens in its own blocks, and no other (R11). For layers with paged caches."""
    del tolerance
    context, length = 6, 3
    blocks, other = blocks_for(context + length), blocks_for(8, 30)
    bench = Bench(mixer)
    bench.run_chunks(rows_of(mixer, 8, seed=5), [8], 1, other)
    x = rows_of(mixer, context + length)
    bench.run_chunks(x[:context], [context], 0, blocks)
    before = bench.snapshot()
    bench.run(x[context:], [Rows(length, context, 0, ((length - 1, 0),), blocks)])
    own = {divmod(position, bench.block_size) for position in range(context, context + length)}
    for name, pool in bench.pools().items():
        if bench.is_state(name):
            continue
        tokens_per_entry = bench.block_size // pool.shape[1]
        allowed = {(blocks[block], offset // tokens_per_entry) for block, offset in own}
        for page, entry in _changed(pool, before[name]):
            what = f"rows {context} to {context + length - 1} in blocks {blocks}"
            require((page, entry) in allowed, f"{what}: entry {entry} of block {page} of {name} has changed")


def _changed(pool: Tensor, before: Tensor) -> list[tuple[int, int]]:
    """Page and entry of all that is not what it was, bit by bit."""
    now, then = (tensor.contiguous().flatten(2).view(torch.uint8).flatten(2) for tensor in (pool, before))
    return [(int(page), int(entry)) for page, entry in (now != then).any(-1).nonzero()]


def check_padding(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """What lies between the pages of a cache is never written: offsets come from strides, not from shapes (I20)."""
    del tolerance
    bench = Bench(mixer)
    before = {name: _between_pages(pool).clone() for name, pool in bench.pools().items()}
    bench.run_chunks(rows_of(mixer, 9), [4, 1, 4], slot=2)
    for name, pool in bench.pools().items():
        require(is_same(_between_pages(pool), before[name]), f"chunks of 4, 1 and 4 rows: {name} was written between its pages")


def _between_pages(pool: Tensor) -> Tensor:
    page = pool.as_strided((len(pool) - 1, pool.stride(0)), (pool.stride(0), 1))
    return page[:, math.prod(pool.shape[1:]) :]


def check_crossing_slots(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """A slot may be one sequence's start and another's target in the same pass: reads come first."""
    xs = [rows_of(mixer, 8, 1), rows_of(mixer, 8, 2)]
    blocks = (blocks_for(8), blocks_for(8, 10))
    bench = Bench(mixer)
    for slot, (x, own) in enumerate(zip(xs, blocks, strict=True)):
        bench.run_chunks(x[:5], [5], slot, own)
    y = bench.run(torch.cat([x[5:] for x in xs]), [Rows(3, 5, 0, ((2, 1),), blocks[0]), Rows(3, 5, 1, ((2, 0),), blocks[1])])
    for x, rows, slot in zip(xs, torch.split(y, 3), (1, 0), strict=True):
        expected, state = run_whole(mixer, x)
        what = f"two sequences of 5 + 3 rows that take each other's slots, the one to slot {slot}"
        tolerance.check(rows, expected[5:], what)
        tolerance.check_states(bench.state(slot), state, what)


def check_no_writes(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """A verification of drafts reads its slot and writes none, so the same rows can be run again."""
    x = rows_of(mixer, 9)
    expected, _ = run_whole(mixer, x)
    bench = Bench(mixer)
    bench.run_chunks(x[:5], [5], slot=4, blocks=blocks_for(9))
    before = bench.snapshot()
    for length in (4, 1, 3):
        y = bench.run(x[5 : 5 + length], [Rows(length, 5, 4, (), blocks_for(9))])
        tolerance.check(y, expected[5 : 5 + length], f"{length} draft rows after 5")
        _check_untouched(bench, before, (), f"{length} draft rows that write nothing")


def check_specs(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """A pass fills every tensor that the specs name, in the declared dtype: nothing is stored that was not declared."""
    del tolerance
    require(mixer.specs() == mixer.specs(), "two calls of specs() differ")
    bench = Bench(mixer)
    before = bench.snapshot()
    bench.run_chunks(rows_of(mixer, bench.block_size), [bench.block_size], slot=1, blocks=(2,))
    for name, pool in bench.pools().items():
        page = 1 if bench.is_state(name) else 2
        left = pool[page].isnan() if pool.is_floating_point() else pool[page] == before[name][page]
        require(not left.any(), f"a block of {bench.block_size} rows: {name} was not written whole")


def check_storage(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Specs give what the engine's storage allocates, to the byte, and the layer computes the same in it."""
    specs = mixer.specs()
    if not specs:
        return
    block_size = block_size_for(specs.values())
    size = plan_cache([specs, specs], 2**50, block_size=block_size).superpage_nbytes
    plan = plan_cache([specs, specs], _SUPERPAGES * 2 * len(specs) * size, block_size=block_size)
    storage = Storage(plan, torch.device("cpu"))
    require(storage.nbytes == plan.nbytes, f"storage has {storage.nbytes:,} bytes, its plan {plan.nbytes:,}")
    caches = storage.layer_caches(2)[1]
    for name, spec in specs.items():
        for tensor in spec.tensors:
            view = caches[name].tensors[tensor.name]
            _check_view(view, (*_entries(spec, block_size), *tensor.shape), tensor.dtype, f"{name}.{tensor.name}")
    bench, x = Bench(mixer), rows_of(mixer, 7)
    own = {}
    for group, (name, cache) in enumerate((name, caches[name]) for name in specs):
        # Groups share the arena: each is given superpages of its own, as the coordinator would.
        first = cache.group * _SUPERPAGES * plan.groups[cache.group].pages_per_superpage
        own[name] = Cache(group, {tensor: view[first:] for tensor, view in cache.tensors.items()})
    bench.use(own)
    y = bench.run_chunks(x, [3, 4], slot=1, blocks=(1, 0))
    tolerance.check(y, run_whole(mixer, x)[0], "chunks of 3 and 4 rows in the engine's own storage")


def _check_view(view: Tensor, expected: tuple[int, ...], dtype: str, name: str) -> None:
    require(
        tuple(view.shape[1:]) == expected, f"storage has pages of {tuple(view.shape[1:])} for {name}, its spec says {expected}"
    )
    require(str(view.dtype) == f"torch.{dtype}", f"storage has {name} in {view.dtype}, its spec says {dtype}")


def _entries(spec: Spec, block_size: int) -> tuple[int, ...]:
    """Dimensions of a page before those of an entry."""
    return () if isinstance(spec, StateSpec) else (block_size // spec.tokens_per_entry,)


def check_offsets(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Pages beyond 2^31 elements are found: offsets take 64 bits (I20). Memory that is not touched costs nothing here."""
    specs = mixer.specs()
    if not specs:
        return
    x = rows_of(mixer, 7)
    expected, state = run_whole(mixer, x)
    bench = Bench(mixer)
    bench.use(_far_apart(specs))
    tolerance.check(bench.run_chunks(x, [3, 4], slot=1, blocks=(1, 0)), expected, "pages 2^31 elements apart")
    tolerance.check_states(bench.state(1), state, "slots 2^31 elements apart")


def _far_apart(specs: dict[str, Spec]) -> dict[str, Cache]:
    """Two pages of each tensor, 2^31 elements apart, all in one stretch of addresses."""
    apart = 2**31 + 64
    block_size = block_size_for(specs.values())
    itemsize = max(DTYPE_NBYTES[tensor.dtype] for spec in specs.values() for tensor in spec.tensors)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    arena = torch.frombuffer(mmap.mmap(-1, (apart + 2**24) * itemsize, flags=flags), dtype=torch.uint8)
    caches, first = {}, 0
    for group, (name, spec) in enumerate(specs.items()):
        tensors = {}
        for tensor in spec.tensors:
            shape = (*_entries(spec, block_size), *tensor.shape)
            inner = torch.empty(shape, device="meta").stride()
            whole, itemsize = arena.view(getattr(torch, tensor.dtype)), DTYPE_NBYTES[tensor.dtype]
            tensors[tensor.name] = whole.as_strided((2, *shape), (apart, *inner), first // itemsize)
            first += -(-math.prod(shape) * itemsize // 64) * 64
        caches[name] = Cache(group, tensors)
    return caches
