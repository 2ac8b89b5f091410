"""From a request's text, messages or ids to checked prompts of token ids.

Owns tokenising and template rendering for requests (in worker threads), the positions that the prefix cache is told of, and the
checks against the model's vocabulary and context. Must not know sampling beyond `max_tokens`. Called by the generation, tokenize
and explain routes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from hybridserve.engine.chat import Message, RenderedChat
from hybridserve.engine.placing import place
from hybridserve.errors import RequestError
from hybridserve.request import MAX_CACHE_MARKS, MAX_CACHE_SALT_CHARS, TENANT_MARK, CacheHints, Explanation
from hybridserve.server.fault import ENDINGS, told
from hybridserve.server.service import Service
from hybridserve.server.wire import (
    MAX_PROMPTS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    GenerationFields,
    TokenizeRequest,
    ToolCall,
)

_TEXT_TYPES = ("text", "input_text", "output_text", "refusal")
#: So many token ids are checked on the event loop; more in a thread.
LOOP_IDS = 2**14
_BAD_SALT = re.compile(rf"[\x00-\x1f\x7f-\x9f{re.escape(TENANT_MARK)}/\\]")


@dataclass(frozen=True)
class Prompt:
    """One prompt. `text` is None when the client sent ids."""

    token_ids: list[int]
    text: str | None = None
    hints: CacheHints = field(default_factory=CacheHints)  # where later prompts are likely to part from it
    chat: "PromptChat | None" = None
    has_special_tokens: bool = True  # whether the tokenizer added its own to `text`


@dataclass(frozen=True)
class PromptChat:
    """The chat that a prompt was rendered from, and the rendering."""

    messages: Sequence[Message]
    options: Mapping[str, Any]
    rendered: RenderedChat


async def completion_prompts(service: Service, request: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion request, in order: one text, several, one list of ids, or several lists."""
    given = request.prompt
    items: Sequence[str | int | list[int]] = [given] if isinstance(given, str) else given
    if not items:
        raise RequestError("prompt is empty; give a text, a list of texts, or token ids", param="prompt")
    if isinstance(items[0], int):
        check_num_ids(service, len(items), "prompt")
    ids = [item for item in items if isinstance(item, int)]
    if len(ids) == len(items):
        items = [ids]
    if len(items) > MAX_PROMPTS:
        raise RequestError(f"prompt holds {len(items)} prompts; at most {MAX_PROMPTS} in one request", param="prompt")
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) not in (0, len(items)) or len(ids) not in (0, len(given)):
        raise RequestError("prompt mixes texts and token ids; send one kind", param="prompt")
    if not texts:
        lists = [item for item in items if isinstance(item, list)]
        for item in lists:
            check_num_ids(service, len(item), "prompt")
        count = sum(map(len, lists))
        if count <= LOOP_IDS:
            return [Prompt(checked_ids(service, item, "prompt")) for item in lists]
        return await service.workers.run(lambda: [Prompt(checked_ids(service, item, "prompt")) for item in lists], size=count)
    for text in texts:
        check_num_chars(service, len(text), "prompt")
    num_chars = sum(map(len, texts))
    add_special = request.add_special_tokens is not False
    control = control_of(service, request.split_special_tokens)
    encode = service.tokenizer.encode
    encoded = await service.workers.run(
        lambda: [encode(text, add_special_tokens=add_special, control=control) for text in texts], size=num_chars
    )
    return [Prompt(_not_empty(ids), text) for ids, text in zip(encoded, texts, strict=True)]


def control_of(service: Service, split: bool | None) -> Sequence[str] | None:
    """Control tokens that a text may not write, where the request wants its special tokens split; None where it may."""
    if not split:
        return None
    return service.template.control if service.template is not None else ()


