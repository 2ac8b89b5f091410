"""Request bodies: their fields, types and the strict reading of them.

Owns what a client may send. Must not know the engine or how a reply looks. Routes call `read`; what it returns still has to be
checked against the model (`prompts.py`) and becomes `SamplingParams` in `sampling.py`. Null means left out, as clients send it.
"""

import heapq
import re
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hybridserve.engine.shape import MAX_DEPTH
from hybridserve.errors import RequestError
from hybridserve.server.json_shape import Shape, shape_of
from hybridserve.server.unsupported import UNSUPPORTED, refuse_unsupported

#: Prompts in one completion request, and sequences that one request may ask for (prompts times n).
MAX_PROMPTS = 1024
MAX_SEQUENCES = 1024
#: Bodies up to so many bytes are decoded on the event loop; what larger ones in a thread.
LOOP_NBYTES = 2**16
#: Values beside token ids that a body may hold: a decoder makes them all in one call that lets nothing else run.
MAX_VALUES = 2**17
#: Bytes that one character takes in JSON at most: two escapes.
MAX_CHAR_NBYTES = 12
#: Messages in one chat: a template may loop over them twice.
MAX_MESSAGES = 4096
#: Names of unknown fields that are told back.
MAX_TOLD_NAMES = 10


class StreamOptions(msgspec.Struct):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CacheXargs(msgspec.Struct, forbid_unknown_fields=True):
    """What the caller wants of the prefix cache."""

    pin: bool = False
    no_store: bool = False


class HybridXargs(msgspec.Struct, forbid_unknown_fields=True):
    """hybridserve's own extensions, in a field of their own."""

    explain: bool = False
    cache: CacheXargs = msgspec.field(default_factory=CacheXargs)


class GenerationFields(msgspec.Struct, kw_only=True):
    """Fields that completions and chats share. Bounds are those of `hybridserve.request.LIMITS`."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    hybrid_xargs: HybridXargs | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    echo: bool | None = None
    split_special_tokens: bool | None = None
    logprobs: int | None = None


class CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    """A mark: other chats begin as this one does, up to the end of the message that has it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None  # as other services read it; here an entry goes when its memory is needed


class ContentPart(msgspec.Struct):
    """One part of a message; only text is understood, an answer's refusal included."""

    type: str
    text: str | None = None
    refusal: str | None = None
    cache_control: CacheControl | None = None


class ToolFunction(msgspec.Struct):
    """The function of an earlier tool call."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CustomTool(msgspec.Struct):
    """The tool of an earlier call whose input is free text."""

    name: str
    input: str | None = None


class ToolCall(msgspec.Struct):
    """A tool call that an earlier reply made: of a function, or of a custom tool."""

    function: ToolFunction | None = None
    custom: CustomTool | None = None
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One message of a chat. Which roles exist is the template's matter."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart] | UnsetType | None = UNSET
    refusal: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    cache_control: CacheControl | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `/tokenize`: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    split_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class ExplainRequest(msgspec.Struct, kw_only=True):
    """Body (or query) of `/v1/cache/explain`: a prompt, token ids, or the messages of a chat."""

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None
    split_special_tokens: bool | None = None
    cache_salt: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `/detokenize`."""

    tokens: list[int]
    model: str | None = None


R = TypeVar("R", CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, ExplainRequest)


def check_shape(kind: type[R], body: bytes, *, max_model_len: int, max_chars: int) -> None:
    """Raise RequestError for a body of more, deeper or longer values than the route takes from a model of this context."""
    limit = MAX_VALUES + _PROMPTS_OF_IDS.get(kind, 0) * max_model_len
    shape = shape_of(body)
    if shape.num_values > limit:
        raise RequestError(f"the body holds {shape.num_values} values; at most {limit} here; send fewer or shorter lists")
    _check_depth(shape)
    if shape.longest > MAX_CHAR_NBYTES * max_chars + 1:
        raise RequestError(
            f"a text of the body has {shape.longest} bytes; this model takes {max_chars} characters at most; shorten it",
            code="context_length_exceeded",
        )


def check_depth(body: bytes) -> None:
    """Raise RequestError for a body whose values lie too deep. Of a large one `check_shape` checks it."""
    _check_depth(shape_of(body))


def _check_depth(shape: Shape) -> None:
    if shape.depth > MAX_DEPTH:
        raise RequestError(f"the body's values nest {shape.depth} levels deep, deeper than {MAX_DEPTH} levels; send flatter ones")


#: How many prompts of token ids a route takes at their full length; more of them when they are shorter.
_PROMPTS_OF_IDS: dict[type, int] = {CompletionRequest: 4, ExplainRequest: 1, DetokenizeRequest: 1}


def read(kind: type[R], body: bytes) -> tuple[R, list[str]]:
    """A request from its body, and the names of fields that mean nothing here. Raises RequestError naming the field at fault."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}; send one JSON object", code="invalid_json") from error
    if not isinstance(raw, dict):
        raise RequestError("the body is not a JSON object; send an object with the fields of this route")
    refuse_unsupported(raw)
    _make_whole(kind, raw)
    try:
        request = msgspec.convert(raw, kind, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RequestError(_without_quotes(str(error)), param=_field_at_fault(str(error))) from error
    unknown = raw.keys() - set(kind.__struct_fields__) - _WITHOUT_EFFECT - UNSUPPORTED.keys()
    return request, heapq.nsmallest(MAX_TOLD_NAMES, unknown)


def _make_whole(kind: type[msgspec.Struct], raw: dict[str, Any]) -> None:
    """Make 5.0 a 5 in fields that are whole numbers, in place: some languages write all numbers so."""
    for field in msgspec.structs.fields(kind):
        value = raw.get(field.encode_name)
        if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_EXACT and int in get_args(field.type):
            raw[field.encode_name] = int(value)


#: The first whole number that a float does not tell from its neighbour.
_MAX_EXACT = 2.0**53
#: Fields of OpenAI's that concern its own service; nobody expects an effect here.
_WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "store", "parallel_tool_calls", "best_of"}
)


def _field_at_fault(message: str) -> str | None:
    if match := re.search(r"at `(?:key` in `)?\$\.?([^`]*)`", message):
        return match[1] or None
    if match := re.search(r"required field `([^`]+)`", message):
        return match[1]
    return None


def _without_quotes(message: str) -> str:
    return message.replace("`", "'").replace("$.", "")
