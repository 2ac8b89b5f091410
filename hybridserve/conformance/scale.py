"""Checks of what shows only at size: many sequences, long texts, far positions, several layers and users, extreme gates, repeats.

Each check takes a built mixer with its parameters filled and raises `ConformanceError`. Called through `checks.py`.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from hybridserve.batch import NO_SLOT
from hybridserve.conformance.batches import Rows
from hybridserve.conformance.bench import Bench, Forward, build_again, rows_of, run_whole
from hybridserve.conformance.filling import fill
from hybridserve.conformance.tolerance import FP32, Tolerance, require
from hybridserve.kv.spec import PagedSpec, StateSpec
from hybridserve.mixers.base import Mixer, RecurrentMixer

#: Rows of a long text: more than four tiles of a kernel, more than 32 blocks.
_LONG = 300
#: The first position of a far text: beyond what bfloat16 and float16 count, and most clamps.
_FAR = 100_000
#: Equal runs in search of one that differs: of a fault that shows in one of five, 24 miss 1 in 200.
_REPEATS = 24


def check_many_sequences(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Twenty sequences at once, prompts and decoding, each with a checkpoint of its own, are as each is alone (I2, I7)."""
    contexts = tuple((7 * i) % 23 for i in range(20))
    xs = [rows_of(mixer, context + 9, seed) for seed, context in enumerate(contexts)]
    alone = []
    for x, context in zip(xs, contexts, strict=True):
        bench = Bench(mixer)
        writes = tuple((context + row, row) for row in (0, 4, 8))
        alone.append((bench, bench.run(x, [Rows(len(x), 0, NO_SLOT, writes, tuple(range(9)))])))
    for length in (1, 9):
        bench = Bench(mixer, num_slots=64, num_blocks=200)
        blocks = [tuple(range(9 * i + 8, 9 * i - 1, -1)) for i in range(20)]
        for i, context in enumerate(contexts):
            if context:
                bench.run_chunks(xs[i][:context], [context], i, blocks[i])
        middle = length // 2
        sequences = [
            Rows(length, c, i if c else NO_SLOT, ((middle, 20 + i), (length - 1, i)), blocks[i]) for i, c in enumerate(contexts)
        ]
        parts = [x[c : c + length] for x, c in zip(xs, contexts, strict=True)]
        y = bench.run(torch.cat(parts), sequences)
        for i, rows in enumerate(torch.split(y, length)):
            own, expected = alone[i]
            what = f"sequence {i} of 20, {length} rows after {contexts[i]}"
            tolerance.check(rows, expected[contexts[i] : contexts[i] + length], what)
            tolerance.check_states(bench.state(i), own.state(length - 1), what)
            tolerance.check_states(bench.state(20 + i), own.state(middle), f"{what}, checkpoint after row {middle} of the pass")