async def chat_prompt(service: Service, request: ChatRequest | TokenizeRequest, messages: Sequence[ChatMessage]) -> Prompt:
    """The prompt of a chat, with the token positions where its messages end when prefixes are cached."""
    template = service.template
    if template is None:
        raise RequestError("this model has no chat template; use /v1/completions", param="messages")
    plain = [_as_dict(message, index) for index, message in enumerate(messages)]
    marked = _marked(messages)
    variables = dict(request.chat_template_kwargs or {})
    if isinstance(request, ChatRequest) and request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    continues = request.continue_final_message is True
    generates = request.add_generation_prompt
    wants_positions = service.is_caching_prefixes and isinstance(request, ChatRequest)
    add_special = request.add_special_tokens is True

    options: dict[str, Any] = {
        "add_generation_prompt": not continues if generates is None else generates,
        "continue_final_message": continues,
        "variables": variables,
    }

    def render() -> Prompt:
        rendered = template.render(plain, marked=marked, places=wants_positions, **options)
        check_num_chars(service, len(rendered.text), "messages")
        ids, hints = place(service.tokenizer, rendered, add_special_tokens=add_special)
        chat = PromptChat(plain, options, rendered)
        return Prompt(ids, rendered.text, hints=hints, chat=chat, has_special_tokens=add_special)

    prompt = await service.workers.run(render, size=_num_chars(messages, variables))
    _not_empty(prompt.token_ids, "messages")
    return prompt


def _marked(messages: Sequence[ChatMessage]) -> list[int]:
    """Numbers of the messages that have a `cache_control`, themselves or in one of their parts."""
    found = []
    for index, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else []
        if message.cache_control is not None or any(part.cache_control is not None for part in parts):
            found.append(index)
    if len(found) > MAX_CACHE_MARKS:
        raise RequestError(
            f"{len(found)} messages have cache_control; at most {MAX_CACHE_MARKS}; mark where other chats will part",
            param="messages",
        )
    return found


async def located(service: Service, prompt: Prompt, explanation: Explanation) -> Explanation:
    """The explanation with the place where the prompt parted in words: the token's text, and the message that holds it.

    What was evicted is known by whole units only: then the place lies somewhere in a unit, and a message is named where the
    whole unit is of one.
    """
    at = explanation.parted_at
    if at is None or at >= len(prompt.token_ids):
        return explanation
    token = service.tokenizer.token_text(prompt.token_ids[at])
    chat, template = prompt.chat, service.template
    if chat is None or template is None:
        return msgspec.structs.replace(explanation, parted_token=token)

    is_exact = explanation.num_text == at or explanation.num_text + 1 == at  # beside the one token that may not be computed
    end = at + 1 if is_exact else min(at + service.client.info.match_unit, len(prompt.token_ids))

    def find() -> int | None:
        numbers = set()
        for index in {at, end - 1}:
            char = service.tokenizer.char_in_chat(chat.rendered, index, add_special_tokens=prompt.has_special_tokens)
            numbers.add(None if char is None else template.message_at(chat.messages, char, **chat.options))
        return numbers.pop() if len(numbers) == 1 else None

    number: int | None = None
    try:
        number = await service.workers.run(find, size=len(chat.rendered.text))
    except ENDINGS:
        raise
    except BaseException as error:  # the answer does not fail with it
        told(error)
    return msgspec.structs.replace(explanation, parted_token=token, parted_in_message=number)


def max_tokens_for(service: Service, prompt: Prompt, wanted: int | None, default: int | None, field: str, source: str) -> int:
    """Tokens to generate: `wanted`, else `default`, else the rest of the context.

    Raises RequestError when prompt and `wanted` do not fit the context together. `field` and `source` are the names of the
    request's fields to tell.
    """
    limit = service.client.info.max_model_len
    length = len(prompt.token_ids)
    room = limit - length
    if room < 1 or (wanted is not None and wanted > room):
        asked = f" and {field} asks for {wanted}" if wanted is not None else ""
        remedy = f"shorten {source}" if room < 1 else f"shorten {source} or lower {field} to {room}"
        raise RequestError(
            f"this model's maximum context length is {limit} tokens, but {source} has {length}{asked}; {remedy}",
            param=source if room < 1 else field,
            code="context_length_exceeded",
        )
    if wanted is not None:
        return wanted
    return room if default is None else min(default, room)


def cache_hints(fields: GenerationFields, prompt: Prompt, tenant_salt: str) -> CacheHints:
    """What the request says about reuse; without a salt of its own it has that of its key.

    Raises RequestError for a salt that could be mistaken for something else.
    """
    salt = fields.cache_salt or ""
    if len(salt) > MAX_CACHE_SALT_CHARS or _BAD_SALT.search(salt):
        raise RequestError(
            f"cache_salt must have at most {MAX_CACHE_SALT_CHARS} characters, without control characters, @, / and \\",
            param="cache_salt",
        )
    xargs = fields.hybrid_xargs
    return msgspec.structs.replace(
        prompt.hints,
        salt=salt or tenant_salt,
        hits_only=bool(salt) or not tenant_salt,
        pin=xargs.cache.pin if xargs else False,
        no_store=xargs.cache.no_store if xargs else False,
    )


