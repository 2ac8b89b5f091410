"""Where the messages of a chat lie in its rendering, and where later chats are likely to part from it.

Owns no text of its own: everything is found by rendering the chat with a part left out or replaced, since what a template does to
a message (strip its thinking, trim it, wrap it) is known to the template alone. Must not know tokens. Made by `rendering.py`.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from hybridserve.engine.control import Span
from hybridserve.engine.template import Message

#: Messages at the end of a chat whose ends are looked for; the first message is looked at too.
MAX_BOUNDARIES = 3
#: Content of messages that are not there yet, or are taken out. No text has it: it is no character.
_PROBE = "\ufdd0"

#: Renders messages, with the beginning of a reply or not, or ending inside the last message; None where the template refuses.
Render: TypeAlias = Callable[[Sequence[Message], bool, bool], str | None]


class Turns:
    """One chat and its rendering, `text`."""

    def __init__(
        self,
        messages: Sequence[Message],
        text: str,
        render: Render,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> None:
        self.text = text
        self._messages = list(messages)
        self._render = render
        self._generates = add_generation_prompt
        self._continues = continue_final_message

    def boundaries(self) -> tuple[int, ...]:
        """Positions where a chat with the same beginning is likely to part, ascending.

        Found by rendering the first message and the last few prefixes of the list alone, and the chat as its next turn
        will have it: where the template strips thinking from history, that parts from `text` before the answer begins.
        What the template refuses is left out.
        """
        chat = self._messages
        counts = sorted({1, *range(max(1, len(chat) - MAX_BOUNDARIES + 1), len(chat) + 1)})
        next_turn = [*chat, {"role": "assistant", "content": _PROBE}, {"role": "user", "content": _PROBE}]
        likely = (self._shared_with(alone) for alone in (*(chat[:count] for count in counts), next_turn))
        return tuple(sorted({position for position in likely if position}))

    def end_of(self, index: int) -> int:
        """Where a message ends, with what the template closes it with.

        Rendered alone, an answer may keep thinking that `text` has stripped; then it ends where its content does.
        """
        alone, span = self._shared_with(self._messages[: index + 1]), self.span_of(index)
        return max(alone or 0, span.end if span is not None else 0)

    def span_of(self, index: int) -> Span | None:
        """Where a message's own text lies: what changes when it is replaced. None where the template leaves it out."""
        replaced = list(self._messages)
        replaced[index] = {"role": replaced[index]["role"], "content": _PROBE}
        rendered = self._render(replaced, self._generates, self._continues)
        if rendered is None or rendered == self.text:
            return None
        start = common_chars(rendered, self.text)
        end = len(self.text) - common_chars(rendered[start:][::-1], self.text[start:][::-1])
        return Span(start, max(start, end))

    def history(self) -> Span | None:
        """From the end of the first question to the end of the last answer before the last message; None without one.

        An earlier turn of this chat has computed that text, unless it was rendered otherwise then.
        """
        roles = [message.get("role") for message in self._messages]
        answers = [index for index, role in enumerate(roles[:-1]) if role == "assistant"]
        if not answers or "user" not in roles[: answers[-1]]:
            return None
        question, answer = self.span_of(roles.index("user")), self.span_of(answers[-1])
        return Span(question.end, answer.end) if question is not None and answer is not None else None

    def message_at(self, position: int) -> int | None:
        """Number of the message that a character belongs to; None behind the last one.

        What the template closes a message with belongs to the one that follows: the message itself has ended.
        """
        low, high = 0, len(self._messages)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.end_of(middle) > position else (middle + 1, high)
        if low < len(self._messages) and not self._messages[low].get("tool_calls"):  # a template may put calls behind the text
            span = self.span_of(low)
            low += span is not None and position >= span.end
        return low if low < len(self._messages) else None

    def _shared_with(self, chat: Sequence[Message]) -> int | None:
        """Length of the beginning that another chat's rendering shares with `text`; None when the template refuses it."""
        rendered = self._render(chat, False, False)
        return None if rendered is None else common_chars(rendered, self.text)


def common_chars(left: str, right: str) -> int:
    """Length of the longest common beginning, by comparing slices, which is much faster than characters."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