def check_long_text(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Chunks and checkpoints of 300 rows give the same rows and states, with blocks of two sizes (I2, I6)."""
    x = rows_of(mixer, _LONG)
    expected, state = run_whole(mixer, x)
    for factor, lengths in ((1, [97, 1, 130, 72]), (4, [64, 64, 64, 108]), (1, [_LONG])):
        bench = Bench(mixer, block_size=factor * Bench(mixer).block_size)
        what = f"{_LONG} rows in chunks {lengths}, blocks of {bench.block_size}"
        done, parts = 0, list[Tensor]()
        kept: dict[int, int] = {}
        blocks = tuple(range(95, 95 - -(-_LONG // bench.block_size), -1))
        for length in lengths:
            writes = [(length - 1, 0)]
            for row in sorted({length // 3, length * 2 // 3, length - 1}):
                kept[done + row + 1] = 1 + len(kept)
                writes.append((row, kept[done + row + 1]))
            rows = Rows(length, done, 0 if done else NO_SLOT, tuple(writes), blocks)
            parts.append(bench.run(x[done : done + length], [rows]))
            done += length
        tolerance.check(torch.cat(parts), expected, what)
        tolerance.check_states(bench.state(0), state, what)
        for stop, slot in kept.items():
            _, at = run_whole(mixer, x[:stop])
            tolerance.check_states(bench.state(slot), at, f"{what}, checkpoint after {stop} rows")


def check_far_positions(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Rows at positions from 100,000 on differ from each other as near ones do: positions are not rounded, nor cut off.

    Not for layers whose entries hold several tokens: they count positions themselves. A layer without positions passes. What
    depends on the position in a `step` may well fade with it, so there `forward` is held to `step` instead.
    """
    if isinstance(mixer, RecurrentMixer) and mixer.needs_positions:
        _check_far_step(mixer, tolerance)
        return
    if any(isinstance(spec, PagedSpec) and spec.tokens_per_entry > 1 for spec in mixer.specs().values()):
        return
    x = rows_of(mixer, 12)
    near = _change_by_position(mixer, x, 0)
    far = _change_by_position(mixer, x, _FAR)
    require(
        near == 0 or far > near / 30,
        f"12 rows: moving the later six by one position changes them by {near:.3g} at position 0 and by {far:.3g} at {_FAR}, "
        "so positions are rounded or cut off there; compute angles in fp32 or fp64",
    )


def _check_far_step(mixer: RecurrentMixer, tolerance: Tolerance) -> None:
    x = rows_of(mixer, 12)
    rows = [Rows(len(x), _FAR, NO_SLOT, ((len(x) - 1, 0),))]
    defined, fast = Bench(mixer, cast(Forward, RecurrentMixer.forward)), Bench(mixer)
    what = f"forward against step, 12 rows from position {_FAR}"
    tolerance.check(fast.run(x, rows), defined.run(x, rows), what)
    tolerance.check_states(fast.state(0), defined.state(0), what)


def _change_by_position(mixer: Mixer, x: Tensor, first: int) -> float:
    """How much the last six of twelve rows change when their positions are one further on."""
    outputs = []
    for gap in (0, 1):
        bench = Bench(mixer)
        rows = Rows(len(x), 0, NO_SLOT, ((len(x) - 1, 0),), (2, 1, 0))
        batch = bench.batch([rows])
        positions = batch.positions + first
        positions[6:] += gap
        with torch.no_grad():
            outputs.append(mixer(x, replace(batch, positions=positions), bench.caches)[6:])
    return float((outputs[1] - outputs[0]).norm())


def check_twins(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Two layers of one config and other parameters, run in one pass as in a model, do not take each other's for their own."""
    twin = fill(build_again(mixer), seed=11)
    x = rows_of(mixer, 12)
    expected = [run_whole(layer, x) for layer in (mixer, twin)]
    benches = [Bench(mixer), Bench(twin)]
    done = 0
    for length in (5, 7):
        rows = Rows(length, done, 0 if done else NO_SLOT, ((length - 1, 0),), (2, 1, 0))
        batch = benches[0].batch([rows])
        for bench, (y, _) in zip(benches, expected, strict=True):
            with torch.no_grad():
                out = bench.mixer(x[done : done + length], batch, bench.caches)
            tolerance.check(out, y[done : done + length], f"rows {done} to {done + length - 1} of two layers in one pass")
        done += length
    for bench, (_, state) in zip(benches, expected, strict=True):
        tolerance.check_states(bench.state(0), state, "two layers in one pass")


def check_alternating_users(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Users that take turns on one layer get what each gets alone: it keeps nothing of a pass but its caches (I4, R11)."""
    xs = [rows_of(mixer, 20, seed) for seed in (1, 2, 3)]
    expected = [run_whole(_not_yet_run(mixer), x)[0] for x in xs]
    bench = Bench(mixer)
    done = [0, 0, 0]
    # Two of them in chunks of equal length and at equal contexts, so that neither tells who is running.
    for user, length in ((0, 5), (1, 5), (2, 3), (0, 1), (1, 1), (1, 1), (0, 1), (2, 9), (1, 6), (0, 6), (0, 7), (1, 7), (2, 8)):
        start = done[user]
        stop = start + length
        blocks = tuple(range(10 * user, 10 * user + 5))
        rows = Rows(length, start, user if start else NO_SLOT, ((length - 1, user),), blocks)
        y = bench.run(xs[user][start:stop], [rows])
        tolerance.check(y, expected[user][start:stop], f"rows {start} to {stop - 1} of user {user}, others in between")
        done[user] = stop


def _not_yet_run(mixer: Mixer) -> Mixer:
    """Another mixer with the same parameters, which has not run yet."""
    twin = build_again(mixer)
    twin.load_state_dict(mixer.state_dict())
    return twin


def check_extreme_gates(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """With two more sets of parameters, up to gates that forget at once or never, chunks and rows alone agree, without NaN.

    Gates are of layers with a state. One without, whose vectors may be exponents, is looked at with the largest factor it bears.
    """
    has_state = any(isinstance(spec, StateSpec) for spec in mixer.specs().values())
    for seed, factors in ((21, (1.0,)), (22, (30.0,) if has_state else (30.0, 10.0, 3.0))):
        for factor in factors:
            other = fill(build_again(mixer), seed=seed)
            for name, parameter in other.named_parameters():
                if parameter.dim() == 1 and "norm" not in name:
                    parameter.data *= factor
            x, alone = rows_of(other, 40, seed), Bench(other)
            expected = alone.run_chunks(x, [1] * 40)
            if expected.isfinite().all():
                break
        what = f"40 rows, vectors of parameters times {factor:g}"
        require(bool(expected.isfinite().all()), f"{what}: the output is not finite")
        for lengths in ([40], [17, 23]):
            bench = Bench(other)
            tolerance.check(bench.run_chunks(x, lengths), expected, f"{what}, chunks {lengths}")
            tolerance.check_states(bench.state(0), alone.state(0), f"{what}, chunks {lengths}")


def check_float16(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """In float16 it gives float16, at an error no larger than bfloat16's."""
    low = build_again(mixer, torch.float16)
    exact = build_again(mixer)
    low.load_state_dict(mixer.state_dict())
    exact.load_state_dict(low.state_dict())
    x = rows_of(low, 40)
    expected = run_whole(exact, x.float())[0]
    for lengths in ([40], [1] * 40):
        y = Bench(low).run_chunks(x, lengths)
        require(y.dtype == torch.float16, f"40 rows in float16: the output is in {y.dtype}")
        error = float(((y.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).median())
        require(error < tolerance.bfloat16, f"40 rows in float16: rows are off by {error:.3g} (allowed: {tolerance.bfloat16:g})")


def check_repeats(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Equal runs give equal bits, every one of 24, in prompts and in decoding."""
    del tolerance
    x = rows_of(mixer, 9)
    first = None
    for run in range(_REPEATS):
        y = Bench(mixer).run_chunks(x, [7, 1, 1])
        first = y if first is None else first
        require(torch.equal(y, first), f"9 rows in chunks of 7, 1 and 1: run {run + 1} of {_REPEATS} differs from the first")
