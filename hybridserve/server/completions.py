"""`/v1/completions`: text or token ids in, text out.

Owns that route's reply and events. What it shares with chats is in `call.py`.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from hybridserve.engine.text import Tokenizer
from hybridserve.errors import RequestError
from hybridserve.server.call import Arrived, Call, Envelope, make_call
from hybridserve.server.generation import Choice, Delta
from hybridserve.server.logprobs import CompletionLogprobs, prompt_logprobs
from hybridserve.server.prompts import Prompt, completion_prompts, max_tokens_for
from hybridserve.server.replies import Completion, CompletionChoice, usage
from hybridserve.server.sampling import sampling_params
from hybridserve.server.service import Service
from hybridserve.server.wire import CompletionRequest

#: OpenAI's default, which clients of completions rely on.
DEFAULT_MAX_TOKENS = 16
ID_PREFIX = "cmpl-"


async def completion_call(service: Service, request: CompletionRequest, arrived: Arrived) -> Call:
    """The engine requests of one completion. Raises RequestError naming the field at fault."""
    _check(request)
    prompts = await completion_prompts(service, request)
    default = service.sampling_defaults.get("max_tokens", DEFAULT_MAX_TOKENS)
    only_echo = request.max_tokens == 0
    samplings = []
    for prompt in prompts:
        wanted = 1 if only_echo else request.max_tokens
        max_tokens = max_tokens_for(service, prompt, wanted, int(default), "max_tokens", "prompt")
        sampling = sampling_params(
            request,
            service.sampling_defaults,
            max_tokens=max_tokens,
            logprobs=request.logprobs,
            vocab_size=service.client.info.vocab_size,
        )
        if request.echo and request.logprobs is not None and sampling.prompt_logprobs is None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=request.logprobs)
        samplings.append(sampling)
    return make_call(service, request, prompts, samplings, arrived=arrived, is_only_prompt=only_echo)


def completion_reply(tokenizer: Tokenizer, request: CompletionRequest, call: Call, wholes: Sequence[Delta]) -> Completion:
    """The whole reply."""
    choices = [
        _choice(tokenizer, request, call, choice, delta, with_prompt=True)
        for choice, delta in zip(call.choices, wholes, strict=True)
    ]
    return Completion(id=ID_PREFIX + call.id, created=call.created, model=call.model, choices=choices, usage=usage(call.choices))


class CompletionEvents:
    """The events of one streamed completion."""

    def __init__(self, tokenizer: Tokenizer, request: CompletionRequest, call: Call) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._call = call
        self._envelope = Envelope(call, ID_PREFIX, "text_completion")
        self._is_plain = request.logprobs is None and not call.returns_token_ids
        self._is_first = [True] * len(call.choices)
        self._offset = [0] * len(call.choices)
        self._plain_heads = [b'{"index":%d,"text":' % choice.index for choice in call.choices]

    def open(self, choice: Choice) -> bytes:
        return b""

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        index = choice.index
        if self._is_plain and delta.finish_reason is None and not (self._is_first[index] and self._request.echo):
            self._is_first[index] = False
            if not delta.text:
                return b""
            body = self._plain_heads[index] + msgspec.json.encode(delta.text) + b',"logprobs":null,"finish_reason":null}'
            return self._envelope.event(body)
        reply = _choice(
            self._tokenizer,
            self._request,
            self._call,
            choice,
            delta,
            with_prompt=self._is_first[index],
            offset=self._offset[index],
        )
        self._is_first[index] = False
        self._offset[index] += len(reply.text)
        return self._envelope.event(msgspec.json.encode(reply))

    def close(self, choices: Sequence[Choice]) -> bytes:
        return self._envelope.usage_event()


def _choice(
    tokenizer: Tokenizer,
    request: CompletionRequest,
    call: Call,
    choice: Choice,
    delta: Delta,
    *,
    with_prompt: bool,
    offset: int = 0,
) -> CompletionChoice:
    """One choice of a reply or of an event; `with_prompt` where what concerns the prompt belongs."""
    echoes = with_prompt and request.echo is True
    text = (_echo(tokenizer, choice.prompt) if echoes else "") + delta.text
    shows_prompt = with_prompt and request.prompt_logprobs is not None
    return CompletionChoice(
        choice.index,
        text,
        _logprobs(tokenizer, choice, delta, echoes=echoes, offset=offset) if request.logprobs is not None else None,
        delta.finish_reason,
        delta.stop_reason,
        token_ids=delta.token_ids if call.returns_token_ids else UNSET,
        prompt_token_ids=choice.prompt.token_ids if call.returns_token_ids and with_prompt else UNSET,
        prompt_logprobs=prompt_logprobs(tokenizer, choice.prompt_logprobs) if shows_prompt else UNSET,
        cache_explanation=choice.explanation if call.explains and delta.finish_reason is not None else UNSET,
    )


def _logprobs(tokenizer: Tokenizer, choice: Choice, delta: Delta, *, echoes: bool, offset: int) -> CompletionLogprobs:
    logprobs = CompletionLogprobs()
    if echoes:
        of_prompt = choice.prompt_logprobs or [None] * len(choice.prompt.token_ids)
        for token_id, entry in zip(choice.prompt.token_ids, of_prompt, strict=True):
            offset = logprobs.append(tokenizer, token_id, entry, offset)
    for entry in delta.logprobs:
        offset = logprobs.append(tokenizer, entry.token_id, entry, offset)
    return logprobs


def _echo(tokenizer: Tokenizer, prompt: Prompt) -> str:
    return tokenizer.decode(prompt.token_ids, skip_special_tokens=False) if prompt.text is None else prompt.text


def _check(request: CompletionRequest) -> None:
    if request.max_tokens == 0 and not request.echo:
        raise RequestError("max_tokens is 0, which makes sense only with echo; ask for at least 1", param="max_tokens")
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs")
