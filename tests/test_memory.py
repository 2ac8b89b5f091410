"""Bytes that a running request holds of released models: little more than its entries and states add up to."""

import pytest

from benchmarks.memory import LIMIT, measure
from tests.releases import SERVED

#: One of each division: a state of many blocks, states smaller than a superpage, windows, an index, the most padding.
TYPICAL = ("Qwen3.5-35B-A3B", "LFM2-350M", "LFM3-1.7B", "Qwen3.8-Flash-Next")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in TYPICAL else pytest.mark.slow) for name in SERVED])
def test_a_request_at_8k_context_holds_at_most_five_percent_more_than_it_must(name):
    held = measure(name, 8192)
    assert 1.0 <= held.ratio <= LIMIT
    # Also in whole superpages, when many run at once.
    assert held.superpages_ratio <= LIMIT
