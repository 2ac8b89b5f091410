"""The conformance kit: what every mixer must hold, whatever its mathematics, checked through `forward` alone.

Owns a small builder of batches and NaN-filled caches, and the checks. Must not know any mixer. Used by the tests of mixers,
of backends and of plug-ins: build a mixer, fill its parameters, call `ALL_CHECKS` on it.

A sequence is a tensor of rows ``[T, D]``. Caches are filled with NaN and strided like views of an arena, so that reading what
was never written, or writing what was not named, shows.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridserve.batch import NO_SLOT, Batch, Cache, LayerCaches, PagedTable, StateTable
from hybridserve.kv.spec import PagedSpec, Spec, StateSpec, TensorSpec
from hybridserve.mixers.base import Mixer, RecurrentMixer

BLOCK_SIZE = 4
NUM_SLOTS = 24
NUM_BLOCKS = 96

#: Signature of `Mixer.forward`, unbound: checks run with another implementation of it where one is to be compared.
Forward = Callable[[Mixer, Tensor, Batch, LayerCaches], Tensor]


@dataclass(frozen=True)
class Rows:
    """The rows of one sequence in a pass, and where its caches live.

    `writes` pairs a row, counted from the sequence's first row here, with the slot that its state is written to.
    """

    length: int
    context: int = 0
    start: int = NO_SLOT
    writes: tuple[tuple[int, int], ...] = ()
    blocks: tuple[int, ...] = ()


def build_batch(sequences: Sequence[Rows], specs: Iterable[Spec], block_size: int = BLOCK_SIZE) -> Batch:
    """The batch of one pass. Spec number i of `specs` is group i; all state groups use the same slots."""
    cu_seqlens = (0, *itertools.accumulate(s.length for s in sequences))
    kv_lens = tuple(s.context + s.length for s in sequences)
    positions = torch.cat([torch.arange(s.context, s.context + s.length) for s in sequences])
    groups = dict(enumerate(specs))
    return Batch(
        input_ids=torch.zeros(cu_seqlens[-1], dtype=torch.int64),
        positions=positions,
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        cu_seqlens_host=cu_seqlens,
        kv_lens_host=kv_lens,
        paged={g: _paged_table(sequences, block_size) for g, spec in groups.items() if isinstance(spec, PagedSpec)},
        states={g: _state_table(sequences, cu_seqlens) for g, spec in groups.items() if isinstance(spec, StateSpec)},
    )


def _paged_table(sequences: Sequence[Rows], block_size: int) -> PagedTable:
    width = max(len(s.blocks) for s in sequences)
    # Unused entries hold an id out of range: reading one fails instead of finding zeros.
    tables = torch.full((len(sequences), width), NUM_BLOCKS + 10**6, dtype=torch.int32)
    index = []
    for table, s in zip(tables, sequences, strict=True):
        table[: len(s.blocks)] = torch.tensor(s.blocks, dtype=torch.int32)
        positions = range(s.context, s.context + s.length)
        index += [s.blocks[position // block_size] * block_size + position % block_size for position in positions]
    return PagedTable(tables, torch.tensor(index, dtype=torch.int64), block_size)


def _state_table(sequences: Sequence[Rows], cu_seqlens: Sequence[int]) -> StateTable:
    starts = tuple(s.start for s in sequences)
    writes = sorted((cu + row, slot) for cu, s in zip(cu_seqlens, sequences, strict=False) for row, slot in s.writes)
    rows, slots = tuple(row for row, _ in writes), [slot for _, slot in writes]
    return StateTable(
        start_slots=torch.tensor(starts, dtype=torch.int64),
        write_rows=torch.tensor(rows, dtype=torch.int64),
        write_slots=torch.tensor(slots, dtype=torch.int64),
        write_rows_host=rows,
        starts_host=starts,
    )


def allocate(specs: dict[str, Spec], num_slots: int = NUM_SLOTS, num_blocks: int = NUM_BLOCKS) -> LayerCaches:
    """Caches as storage lays them out: one entry of every tensor after the other, so that the first dimension is strided."""
    return {
        name: Cache(
            group,
            {
                tensor.name: _strided_pool(tensor, num_slots, ())
                if isinstance(spec, StateSpec)
                else _strided_pool(tensor, num_blocks, (BLOCK_SIZE // spec.tokens_per_entry,))
                for tensor in spec.tensors
            },
        )
        for group, (name, spec) in enumerate(specs.items())
    }


def _strided_pool(tensor: TensorSpec, num_pages: int, entries: tuple[int, ...]) -> Tensor:
    """[num_pages, *entries, *shape] filled with NaN (the largest number where there is none)."""
    dtype = getattr(torch, tensor.dtype)
    poison = math.nan if dtype.is_floating_point else torch.iinfo(dtype).max
    shape = (*entries, *tensor.shape)
    page = torch.full((num_pages, math.prod(shape) + 8), poison, dtype=dtype)
    return page[:, : math.prod(shape)].unflatten(1, shape)


@dataclass
class Bench:
    """One mixer with caches of its own. `forward` replaces the mixer's, to compare two implementations."""

    mixer: Mixer
    forward: Forward | None = None
    caches: LayerCaches = field(init=False)

    def __post_init__(self) -> None:
        self.caches = allocate(self.mixer.specs())

    def run(self, x: Tensor, sequences: Sequence[Rows]) -> Tensor:
        """One pass. x: [T, D]. Returns [T, D]."""
        batch = build_batch(sequences, self.mixer.specs().values())
        with torch.no_grad():
            if self.forward is not None:
                return self.forward(self.mixer, x, batch, self.caches)
            return self.mixer(x, batch, self.caches)

    def run_chunks(self, x: Tensor, lengths: Iterable[int], slot: int = 0, blocks: tuple[int, ...] = ()) -> Tensor:
        """One sequence alone, chunk after chunk, its state in `slot`. x: [T, D]. Returns [T, D]."""
        blocks = blocks or blocks_for(len(x))
        out, done = [], 0
        for length in lengths:
            start = slot if done else NO_SLOT
            rows = Rows(length, done, start, ((length - 1, slot),), blocks)
            out.append(self.run(x[done : done + length], [rows]))
            done += length
        assert done == len(x), f"chunks of {done} rows in all were given for {len(x)} rows"
        return torch.cat(out)

    def state(self, slot: int) -> dict[str, Tensor]:
        """Copies of what a slot holds, in fp32, by spec and tensor name."""
        specs = self.mixer.specs()
        return {
            f"{name}.{tensor}": pool[slot].float()
            for name, cache in self.caches.items()
            if isinstance(specs[name], StateSpec)
            for tensor, pool in cache.tensors.items()
        }

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of all caches, whole."""
        return {f"{n}.{t}": pool.clone() for n, cache in self.caches.items() for t, pool in cache.tensors.items()}


@dataclass(frozen=True)
class Tolerance:
    """How far two runs of one mixer may differ: absolute, plus relative to the expected value."""

    atol: float = 2e-5
    rtol: float = 1e-4

    def check(self, actual: Tensor, expected: Tensor, what: str) -> None:
        """Raise AssertionError, naming `what`, unless the tensors are close and without NaN."""
        assert not actual.isnan().any(), f"{what}: NaN, so something was read that this sequence never wrote"
        torch.testing.assert_close(
            actual, expected, atol=self.atol, rtol=self.rtol, check_dtype=False, msg=lambda text: f"{what}: {text}"
        )

    def check_states(self, actual: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
        """The same for two states."""
        assert actual.keys() == expected.keys(), what
        for name, tensor in actual.items():
            self.check(tensor, expected[name], f"{what}, state {name}")


FP32 = Tolerance()


def blocks_for(num_tokens: int, first: int = 0) -> tuple[int, ...]:
    """Blocks for a sequence, from `first` on, in an order that is not theirs in memory."""
    count = -(-num_tokens // BLOCK_SIZE)
    return tuple(first + (i ^ 1 if (i ^ 1) < count else i) for i in range(count))


def rows_of(mixer: Mixer, num_rows: int, seed: int = 1) -> Tensor:
    """Inputs of a sequence: [num_rows, D], from a generator of their own."""
    x = torch.randn(num_rows, mixer.config.hidden_size, generator=torch.Generator().manual_seed(seed))
    return x.to(mixer.dtype)


def run_whole(mixer: Mixer, x: Tensor, forward: Forward | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Output [T, D] of one sequence in one pass, and its state after the last row."""
    bench = Bench(mixer, forward)
    y = bench.run_chunks(x, [len(x)])
    return y, bench.state(0)


