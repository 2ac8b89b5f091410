"""`LLM`: the engine inside one's own process, for scripts and notebooks.

Owns an `EngineCore` and the text around it. Shaped as vLLM's class so that scripts move over. Installs no signal handlers and
starts no process; close it, or use it as a context manager, to free the model's memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, TypeAlias, TypedDict

import msgspec

from hybridserve.config import EngineSettings, resolve
from hybridserve.engine.chat import ChatTemplate, Message, read_source
from hybridserve.engine.core import EngineCore
from hybridserve.engine.messages import EngineInfo
from hybridserve.engine.placing import place
from hybridserve.engine.text import Detokenizer, Tokenizer
from hybridserve.errors import EngineError, RequestError, UsageError
from hybridserve.models import resolve as resolve_model
from hybridserve.origin import vocabulary_file
from hybridserve.request import CacheHints, EngineRequest, FinishReason, RequestOutput, SamplingParams, TokenLogprob


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


Prompt: TypeAlias = str | TokensPrompt


@dataclass
class CompletionOutput:
    """One choice. `logprobs` has an entry per token when asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string, or the id in stop_token_ids, that ended it


@dataclass
class GenerationResult:
    """What `generate` and `chat` return for one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


class _Job(NamedTuple):
    """One prompt to run."""

    prompt: str | None
    token_ids: list[int]
    sampling: SamplingParams
    hints: CacheHints = CacheHints()


@dataclass
class _Choice:
    """One engine request and where its output goes."""

    result: GenerationResult
    output: CompletionOutput
    detokenizer: Detokenizer | None  # None where the model has no tokenizer, and its output no text
    sampling: SamplingParams


class LLM:
    """A loaded model. `settings` are the fields of `EngineSettings`, under the names of the command's flags.

    Raises UsageError for a setting that does not exist, ModelError when the model cannot be served.
    """

    def __init__(self, model: str, **settings: object) -> None:
        # Everything handed to `generate` at once may wait: the caller is the only client.
        self._settings = resolve(EngineSettings, {"model": model, **settings}, {"max_num_queued_reqs": 2**31})
        folder = resolve_model(self._settings.tokenizer or model, load_format=self._settings.load_format)
        has_vocabulary = vocabulary_file(folder.path) is not None
        self._tokenizer = Tokenizer.from_folder(folder.path) if has_vocabulary else None
        self._template_source = read_source(folder.path)
        self._core: EngineCore | None = EngineCore(self._settings)
        self._template: ChatTemplate | None = None  # made for the first chat
        self._num_requests = 0

    @property
    def info(self) -> EngineInfo:
        """What was loaded, and how memory is divided."""
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises UsageError when the model has none (a bare config with dummy weights): use token ids."""
        if self._tokenizer is None:
            raise UsageError("this model has no vocabulary; give prompts as {'prompt_token_ids': [...]}, or --tokenizer")
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works; then a bare prompt may be nothing that the model knows how to go on from."""
        return self._template_source is not None

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationResult]:
        """Complete prompts, all at once; results come in the prompts' order.

        Raises RequestError for a prompt or parameter that can never run, before anything is generated.
        """
        # A single prompt is itself a sequence (of characters) or a mapping.
        listed: list[Prompt] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = self._per_prompt(sampling_params, len(listed))
        return self._run([_Job(*self._ids(prompt), one) for prompt, one in zip(listed, params, strict=True)])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationResult]:
        """Answer one chat or several, each a list of messages with `role` and `content`."""
        template = self._chat_template()
        chats: list[Sequence[Message]] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)  # type: ignore[list-item, arg-type]
        params = self._per_prompt(sampling_params, len(chats))
        jobs = []
        for chat, one in zip(chats, params, strict=True):
            rendered = template.render(chat, places=True)
            ids, hints = place(self.tokenizer, rendered)
            jobs.append(_Job(rendered.text, ids, one, hints))
        return self._run(jobs)

    def close(self) -> None:
        """Free the model and its caches. The object is of no use afterwards."""
        self._core = None
        if self._template is not None:
            self._template.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def _engine(self) -> EngineCore:
        if self._core is None:
            raise UsageError("this LLM is closed; make a new one")
        return self._core

    def _chat_template(self) -> ChatTemplate:
        if self._template_source is None:
            raise UsageError("this model has no chat template; use generate()")
        if self._template is None:
            self._template = ChatTemplate(
                self._template_source, special_tokens=self.tokenizer.special_tokens, added_tokens=self.tokenizer.added_tokens
            )
        return self._template

    def _per_prompt(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if len(params) != count:
            raise RequestError(
                f"{len(params)} sampling_params for {count} prompts; give one, or one each", param="sampling_params"
            )
        return list(params)

    def _ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if not isinstance(prompt, Mapping) or "prompt_token_ids" not in prompt:
            raise RequestError(f"a prompt is {prompt!r:.100}; give text, or {{'prompt_token_ids': [...]}}", param="prompts")
        return None, list(prompt["prompt_token_ids"])

    def _run(self, jobs: "Sequence[_Job]") -> list[GenerationResult]:
        engine = self._engine
        results: list[GenerationResult] = []
        choices: dict[str, _Choice] = {}
        try:
            for job in jobs:
                result = GenerationResult(str(self._num_requests), job.prompt, job.token_ids, [])
                self._num_requests += 1
                results.append(result)
                for index in range(job.sampling.n):
                    self._submit(engine, result, index, job, choices)
            while choices:
                stopped = [output.request_id for output in engine.step() if self._take(output, choices)]
                engine.abort(stopped)
        finally:
            # Also when one prompt is refused or the user interrupts: nothing may go on without a reader.
            engine.abort(list(choices))
        return results

    def _submit(self, engine: EngineCore, result: GenerationResult, index: int, job: "_Job", choices: dict[str, _Choice]) -> None:
        sampling = job.sampling
        request_id = f"{result.request_id}.{index}"
        seed = sampling.seed + index if sampling.seed is not None else None
        own = msgspec.structs.replace(sampling, n=1, seed=seed)
        eos = self._tokenizer.eos_token_ids if self._tokenizer is not None else ()
        refusal = engine.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=result.prompt_token_ids,
                sampling=own,
                eos_token_ids=eos,
                cache=job.hints,
            )
        )
        if refusal is not None:
            raise RequestError(refusal.error or "the engine refused the request")
        output = CompletionOutput(index, logprobs=[] if sampling.logprobs is not None else None)
        result.outputs.append(output)
        choices[request_id] = _Choice(result, output, self._detokenizer(own), own)

    def _detokenizer(self, sampling: SamplingParams) -> Detokenizer | None:
        if self._tokenizer is None:
            return None
        return Detokenizer(
            self._tokenizer,
            stop=sampling.stop,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
        )

    def _take(self, message: RequestOutput, choices: dict[str, _Choice]) -> bool:
        """Add what one step said of a choice. Returns whether a stop string ended it, so that the engine must be told."""
        choice = choices.get(message.request_id)
        if choice is None:
            return False
        if message.finish_reason in ("error", "timeout"):
            raise EngineError(message.error or f"the engine ended the request: {message.finish_reason}")
        self._note_once(message, choice)
        output = choice.output
        output.token_ids += message.new_token_ids
        if output.logprobs is not None:
            output.logprobs += message.logprobs or []
        output.finish_reason = message.finish_reason
        if message.stop_token_id in choice.sampling.stop_token_ids:
            output.stop_reason = message.stop_token_id
        if choice.detokenizer is not None:
            _add_text(message, choice, choice.detokenizer)
        if output.finish_reason is None:
            return False
        del choices[message.request_id]
        return message.finish_reason is None

    @staticmethod
    def _note_once(message: RequestOutput, choice: _Choice) -> None:
        if message.num_cached_tokens is not None:
            choice.result.num_cached_tokens = max(choice.result.num_cached_tokens, message.num_cached_tokens)
        if message.prompt_logprobs is not None:
            choice.result.prompt_logprobs = message.prompt_logprobs


def _add_text(message: RequestOutput, choice: _Choice, detokenizer: Detokenizer) -> None:
    """Append what the new tokens say, up to a stop string, which ends the choice."""
    spoken = message.new_token_ids
    if message.stop_token_id is not None and not choice.sampling.include_stop_str_in_output:
        spoken = spoken[:-1]
    choice.output.text += detokenizer.push(spoken)
    if message.finish_reason is not None:
        choice.output.text += detokenizer.finish()
    if detokenizer.stop_string is not None:
        choice.output.finish_reason, choice.output.stop_reason = "stop", detokenizer.stop_string
