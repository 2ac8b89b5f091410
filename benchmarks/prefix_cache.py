"""Hits of the prefix cache and what they are worth in time, with Qwen3.5-35B-A3B's cache shapes.

    python -m benchmarks.prefix_cache [--trace FILE ...] [--num-requests N] [--json FILE]

The real scheduler and cache on a virtual clock. Every trace first with ample memory, which tells how many bytes all its hits
take at once on average; then with as many bytes and with half as many, each with the default, with plain LRU, and with plain LRU
and requests that start in order of arrival. Without `--trace` the synthetic traces are replayed.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridserve.kv.arena import plan_cache
from hybridserve.kv.eviction import Policy
from hybridserve.kv.spec import PagedSpec, Spec, StateSpec, TensorSpec
from hybridserve.replay.report import Report, make_report
from hybridserve.replay.roofline import DEVICES, Roofline
from hybridserve.replay.simulate import Replay
from hybridserve.replay.trace import SYNTHETIC, TraceRequest, load_trace

KV = PagedSpec((TensorSpec("k", (2, 256), "bfloat16"), TensorSpec("v", (2, 256), "bfloat16")))
STATE = StateSpec((TensorSpec("conv", (3, 8192), "bfloat16"), TensorSpec("recurrent", (32, 128, 128), "float32")))
LAYERS: list[dict[str, Spec]] = [{"kv": KV} if i % 4 == 3 else {"state": STATE} for i in range(40)]
NUM_SEQS = 64
NUM_REQUESTS = 600  # of each trace
#: By name: what goes first when memory runs out, and whether requests start in order of arrival.
WAYS: dict[str, tuple[Policy, bool]] = {"default": ("cost", False), "lru": ("lru", False), "lru, in order": ("lru", True)}
AMPLE = 2_000e9
SHARES = {"all hits": 1.0, "half of it": 0.5}
#: Memory holds at least the longest request so many times, whatever its share.
LEAST_SEQUENCES = 4


def replay(trace: Sequence[TraceRequest], nbytes: float, way: str) -> Report:
    """The report of one replay."""
    policy, in_order = WAYS[way]
    plan = plan_cache(LAYERS, int(nbytes), max_chunk=8192)
    roofline = Roofline.of(plan, DEVICES["h200"], dense=3 * 10**9, experts=32 * 10**9, expert_share=1 / 32, itemsize=2)
    started = time.monotonic()
    outcome = Replay(
        trace,
        plan,
        roofline,
        max_model_len=plan.longest_sequence(longest_of(trace)),
        max_num_seqs=NUM_SEQS,
        max_num_batched_tokens=8192,
        policy=policy,
        starts_in_order=in_order,
    ).run()
    return make_report(trace, plan, outcome, policy=policy, nbytes=int(nbytes), wall_s=time.monotonic() - started)


def longest_of(trace: Sequence[TraceRequest]) -> int:
    """Tokens of the longest request."""
    return max(request.num_prompt + request.answer.length for request in trace) + 1


def reports(trace: Sequence[TraceRequest]) -> Iterator[tuple[str, str, float, Report]]:
    """By memory and way: its bytes and its report."""
    ample = replay(trace, AMPLE, "default")
    yield "ample", "default", AMPLE, ample
    unit = plan_cache(LAYERS, int(AMPLE), max_chunk=8192)
    least = LEAST_SEQUENCES * unit.superpages_needed(longest_of(trace)) * unit.superpage_nbytes
    for memory, share in SHARES.items():
        nbytes = max(least, share * ample.full_nbytes)
        for way in WAYS:
            yield memory, way, nbytes, replay(trace, nbytes, way)
        if nbytes == least:
            return  # half as many would be as many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", default=[], help="a jsonl file, or a synthetic trace by its name")
    parser.add_argument("--num-requests", type=int, default=NUM_REQUESTS, help=f"of each trace (default: {NUM_REQUESTS})")
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.trace or SYNTHETIC:
        trace = load_trace(name, num_requests=arguments.num_requests, seed=0)
        for memory, way, nbytes, report in reports(trace):
            row = {"trace": Path(name).name, "num_requests": len(trace), "memory": memory, "nbytes": int(nbytes), "way": way}
            shown = ("hit_ratio", "bound_ratio", "oracle_ratio", "excess_prefill", "output_tokens_per_s", "num_preemptions")
            row |= {key: round(getattr(report, key), 4) for key in shown}
            row |= {f"first_token_{key}_s": round(report.first_token_s[key], 4) for key in ("mean", "p50", "p99")}
            row |= {f"end_to_end_{key}_s": round(report.end_to_end_s[key], 4) for key in ("mean", "p99")}
            row["times_real_time"] = round(report.virtual_s / report.wall_s)
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
