"""Checks of what a sequence computes: the same rows and states however it is cut, batched, resumed, moved or rolled back.

Each check takes a built mixer with its parameters filled and raises `ConformanceError`. Called through `checks.py`.
"""

from typing import cast

import torch
from torch import Tensor

from hybridserve.batch import NO_SLOT
from hybridserve.conformance.batches import Rows, blocks_for
from hybridserve.conformance.bench import NUM_BLOCKS, NUM_SLOTS, Bench, Forward, build_again, is_same, poison, rows_of, run_whole
from hybridserve.conformance.tolerance import FP32, ConformanceError, Tolerance, require
from hybridserve.kv.spec import PagedSpec, StateSpec
from hybridserve.mixers.base import Mixer, RecurrentMixer


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


def check_token_ids(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """The same for a layer that looks at token ids: what it remembers of them survives a chunk's end."""
    x = rows_of(mixer, 12)
    ids = torch.randint(1, 50, (12,), generator=torch.Generator().manual_seed(2))
    expected, state = run_whole(mixer, x, input_ids=ids)
    for lengths in ([1] * 12, [5, 7], [2, 1, 9]):
        bench = Bench(mixer)
        tolerance.check(bench.run_chunks(x, lengths, slot=5, input_ids=ids), expected, f"ids in chunks {lengths}")
        tolerance.check_states(bench.state(5), state, f"ids in chunks {lengths}")


def check_memory(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """The first row matters to later ones: what forgets at once would pass every other check. Not for layers without caches."""
    if not mixer.specs():
        return
    x = rows_of(mixer, 12)
    ids = torch.randint(1, 50, (12,), generator=torch.Generator().manual_seed(2))
    y, _ = run_whole(mixer, x, input_ids=ids)
    ids[0] += 1
    other, _ = run_whole(mixer, torch.cat((rows_of(mixer, 1, seed=9), x[1:])), input_ids=ids)
    change = (y - other)[1:].abs().max()
    if not change > 10 * tolerance.atol:
        raise ConformanceError(
            f"12 rows, the first one changed: the rows after it change by {change:.3g} at most, so nothing is remembered that "
            "these checks could see; if the layer is right, fill its parameters so that it forgets slowly",
            float(change),
        )


def check_batching(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Sequences of one batch don't change each other, whatever their lengths and contexts, in any order (I7, I8)."""
    contexts, lengths = (0, 9, 0, 17, 6, 0), (1, 1, 23, 3, 1, 2)
    xs = [rows_of(mixer, c + n, seed) for seed, (c, n) in enumerate(zip(contexts, lengths, strict=True))]
    alone = [run_whole(mixer, x) for x in xs]
    for order in ((0, 1, 2, 3, 4, 5), (5, 3, 1, 4, 2, 0), (2, 0), (1, 4), (3,)):
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
        for i, rows in zip(order, torch.split(y, [lengths[i] for i in order]), strict=True):
            expected, state = alone[i]
            what = f"sequence {i} of {contexts[i]} + {lengths[i]} rows in a batch of {order}"
            tolerance.check(rows, expected[contexts[i] :], what)
            tolerance.check_states(bench.state(places[i][0]), state, what)


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


def check_starts(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """A sequence may start from any slot and go to any other; one that starts from none reads none, whatever lies there (I5)."""
    x = rows_of(mixer, 7)
    expected, state = run_whole(mixer, x)
    for start, target in ((0, NUM_SLOTS - 1), (NUM_SLOTS - 1, 0), (11, 11)):
        bench = Bench(mixer)
        bench.run_chunks(x[:4], [4], start, blocks_for(7))
        y = bench.run(x[4:], [Rows(3, 4, start, ((2, target),), blocks_for(7))])
        tolerance.check(y, expected[4:], f"4 rows in slot {start}, 3 more to slot {target}")
        tolerance.check_states(bench.state(target), state, f"4 rows in slot {start}, 3 more to slot {target}")
    for first in (1, 3):
        bench = Bench(mixer)
        for pool in bench.pools().values():  # a slot that somebody left, plausible where NaN would show
            pool.fill_(1)
        bench.fill_constant_slot(mixer)
        tolerance.check(bench.run_chunks(x, [first, 7 - first], slot=2), expected, f"first chunk of {first} rows in a used slot")


def check_initial_state(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """A fresh sequence starts from the learned state in its slot, and sees it nowhere else. Not for starts from zeros."""
    learned = mixer.initial_states()
    if not learned:
        return
    x = rows_of(mixer, 7)
    expected, state = run_whole(mixer, x)
    bench = Bench(mixer)
    for name in learned:
        for pool in bench.caches[name].tensors.values():
            pool[bench.constant_slot] = 0
    change = float((bench.run_chunks(x, [7]) - expected).abs().max())
    require(change > 10 * tolerance.atol, f"7 rows from zeros instead of the learned state: rows change by {change:.3g} at most")
    other = build_again(mixer)
    other.load_state_dict(mixer.state_dict())
    names = {t.initial for spec in mixer.specs().values() if isinstance(spec, StateSpec) for t in spec.tensors if t.initial}
    for name in names:
        parameter = other.get_parameter(name)
        parameter.data = parameter.data.flip(0) * 1.5 + 0.25
    expected, state = run_whole(other, x)
    for lengths in ([7], [1, 6], [3, 4]):
        bench = Bench(mixer)
        bench.fill_constant_slot(other)
        before = bench.state(bench.constant_slot)
        what = f"chunks {lengths}, another learned state in the slot that fresh sequences start from"
        tolerance.check(bench.run_chunks(x, lengths), expected, what)
        tolerance.check_states(bench.state(0), state, what)
        after = bench.state(bench.constant_slot)
        require(all(is_same(after[name], before[name]) for name in before), f"{what}: the pass has changed that slot")


def check_resume(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Saved as bytes after any row and restored elsewhere, with all else poisoned, a sequence goes on as if nothing was (I4)."""
    num_rows = 9
    x = rows_of(mixer, num_rows)
    expected, state = run_whole(mixer, x)
    blocks, elsewhere = blocks_for(num_rows), blocks_for(num_rows, 50)
    source = Bench(mixer)
    for saved in range(1, num_rows):
        source.run(x[saved - 1 : saved], [Rows(1, saved - 1, 3 if saved > 1 else NO_SLOT, ((0, 3),), blocks)])
        target = Bench(mixer)
        used = -(-saved // source.block_size)
        for name, pool in source.pools().items():
            pages = ((3, 17),) if source.is_state(name) else tuple(zip(blocks[:used], elsewhere[:used], strict=True))
            for old, new in pages:
                target.pools()[name][new] = _through_bytes(pool[old])
        rest = Rows(num_rows - saved, saved, 17, ((num_rows - saved - 1, 17),), elsewhere)
        y = target.run(x[saved:], [rest])
        tolerance.check(y, expected[saved:], f"saved after {saved} of {num_rows} rows and restored in another slot")
        tolerance.check_states(target.state(17), state, f"saved after {saved} of {num_rows} rows")


def _through_bytes(page: Tensor) -> Tensor:
    """A page made again from its bytes."""
    data = bytearray(page.contiguous().view(torch.uint8).flatten().tolist())
    return torch.frombuffer(data, dtype=page.dtype).view(page.shape)


def check_rollback(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Drafts that are refused leave nothing: a verification writes no state, then the accepted rows alone are run again."""
    context, num_drafts = 5, 4
    right, wrong = rows_of(mixer, context + num_drafts + 2), rows_of(mixer, context + num_drafts + 2, seed=8)
    expected, state = run_whole(mixer, right)
    blocks = blocks_for(len(right))
    for accepted in range(num_drafts + 1):
        bench = Bench(mixer)
        bench.run_chunks(right[:context], [context], 4, blocks)
        known = context + accepted
        drafts = torch.cat((right[context:known], wrong[known : context + num_drafts]))
        what = f"{accepted} of {num_drafts} drafts accepted after {context} rows"
        y = bench.run(drafts, [Rows(num_drafts, context, 4, (), blocks)])
        tolerance.check(y[:accepted], expected[context:known], f"{what}, verification")
        if accepted:
            bench.run(right[context:known], [Rows(accepted, context, 4, ((accepted - 1, 4),), blocks)])
        rest = len(right) - known
        y = bench.run(right[known:], [Rows(rest, known, 4, ((rest - 1, 4),), blocks)])
        tolerance.check(y, expected[known:], f"{what}, the rows after them")
        tolerance.check_states(bench.state(4), state, what)


def check_step(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """`forward` is `step` over the rows, in outputs and in written states. Not for mixers without `step`."""
    if not isinstance(mixer, RecurrentMixer):
        return
    lengths = (70, 1, 2, 13)
    xs = [rows_of(mixer, n, seed) for seed, n in enumerate(lengths)]
    sequences = [Rows(len(x), 0, NO_SLOT, ((len(x) // 2, s + 8), (len(x) - 1, s))) for s, x in enumerate(xs)]
    defined, fast = Bench(mixer, cast(Forward, RecurrentMixer.forward)), Bench(mixer)
    expected = defined.run(torch.cat(xs), sequences)
    tolerance.check(fast.run(torch.cat(xs), sequences), expected, f"forward against step, sequences of {lengths} rows")
    more = [Rows(len(x), len(x), s + 8, ((0, s),)) for s, x in enumerate(xs)]
    expected = defined.run(torch.cat(xs), more)
    tolerance.check(fast.run(torch.cat(xs), more), expected, f"forward against step, {lengths} rows from a slot")
    for slot in (0, 1, 2, 3, 8, 9, 10, 11):
        tolerance.check_states(fast.state(slot), defined.state(slot), f"forward against step, slot {slot}")


def check_window(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Blocks that fell out of a window are never read, be they poisoned or their ids stale."""
    windows = [spec.window for spec in mixer.specs().values() if isinstance(spec, PagedSpec) and spec.window]
    if not windows:
        return
    bench = Bench(mixer)
    context, length = 30 + 2 * bench.block_size, 3
    x = rows_of(mixer, context + length)
    expected, _ = run_whole(mixer, x)
    blocks = blocks_for(context + length)
    bench.run_chunks(x[:context], [context], 0, blocks)
    gone = (context - max(windows) + 1) // bench.block_size
    require(gone > 0, f"a window of {max(windows)} loses no block within {context} tokens: test a smaller one")
    for name, pool in bench.pools().items():
        if not bench.is_state(name):
            pool[list(blocks[:gone])] = poison(pool.dtype)
    stale = (NUM_BLOCKS - 1,) * gone + blocks[gone:]
    y = bench.run(x[context:], [Rows(length, context, 0, (), stale)])
    tolerance.check(y, expected[context:], f"{length} rows after {context}, {gone} blocks fallen out of the window")
