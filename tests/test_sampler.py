"""Sampling against distributions and rules worked out in the test, and its independence of everything but the request."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridserve.engine.sampler import Sampler
from hybridserve.engine.seats import Running, Seats
from hybridserve.errors import RequestError
from hybridserve.request import EngineRequest, SamplingParams

VOCAB = 2000
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def seated(params, prompt=(1, 2, 3), output=(), stop_ids=()):
    """A sampler and seats with one request per set of parameters."""
    seats = Seats(len(params), 256)
    sampler = Sampler(len(params), VOCAB, seed=1)
    rows = []
    for i, one in enumerate(params):
        request = EngineRequest(request_id=str(i), prompt_token_ids=list(prompt), sampling=one)
        seat = seats.take(Running(request, i, 200, stop_ids, output=list(output)))
        sampler.admit(seat, one, i)
        rows.append(seat)
    return sampler, seats, np.array(rows)


def sample(params, logits=LOGITS, **where):
    sampler, seats, rows = seated(params, **where)
    return sampler.sample(logits.expand(len(params), -1).clone(), rows, seats)


def frequencies(num, **params):
    sampled = sample([SamplingParams(seed=i, **params) for i in range(num)])
    return np.bincount(sampled.tokens, minlength=VOCAB) / num


def test_greedy_takes_the_best():
    assert sample([SamplingParams(temperature=0.0)]).tokens.tolist() == [int(LOGITS.argmax())]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_samples_follow_the_softmax(temperature):
    want = torch.softmax(LOGITS.double() / temperature, -1).numpy()
    assert np.abs(frequencies(4000, temperature=temperature) - want).sum() < 0.45  # total variation of 4,000 draws
    top = np.argsort(-want)[:5]
    assert np.abs(frequencies(4000, temperature=temperature)[top] - want[top]).max() < 0.03


def test_top_k_top_p_and_min_p_keep_what_their_definitions_keep():
    probs = torch.softmax(LOGITS.double(), -1).numpy()
    order = np.argsort(-probs)
    nucleus = order[: int(np.searchsorted(np.cumsum(probs[order]), 0.7)) + 1]
    for params, kept in (
        ({"top_k": 5}, order[:5]),
        ({"top_p": 0.7}, nucleus),
        ({"min_p": 0.2}, np.flatnonzero(probs >= 0.2 * probs.max())),
        ({"top_p": 0.0}, order[:1]),
        ({"top_k": 1}, order[:1]),
    ):
        found = frequencies(3000, **params)
        want = np.zeros(VOCAB)
        want[kept] = probs[kept] / probs[kept].sum()
        assert set(np.flatnonzero(found)) <= set(kept), params
        assert np.abs(found - want).max() < 0.04, params


def test_top_k_is_renormalised_before_top_p():
    probs = torch.softmax(LOGITS.double(), -1).numpy()
    order = np.argsort(-probs)[:4]
    share = probs[order] / probs[order].sum()
    kept = order[: int(np.searchsorted(np.cumsum(share), 0.6)) + 1]
    assert set(np.flatnonzero(frequencies(2000, top_k=4, top_p=0.6))) == set(kept)


def test_a_flat_nucleus_wider_than_the_candidates_is_sorted_whole():
    flat = torch.zeros(VOCAB)
    sampled = sample([SamplingParams(seed=i, top_p=0.9) for i in range(500)], logits=flat)
    assert len(set(sampled.tokens.tolist())) > 350


def test_a_result_depends_on_seed_and_position_alone():
    mixed = [SamplingParams(seed=4, top_p=0.9), SamplingParams(temperature=0.0), SamplingParams(seed=9)]
    alone = [sample([params]).tokens[0] for params in mixed]
    assert sample(mixed).tokens.tolist() == alone
    assert sample(mixed[::-1]).tokens.tolist() == alone[::-1]
    other_position = [sample([SamplingParams(seed=9)], output=[5] * n).tokens[0] for n in range(12)]
    assert len(set(other_position)) > 4


def test_penalties_follow_their_formulas():
    logits = torch.zeros(VOCAB)
    logits[[3, 4, 5, 6]] = torch.tensor([3.0, 2.9, 2.5, -0.1])
    greedy = {"temperature": 0.0}
    assert sample([SamplingParams(**greedy, repetition_penalty=1.5)], logits=logits).tokens[0] == 4  # 3 / 1.5 = 2: 3 is prompt
    assert sample([SamplingParams(**greedy, presence_penalty=0.2)], logits=logits).tokens[0] == 3  # prompt does not count
    assert sample([SamplingParams(**greedy, presence_penalty=0.2)], logits=logits, output=[3]).tokens[0] == 4
    assert sample([SamplingParams(**greedy, frequency_penalty=0.2)], logits=logits, output=[3, 3, 3, 4]).tokens[0] == 4
    assert sample([SamplingParams(**greedy, frequency_penalty=0.2)], logits=logits, output=[3, 3, 3, 4, 4, 4]).tokens[0] == 5
    assert sample([SamplingParams(**greedy, logit_bias={9: 5.0})], logits=logits).tokens[0] == 9
    assert sample([SamplingParams(**greedy, logit_bias={3: -100.0})], logits=logits).tokens[0] == 4


def test_min_tokens_keeps_stop_tokens_out_until_then():
    best = int(LOGITS.argmax())
    params = SamplingParams(temperature=0.0, min_tokens=2)
    assert sample([params], stop_ids=(best,)).tokens[0] != best
    assert sample([params], stop_ids=(best,), output=[1, 1]).tokens[0] == best


def test_logprobs_are_the_models_own():
    want = torch.log_softmax(LOGITS, -1)
    sampled = sample([SamplingParams(seed=3, temperature=2.0, logprobs=4), SamplingParams(seed=3, temperature=2.0)])
    assert list(sampled.logprobs) == [0]
    found = sampled.logprobs[0]
    assert found.token_id == sampled.tokens[0] == sampled.tokens[1]
    assert found.logprob == pytest.approx(float(want[found.token_id]), abs=1e-5)
    assert found.rank == int((want > want[found.token_id]).sum()) + 1
    assert [token for token, _ in found.top] == want.topk(4).indices.tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_logits_fail_their_row_alone(bad):
    sampler, seats, rows = seated([SamplingParams(seed=1), SamplingParams(temperature=0.0)])
    logits = LOGITS.repeat(2, 1)
    logits[0, 17] = bad
    sampled = sampler.sample(logits, rows, seats)
    assert sampled.failed.tolist() == [True, False]
    assert sampled.tokens[1] == int(LOGITS.argmax())


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-46, 1e-39, 1e-38, 2e-38, 1e-12])
@pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"repetition_penalty": 0.001}])
def test_I32_a_temperature_too_small_to_divide_by_is_greedy(temperature, more):
    tiny = SamplingParams(temperature=temperature, **more)
    sampled = sample([tiny, SamplingParams(temperature=0.0, **more)])
    assert sampled.tokens[0] == sampled.tokens[1]
    assert not (sampled.failed | sampled.barred).any()


def test_I32_a_request_that_bars_every_token_fails_alone():
    few = LOGITS[:4]
    sampler, seats, rows = seated([SamplingParams(temperature=t, min_tokens=3) for t in (0.0, 1.0)], stop_ids=(0, 1, 2, 3))
    others = [SamplingParams(temperature=0.0), SamplingParams(seed=3)]
    assert sampler.sample(few.expand(2, -1).clone(), rows, seats).barred.tolist() == [True, True]
    assert not sample(others, logits=few).barred.any()


#: Where floats go wrong: zero, denormal in fp32 and fp64, the bounds, and what lies beside them.
EDGES = [0.0, 5e-324, 1e-310, sys.float_info.min, 1e-46, 1e-39, 1.1754943e-38, 1e-12, 1e-3, 0.5, 1.0]


def floats(low, high):
    edges = [value for edge in EDGES for value in (edge, -edge) if low <= value <= high]
    return st.one_of(st.sampled_from([*edges, low, high]), st.floats(low, high, allow_nan=False))


def parameters():
    ids = st.integers(0, 39)
    return st.builds(
        SamplingParams,
        temperature=floats(0.0, 100.0),
        top_p=floats(0.0, 1.0),
        min_p=floats(0.0, 1.0),
        top_k=st.sampled_from([0, 1, 2, 39, 40, 2**31 - 1]),
        presence_penalty=floats(-2.0, 2.0),
        frequency_penalty=floats(-2.0, 2.0),
        repetition_penalty=floats(1e-3, 100.0),
        logit_bias=st.dictionaries(ids, floats(-100.0, 100.0), max_size=5),
        seed=st.integers(-(2**63), 2**63 - 1),
        min_tokens=st.integers(0, 16),
        logprobs=st.sampled_from([None, 0, 20]),
    )


@st.composite
def logits(draw, size):
    """A row of finite numbers, ordinary or as large as fp32 holds, some of them barred by the model."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    row = torch.randn(size, generator=generator) * draw(st.sampled_from([0.0, 1e-45, 1e-38, 1.0, 40.0, 1e30, 1e37]))
    row[torch.rand(size, generator=generator) < draw(st.sampled_from([0.0, 0.0, 0.5, 0.97]))] = -torch.inf
    row[draw(st.integers(0, size - 1))] = draw(st.sampled_from([0.0, 3.0, -3.4e38, 3.4e38]))
    return row.tolist()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_I32_every_finite_parameter_gives_a_token_or_an_error_of_its_own(data):
    """And what the others get is, to the bit, what they get alone."""
    params = data.draw(st.lists(parameters(), min_size=1, max_size=4))
    size = 40
    rows_of = torch.tensor([data.draw(logits(size)) for _ in params])
    stop_ids = tuple(data.draw(st.sampled_from([(), (3,), range(size)])))
    output = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    where = {"stop_ids": stop_ids, "output": output, "prompt": (1, 2, 3)}
    sampler, seats, rows = seated(params, **where)
    together = sampler.sample(rows_of.clone(), rows, seats)
    assert ((together.tokens >= 0) & (together.tokens < size)).all()
    assert together.failed.tolist() == (~torch.isfinite(rows_of).any(-1)).tolist()
    assert not together.barred.any() or stop_ids or (rows_of == -torch.inf).any()
    for at, one in enumerate(params):
        # A request's seed is its own; which row it is in is not looked at.
        sampler, seats, rows = seated([one], **where)
        alone = sampler.sample(rows_of[at : at + 1].clone(), rows, seats)
        assert alone.barred[0] == together.barred[at]
        assert alone.tokens[0] == together.tokens[at]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_p", 1.5),
        ("top_k", -1),
        ("n", 0),
        ("n", 1000),
        ("logprobs", 21),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("seed", 2**64),
        ("presence_penalty", 3),
        ("temperature", float("nan")),
        ("logit_bias", {1: 101.0}),
        ("stop", ("",)),
        ("stop", tuple("abcdefghijklmnopqrs")),
        ("top_k", True),
        ("stop", 24),
        ("stop", {"24"}),
        ("stop_token_ids", "24"),
        ("stop_token_ids", 24),
        ("logit_bias", [1, 2]),
        ("logit_bias", {1: "2"}),
    ],
)
def test_parameters_out_of_bounds_are_refused_by_name(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field.split("_")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"stop": "24"}, {"stop": ("24",)}),
        ({"stop": ["2", "4"]}, {"stop": ("2", "4")}),
        ({"stop": None, "stop_token_ids": None, "logit_bias": None}, {"stop": (), "stop_token_ids": (), "logit_bias": {}}),
        ({"stop_token_ids": [2, 4]}, {"stop_token_ids": (2, 4)}),
    ],
)
def test_lists_are_read_as_callers_write_them(given, read):
    params = SamplingParams(**given)
    assert {name: getattr(params, name) for name in read} == read