def build_again(mixer: Mixer) -> Mixer:
    """Another mixer of the same kind and config, its parameters unfilled."""
    return type(mixer)(mixer.config, mixer.ops, mixer.dtype)


# --- checks: each takes a built mixer and raises AssertionError ---


def check_chunking(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Any split of a sequence gives the same rows and the same state: chunk end = batch end = resume point (I6)."""
    # Chunks shorter and longer than a convolution; kernels work in tiles of 64 rows, so splits beside one as well.
    short = ([1] * 9, [2, 2, 2, 2, 1], [3, 3, 3], [5, 4], [8, 1])
    long = ([64, 6], [1, 69], [2, 1, 3, 1, 1, 62])
    for splits in (short, long):
        x = rows_of(mixer, sum(splits[0]))
        expected, state = run_whole(mixer, x)
        for lengths in splits:
            bench = Bench(mixer)
            tolerance.check(bench.run_chunks(x, lengths, slot=5), expected, f"chunks {lengths}")
            tolerance.check_states(bench.state(5), state, f"chunks {lengths}")


def check_batching(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Sequences of one batch don't change each other, whatever their lengths and contexts, in any order (I7, I8)."""
    contexts, lengths = (0, 9, 0, 17, 6, 0), (1, 1, 23, 3, 1, 2)
    xs = [rows_of(mixer, c + n, seed) for seed, (c, n) in enumerate(zip(contexts, lengths, strict=True))]
    alone = [run_whole(mixer, x) for x in xs]
    for order in ((0, 1, 2, 3, 4, 5), (5, 3, 1, 4, 2, 0), (2, 0), (1, 4)):
        bench = Bench(mixer)
        # Slots and blocks follow the place in the batch, so that they are permuted as well.
        places = {i: (2 * place + 1, blocks_for(len(xs[i]), 10 * place)) for place, i in enumerate(order)}
        for i in order:
            slot, blocks = places[i]
            if contexts[i]:
                bench.run_chunks(xs[i][: contexts[i]], [contexts[i]], slot, blocks)
        sequences = [
            Rows(lengths[i], contexts[i], slot if contexts[i] else NO_SLOT, ((lengths[i] - 1, slot),), blocks)
            for i, (slot, blocks) in places.items()
        ]
        y = bench.run(torch.cat([xs[i][contexts[i] :] for i in order]), sequences)
        for i, rows in zip(order, y.split([lengths[i] for i in order]), strict=True):
            expected, state = alone[i]
            tolerance.check(rows, expected[contexts[i] :], f"sequence {i} in order {order}")
            tolerance.check_states(bench.state(places[i][0]), state, f"sequence {i} in order {order}")


def check_written_states(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """The state written after a row is that of a run that ends there; from it, the rest of the sequence follows (I2)."""
    num_rows, context = 10, 2
    x = rows_of(mixer, num_rows)
    expected, _ = run_whole(mixer, x)
    bench = Bench(mixer)
    blocks = blocks_for(num_rows)
    bench.run_chunks(x[:context], [context], 0, blocks)
    # One pass writes the state after every row, the last of them to two slots.
    writes = (*((row, row + 1) for row in range(num_rows - context)), (num_rows - context - 1, 0))
    bench.run(x[context:], [Rows(num_rows - context, context, 0, writes, blocks)])
    tolerance.check_states(bench.state(0), bench.state(num_rows - context), "one row to two slots")
    for row in range(num_rows - context):
        length = context + row + 1
        _, state = run_whole(mixer, x[:length])
        tolerance.check_states(bench.state(row + 1), state, f"state after {length} rows")
        if length < num_rows:
            rest = Rows(num_rows - length, length, row + 1, (), blocks)
            tolerance.check(bench.run(x[length:], [rest]), expected[length:], f"resumed after {length} rows")


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
    sequences = [
        Rows(length, context, 3, w, b) for w, b in zip((((length - 1, 7),), ((length - 1, 9),), ()), blocks, strict=True)
    ]
    y = bench.run(x[context:].repeat(3, 1), sequences)
    for rows in y.split(length):
        tolerance.check(rows, expected[context:], "started from a shared slot")
    for slot in (7, 9):
        tolerance.check_states(bench.state(slot), state, f"slot {slot}")
    _check_untouched(bench, before, {7, 9})


def _check_untouched(bench: Bench, before: dict[str, Tensor], written: set[int]) -> None:
    """All slots but those written hold what they held, bit by bit; so do those of the cache's padding."""
    specs = bench.mixer.specs()
    for name, pool in bench.snapshot().items():
        if isinstance(specs[name.split(".")[0]], StateSpec):
            kept = [slot for slot in range(NUM_SLOTS) if slot not in written]
            same = torch.equal(pool[kept].view(torch.uint8), before[name][kept].view(torch.uint8))
            assert same, f"{name}: a slot that the pass did not name has changed"


def check_padding(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """What lies between the pages of a cache is never written: offsets come from strides, not from shapes (I20)."""
    del tolerance
    bench = Bench(mixer)
    bench.run_chunks(rows_of(mixer, 9), [4, 1, 4], slot=2)
    for name, cache in bench.caches.items():
        for tensor, pool in cache.tensors.items():
            page = pool.as_strided((len(pool), pool.stride(0)), (pool.stride(0), 1))
            padding = page[:, math.prod(pool.shape[1:]) :]
            assert padding.isnan().all() if pool.is_floating_point() else True, f"{name}.{tensor}: written between pages"


def check_crossing_slots(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """A slot may be one sequence's start and another's target in the same pass: reads come first."""
    xs = [rows_of(mixer, 8, 1), rows_of(mixer, 8, 2)]
    blocks = (blocks_for(8), blocks_for(8, 10))
    bench = Bench(mixer)
    for slot, (x, own) in enumerate(zip(xs, blocks, strict=True)):
        bench.run_chunks(x[:5], [5], slot, own)
    y = bench.run(torch.cat([x[5:] for x in xs]), [Rows(3, 5, 0, ((2, 1),), blocks[0]), Rows(3, 5, 1, ((2, 0),), blocks[1])])
    for x, rows, slot in zip(xs, y.split(3), (1, 0), strict=True):
        expected, state = run_whole(mixer, x)
        tolerance.check(rows, expected[5:], "slots crossed")
        tolerance.check_states(bench.state(slot), state, "slots crossed")


def check_no_writes(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """A verification of drafts reads its slot and writes none, so the same rows can be run again."""
    x = rows_of(mixer, 9)
    expected, _ = run_whole(mixer, x)
    bench = Bench(mixer)
    bench.run_chunks(x[:5], [5], slot=4, blocks=blocks_for(9))
    before = bench.snapshot()
    for length in (4, 1, 3):
        y = bench.run(x[5 : 5 + length], [Rows(length, 5, 4, (), blocks_for(9))])
        tolerance.check(y, expected[5 : 5 + length], f"{length} draft rows")
        _check_untouched(bench, before, set())


def check_step(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """`forward` is `step` over the rows, in outputs and in written states. Not for mixers without `step`."""
    if not isinstance(mixer, RecurrentMixer):
        return
    xs = [rows_of(mixer, n, seed) for seed, n in enumerate((70, 1, 2, 13))]
    sequences = [Rows(len(x), 0, NO_SLOT, ((len(x) - 1, s), (len(x) // 2, s + 8))) for s, x in enumerate(xs)]
    defined, fast = Bench(mixer, RecurrentMixer.forward), Bench(mixer)
    expected = defined.run(torch.cat(xs), sequences)
    tolerance.check(fast.run(torch.cat(xs), sequences), expected, "forward against step")
    more = [Rows(len(x), len(x), s + 8, ((0, s),)) for s, x in enumerate(xs)]
    for bench in (defined, fast):
        y = bench.run(torch.cat(xs), more)
        expected = y if bench is defined else expected
    tolerance.check(y, expected, "forward against step, from a slot")
    for slot in (0, 1, 2, 3, 8, 9, 10, 11):
        tolerance.check_states(fast.state(slot), defined.state(slot), f"slot {slot}")


def check_window(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Blocks that fell out of a window are never read, be they poisoned or their ids stale."""
    windows = [spec.window for spec in mixer.specs().values() if isinstance(spec, PagedSpec) and spec.window]
    if not windows:
        return
    context, length = 30, 3
    x = rows_of(mixer, context + length)
    expected, _ = run_whole(mixer, x)
    bench = Bench(mixer)
    blocks = blocks_for(context + length)
    bench.run_chunks(x[:context], [context], 0, blocks)
    gone = (context - max(windows) + 1) // BLOCK_SIZE
    assert gone > 0, f"a window of {max(windows)} loses no block within {context} tokens: test a smaller one"
    for cache in bench.caches.values():
        for pool in cache.tensors.values():
            pool[list(blocks[:gone])] = math.nan
    stale = (NUM_BLOCKS - 1,) * gone + blocks[gone:]
    tolerance.check(bench.run(x[context:], [Rows(length, context, 0, (), stale)]), expected[context:], "stale blocks")


def check_specs(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """A pass fills every tensor that the specs name, in the declared dtype: nothing is stored that was not declared."""
    del tolerance
    specs = mixer.specs()
    assert specs.keys() == mixer.specs().keys()
    bench = Bench(mixer)
    bench.run_chunks(rows_of(mixer, BLOCK_SIZE), [BLOCK_SIZE], slot=1, blocks=(2,))
    for name, spec in specs.items():
        page = 1 if isinstance(spec, StateSpec) else 2
        for tensor in spec.tensors:
            pool = bench.caches[name].tensors[tensor.name]
            assert not pool[page].isnan().any(), f"{name}.{tensor.name} was not written whole"


def check_meta(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Built on the meta device, filled later, a mixer computes the same: it keeps no tensor but its parameters there."""
    del tolerance
    x = rows_of(mixer, 7)
    with torch.device("meta"):
        twin = build_again(mixer)
    assert all(p.is_meta for p in twin.parameters()), "a parameter ignores the default device"
    assert not list(twin.buffers()), "a buffer would be left without values when parameters are loaded"
    assert twin.specs() == mixer.specs()
    assert not any(p.requires_grad for p in twin.parameters()), "parameters are not trained"
    twin = twin.to_empty(device="cpu")
    twin.load_state_dict(mixer.state_dict())
    assert torch.equal(run_whole(twin, x)[0], run_whole(mixer, x)[0])


def check_no_global_state(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Building and running use no global random numbers, leave their input alone, and repeat exactly."""
    del tolerance
    x = rows_of(mixer, 12)
    kept, seed = x.clone(), torch.get_rng_state()
    build_again(mixer)
    first, second = run_whole(mixer, x)[0], run_whole(mixer, x)[0]
    assert torch.equal(torch.get_rng_state(), seed), "the global random generator was used"
    assert torch.equal(x, kept), "the input was changed in place"
    assert torch.equal(first, second), "two equal runs differ"


Check = Callable[[Mixer, Tolerance], None]

ALL_CHECKS: tuple[Check, ...] = (
    check_chunking,
    check_batching,
    check_written_states,
    check_slots,
    check_padding,
    check_crossing_slots,
    check_no_writes,
    check_step,
    check_window,
    check_specs,
    check_meta,
    check_no_global_state,
)
