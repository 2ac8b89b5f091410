"""Messages between the engine process and its clients, beside the request itself (`hybridserve/request.py`).

Owns the wire types and their codec (msgspec msgpack with a schema; nothing else is ever decoded). Must not know HTTP or tensors.
"""

from collections.abc import AsyncGenerator
from typing import Protocol, TypeAlias

import msgspec

from hybridserve.engine.unread import Unread
from hybridserve.request import CacheHints, EngineRequest, Explanation, RequestOutput

#: How long a question about the engine, such as an explanation, waits for its answer.
ANSWER_LIMIT_S = 30.0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these requests and free what they hold. Unknown ids are ignored: they have just ended."""

    request_ids: list[str]


class AskStats(msgspec.Struct, frozen=True, tag="stats"):
    """Ask for an `EngineStats`; answered at the next step, or at once when idle."""


class AskExplanation(msgspec.Struct, frozen=True, kw_only=True, tag="explain"):
    """Ask what a prompt would hit now, without running it; answered with an `Explained` of the same number."""

    number: int
    prompt_token_ids: list[int]
    cache: CacheHints


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the engine process once what runs has finished (`drain`), or at once."""

    drain: bool


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One cache group of the plan."""

    kind: str  # "paged" or "state"
    layers: list[int]
    page_nbytes: int  # after rounding
    natural_nbytes: int
    pages_per_superpage: int
    window: int | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag="info"):
    """What the engine is once loaded; constant from then on. First message that the engine sends."""

    architecture: str
    layer_plan: str  # "0-2,4-6: gated_delta  3,7: attention"
    dtype: str
    device: str
    backends: dict[str, str]  # operation -> "native: reason"
    num_parameters: int
    weights_nbytes: int
    load_s: float
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    match_unit: int
    superpage_nbytes: int
    num_superpages: int
    padding_percent: float
    kv_nbytes_per_token: int
    state_nbytes_per_sequence: int
    groups: list[GroupInfo]
    users_at: dict[str, int]  # context length -> sequences of it that fit at once
    features_off: dict[str, str]  # feature -> reason code
    max_num_queued_reqs: int
    limit_at: dict[str, str] = {}  # context length -> what keeps it from being one user more


class EngineStats(msgspec.Struct, kw_only=True, tag="engine_stats"):
    """A sample of the engine's gauges and counters (counters since start)."""

    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_total: int = 0
    slots_used: int = 0
    slots_cached: int = 0
    slots_total: int = 0
    superpages_free: int = 0
    superpages_total: int = 0
    num_checkpoints_written: int = 0
    prompt_tokens_by_reason: dict[str, int] = {}  # what became of each prompt token; adds up to num_prompt_tokens


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What one step produced, for all its requests. Steps that produce nothing are told now and then by an empty one."""

    outputs: list[RequestOutput]
    num_steps: int = 0  # completed since start


class Explained(msgspec.Struct, frozen=True, tag="explained"):
    """Answer to `AskExplanation`; None when explaining failed, which the engine's log tells more about."""

    number: int
    explanation: Explanation | None


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine could not start, or stops; `error` is the class name of a `HybridServeError`, or the exception's own."""

    error: str
    message: str


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress of loading, from 0 to 1, for a bar."""

    stage: str
    fraction: float


ToEngine: TypeAlias = EngineRequest | Abort | AskStats | AskExplanation | Shutdown
FromEngine: TypeAlias = EngineInfo | Outputs | EngineStats | Explained | Fatal | Loading

encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)


class EngineClient(Protocol):
    """The other side of the process border, as the server sees it. One event loop owns it."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def stalled_s(self) -> float:
        """Seconds for which the engine has had work and completed no step; 0 when idle."""
        ...

    def submit(self, request: EngineRequest, unread: Unread | None = None) -> AsyncGenerator[RequestOutput, None]:
        """Send a request and yield its outputs, the last one with a finish_reason.

        Outputs wait for their reader; with `unread` no more than its limit. Beyond it the request is aborted and SlowReaderError
        raised.

        Closing the iterator early (a client that disconnects) aborts the request. Raises OverloadedError when the queue is full
        or the engine drains, EngineDeadError when the process has stopped, also in mid-stream.
        """
        ...

    async def stats(self) -> EngineStats:
        """Gauges and counters. Raises EngineDeadError, or DeadlineError when the engine does not answer."""
        ...

    async def explain(self, prompt_token_ids: list[int], cache: CacheHints) -> Explanation:
        """What a prompt would hit now, without running it. Raises what `stats` raises, OverloadedError and EngineError."""
        ...

    async def close(self, drain_s: float) -> None:
        """Refuse new requests, let running ones finish for at most `drain_s`, then stop the process."""
        ...
