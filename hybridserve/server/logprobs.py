"""Log-probabilities in the three shapes that clients expect: completions, chats and prompts.

Owns those shapes. Must not know where the numbers come from.
"""

from collections.abc import Sequence

import msgspec

from hybridserve.engine.text import Tokenizer
from hybridserve.request import TokenLogprob

#: JSON has no minus infinity; clients take this for it.
_FLOOR = -9999.0


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token. The first token of an echoed prompt has None."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def append(self, tokenizer: Tokenizer, token_id: int, entry: TokenLogprob | None, offset: int) -> int:
        """Add one token whose text starts at `offset`; returns where the next one starts."""
        text = tokenizer.token_text(token_id)
        self.tokens.append(text)
        self.text_offset.append(offset)
        self.token_logprobs.append(None if entry is None else _number(entry.logprob))
        self.top_logprobs.append(None if entry is None else _top_by_text(tokenizer, entry))
        return offset + len(tokenizer.token_bytes(token_id).decode(errors="ignore"))


class TopLogprob(msgspec.Struct):
    """One alternative in a chat's log-probabilities."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """One token of a chat's reply."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat's choice."""

    content: list[ChatLogprob]


class PromptLogprob(msgspec.Struct):
    """One alternative at a place of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    """The chat shape."""
    return ChatLogprobs(
        [
            ChatLogprob(
                tokenizer.token_text(entry.token_id),
                _number(entry.logprob),
                list(tokenizer.token_bytes(entry.token_id)),
                [_top(tokenizer, token_id, logprob) for token_id, logprob in entry.top],
            )
            for entry in entries
        ]
    )


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None] | None
) -> list[dict[str, PromptLogprob] | None] | None:
    """The prompt's shape: token id -> log-probability, the prompt's own token included."""
    if entries is None:
        return None
    return [None if entry is None else _by_id(tokenizer, entry) for entry in entries]


def _by_id(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, PromptLogprob]:
    found = {
        str(token_id): PromptLogprob(_number(logprob), rank, tokenizer.token_text(token_id))
        for rank, (token_id, logprob) in enumerate(entry.top, start=1)
    }
    own = PromptLogprob(_number(entry.logprob), entry.rank, tokenizer.token_text(entry.token_id))
    return {str(entry.token_id): own, **found} | {str(entry.token_id): own}


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    return TopLogprob(tokenizer.token_text(token_id), _number(logprob), list(tokenizer.token_bytes(token_id)))


def _top_by_text(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, float]:
    found = {tokenizer.token_text(token_id): _number(logprob) for token_id, logprob in entry.top}
    found.setdefault(tokenizer.token_text(entry.token_id), _number(entry.logprob))
    return found


def _number(logprob: float) -> float:
    return max(logprob, _FLOOR)
