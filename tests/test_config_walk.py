"""Configs with one key changed, added, removed or null compute what transformers computes, or are refused by the key's name.

By default a seeded twentieth of all of them, under `slow` all. Another part: HYBRIDSERVE_WALK_SEED=7 pytest
tests/test_config_walk.py.
"""

import os
from collections import Counter
from pathlib import Path

import pytest
import transformers as tf

from tests.config_walk import bases, sample, walk

SEED = int(os.environ.get("HYBRIDSERVE_WALK_SEED", "0"))


@pytest.fixture(autouse=True)
def _quiet() -> None:
    tf.logging.set_verbosity_error()


def check(fraction: float, folder: Path, names: list[str]) -> Counter[str]:
    """Judge a part of the variants of some bases. Returns how many came to what."""
    counts: Counter[str] = Counter()
    wrong = []
    for name in names:
        for outcome in walk(sample(name, fraction, SEED), folder):
            counts[outcome.kind] += 1
            if not outcome.is_good:
                wrong.append(f"{outcome.variant}: {outcome.kind}: {outcome.detail[:300]}")
    assert not wrong, "\n".join(wrong)
    return counts


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(4))
def test_i37_a_part_of_all_keys_equals_transformers_or_is_refused_by_name(part: int, tmp_path: Path) -> None:
    counts = check(1 / 20, tmp_path, bases()[part::4])
    # Were most refused or beyond comparison, the rest would say little.
    assert counts["equal"] > 0.1 * counts.total()
    assert counts["incomparable"] < 0.2 * counts.total()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", bases())
def test_i37_every_key_equals_transformers_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    assert check(1, tmp_path, [name])["equal"] > 50
