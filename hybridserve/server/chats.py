"""`/v1/chat/completions`: messages in, the assistant's message out.

Owns that route's reply and events. What it shares with completions is in `call.py`.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from hybridserve.engine.text import Tokenizer
from hybridserve.errors import RequestError
from hybridserve.request import LIMITS
from hybridserve.server.call import Arrived, Call, Envelope, make_call
from hybridserve.server.generation import Choice, Delta
from hybridserve.server.logprobs import chat_logprobs, prompt_logprobs
from hybridserve.server.prompts import chat_prompt, max_tokens_for
from hybridserve.server.replies import ChatChoice, ChatChunkChoice, ChatCompletion, ChatDelta, ReplyMessage, usage
from hybridserve.server.sampling import sampling_params
from hybridserve.server.service import Service
from hybridserve.server.wire import ChatRequest

ID_PREFIX = "chatcmpl-"


async def chat_call(service: Service, request: ChatRequest, arrived: Arrived) -> Call:
    """The engine requests of one chat. Raises RequestError naming the field at fault."""
    _check(request)
    prompt = await chat_prompt(service, request, request.messages)
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    default = service.sampling_defaults.get("max_tokens")
    default = None if default is None else int(default)
    max_tokens = max_tokens_for(service, prompt, wanted, default, field, "messages")
    sampling = sampling_params(
        request,
        service.sampling_defaults,
        max_tokens=max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        vocab_size=service.client.info.vocab_size,
    )
    return make_call(service, request, [prompt], [sampling], arrived=arrived)


def chat_reply(tokenizer: Tokenizer, request: ChatRequest, call: Call, wholes: Sequence[Delta]) -> ChatCompletion:
    """The whole reply."""
    first = call.choices[0]
    shows_prompt = request.prompt_logprobs is not None
    return ChatCompletion(
        id=ID_PREFIX + call.id,
        created=call.created,
        model=call.model,
        choices=[
            ChatChoice(
                choice.index,
                ReplyMessage(delta.text),
                chat_logprobs(tokenizer, delta.logprobs) if request.logprobs else None,
                delta.finish_reason,
                delta.stop_reason,
                token_ids=delta.token_ids if call.returns_token_ids else UNSET,
                cache_explanation=choice.explanation if call.explains else UNSET,
            )
            for choice, delta in zip(call.choices, wholes, strict=True)
        ],
        usage=usage(call.choices),
        prompt_token_ids=first.prompt.token_ids if call.returns_token_ids else UNSET,
        prompt_logprobs=prompt_logprobs(tokenizer, first.prompt_logprobs) if shows_prompt else UNSET,
    )


class ChatEvents:
    """The events of one streamed chat."""

    def __init__(self, tokenizer: Tokenizer, request: ChatRequest, call: Call) -> None:
        self._tokenizer = tokenizer
        self._has_logprobs = request.logprobs is True
        self._call = call
        self._envelope = Envelope(call, ID_PREFIX, "chat.completion.chunk")
        self._is_plain = not self._has_logprobs and not call.returns_token_ids
        self._plain_heads = [b'{"index":%d,"delta":{"content":' % choice.index for choice in call.choices]

    def open(self, choice: Choice) -> bytes:
        first = ChatChunkChoice(choice.index, ChatDelta("assistant", ""), None, None)
        body = msgspec.json.encode(first)
        if self._call.returns_token_ids:
            body = body[:-1] + b',"prompt_token_ids":' + msgspec.json.encode(choice.prompt.token_ids) + b"}"
        return self._envelope.event(body)

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        if self._is_plain and delta.finish_reason is None:
            if not delta.text:
                return b""
            body = self._plain_heads[choice.index] + msgspec.json.encode(delta.text) + b'},"logprobs":null,"finish_reason":null}'
            return self._envelope.event(body)
        is_last = delta.finish_reason is not None
        chunk = ChatChunkChoice(
            choice.index,
            ChatDelta(content=delta.text or None),
            chat_logprobs(self._tokenizer, delta.logprobs) if self._has_logprobs and delta.logprobs else None,
            delta.finish_reason,
            stop_reason=delta.stop_reason if is_last else UNSET,
            token_ids=delta.token_ids if self._call.returns_token_ids else UNSET,
            cache_explanation=choice.explanation if self._call.explains and is_last else UNSET,
        )
        return self._envelope.event(msgspec.json.encode(chunk))

    def close(self, choices: Sequence[Choice]) -> bytes:
        return self._envelope.usage_event()


def _check(request: ChatRequest) -> None:
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs is set, but logprobs is not; set logprobs to true", param="top_logprobs")
    low, high = LIMITS["logprobs"]
    if request.top_logprobs is not None and not low <= request.top_logprobs <= high:
        raise RequestError(
            f"top_logprobs is {request.top_logprobs}; it must be from {low:.10g} to {high:.10g}", param="top_logprobs"
        )
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs")
    wanted = (request.max_tokens, request.max_completion_tokens)
    if None not in wanted and wanted[0] != wanted[1]:
        raise RequestError(
            f"max_tokens is {wanted[0]} and max_completion_tokens {wanted[1]}; send one of them", param="max_completion_tokens"
        )
