"""One choice of a request: the engine's outputs as text.

Owns the detokeniser, the counts and the end of one sequence. Must not know wire formats. The streaming and the collecting
routes both read `Choice.deltas`, so a stream and a whole reply cannot differ.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeAlias

import msgspec

from hybridserve.engine.messages import EngineClient
from hybridserve.engine.text import Detokenizer, Tokenizer
from hybridserve.engine.unread import Unread
from hybridserve.errors import DeadlineError, EngineError, HybridServeError, OverloadedError
from hybridserve.request import EngineRequest, Explanation, RequestOutput, TokenLogprob
from hybridserve.server.metrics import Metrics
from hybridserve.server.prompts import Prompt

#: The engine ends a request at its deadline; so long after it the server does.
DEADLINE_GRACE_S = 1.0

#: Adds to an explanation where in the text the prompt parted.
Locate: TypeAlias = Callable[[Prompt, Explanation], Awaitable[Explanation]]


class Delta(msgspec.Struct):
    """What became certain at once: text, and the tokens that were generated, whose text may come later."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def extend(self, later: "Delta") -> None:
        """Merge what came next into this."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


class Choice:
    """One sequence of a request, from submission to finish."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        request: EngineRequest,
        tokenizer: Tokenizer,
        metrics: Metrics,
        arrival: float,
        locate: Locate,
        *,
        is_only_prompt: bool = False,
    ) -> None:
        """`is_only_prompt`: the one token that the engine must generate is neither told nor counted."""
        sampling = request.sampling
        self.index = index
        self.prompt = prompt
        self.request = request
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.explanation: Explanation | None = None
        self._is_only_prompt = is_only_prompt
        self._metrics = metrics
        self._locate = locate
        self._arrival = arrival  # on the clock of time.monotonic
        self._last: float | None = None  # when the last token came
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=sampling.stop,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
        )

    async def deltas(self, client: EngineClient, unread: Unread | None = None) -> AsyncGenerator[Delta, None]:
        """Submit the request and yield what it says; the last delta has a finish reason.

        Closing this closes the engine's iterator, which aborts the request. A stop string does the same. Raises what the
        engine's client raises, EngineError when the engine failed the request, DeadlineError when it ran out of time: a while
        after the engine should have said so, this does, whatever the engine does.
        """
        is_finished = False
        async with aclosing(self._outputs(client, unread)) as outputs:
            async for output in outputs:
                delta = self._take(output)
                if output.explanation is not None:
                    self.explanation = await self._locate(self.prompt, output.explanation)
                is_finished = delta.finish_reason is not None
                yield delta
                if self._detokenizer.stop_string is not None:
                    return
        if not is_finished:
            raise EngineError("the engine ended this request without a reason")

    async def _outputs(self, client: EngineClient, unread: Unread | None) -> AsyncGenerator[RequestOutput, None]:
        """The engine's outputs until the deadline, which counts from the arrival of the whole call."""
        request, limit_s = self.request, self.request.deadline_s
        ends_at = None
        if limit_s is not None:
            ends_at = self._arrival + limit_s + DEADLINE_GRACE_S
            left_s = self._arrival + limit_s - time.monotonic()
            request = msgspec.structs.replace(request, deadline_s=max(left_s, 0.001))
        async with aclosing(client.submit(request, unread)) as outputs:
            while True:
                left = None if ends_at is None else max(ends_at - time.monotonic(), 0.0)
                try:
                    async with asyncio.timeout(left):
                        output = await anext(outputs)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    self._metrics.finished["timeout"] += 1
                    raise _too_late() from None
                yield output

    def _take(self, output: RequestOutput) -> Delta:
        if output.finish_reason in ("error", "abort", "timeout"):
            self._metrics.finished[output.finish_reason] += 1
            raise _failure(output)
        self._note_once(output)
        ids = output.new_token_ids
        self._measure(len(ids))
        spoken = ids
        ends_with_stop_token = output.stop_token_id is not None and bool(ids) and ids[-1] == output.stop_token_id
        if ends_with_stop_token and not self.request.sampling.include_stop_str_in_output:
            spoken = ids[:-1]
        before = self._detokenizer.num_tokens
        text = self._detokenizer.push(spoken)
        if output.finish_reason is not None:
            text += self._detokenizer.finish()
        delta = Delta(text, ids, output.logprobs or [], output.finish_reason)
        if self._detokenizer.stop_string is not None:
            count = self._detokenizer.num_tokens - before
            delta = Delta(text, ids[:count], delta.logprobs[:count], "stop", self._detokenizer.stop_string)
        elif output.stop_token_id in self.request.sampling.stop_token_ids:
            delta.stop_reason = output.stop_token_id
        if self._is_only_prompt:
            delta = Delta("", [], [], delta.finish_reason and "length")
        self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._measure_finish(delta.finish_reason)
        return delta

    def _note_once(self, output: RequestOutput) -> None:
        if output.num_cached_tokens is not None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs

    def _measure(self, num_new: int) -> None:
        if not num_new:
            return
        now = time.monotonic()
        if self._last is None:
            self._metrics.time_to_first_token_s.observe(now - self._arrival)
        else:
            self._metrics.inter_token_latency_s.observe((now - self._last) / num_new, num_new)
        self._last = now

    def _measure_finish(self, reason: str) -> None:
        self._metrics.finished[reason] += 1
        self._metrics.e2e_latency_s.observe(time.monotonic() - self._arrival)
        self._metrics.prompt_tokens.observe(len(self.prompt.token_ids))
        self._metrics.generation_tokens.observe(self.num_tokens)


async def collect(choice: Choice, client: EngineClient) -> Delta:
    """Everything one choice says, as one delta."""
    whole = Delta("", [], [])
    async with aclosing(choice.deltas(client)) as deltas:
        async for delta in deltas:
            whole.extend(delta)
    return whole


async def collect_all(choices: Sequence[Choice], client: EngineClient, max_at_once: int) -> list[Delta]:
    """Everything that all choices say, in order. The first failure ends the others."""
    if len(choices) == 1:
        return [await collect(choices[0], client)]
    gate = asyncio.Semaphore(max_at_once)

    async def one(choice: Choice) -> Delta:
        async with gate:
            return await collect(choice, client)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(choice)) for choice in choices]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _failure(output: RequestOutput) -> HybridServeError:
    if output.finish_reason == "timeout":
        return _too_late()
    if output.finish_reason == "abort":
        return OverloadedError("the request was aborted because the server is shutting down; send it again")
    return EngineError(output.error or "the engine failed this request")


def _too_late() -> DeadlineError:
    return DeadlineError("the request ran longer than it may; ask for fewer tokens or raise --request-timeout-s")
