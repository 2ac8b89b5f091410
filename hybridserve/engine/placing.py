"""From a rendered chat to its tokens and to the token positions that the prefix cache is told of.

Owns the step from characters to tokens, once for the server and for `LLM`. Called in a worker thread by the server: both
rendering and tokenising take time.
"""

from collections.abc import Mapping, Sequence

from hybridserve.engine.chat import RenderedChat
from hybridserve.engine.text import Tokenizer
from hybridserve.request import CacheHints


def place(tokenizer: Tokenizer, chat: RenderedChat, *, add_special_tokens: bool = False) -> tuple[list[int], CacheHints]:
    """Token ids of a chat, and where in them later chats are likely to part from it."""
    history = chat.history
    positions = {*chat.boundaries, *chat.marks, *(history or ())}
    ids, index_of = tokenizer.encode_chat(chat, positions, add_special_tokens=add_special_tokens)
    return ids, CacheHints(
        boundaries=_indices(chat.boundaries, index_of),
        marks=_indices(chat.marks, index_of),
        history=(index_of[history[0]], index_of[history[1]]) if history and index_of.keys() >= set(history) else None,
    )


def _indices(positions: Sequence[int], index_of: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(sorted({index_of[position] for position in positions if index_of.get(position)}))
