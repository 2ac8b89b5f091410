"""Hits of the prefix cache on synthetic traces, against both oracles, with Qwen3.5-35B-A3B's cache shapes.

    python -m benchmarks.prefix_cache

The real scheduler and cache on a virtual clock; every trace with the default policy and with plain LRU.
"""

import time

from hybridserve.kv.arena import plan_cache
from hybridserve.kv.spec import PagedSpec, Spec, StateSpec, TensorSpec
from hybridserve.replay.report import make_report
from hybridserve.replay.roofline import DEVICES, Roofline
from hybridserve.replay.simulate import Replay
from hybridserve.replay.trace import load_trace

KV = PagedSpec((TensorSpec("k", (2, 256), "bfloat16"), TensorSpec("v", (2, 256), "bfloat16")))
STATE = StateSpec((TensorSpec("conv", (3, 8192), "bfloat16"), TensorSpec("recurrent", (32, 128, 128), "float32")))
LAYERS: list[dict[str, Spec]] = [{"kv": KV} if i % 4 == 3 else {"state": STATE} for i in range(40)]
#: Trace, requests, bytes, requests at once.
CASES = (
    ("shared-prefixes", 1000, 60e9, 64),
    ("bursts", 1000, 60e9, 64),
    ("conversations", 1000, 60e9, 64),
    ("conversations", 500, 7e9, 16),
    ("branches", 400, 6e9, 16),
)


def main() -> None:
    for name, count, nbytes, num_seqs in CASES:
        trace = load_trace(name, num_requests=count, seed=0)
        plan = plan_cache(LAYERS, int(nbytes), max_chunk=8192)
        roofline = Roofline.of(plan, DEVICES["h200"], dense=3 * 10**9, experts=32 * 10**9, expert_share=1 / 32, itemsize=2)
        for policy in ("cost", "lru"):
            started = time.monotonic()
            outcome = Replay(
                trace,
                plan,
                roofline,
                max_model_len=262_144,
                max_num_seqs=num_seqs,
                max_num_batched_tokens=8192,
                policy=policy,
            ).run()
            wall_s = time.monotonic() - started
            report = make_report(trace, plan, outcome, policy=policy, nbytes=int(nbytes), wall_s=wall_s)
            print(
                f"{name:<16} {nbytes / 1e9:4.0f} GB {policy:<5} hit {report.hit_ratio:.3f}  oracle {report.oracle_ratio:.3f}  "
                f"of same memory {report.share_of_capacity_oracle:.3f}  excess {report.excess_prefill:.2f}  "
                f"{report.virtual_s / wall_s:.0f} times real time",
                flush=True,
            )


if __name__ == "__main__":
    main()
