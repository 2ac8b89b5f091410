"""Bytes that one running request holds at 8k context, over the least that its specs add up to, for every released shape.

    python -m benchmarks.memory [--tokens 8192] [--json FILE]

No weights: each model is laid out on the meta device. Held is what the arena gives out (whole blocks and slots, after rounding);
the floor is what the specs say to the byte. The last ratio counts whole superpages for 64 such requests at once, with what is
stranded in the last superpage of each group. Exits non-zero when a model is above 1.05.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from hybridserve.backends.select import select
from hybridserve.kv.arena import CachePlan, plan_cache
from hybridserve.models import build_model, resolve
from tests.releases import SERVED
from tests.test_check_model import write_config

LIMIT = 1.05
#: Requests at once for which whole superpages are counted.
MANY = 64


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


@dataclass(frozen=True)
class Held:
    """What one model's request holds."""

    model: str
    held_nbytes: int
    least_nbytes: int
    ratio: float
    superpages_ratio: float  # of MANY requests at once
    padding_percent: float
    pages_per_superpage: list[str]


def measure(name: str, num_tokens: int) -> Held:
    """Lay a released model out and count."""
    ops = select(torch.device("cpu"), torch.float32, ("reference",)).ops
    with tempfile.TemporaryDirectory() as folder:
        config = resolve(str(write_config(name, Path(folder))), load_format="dummy").config
    plan = plan_cache(build_model(config, ops, torch.bfloat16).cache_specs(), 2**50, max_chunk=16)
    held, least = held_nbytes(plan, num_tokens), least_nbytes(plan, num_tokens)
    superpages = plan.superpages_needed(num_tokens, MANY) * plan.superpage_nbytes / (MANY * least)
    pages = [f"{group.pages_per_superpage} {group.kind}" for group in plan.groups]
    return Held(name, held, least, held / least, superpages, plan.padding_percent, pages)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"{'model':<28} {'held MiB':>9} {'least MiB':>9} {'ratio':>7} {'64 at once':>10} {'padding %':>9}  superpage")
    rows = []
    for name in SERVED:
        row = measure(name, arguments.tokens)
        rows.append(row)
        print(
            f"{name:<28} {row.held_nbytes / 2**20:9.2f} {row.least_nbytes / 2**20:9.2f} {row.ratio:7.4f} "
            f"{row.superpages_ratio:10.4f} {row.padding_percent:9.2f}  {'  '.join(row.pages_per_superpage)}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    worst = max(rows, key=lambda row: row.ratio)
    print(f"largest: {worst.model} at {worst.ratio:.4f}; the limit is {LIMIT}")
    return 0 if worst.ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
