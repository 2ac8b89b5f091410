"""Sampling against distributions and rules worked out in the test, and its independence of everything but the request."""

import numpy as np
import pytest
import torch

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
