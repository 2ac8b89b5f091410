"""`hybridserve replay TRACE --model CONFIG --memory 60GiB`: what a cache of this size would do for this traffic.

Owns the flags and the assembly; the work is `hybridserve.replay`'s. No weights and no device are needed.
"""

import argparse
import sys
import time
from pathlib import Path

import msgspec

from hybridserve.cli.flags import at_least
from hybridserve.config import parse_nbytes
from hybridserve.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the replay."""
    parser.add_argument(
        "trace",
        help="a jsonl file (.gz too), or a synthetic trace: shared-prefixes, conversations, branches, bursts, retrieval, agents, "
        "trees, edits",
    )
    parser.add_argument("--model", required=True, help="a folder, config.json or repo id: its config alone is read")
    parser.add_argument("--memory", required=True, help="bytes for caches, such as 60GiB")
    parser.add_argument("--policy", choices=("cost", "lru"), default="cost", help="what goes first when memory runs out")
    parser.add_argument("--in-order", action="store_true", help="start requests in order of arrival, whatever they cost")
    parser.add_argument("--device", default="h200", help="whose rates the virtual clock uses: h200, h100, a100, cpu")
    parser.add_argument("--num-requests", type=at_least(1), help="replay only so many")
    parser.add_argument("--seed", type=int, default=0, help="of a synthetic trace")
    parser.add_argument("--max-model-len", type=at_least(2), help="longest context; default: the model's own")
    parser.add_argument("--max-num-seqs", type=at_least(1), default=64, help="requests that run at once")
    parser.add_argument("--max-num-batched-tokens", type=at_least(1), default=8192, help="token budget of one step")
    parser.add_argument("--calibration", metavar="FILE.json", help="measured rates instead of --device's")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--picture", metavar="FILE.png", help="draw the memory over time")


def run(arguments: argparse.Namespace) -> int:
    """Replay and print the report."""
    # Here rather than above: torch and numpy cost seconds, and --help needs neither.
    from hybridserve.replay.model import plan_of
    from hybridserve.replay.report import as_table, check_drawing, draw, make_report
    from hybridserve.replay.roofline import DEVICES, read_device
    from hybridserve.replay.simulate import Replay
    from hybridserve.replay.trace import load_trace

    if arguments.device not in DEVICES:
        raise UsageError(f"--device {arguments.device!r} is not known; known: {', '.join(DEVICES)}")
    device = DEVICES[arguments.device] if arguments.calibration is None else read_device(arguments.calibration)
    if arguments.picture:
        check_drawing()
    nbytes = parse_nbytes(arguments.memory)
    trace = load_trace(arguments.trace, num_requests=arguments.num_requests, seed=arguments.seed)
    model = plan_of(arguments.model, nbytes, max_chunk=arguments.max_num_batched_tokens)
    roofline = model.roofline(device)
    started = time.monotonic()
    outcome = Replay(
        trace,
        model.plan,
        roofline,
        max_model_len=min(arguments.max_model_len or model.max_positions, model.plan.longest_sequence(model.max_positions)),
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        policy=arguments.policy,
        starts_in_order=arguments.in_order,
        on_progress=_bar if sys.stderr.isatty() else lambda fraction: None,
    ).run()
    report = make_report(trace, model.plan, outcome, policy=arguments.policy, nbytes=nbytes, wall_s=time.monotonic() - started)
    if arguments.picture:
        draw(report, Path(arguments.picture))
    print(msgspec.json.encode(report).decode() if arguments.json else as_table(report))
    return 0


def _bar(fraction: float) -> None:
    """A bar on standard error that overwrites itself."""
    done = int(40 * fraction)
    end = "\n" if fraction >= 1.0 else ""
    print(f"\r[{'#' * done}{'.' * (40 - done)}] {100 * fraction:3.0f} %", end=end, file=sys.stderr, flush=True)
