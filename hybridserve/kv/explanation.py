"""Why a prompt hit as far as it did: the arithmetic from what was found to an `Explanation`.

Owns the order in which reasons are given. Knows no pages; `PrefixCache` tells it what was found. The codes themselves are in
`request.py`, since they cross the wire.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hybridserve.request import CacheHints, Explanation, Reason


@dataclass(slots=True)
class Findings:
    """What a lookup found out, in tokens from the start of the prompt."""

    num_hit: int
    num_text: int  # text in the index
    num_known: int  # text in the index, and behind it text that was there and was evicted
    group_tokens: Mapping[int, int]
    state_was_evicted: bool  # a state further on in the text had been kept and was evicted
    limited_by_window: bool
    has_siblings: bool  # other text goes on from where this prompt's known text ends

    def of_hits(self) -> "Findings":
        """No more than what running the prompt would show."""
        return replace(self, num_text=self.num_hit, num_known=self.num_hit, group_tokens={}, has_siblings=False)


#: Tokens at the end of an answer that its request never computed: the last one is chosen and ends it.
_NOT_COMPUTED = 1


def explain(num_prompt: int, found: Findings, hints: CacheHints) -> Explanation:
    """Give every token of the prompt its reason."""
    history = hints.history
    if hints.hits_only:
        found = found.of_hits()
    last = num_prompt - 1
    hit = min(found.num_hit, last)
    text, known = min(found.num_text, last), min(found.num_known, last)
    tokens: dict[Reason, int] = {}

    def count(reason: Reason, num: int) -> None:
        if num > 0:
            tokens[reason] = tokens.get(reason, 0) + num

    count("hit", hit)
    behind: Reason = "window" if found.limited_by_window else "evicted" if found.state_was_evicted else "no_state"
    count(behind, text - hit)
    count("evicted", known - text)
    drifted = _drift(known, min(history[1], last), history[0]) if history is not None and found.has_siblings else 0
    count("template_drift", drifted)
    count("salted" if hints.has_own_salt else "never_seen", last - known - drifted)
    count("last_token", 1)
    lost = {reason: num for reason, num in tokens.items() if reason not in ("hit", "last_token")}
    limiting = min(found.group_tokens, key=lambda g: found.group_tokens[g], default=None) if hit < text else None
    # The last token of an answer that was cut short was never computed: where only that is missing nothing has parted yet.
    parted = history[1] if history is not None and history[1] - known == _NOT_COMPUTED else known
    return Explanation(
        num_prompt=num_prompt,
        num_hit=hit,
        num_text=text,
        group_tokens=dict(found.group_tokens),
        limiting_group=limiting,
        reason=max(lost, key=lambda reason: lost[reason]) if lost else "hit",
        tokens=tokens,
        parted_at=parted if parted < last else None,
    )


def _drift(known: int, end: int, start: int) -> int:
    """Tokens of a chat's history that were expected to be known and are not.

    Who parts before the first question's end at `start` is another chat; who comes to the last answer's `end` has not parted.
    """
    return end - known if known >= start and end - known > _NOT_COMPUTED else 0


def unexplored(num_prompt: int, reason: Reason) -> Explanation:
    """The explanation of a prompt that was not looked up at all."""
    tokens: dict[Reason, int] = {"last_token": 1}
    if num_prompt > 1:
        tokens[reason] = num_prompt - 1
    return Explanation(
        num_prompt=num_prompt, num_hit=0, num_text=0, group_tokens={}, limiting_group=None, reason=reason, tokens=tokens
    )
