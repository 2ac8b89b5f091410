"""A request and its sampling: what a caller asks of the engine, validated, and what the engine says back.

Owns the messages that cross the process border (msgspec Structs, never pickle) and the bounds of every number and list in them.
Must not know pools, models or HTTP. Built by `server/` and `llm.py`, read by `engine/`.
"""

import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Literal, TypeAlias

import msgspec

from hybridserve.errors import RequestError

#: Bounds of every field, in one table; `/v1/limits` prints it, the border and the engine both check against it.
LIMITS: dict[str, tuple[float, float]] = {
    "n": (1, 128),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-3, 100.0),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
}
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_CACHE_SALT_CHARS = 128
MAX_CACHE_MARKS = 8

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error", "timeout"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose tokens and when to end. Names and meanings are vLLM's; defaults are OpenAI's where both have one.

    `temperature` 0 is greedy. `max_tokens` None means as many as the context holds. Raises RequestError naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives beside the chosen token; None: no log-probabilities
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._read_lists()
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise RequestError(f"{name} is {value!r}; it must be a number from {low:.10g} to {high:.10g}", param=name)
        for name in ("n", "top_k", "seed", "logprobs", "prompt_logprobs", "max_tokens", "min_tokens"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise RequestError(f"{name} is {value!r}; it must be a whole number", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}; lower it", param="min_tokens"
            )
        self._check_lists()

    def _read_lists(self) -> None:
        """Take lists as callers write them: None for an empty one, one string for a list of it, any sequence."""
        bias: object = self.logit_bias
        given: dict[str, object] = {"stop": self.stop, "stop_token_ids": self.stop_token_ids}
        for name, value in given.items():
            if isinstance(value, str) and name == "stop":
                value = (value,)
            if value is not None and not isinstance(value, list | tuple):
                raise RequestError(f"{name} is {value!r:.100}; it must be a list", param=name)
            msgspec.structs.force_setattr(self, name, tuple(value or ()))
        if bias is not None and not isinstance(bias, Mapping):
            raise RequestError(f"logit_bias is {bias!r:.100}; it must map token ids to numbers", param="logit_bias")
        msgspec.structs.force_setattr(self, "logit_bias", dict(bias or {}))

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS}, in a list", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise RequestError(f"a stop string must have 1 to {MAX_STOP_STRING_CHARS} characters", param="stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS}", param="stop_token_ids"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS}", param="logit_bias")
        for bias in self.logit_bias.values():
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100.0 <= bias <= 100.0:
                raise RequestError(f"a logit_bias is {bias!r}; it must be from -100 to 100", param="logit_bias")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


#: Begins the salts that derive from API keys; no salt of a request may hold it.
TENANT_MARK = "@"


class CacheHints(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller knows about reuse. Token positions count from the start of the prompt."""

    salt: str = ""  # requests with different salts never share cache entries
    hits_only: bool = False  # others share this salt, perhaps: explanations tell what is resumed from and nothing else
    boundaries: tuple[int, ...] = ()  # positions where another request is likely to part: ends of messages
    marks: tuple[int, ...] = ()  # positions where the caller says so; they go before all others
    history: tuple[int, int] | None = None  # of a chat: where its first question ends, and its last answer
    pin: bool = False
    no_store: bool = False

    @property
    def has_own_salt(self) -> bool:
        """Whether the caller gave the salt, rather than its key."""
        return bool(self.salt) and not self.salt.startswith(TENANT_MARK)


Reason: TypeAlias = Literal[
    "hit",  # reused
    "last_token",  # the last token of a prompt is always computed: its logits are wanted
    "no_state",  # the text is cached, but no state was kept at a point further on
    "evicted",  # it was cached and gave way to something else
    "window",  # a sliding-window layer's entries for that point are gone
    "template_drift",  # inside the history of a chat whose beginning is cached: it was rendered otherwise before
    "salted",  # never seen under this request's salt; what other salts hold is not told
    "never_seen",
    "prompt_logprobs",  # the request needs every prompt token computed
    "caching_off",  # the engine runs without prefix caching
]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What of a prompt was reused, and why not more. `tokens` by reason add up to the prompt's length."""

    num_prompt: int
    num_hit: int  # tokens resumed from
    num_text: int  # tokens whose text is cached, whether or not every layer can resume there
    group_tokens: dict[int, int]  # by cache group: how far that group alone could resume
    limiting_group: int | None  # the group that kept the hit shorter than the text, if one did
    reason: Reason  # what cost the most tokens; "hit" if only the last token was computed
    tokens: dict[Reason, int]
    parted_at: int | None = None  # token at which the prompt left what is cached
    parted_token: str | None = None  # its text, added by the server
    parted_in_message: int | None = None  # number of the chat message that holds it, 0 for the first; added by the server


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """One sequence to generate. `n` choices are n of these; text and templates stay on the caller's side."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    cache: CacheHints = CacheHints()
    explain: bool = False
    deadline_s: float | None = None  # seconds from submission; then it ends with reason "timeout"


def check_request(request: EngineRequest, *, vocab_size: int, max_model_len: int) -> None:
    """The engine's own check, against its model, of what the border has checked already. Raises RequestError naming the field."""
    tokens, sampling = request.prompt_token_ids, request.sampling
    if not tokens:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    if len(tokens) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens; at most {max_model_len - 1} leave room for one more in a context of "
            f"{max_model_len}; shorten it",
            param="prompt",
            code="context_length_exceeded",
        )
    given: dict[str, Iterable[object]] = {
        "prompt": (min(tokens), max(tokens)),
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": sampling.logit_bias,
    }
    for name, ids in given.items():
        wrong = next((one for one in ids if not isinstance(one, Integral) or not 0 <= int(one) < vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"{name}: token id {wrong!r:.100} is outside the vocabulary of {vocab_size}; use ids from 0 to {vocab_size - 1}",
                param=name,
            )
    if request.deadline_s is not None and not math.isfinite(request.deadline_s):
        raise RequestError(f"deadline_s is {request.deadline_s}; give a number of seconds, or none", param="deadline_s")
    if any("\ud800" <= char <= "\udfff" for char in request.cache.salt):
        raise RequestError("the cache salt holds half of a surrogate pair; give valid text", param="cache_salt")


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token, its rank (1 = most likely), and the most likely alternatives as (id, logprob)."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step produced for one request. Token ids are new ones only; `finish_reason` is set exactly once, last."""

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it, which is not among the text
    error: str | None = None
    error_type: str | None = None  # name of the class in `errors.py`, where the request was refused
    logprobs: list[TokenLogprob] | None = None  # one per new token
    prompt_logprobs: list[TokenLogprob | None] | None = None  # once, with the first output; None for the first token
    num_cached_tokens: int | None = None  # once, with the first output: prompt tokens that a prefix hit saved
    explanation: Explanation | None = None  # once, with the first output, when asked for
