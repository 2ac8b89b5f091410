"""Bytes that a running request holds of released models: little more than its entries and states add up to."""

import pytest

from benchmarks.memory import LIMIT, measure
from hybridserve.config import EngineSettings
from hybridserve.engine.sizing import size_cache
from hybridserve.errors import DoesNotFitError
from hybridserve.kv.spec import PagedSpec, StateSpec, TensorSpec
from tests.releases import SERVED

#: One of each division: a state of many blocks, states smaller than a superpage, windows, an index, the most padding.
TYPICAL = ("Qwen3.5-35B-A3B", "LFM2-350M", "LFM3-1.7B", "Qwen3.8-Flash-Next")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in TYPICAL else pytest.mark.slow) for name in SERVED])
def test_a_request_at_8k_context_holds_at_most_five_percent_more_than_it_must(name):
    held = measure(name, 8192)
    assert 1.0 <= held.ratio <= LIMIT
    # Also in whole superpages, when many run at once.
    assert held.superpages_ratio <= LIMIT


@pytest.mark.parametrize(
    ("nbytes", "says"),
    [
        (2 * 4096, "lower --max-model-len to 16 or raise --kv-cache-memory to 258,048$"),
        (4096, "; raise --kv-cache-memory to 258,048, or to at least 8,192 and lower --max-model-len$"),
    ],
)
def test_what_to_do_when_no_sequence_fits_can_be_done(nbytes, says):
    """A block and a state of 4,096 bytes each. With room for one of them no length fits: there is none to lower to."""
    paged, state = PagedSpec((TensorSpec("k", (64,), "float32"),)), StateSpec((TensorSpec("s", (1024,), "float32"),))
    specs = [{"kv": paged, "state": state}]
    with pytest.raises(DoesNotFitError, match=says):
        size_cache(EngineSettings(model="any", kv_cache_memory=nbytes, max_model_len=992), specs, 1000, 2**40)
    for enough, length in ((258_048, 992), (8_192, 16)):
        settings = EngineSettings(model="any", kv_cache_memory=enough, max_model_len=length)
        assert size_cache(settings, specs, 1000, 2**40).max_model_len == length
