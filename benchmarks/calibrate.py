"""Measures this machine's rates for `hybridserve replay --calibration`, and how far the replay's clock is from the engine's.

    python -m benchmarks.calibrate MODEL [--load-format dummy] [--json rates.json] [--passes FILE]

The engine runs prompts of several lengths, alone and at once, and every pass is timed. Bandwidth, FLOP rate and the fixed cost of
a pass are those with the least median error of the modelled time over half of the passes; the other half, which the rates have
not seen, tells how far they hold. Prefix caching is off: passes are what the plan says.
"""

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from hybridserve.config import EngineSettings
from hybridserve.engine.core import EngineCore
from hybridserve.replay.model import plan_of
from hybridserve.replay.roofline import Device, Roofline, Work
from hybridserve.request import EngineRequest, SamplingParams

#: Prompt tokens and requests at once.
SHAPES = ((16, 1), (128, 1), (512, 1), (1024, 1), (64, 4), (256, 4), (64, 16), (192, 16))
NUM_NEW = 12
REPEATS = 3
MEMORY = 2 * 2**30


def passes(core: EngineCore, num_prompt: int, num_requests: int, rng: np.random.Generator) -> list[tuple[Work, float]]:
    """Run `num_requests` prompts at once; what every pass had to do, and the seconds that it took."""
    vocab = core.info.vocab_size
    for number in range(num_requests):
        core.add(
            EngineRequest(
                request_id=f"{time.monotonic_ns()}-{number}",
                prompt_token_ids=rng.integers(0, vocab, num_prompt).tolist(),
                sampling=SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True),
            )
        )
    timed = []
    for number in range(NUM_NEW):
        done = num_prompt + number - 1
        count = num_prompt if number == 0 else 1
        start = 0 if number == 0 else done
        pairs = count * start + count * (count + 1) // 2
        work = Work(num_requests * count, num_requests, num_requests * (start + count), num_requests * pairs)
        started = time.perf_counter()
        core.step()
        timed.append((work, time.perf_counter() - started))
    assert not core.has_work, "a prompt did not fit one pass, so that the passes are not what was written down"
    return timed


def fit(roofline: Roofline, timed: Sequence[tuple[Work, float]]) -> Device:
    """The rates of least median error: a search that halves its steps."""

    def error(rates: tuple[float, float, float]) -> float:
        device = Device(*map(math.exp, rates))
        return median_error(msgspec.structs.replace(roofline, device=device), timed)

    best = (math.log(1e10), math.log(5e10), math.log(2e-3))
    least, width = error(best), 2.0
    while width > 0.01:
        moved = False
        for axis in range(3):
            for by in (-width, width):
                tried = tuple(rate + by * (at == axis) for at, rate in enumerate(best))
                found = error((tried[0], tried[1], tried[2]))
                if found < least:
                    best, least, moved = (tried[0], tried[1], tried[2]), found, True
        width = width if moved else width / 2
    return Device(*map(math.exp, best))


def median_error(roofline: Roofline, timed: Sequence[tuple[Work, float]]) -> float:
    """Median of how far the modelled time is from the measured one, as a share of it."""
    return statistics.median(abs(roofline.seconds(work) / seconds - 1) for work, seconds in timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, config.json (with --load-format dummy) or repo id")
    parser.add_argument("--load-format", choices=("safetensors", "dummy"), default="safetensors")
    parser.add_argument("--json", help="write the rates to this file")
    parser.add_argument("--passes", type=Path, help="write what was measured and what the rates predict to this file")
    arguments = parser.parse_args()
    core = EngineCore(
        EngineSettings(
            model=arguments.model,
            load_format=arguments.load_format,
            enable_prefix_caching=False,
            kv_cache_memory=MEMORY,
            max_model_len=2048,
            max_num_batched_tokens=4096,
        )
    )
    rng = np.random.default_rng(0)
    passes(core, 128, 2, rng)  # warm-up
    rounds = [[(shape, passes(core, *shape, rng)) for shape in SHAPES] for _ in range(REPEATS)]
    medians = [
        [(work, statistics.median(one[at][1][number][1] for one in rounds)) for number, (work, _) in enumerate(timed)]
        for at, (_, timed) in enumerate(rounds[0])
    ]
    every = [one for timed in medians for one in timed]
    model = plan_of(arguments.model, MEMORY, max_chunk=4096)
    device = fit(model.roofline(Device(1.0, 1.0, 0.0)), every[::2])
    roofline = model.roofline(device)
    print(f"bytes {device.nbytes_per_s:.3g}/s  FLOP {device.flop_per_s:.3g}/s  a pass {1e3 * device.step_s:.2f} ms")
    print(f"{'prompt':>7} {'at once':>8} {'prefill ms':>11} {'modelled':>9} {'decode ms':>10} {'modelled':>9}")
    for (num_prompt, num_requests), timed in zip(SHAPES, medians, strict=True):
        prefill, decode = timed[0], timed[len(timed) // 2]
        print(
            f"{num_prompt:>7} {num_requests:>8} {1e3 * prefill[1]:>11.2f} {1e3 * roofline.seconds(prefill[0]):>9.2f} "
            f"{1e3 * decode[1]:>10.2f} {1e3 * roofline.seconds(decode[0]):>9.2f}"
        )
    error = median_error(roofline, every[1::2])
    print(f"median error on passes that were not fitted: {100 * error:.1f} %")
    if arguments.passes:
        rows = [{"measured_ms": 1e3 * seconds, "modelled_ms": 1e3 * roofline.seconds(work)} for work, seconds in every]
        found = {"model": arguments.model, "rates": device, "median_error": error, "passes": rows}
        arguments.passes.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    if arguments.json:
        Path(arguments.json).write_bytes(msgspec.json.format(msgspec.json.encode(device)) + b"\n")


if __name__ == "__main__":
    main()
