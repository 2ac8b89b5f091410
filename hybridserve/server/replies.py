"""Reply bodies, as OpenAI's clients read them, with hybridserve's and vLLM's extra fields only where they were asked for.

Owns the shapes and the usage count. Must not know how a reply came about.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from hybridserve.request import Explanation
from hybridserve.server.generation import Choice
from hybridserve.server.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprob


class PromptTokensDetails(msgspec.Struct):
    """Of the prompt's tokens, those that a prefix hit saved."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of one request. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(msgspec.Struct):
    """One choice of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType | None = UNSET
    cache_explanation: Explanation | UnsetType | None = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Reply of `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ReplyMessage(msgspec.Struct):
    """The message that a chat's reply is."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One choice of a chat completion."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    cache_explanation: Explanation | UnsetType | None = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Reply of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType | None = UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    """One choice in a chunk of a streamed chat."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    cache_explanation: Explanation | UnsetType | None = UNSET


class TokenizeReply(msgspec.Struct):
    """Reply of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(msgspec.Struct):
    """Reply of `/detokenize`."""

    prompt: str


def usage(choices: Sequence[Choice]) -> Usage:
    """Usage of all choices; those of one prompt share the prompt object, which counts once."""
    first_of = {id(choice.prompt): choice for choice in reversed(choices)}
    num_prompt = sum(len(choice.prompt.token_ids) for choice in first_of.values())
    num_cached = sum(choice.num_cached_tokens for choice in first_of.values())
    num_new = sum(choice.num_tokens for choice in choices)
    return Usage(num_prompt, num_new, num_prompt + num_new, PromptTokensDetails(num_cached))
