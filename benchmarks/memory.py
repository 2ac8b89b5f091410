"""Bytes that one running request holds at 8k context, over the least that its specs add up to, for every released shape.

    python -m benchmarks.memory [--tokens 8192] [--json FILE]

No weights: each model is laid out on the meta device. Held is what the arena gives out (whole blocks and slots, after rounding);
the floor is what the specs say to the byte. Exits non-zero when a model is above 1.05.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

from hybridserve.backends.select import select
from hybridserve.kv.arena import CachePlan, plan_cache
from hybridserve.models import build_model, resolve
from tests.releases import SERVED
from tests.test_check_model import write_config

LIMIT = 1.05


def held_nbytes(plan: CachePlan, num_tokens: int) -> int:
    """Bytes of the pages that one request of `num_tokens` holds."""
    return sum(plan.pages_needed(group, num_tokens) * group.page_nbytes for group in plan.groups)


def least_nbytes(plan: CachePlan, num_tokens: int) -> int:
    """Bytes of its entries and states, to the token."""
    total = plan.state_nbytes_per_sequence
    for group in plan.paged:
        tokens = num_tokens if group.window is None else min(num_tokens, group.window + plan.max_chunk)
        total += -(-group.natural_nbytes * tokens // group.block_size)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ops = select(torch.device("cpu"), torch.float32, ("reference",)).ops
    rows = []
    print(f"{'model':<28} {'held MiB':>9} {'least MiB':>9} {'ratio':>7} {'padding %':>9}  superpage")
    folder = tempfile.mkdtemp()
    for name in SERVED:
        config = resolve(str(write_config(name, Path(folder))), load_format="dummy").config
        model = build_model(config, ops, torch.bfloat16)
        plan = plan_cache(model.cache_specs(), 2**50, max_chunk=16)
        held, least = held_nbytes(plan, arguments.tokens), least_nbytes(plan, arguments.tokens)
        rows.append(
            {"model": name, "held_nbytes": held, "least_nbytes": least, "ratio": held / least, "padding": plan.padding_percent}
        )
        print(
            f"{name:<28} {held / 2**20:9.2f} {least / 2**20:9.2f} {held / least:7.4f} {plan.padding_percent:9.2f}  "
            + "  ".join(f"{g.pages_per_superpage} {g.kind}" for g in plan.groups)
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    worst = max(rows, key=lambda row: row["ratio"])
    print(f"largest: {worst['model']} at {worst['ratio']:.4f}; the limit is {LIMIT}")
    return 0 if worst["ratio"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