def check_num_chars(service: Service, num_chars: int, param: str) -> None:
    """Raise RequestError for a text that cannot fit the context: tokenising it would take long for nothing."""
    max_model_len, longest = service.client.info.max_model_len, service.tokenizer.max_token_chars
    if num_chars > max_model_len * longest:
        raise RequestError(
            f"this model's maximum context length is {max_model_len} tokens of at most {longest} characters, so "
            f"{max_model_len * longest} characters, but {param} has {num_chars}; shorten {param}",
            param=param,
            code="context_length_exceeded",
        )


def check_num_ids(service: Service, num_ids: int, param: str) -> None:
    """Raise RequestError for more token ids than a prompt of this model may have."""
    limit = service.client.info.max_model_len
    if num_ids > limit:
        raise RequestError(
            f"this model's maximum context length is {limit} tokens, but {param} has {num_ids}; shorten {param}",
            param=param,
            code="context_length_exceeded",
        )


def _num_chars(messages: Sequence[ChatMessage], variables: Mapping[str, Any]) -> int:
    """Characters of all that a template may print of a chat, about."""
    return sum(_num_chars_of(message) for message in messages) + len(msgspec.json.encode(variables))


def _num_chars_of(message: ChatMessage) -> int:
    texts = [message.refusal, message.name, message.reasoning_content, message.reasoning, message.tool_call_id]
    if isinstance(message.content, list):
        texts += [text for part in message.content for text in (part.text, part.refusal)]
    elif isinstance(message.content, str):
        texts.append(message.content)
    calls = len(msgspec.json.encode(message.tool_calls)) if message.tool_calls else 0
    return calls + sum(len(text) for text in texts if text)


def checked_ids(service: Service, ids: Sequence[int], param: str) -> list[int]:
    """Token ids that the model knows. Raises RequestError."""
    size = service.client.info.vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < size)
        raise RequestError(f"{param} holds token id {wrong}; this model's ids are from 0 to {size - 1}", param=param)
    return _not_empty(list(ids), param)


def _not_empty(ids: list[int], param: str = "prompt") -> list[int]:
    if not ids:
        raise RequestError(f"{param} gives no tokens; send at least one", param=param)
    return ids


def _as_dict(message: ChatMessage, index: int) -> Message:
    """A message as the template's process takes it: text parts only, calls of custom tools as those of functions."""
    content = message.content
    is_left_out = content is UNSET and message.refusal is None
    if is_left_out or content is None:
        content = message.refusal
    if content is None and not (message.tool_calls or message.reasoning or message.reasoning_content):
        field = f"messages[{index}].content"
        raise RequestError(f"{field} is missing; send a text, which may be empty", param=field)
    result: Message = {"role": message.role}
    if not is_left_out:
        result["content"] = _parts(content, index) if isinstance(content, list) else content
    for name in ("name", "reasoning_content", "reasoning", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            result[name] = value
    if message.tool_calls:
        result["tool_calls"] = [_call(call, index) for call in message.tool_calls]
    return result


def _parts(parts: Sequence[ContentPart], index: int) -> list[Message]:
    """Text parts, all of the type that templates know."""
    texts = []
    for part in parts:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in _TEXT_TYPES or text is None:
            raise RequestError(
                f"messages[{index}].content has a part of type {part.type[:64]!r}; this model reads text parts only",
                param=f"messages[{index}].content",
            )
        texts.append({"type": "text", "text": text})
    return texts


def _call(call: ToolCall, index: int) -> Message:
    """A call of a function; the free text of a custom tool is its one argument."""
    function: Message
    if call.function is not None:
        function = {"name": call.function.name, "arguments": call.function.arguments}
    elif call.custom is not None:
        function = {"name": call.custom.name, "arguments": {"input": call.custom.input or ""}}
    else:
        field = f"messages[{index}].tool_calls"
        raise RequestError(f"{field} has a call without function and custom; send one of them", param=field)
    kind = "function" if call.custom is not None else call.type
    given = {"id": call.id, "type": kind, "function": function}  # in the order in which some templates print it
    return {name: value for name, value in given.items() if value is not None}
