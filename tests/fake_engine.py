"""An `EngineClient` without an engine: scripted tokens, delays and failures, and a record of what it was asked."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import hybridserve
from hybridserve.config import ServerSettings
from hybridserve.engine.messages import EngineInfo, EngineStats, GroupInfo
from hybridserve.engine.text import Tokenizer
from hybridserve.engine.unread import Unread
from hybridserve.errors import OverloadedError
from hybridserve.kv.explanation import unexplored
from hybridserve.request import CacheHints, EngineRequest, Explanation, FinishReason, RequestOutput, TokenLogprob


def make_info(vocab_size: int, max_model_len: int = 256) -> EngineInfo:
    return EngineInfo(
        architecture="FakeForCausalLM",
        layer_plan="0,2: short_conv  1,3: attention",
        dtype="float32",
        device="cpu",
        backends={"attention": "reference: a fake"},
        num_parameters=1_234_567,
        weights_nbytes=5 * 2**20,
        load_s=0.25,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        block_size=16,
        match_unit=16,
        superpage_nbytes=2**16,
        num_superpages=32,
        padding_percent=1.5,
        kv_nbytes_per_token=512,
        state_nbytes_per_sequence=4096,
        groups=[GroupInfo(kind="paged", layers=[1, 3], page_nbytes=8192, natural_nbytes=8192, pages_per_superpage=8)],
        users_at={"1024": 3, "256": 12},
        features_off={"speculation": "not_implemented"},
        max_num_queued_reqs=16,
    )


@dataclass
class Script:
    """What the engine does for one request. `tokens` come in steps of `step` tokens, `delay_s` before each."""

    tokens: Sequence[int]
    step: int = 1
    delay_s: float = 0.0
    finish: FinishReason = "length"
    stop_token_id: int | None = None
    raises: Exception | None = None  # after all tokens, instead of a finish
    error: str | None = None  # text of finish "error"
    cached: int = 0


@dataclass
class FakeEngine:
    """Answers every request by `script`. `submitted` and `aborted` record what happened, in order."""

    info: EngineInfo
    script: Callable[[EngineRequest], Script]
    is_alive: bool = True
    stalled_s: float = 0.0
    refuses: Exception | None = None
    submitted: list[EngineRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    closed: list[float] = field(default_factory=list)
    num_open: int = 0

    async def submit(self, request: EngineRequest, unread: Unread | None = None) -> AsyncGenerator[RequestOutput, None]:
        if self.refuses is not None:
            raise self.refuses
        if self.closed:
            raise OverloadedError("closed")
        self.submitted.append(request)
        self.num_open += 1
        is_finished = False
        try:
            async for output in self._outputs(request, self.script(request)):
                yield output
            is_finished = True
        except Exception:
            is_finished = True
            raise
        finally:
            self.num_open -= 1
            if not is_finished:
                self.aborted.append(request.request_id)

    async def _outputs(self, request: EngineRequest, script: Script) -> AsyncGenerator[RequestOutput, None]:
        limit = request.sampling.max_tokens or self.info.max_model_len
        tokens = list(script.tokens)[:limit]
        steps = [tokens[start : start + script.step] for start in range(0, len(tokens), script.step)] or [[]]
        for number, step in enumerate(steps):
            await asyncio.sleep(script.delay_s)
            if self.closed:
                yield RequestOutput(request_id=request.request_id, new_token_ids=[], finish_reason="abort")
                return
            is_last = number == len(steps) - 1 and script.raises is None
            yield RequestOutput(
                request_id=request.request_id,
                new_token_ids=step,
                finish_reason=script.finish if is_last else None,
                stop_token_id=script.stop_token_id if is_last else None,
                error=script.error if is_last else None,
                logprobs=self._logprobs(request, step),
                prompt_logprobs=self._prompt_logprobs(request) if number == 0 else None,
                num_cached_tokens=script.cached if number == 0 else None,
                explanation=self._explanation(len(request.prompt_token_ids)) if request.explain and number == 0 else None,
            )
        if script.raises is not None:
            raise script.raises

    def _logprobs(self, request: EngineRequest, step: Sequence[int]) -> list[TokenLogprob] | None:
        count = request.sampling.logprobs
        return None if count is None else [self._logprob(token_id, count) for token_id in step]

    def _prompt_logprobs(self, request: EngineRequest) -> list[TokenLogprob | None] | None:
        count = request.sampling.prompt_logprobs
        if count is None:
            return None
        return [None, *(self._logprob(token_id, count) for token_id in request.prompt_token_ids[1:])]

    def _logprob(self, token_id: int, count: int) -> TokenLogprob:
        """Rank 2 of alternatives with ids beside it; the second one is impossible."""
        others = [(token_id + 1 + number) % self.info.vocab_size for number in range(count)]
        values = [-0.25, float("-inf"), *[-5.0] * count]
        return TokenLogprob(token_id, -1.5, 2, list(zip(others, values, strict=False)))

    @staticmethod
    def _explanation(num_prompt: int) -> Explanation:
        return unexplored(num_prompt, "never_seen")

    async def explain(self, prompt_token_ids: list[int], cache: CacheHints) -> Explanation:
        return self._explanation(len(prompt_token_ids))

    async def stats(self) -> EngineStats:
        return EngineStats(num_running=self.num_open, num_prompt_tokens=100, num_cached_tokens=40, slots_used=3, slots_total=9)

    async def close(self, drain_s: float) -> None:
        self.closed.append(drain_s)
        self.is_alive = False


def main(port: str, delay_s: str) -> None:
    """Serve a fake engine, for tests that need a process to send signals to."""
    # Late: processes that only speak an engine's messages import this module, too.
    from hybridserve.server.app import create_app
    from hybridserve.server.run import Launch, serve

    folder = Path(hybridserve.__file__).parent / "demo"
    tokenizer = Tokenizer.from_folder(folder)
    tokens = tokenizer.encode("the quick brown fox jumps over the lazy dog ")
    engine = FakeEngine(make_info(tokenizer.vocab_size), lambda request: Script(tokens * 20, delay_s=float(delay_s)))
    settings = ServerSettings(port=int(port), drain_timeout_s=20.0)

    async def start() -> FakeEngine:
        return engine

    launch = Launch(
        settings,
        start,
        lambda client, lifecycle: create_app(client, tokenizer, settings, "fake", lifecycle=lifecycle),
        lambda client, address: print(address, flush=True),
    )
    asyncio.run(serve(launch))
    print("num_open", engine.num_open, "aborted", len(engine.aborted), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
