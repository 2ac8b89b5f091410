"""Hits of the prefix cache, against both oracles, with Qwen3.5-35B-A3B's cache shapes.

    python -m benchmarks.prefix_cache [--trace FILE ...] [--num-requests N] [--json FILE]

The real scheduler and cache on a virtual clock; every trace with the default policy and with plain LRU, with ample memory and
with a tenth of the trace's footprint: the bytes of all its different text, and of one state for each request. Without `--trace`
the synthetic traces are replayed.
"""

import argparse
import json
import time
from pathlib import Path

from hybridserve.kv.arena import plan_cache
from hybridserve.kv.eviction import Policy
from hybridserve.kv.spec import PagedSpec, Spec, StateSpec, TensorSpec
from hybridserve.replay.oracle import visits_of
from hybridserve.replay.report import Report, make_report
from hybridserve.replay.roofline import DEVICES, Roofline
from hybridserve.replay.simulate import Replay
from hybridserve.replay.trace import TraceRequest, load_trace

KV = PagedSpec((TensorSpec("k", (2, 256), "bfloat16"), TensorSpec("v", (2, 256), "bfloat16")))
STATE = StateSpec((TensorSpec("conv", (3, 8192), "bfloat16"), TensorSpec("recurrent", (32, 128, 128), "float32")))
LAYERS: list[dict[str, Spec]] = [{"kv": KV} if i % 4 == 3 else {"state": STATE} for i in range(40)]
#: Synthetic traces: requests, and how many run at once.
SYNTHETIC = {"shared-prefixes": (1000, 64), "bursts": (1000, 64), "conversations": (2000, 16), "branches": (1000, 16)}
POLICIES: tuple[Policy, ...] = ("cost", "lru")
AMPLE = 2_000e9
SHARE = 0.1


def footprint_nbytes(trace: list[TraceRequest]) -> float:
    """Bytes of all different text, and of one state for each request."""
    text = sum(
        request.num_prompt - visit.hit + request.answer.length for request, visit in zip(trace, visits_of(trace), strict=True)
    )
    plan = plan_cache(LAYERS, int(AMPLE))
    return text * plan.kv_nbytes_per_token + len(trace) * plan.state_nbytes_per_sequence


def replay(trace: list[TraceRequest], nbytes: float, policy: Policy, num_seqs: int) -> tuple[Report, float]:
    """The report of one replay, and virtual seconds per second of it."""
    plan = plan_cache(LAYERS, int(nbytes), max_chunk=8192)
    roofline = Roofline.of(plan, DEVICES["h200"], dense=3 * 10**9, experts=32 * 10**9, expert_share=1 / 32, itemsize=2)
    started = time.monotonic()
    longest = max(request.num_prompt + request.answer.length for request in trace) + 1
    outcome = Replay(
        trace,
        plan,
        roofline,
        max_model_len=plan.longest_sequence(longest),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=8192,
        policy=policy,
    ).run()
    wall_s = time.monotonic() - started
    return make_report(trace, plan, outcome, policy=policy, nbytes=int(nbytes), wall_s=wall_s), outcome.clock_s / wall_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", default=[], help="a jsonl file to replay instead of the synthetic traces")
    parser.add_argument("--num-requests", type=int, help="only so many of each file")
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    cases = [(Path(name).name, load_trace(name, num_requests=arguments.num_requests, seed=0), 64) for name in arguments.trace]
    if not cases:
        cases = [(name, load_trace(name, num_requests=n, seed=0), seqs) for name, (n, seqs) in SYNTHETIC.items()]
    rows = []
    for name, trace, num_seqs in cases:
        for memory, nbytes in (("ample", AMPLE), ("a tenth", SHARE * footprint_nbytes(trace))):
            for policy in POLICIES:
                report, speed = replay(trace, nbytes, policy, num_seqs)
                print(
                    f"{name:<28} {memory:<7} {nbytes / 1e9:6.1f} GB {policy:<5} hit {report.hit_ratio:.3f}  "
                    f"oracle {report.oracle_ratio:.3f}  same memory {report.capacity_oracle_ratio:.3f} "
                    f"(of it {report.share_of_capacity_oracle:.3f})  excess {report.excess_prefill:.2f}  "
                    f"checkpoints {report.checkpoints_per_request:.1f}  {speed:.0f} times real time",
                    flush=True,
                )
                row = {"trace": name, "memory": memory, "nbytes": int(nbytes), "policy": policy, "num_requests": len(trace)}
                shown = ("hit_ratio", "oracle_ratio", "capacity_oracle_ratio", "share_of_capacity_oracle", "excess_prefill")
                rows.append({**row, **{key: round(getattr(report, key), 4) for key in shown}, "times_real_time": round(speed)})
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
