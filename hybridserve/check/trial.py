"""`--run`: the model on this machine, and whether every way to the same tokens gives the same tokens.

Owns the trial's requests and what counts as the same. Weights are the model's own where they are here, else random ones of its
shape. Called by `checker.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from hybridserve.check.report import Finding, passed, warned
from hybridserve.config import EngineSettings
from hybridserve.engine.core import EngineCore
from hybridserve.engine.sizing import unlimited_plan
from hybridserve.errors import EngineError
from hybridserve.models import CausalLM
from hybridserve.request import CacheHints, EngineRequest, SamplingParams, TokenLogprob

NUM_TOKENS = 8
#: Prompts shorter than a convolution, across a block of 16, and across several chunks.
PROMPT_LENGTHS = (2, 17, 40, 75)
CHUNK = 16
_LONGEST = 160
#: How far apart two log-probabilities of the same token may be: rounding, by dtype.
TOLERANCES = {"float32": 2e-3, "bfloat16": 0.25, "float16": 0.05}
_NUM_ALTERNATIVES = 5


@dataclass
class _Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached: int = 0


@dataclass(frozen=True)
class _Asked:
    name: str
    prompt: list[int]
    salt: str  # requests of one salt may reuse each other's caches


def run_trial(model: CausalLM, settings: EngineSettings, *, with_weights: bool) -> list[Finding]:
    """Load the model twice, with long and with short chunks, and compare. Raises what loading raises."""
    dtype = str(model.dtype).removeprefix("torch.")
    trial = _settings(model, settings, with_weights)
    prompts = _prompts(model, settings)
    whole = EngineCore(trial)
    alone = [_ask(whole, [_Asked(f"alone.{i}", prompt, "first")])[0] for i, prompt in enumerate(prompts)]
    findings = [_describe(whole, with_weights)]
    batched = _ask(whole, [_Asked(f"batched.{i}", prompt, "second") for i, prompt in enumerate(prompts)])
    findings.append(_compare("run.batched", "all prompts in one batch", alone, batched, dtype))
    again = [_ask(whole, [_Asked(f"cached.{i}", prompt, "first")])[0] for i, prompt in enumerate(prompts)]
    findings.append(_compare("run.cached", _hits(again, prompts), alone, again, dtype))
    findings.append(_resume(whole, prompts, alone, dtype))
    del whole
    chunked = EngineCore(
        msgspec.structs.replace(trial, max_num_batched_tokens=CHUNK, max_num_seqs=min(trial.max_num_seqs, CHUNK))
    )
    pieces = [_ask(chunked, [_Asked(f"chunked.{i}", prompt, "first")])[0] for i, prompt in enumerate(prompts)]
    findings.append(_compare("run.chunked", f"prompts in chunks of {CHUNK}", alone, pieces, dtype))
    return findings


def _settings(model: CausalLM, settings: EngineSettings, with_weights: bool) -> EngineSettings:
    """The same engine with room for the trial alone."""
    seats = len(PROMPT_LENGTHS)
    small = msgspec.structs.replace(
        settings,
        load_format="safetensors" if with_weights else "dummy",
        max_num_seqs=seats,
        max_num_batched_tokens=max(_LONGEST, CHUNK),
        max_model_len=min(_LONGEST, model.info.max_positions),
        enable_prefix_caching=True,
    )
    plan = unlimited_plan(small, model.cache_specs())
    room = 4 * max(1, plan.superpages_needed(_LONGEST, seats)) * plan.superpage_nbytes
    return msgspec.structs.replace(small, kv_cache_memory=room)


def _prompts(model: CausalLM, settings: EngineSettings) -> list[list[int]]:
    generator = np.random.default_rng(settings.seed)
    longest = min(_LONGEST, model.info.max_positions) - 3 * NUM_TOKENS
    lengths = sorted({max(1, min(length, longest)) for length in PROMPT_LENGTHS})
    return [generator.integers(0, model.info.vocab_size, length).tolist() for length in lengths]


def _ask(engine: EngineCore, asked: Sequence[_Asked]) -> list[_Answer]:
    """Answers in order, all asked at once. Raises EngineError when one fails."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=_NUM_ALTERNATIVES)
    answers = {one.name: _Answer() for one in asked}
    for one in asked:
        hints = CacheHints(salt=one.salt)
        refusal = engine.add(EngineRequest(request_id=one.name, prompt_token_ids=one.prompt, sampling=sampling, cache=hints))
        if refusal is not None:
            raise EngineError(f"the trial's request was refused: {refusal.error}")
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason == "error":
                raise EngineError(f"a request of the trial failed: {output.error}")
            answer = answers[output.request_id]
            answer.tokens += output.new_token_ids
            answer.logprobs += output.logprobs or []
            answer.num_cached += output.num_cached_tokens or 0
    return list(answers.values())


def _describe(engine: EngineCore, with_weights: bool) -> Finding:
    info = engine.info
    weights = "the model's weights" if with_weights else "random weights of its shape"
    return passed("run", f"loaded in {info.load_s:.1f} s on {info.device} with {weights}, {info.num_parameters:,} parameters")


def _hits(answers: Sequence[_Answer], prompts: Sequence[list[int]]) -> str:
    hits = ", ".join(f"{answer.num_cached} of {len(prompt)}" for answer, prompt in zip(answers, prompts, strict=True))
    return f"the same prompts again (tokens reused: {hits})"


def _resume(engine: EngineCore, prompts: Sequence[list[int]], alone: Sequence[_Answer], dtype: str) -> Finding:
    """A second turn: the prompt, its answer and more, once on top of the caches and once from nothing."""
    turns = [[*prompt, *answer.tokens, *prompt[:3]] for prompt, answer in zip(prompts, alone, strict=True)]
    cold = [_ask(engine, [_Asked(f"cold.{i}", turn, "third")])[0] for i, turn in enumerate(turns)]
    warm = [_ask(engine, [_Asked(f"resumed.{i}", turn, "first")])[0] for i, turn in enumerate(turns)]
    return _compare("run.resumed", _hits(warm, turns).replace("the same prompts again", "second turns"), cold, warm, dtype)


def _compare(name: str, what: str, wanted: Sequence[_Answer], found: Sequence[_Answer], dtype: str) -> Finding:
    """Token for token; where they part, whether the two tokens were as good as each other."""
    tolerance = TOLERANCES[dtype]
    worst = max((_distance(one, other) for one, other in zip(wanted, found, strict=True)), default=0.0)
    same = sum(one.tokens == other.tokens for one, other in zip(wanted, found, strict=True))
    text = f"{what}: {same} of {len(wanted)} answers have the same tokens, log-probabilities within {worst:.1e}"
    if worst <= tolerance:
        return passed(name, text)
    return warned(
        name,
        f"{text}; rounding explains {tolerance:g} in {dtype}",
        "run it again with --dtype float32 and report it if it stays: the answer depends on how it was computed",
    )


def _distance(wanted: _Answer, found: _Answer) -> float:
    """Largest difference of log-probabilities up to where the tokens part; there, of the two tokens that were chosen."""
    worst = 0.0
    for one, other in zip(wanted.logprobs, found.logprobs, strict=True):
        if one.token_id == other.token_id:
            worst = max(worst, abs(one.logprob - other.logprob))
            continue
        # A tie broken otherwise is rounding; a token that was not even among the best is not.
        alternatives = dict(one.top)
        return max(worst, one.logprob - alternatives.get(other.token_id, float("-inf")))
    return worst
