"""From logits to tokens, for all sequences of a step at once.

Owns each seat's sampling parameters as arrays and the arithmetic on logits. Must not know the scheduler or memory. A row's result
depends on its logits, its parameters and its position alone: the random number of a token is a hash of the request's seed and the
token's position, so neither neighbours nor preemption nor chunks change what is sampled.

Letters: R rows that sample, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridserve.engine.seats import Ints, Seats
from hybridserve.request import SamplingParams, TokenLogprob

Floats = NDArray[np.float64]

#: A temperature below it is greedy: it would be a denormal number, which the engine's process takes for zero.
_LEAST_TEMPERATURE = float(np.finfo(np.float64).tiny)
#: Candidates looked at before a full sort: nearly every nucleus lies within them.
_NUM_CANDIDATES = 1024
#: Rows whose prompt log-probabilities are computed at once, so that fp32 logits of a long chunk never exist as a whole.
PROMPT_ROWS = 64


@dataclass(frozen=True)
class Sampled:
    """Results by row of the logits."""

    tokens: Ints  # [R], all ids of the vocabulary
    failed: NDArray[np.bool_]  # [R]: logits held NaN or +inf; the token is meaningless
    barred: NDArray[np.bool_]  # [R]: the request's own parameters left no token to choose; the token is meaningless
    logprobs: dict[int, TokenLogprob]  # by row, for those that asked


class Sampler:
    """Vectorised sampling. `admit` writes a seat's parameters once; `sample` reads them."""

    def __init__(self, num_seats: int, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._params: list[SamplingParams] = [SamplingParams()] * num_seats
        self._is_plain = np.ones(num_seats, np.bool_)  # greedy, and the logits are used as they are
        self._temperature: Floats = np.zeros(num_seats)
        self._top_k: Ints = np.zeros(num_seats, np.int64)
        self._top_p: Floats = np.ones(num_seats)
        self._min_p: Floats = np.zeros(num_seats)
        self._seeds: NDArray[np.uint64] = np.zeros(num_seats, np.uint64)
        self._num_logprobs: Ints = np.full(num_seats, -1, np.int64)
        self._adjusts = np.zeros(num_seats, np.bool_)  # penalties, bias or min_tokens change the logits

    def admit(self, seat: int, params: SamplingParams, arrival: int) -> None:
        """Note how the request in `seat` is sampled. Without a seed of its own it gets one from the engine's and its arrival."""
        self._params[seat] = params
        self._temperature[seat] = params.temperature if params.temperature >= _LEAST_TEMPERATURE else 0.0
        self._top_k[seat] = params.top_k if params.top_k < self._vocab_size else 0
        self._top_p[seat] = params.top_p
        self._min_p[seat] = params.min_p
        self._num_logprobs[seat] = -1 if params.logprobs is None else params.logprobs
        own = params.seed if params.seed is not None else (self._seed << 32) ^ arrival
        self._seeds[seat] = _mix(np.array([own & (2**64 - 1)], np.uint64))[0]
        self._adjusts[seat] = bool(
            params.logit_bias
            or params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1.0
            or params.min_tokens
        )
        self._is_plain[seat] = self._temperature[seat] == 0.0 and not self._adjusts[seat]

    def sample(self, logits: Tensor, rows: Ints, seats: Seats) -> Sampled:
        """Choose a token for each row. logits: fp32 [R, V], left as they are; rows: the seat of each row [R]."""
        best, greedy = logits.max(dim=-1)
        tokens: Ints = greedy.cpu().numpy().astype(np.int64)
        failed = ~np.isfinite(best.float().cpu().numpy())
        barred = np.zeros(len(rows), np.bool_)
        logprobs = self._logprobs_before(logits, rows)
        busy = np.flatnonzero(~self._is_plain[rows] & ~failed)
        if len(busy):
            chosen = self._choose(logits[torch.from_numpy(busy).to(logits.device)].double(), rows[busy], seats)
            tokens[busy], barred[busy] = chosen
        wanted = np.flatnonzero(self._num_logprobs[rows] >= 0)
        found = describe(logprobs, tokens[wanted], self._num_logprobs[rows[wanted]]) if logprobs is not None else []
        return Sampled(tokens, failed, barred, dict(zip(wanted.tolist(), found, strict=True)))

    def _logprobs_before(self, logits: Tensor, rows: Ints) -> Tensor | None:
        """Log-probabilities of the rows that report them, from the model's own logits: [R', V]."""
        wanted = np.flatnonzero(self._num_logprobs[rows] >= 0)
        if not len(wanted):
            return None
        return torch.log_softmax(logits[torch.from_numpy(wanted).to(logits.device)], dim=-1)

    def _choose(self, logits: Tensor, rows: Ints, seats: Seats) -> tuple[Ints, NDArray[np.bool_]]:
        """Tokens for rows that do not just take the best, and the rows that have none left. logits: fp64 [R, V], ours to change.

        In fp64 no bound of a parameter overflows what fp32 logits hold. Measured from the best logit, no temperature does either.
        """
        for row in np.flatnonzero(self._adjusts[rows]).tolist():
            self._adjust(logits[row], int(rows[row]), seats)
        best, greedy = logits.max(dim=-1, keepdim=True)
        tokens: Ints = greedy[:, 0].cpu().numpy().astype(np.int64)
        barred = ~np.isfinite(best[:, 0].cpu().numpy())
        temperature = self._temperature[rows]
        hot = np.flatnonzero((temperature > 0.0) & ~barred)
        if not len(hot):
            return tokens, barred
        at = torch.from_numpy(hot).to(logits.device)
        scaled = (logits[at] - best[at]) / torch.from_numpy(temperature[hot]).to(logits)[:, None]
        uniform = self._uniform(rows[hot], seats.num_tokens[rows[hot]])
        narrow = (self._top_k[rows[hot]] > 0) | (self._top_p[rows[hot]] < 1.0) | (self._min_p[rows[hot]] > 0.0)
        for among, choose in ((np.flatnonzero(~narrow), self._from_all), (np.flatnonzero(narrow), self._from_best)):
            if len(among):
                tokens[hot[among]] = choose(scaled[torch.from_numpy(among).to(logits.device)], rows[hot[among]], uniform[among])
        return tokens, barred

    def _uniform(self, rows: Ints, positions: Ints) -> Floats:
        """A number in [0, 1) for each row from its seed and the position that is chosen."""
        bits = _mix(self._seeds[rows] + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        return (bits >> np.uint64(11)).astype(np.float64) / 2.0**53

    @staticmethod
    def _from_all(scaled: Tensor, rows: Ints, uniform: Floats) -> Ints:
        """Inverse of the cumulative distribution over the whole vocabulary. scaled: fp64 [R, V]."""
        return _invert(torch.softmax(scaled, dim=-1), uniform)

    def _from_best(self, scaled: Tensor, rows: Ints, uniform: Floats) -> Ints:
        """The same over what top_k, then top_p, and min_p leave. scaled: fp64 [R, V]."""
        total = torch.logsumexp(scaled, dim=-1, keepdim=True)
        tokens: Ints = np.zeros(len(rows), np.int64)
        count = min(scaled.shape[-1], max(_NUM_CANDIDATES, int(self._top_k[rows].max())))
        left = np.arange(len(rows))
        while len(left):
            at = torch.from_numpy(left).to(scaled.device)
            best, ids = torch.topk(scaled[at], count, dim=-1)
            probs = (best - total[at]).exp()
            kept, is_enough = self._keep(probs, rows[left], is_all=count == scaled.shape[-1])
            chosen = ids.gather(-1, torch.from_numpy(_invert(kept, uniform[left])).to(ids)[:, None])[:, 0].cpu().numpy()
            tokens[left[is_enough]] = chosen[is_enough]
            left, count = left[~is_enough], scaled.shape[-1]
        return tokens

    def _keep(self, probs: Tensor, rows: Ints, *, is_all: bool) -> tuple[Tensor, NDArray[np.bool_]]:
        """Zero the candidates that fall away. probs: [R, M], descending. Also whether M candidates were enough to tell."""
        device = probs.device
        top_k = torch.from_numpy(np.where(self._top_k[rows] > 0, self._top_k[rows], self._vocab_size)).to(device)[:, None]
        top_p = torch.from_numpy(self._top_p[rows]).to(device)[:, None]
        floor = torch.from_numpy(self._min_p[rows]).to(device)[:, None] * probs[:, :1]
        kept = torch.where(torch.arange(probs.shape[-1], device=device) < top_k, probs, 0.0)
        running = kept.cumsum(-1)  # its end, unlike a sum, does not depend on how many zeros follow for a neighbour's sake
        mass = torch.where(top_k <= probs.shape[-1], running[:, -1:], 1.0)
        before = (running - kept) / mass
        # The most likely token always stays, also with top_p 0.
        kept = torch.where((before < top_p) | (before == 0.0), kept, 0.0)
        kept = torch.where(kept >= floor, kept, 0.0)
        enough = (kept[:, -1] == 0.0) | (top_k[:, 0] <= probs.shape[-1]) | is_all
        return kept, enough.cpu().numpy()

    def _adjust(self, logits: Tensor, seat: int, seats: Seats) -> None:
        """Apply bias, penalties and min_tokens to one row. logits: fp64 [V], in place."""
        params = self._params[seat]
        num_prompt, num_tokens = int(seats.num_prompt[seat]), int(seats.num_tokens[seat])
        if params.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.unique(seats.tokens[seat, :num_tokens]).astype(np.int64)).to(logits.device)
            found = logits[seen]
            logits[seen] = torch.where(found > 0, found / params.repetition_penalty, found * params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            ids_np, counts = np.unique(seats.tokens[seat, num_prompt:num_tokens], return_counts=True)
            ids = torch.from_numpy(ids_np.astype(np.int64)).to(logits.device)
            logits[ids] -= params.presence_penalty + params.frequency_penalty * torch.from_numpy(counts).to(logits)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits.device)
            logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        if num_tokens - num_prompt < params.min_tokens:
            stops = seats.stop_ids[seat]
            logits[torch.from_numpy(stops[stops >= 0]).to(logits.device)] = -torch.inf


def describe(logprobs: Tensor | None, tokens: Ints, num_top: Ints) -> list[TokenLogprob]:
    """Log-probability, rank and best alternatives of a token per row. logprobs: [R, V]; tokens, num_top: [R]."""
    if logprobs is None or not len(tokens):
        return []
    chosen = logprobs.gather(-1, torch.from_numpy(tokens).to(logprobs.device)[:, None])
    ranks = ((logprobs > chosen).sum(-1) + 1).tolist()
    values, ids = torch.topk(logprobs, min(max(1, int(num_top.max())), logprobs.shape[-1]), dim=-1)
    rows: Sequence[tuple[int, float, int, int, list[int], list[float]]] = list(
        zip(tokens.tolist(), chosen[:, 0].tolist(), ranks, num_top.tolist(), ids.tolist(), values.tolist(), strict=True)
    )
    return [TokenLogprob(t, lp, rank, list(zip(i[:n], v[:n], strict=True))) for t, lp, rank, n, i, v in rows]


def _invert(weights: Tensor, uniform: Floats) -> Ints:
    """Index where the running sum of each row passes its share `uniform` of the row's total. weights: fp64 [R, M]."""
    running = weights.cumsum(-1)
    target = torch.from_numpy(uniform).to(running)[:, None] * running[:, -1:]
    at = torch.searchsorted(running, target, right=True)[:, 0]
    last = (weights > 0).long().mul(torch.arange(1, weights.shape[-1] + 1, device=weights.device)).amax(-1) - 1
    return torch.minimum(at, last).cpu().numpy().astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele et al. 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
