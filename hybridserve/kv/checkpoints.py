"""Where in a prompt states are kept for later hits.

Owns the placement policy: positions only, from the prompt's length, what matched, the caller's hints and what a state weighs.
Knows no pages and no tensors. Writing a checkpoint costs no extra pass: the pass that computes the token also writes the state.
"""

from dataclasses import dataclass
from typing import Final

from hybridserve.kv.arena import CachePlan

#: Tokens between optional states, a multiple of the chunks that recurrent layers compute; and how many a prompt has at most.
_LEAST_STRIDE: Final = 128
_MOST_OPTIONAL: Final = 32


@dataclass(frozen=True)
class CheckpointPolicy:
    """Spacing on long prompts and the most checkpoints that one prompt may write."""

    spacing: int  # tokens between checkpoints where nothing else asks for one
    most_per_prompt: int
    has_states: bool = True

    @classmethod
    def for_plan(cls, plan: CachePlan) -> "CheckpointPolicy":
        """A checkpoint every so many tokens that it costs no more than the text between two of them.

        That is state bytes over KV bytes per token: 3 for LFM2, 33,200 for a large Mamba-2 hybrid. Where no cache grows with the
        text there is no such weight, and the memory at hand decides alone.
        """
        unit = plan.match_unit
        if not plan.states:
            return cls(spacing=2**62, most_per_prompt=2**62, has_states=False)
        slots = min(plan.num_superpages * group.pages_per_superpage for group in plan.states)
        most = max(2, slots // 8)
        if not plan.kv_nbytes_per_token:
            return cls(spacing=4096, most_per_prompt=most)
        weight = plan.state_nbytes_per_sequence / plan.kv_nbytes_per_token
        return cls(spacing=max(unit, -(-int(weight) // unit) * unit), most_per_prompt=most)

    def optional(self, start: int, num_prompt: int) -> range:
        """Positions after `start` where a state is kept only if nothing better has to give way for it.

        Prompts that part where no earlier one did, as behind a changed line of a system prompt, resume from these.
        """
        last = num_prompt - 1
        stride = -(-(last - start) // (_MOST_OPTIONAL * _LEAST_STRIDE)) * _LEAST_STRIDE
        if not self.has_states or not 0 < stride < self.spacing:
            return range(0)
        return range((start // stride + 1) * stride, last, stride)

    def positions(
        self, start: int, num_prompt: int, junction: int, boundaries: tuple[int, ...], marks: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """Positions after `start` worth a checkpoint, ascending.

        `junction` is how far the text was known: an earlier request parted there, so a third one is likely to resume there. What
        the caller marked goes before all else, and may be the prompt's very end; the others are at most num_prompt - 1.
        """
        last, most = num_prompt - 1, self.most_per_prompt
        is_short = last <= (start // self.spacing + 1) * self.spacing
        if is_short and not (marks or boundaries) and start < last and most > 1:
            return (junction, last) if start < junction < last else (last,)
        marked = {position for position in marks if start < position <= num_prompt}
        likely = sorted({position for position in (last, junction, *boundaries) if start < position <= last} - marked)
        chosen = sorted(marked)[-most:]
        if len(chosen) < most:
            chosen += likely[len(chosen) - most :]
        if len(chosen) < most:
            grid = range((start // self.spacing + 1) * self.spacing, last, self.spacing)
            stride = -(-len(grid) // (most - len(chosen))) if grid else 1
            chosen = [*{*chosen, *grid[::stride]}]
        return tuple(sorted(chosen))
