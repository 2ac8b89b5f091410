"""From a request's fields to `SamplingParams`: what the request says, else the model's generation config, else the default.

Owns that order and the seeds of choices. Must not know prompts or replies. Called by the two generation routes.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from hybridserve.errors import RequestError
from hybridserve.request import SamplingParams
from hybridserve.server.wire import GenerationFields

_COPIED = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "seed", "min_tokens", "prompt_logprobs", "include_stop_str_in_output", "ignore_eos"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
)
_SEED_STEP = 0x9E3779B97F4A7C15  # odd and without pattern, so that the seeds of choices do not meet
_SEED_SPAN = 2**64


def sampling_params(
    fields: GenerationFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    vocab_size: int,
) -> SamplingParams:
    """Sampling of every choice of one request. Raises RequestError naming the field that is out of bounds."""
    values: dict[str, object] = {name: value for name, value in defaults.items() if name != "max_tokens"}
    for name in _COPIED:
        value = getattr(fields, name)
        if value is not None:
            values[name] = value
    if values.get("top_k") == -1:  # other servers' word for no limit
        values["top_k"] = 0
    # What the author suppresses stays so, unless the request says otherwise of that very token.
    known = {token_id: bias for token_id, bias in defaults.get("logit_bias", {}).items() if token_id < vocab_size}
    values["logit_bias"] = {**known, **(fields.logit_bias or {})}
    if fields.min_tokens is None and max_tokens is not None:
        values["min_tokens"] = min(defaults.get("min_tokens", 0), max_tokens)
    stop = defaults.get("stop") if fields.stop is None else fields.stop
    values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    values["stop_token_ids"] = tuple(fields.stop_token_ids or ())
    values["max_tokens"] = max_tokens
    values["logprobs"] = logprobs
    sampling = SamplingParams(**values)  # type: ignore[arg-type]  # it checks every field itself
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_ids("logit_bias", tuple(sampling.logit_bias), vocab_size)
    return sampling


def of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """The sampling of one of `n` choices: its own seed, derived from the request's."""
    seed = sampling.seed
    if seed is not None and index > 0:
        seed = (seed + index * _SEED_STEP + 2**63) % _SEED_SPAN - 2**63
    return msgspec.structs.replace(sampling, n=1, seed=seed)


def _check_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{name} holds {token_id}; token ids are from 0 to {vocab_size - 1}", param=name)
