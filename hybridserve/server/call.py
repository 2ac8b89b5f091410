"""One generation call: its ids, its choices as engine requests, and the envelope of its events.

Owns what completions and chats share between the parsed request and the reply. Must not know either's fields beyond the shared
ones.
"""

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from hybridserve.errors import RequestError
from hybridserve.request import EngineRequest, SamplingParams
from hybridserve.server.generation import Choice
from hybridserve.server.prompts import Prompt, cache_hints, located
from hybridserve.server.replies import usage
from hybridserve.server.sampling import of_choice
from hybridserve.server.service import Service
from hybridserve.server.wire import MAX_SEQUENCES, GenerationFields


class CallIds:
    """Ids that no other call of any server has: a random beginning and a count."""

    def __init__(self) -> None:
        self._start = os.urandom(9).hex()
        self._count = itertools.count(1)

    def next(self) -> str:
        return f"{self._start}{next(self._count):06x}"


@dataclass(frozen=True)
class Arrived:
    """What is known of a call beside its body."""

    call_id: str
    at: float  # on the clock of time.monotonic
    explains: bool  # whether its header asks for an explanation
    tenant_salt: str  # of the key that it came with


@dataclass(frozen=True)
class Call:
    """One request's choices, and how its reply names itself."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    has_usage: bool  # whether a stream ends with a usage event
    has_running_usage: bool  # whether every event carries it
    returns_token_ids: bool
    explains: bool


def make_call(
    service: Service,
    fields: GenerationFields,
    prompts: Sequence[Prompt],
    samplings: Sequence[SamplingParams],
    *,
    arrived: Arrived,
    is_only_prompt: bool = False,
) -> Call:
    """Choices of all prompts, prompt by prompt; with `is_only_prompt` nothing is generated for the client.

    Raises RequestError when they are too many.
    """
    num_sequences = sum(sampling.n for sampling in samplings)
    if num_sequences > MAX_SEQUENCES:
        raise RequestError(f"n times the prompts is {num_sequences} sequences; at most {MAX_SEQUENCES}; lower n", param="n")
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options is set, but stream is not; set stream to true", param="stream_options")
    explains = arrived.explains or (fields.hybrid_xargs is not None and fields.hybrid_xargs.explain)
    locate = partial(located, service)
    choices: list[Choice] = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        hints = cache_hints(fields, prompt, arrived.tenant_salt)
        for number in range(sampling.n):
            request = EngineRequest(
                request_id=f"{arrived.call_id}-{len(choices)}",
                prompt_token_ids=prompt.token_ids,
                sampling=of_choice(sampling, number),
                eos_token_ids=service.tokenizer.eos_token_ids,
                cache=hints,
                explain=explains,
                deadline_s=service.settings.request_timeout_s,
            )
            choices.append(
                Choice(
                    len(choices),
                    prompt,
                    request,
                    service.tokenizer,
                    service.metrics,
                    arrived.at,
                    locate,
                    is_only_prompt=is_only_prompt,
                )
            )
    options = fields.stream_options
    return Call(
        id=arrived.call_id,
        created=int(time.time()),
        model=service.model_name,
        choices=choices,
        has_usage=options is not None and bool(options.include_usage),
        has_running_usage=options is not None and bool(options.include_usage and options.continuous_usage_stats),
        returns_token_ids=fields.return_token_ids is True,
        explains=explains,
    )


class Envelope:
    """The constant part of a stream's events, rendered once; an event is it around one choice's JSON."""

    def __init__(self, call: Call, prefix: str, kind: str) -> None:
        head = {"id": prefix + call.id, "object": kind, "created": call.created, "model": call.model}
        self._call = call
        self._head = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if call.has_usage else b"]}\n\n"

    def event(self, choice: bytes) -> bytes:
        """An event with one choice, given as JSON."""
        return self._head + choice + (self._running_usage() if self._call.has_running_usage else self._tail)

    def usage_event(self) -> bytes:
        """The event without choices that ends a stream, when it was asked for."""
        if not self._call.has_usage:
            return b""
        return self._head + self._running_usage()

    def _running_usage(self) -> bytes:
        return b'],"usage":' + msgspec.json.encode(usage(self._call.choices)) + b"}\n\n"
