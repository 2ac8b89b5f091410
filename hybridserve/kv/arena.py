"""How one arena of bytes is divided: groups of layers, page sizes, superpages, and who holds which superpage.

`plan_cache` turns the layers' specs into a `CachePlan`, pure arithmetic that `check-model` prints and storage allocates to the
byte. `Arena` owns the free superpages at run time. Neither knows tensors, requests or what a page holds.

    arena      | superpage 0        | superpage 1        | superpage 2        | ...
    group 0    | block 0 ... block 99 |                  | block 200 ... 299  |      taken as needed,
    group 1    |                    | slot 1             |                    |      given back empty
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from hybridserve.errors import DoesNotFitError
from hybridserve.kv.spec import PagedSpec, Spec, StateSpec

#: Page sizes are multiples of this, so that every view into the arena is aligned for any dtype and for vector loads.
ALIGN_NBYTES = 64
#: How much a page may be rounded up to keep superpages small.
MAX_ROUNDING = 0.03
_MAX_SUPERPAGE_FACTOR = 64
#: How many sizes of a superpage are tried, for rounding within bounds and then for the least that there is.
_MAX_CANDIDATES = 50_000
_MAX_FALLBACKS = 64


@dataclass(frozen=True)
class TensorPlace:
    """One tensor of one layer inside a page of its group."""

    layer: int
    spec_name: str
    tensor_name: str
    dtype: str
    shape: tuple[int, ...]  # of one page: entries first for paged groups
    offset_nbytes: int  # from the start of the page


@dataclass(frozen=True)
class GroupPlan:
    """Layers with identical specs. A page holds one block, or one state slot, of all of them."""

    index: int
    kind: Literal["paged", "state"]
    spec: Spec
    layers: tuple[int, ...]
    places: tuple[TensorPlace, ...]
    natural_nbytes: int  # what the specs add up to
    page_nbytes: int  # after alignment and rounding
    pages_per_superpage: int
    block_size: int  # tokens per block; 0 for states
    window: int | None
    num_constant: int = 0  # slots that hold a learned initial state, taken at start and never given back

    @property
    def is_paged(self) -> bool:
        return self.kind == "paged"


@dataclass(frozen=True)
class CachePlan:
    """The whole division of the arena. Constant once the engine has started."""

    groups: tuple[GroupPlan, ...]
    superpage_nbytes: int
    num_superpages: int
    block_size: int
    max_chunk: int  # most tokens of one sequence in a pass: a window group holds a window and a chunk
    match_unit: int  # tokens per prefix hash: greatest common divisor of the block sizes

    @cached_property
    def paged(self) -> tuple[GroupPlan, ...]:
        return tuple(group for group in self.groups if group.is_paged)

    @cached_property
    def states(self) -> tuple[GroupPlan, ...]:
        return tuple(group for group in self.groups if not group.is_paged)

    @property
    def nbytes(self) -> int:
        return self.superpage_nbytes * self.num_superpages

    @cached_property
    def kv_nbytes_per_token(self) -> int:
        """Natural bytes that one more token of text takes; window groups do not grow, so they are left out."""
        return sum(group.natural_nbytes // group.block_size for group in self.paged if group.window is None)

    @property
    def state_nbytes_per_sequence(self) -> int:
        """Natural bytes of one sequence's states."""
        return sum(group.natural_nbytes for group in self.states)

    @property
    def padding_percent(self) -> float:
        """Share of the pages' bytes that rounding added, of the group where it is largest."""
        return max((100.0 * (g.page_nbytes / g.natural_nbytes - 1) for g in self.groups), default=0.0)

    def pages_needed(self, group: GroupPlan, num_tokens: int, num_sequences: int = 1) -> int:
        """Pages of `group` that so many sequences of `num_tokens` hold at once, at most, while they are computed."""
        if not group.is_paged:
            return num_sequences
        if group.window is None:
            return -(-num_tokens // group.block_size) * num_sequences

        def reaching(num_rows: int) -> int:
            # A window that starts inside a block touches one block more.
            assert group.window is not None
            return -(-min(num_tokens, group.window + num_rows + group.block_size) // group.block_size)

        # Beside its window a sequence holds what it computes in this step, and all together compute at most one budget.
        together = reaching(1) * num_sequences + -(-self.max_chunk // group.block_size)
        return min(reaching(self.max_chunk) * num_sequences, together)

    def superpages_needed(self, num_tokens: int, num_sequences: int = 1) -> int:
        """Superpages that hold `num_sequences` sequences of `num_tokens` at once, shared by group."""
        return sum(self.superpages_of(group, num_tokens, num_sequences) for group in self.groups)

    def superpages_of(self, group: GroupPlan, num_tokens: int, num_sequences: int) -> int:
        """The same of one group, constant slots included."""
        pages = self.pages_needed(group, num_tokens, num_sequences) + group.num_constant
        return -(-pages // group.pages_per_superpage)

    def users_at(self, num_tokens: int) -> int:
        """Sequences of `num_tokens` that fit at once."""
        low, high = 0, 1
        if not self.groups:
            return 2**31 - 1
        while self.superpages_needed(num_tokens, high) <= self.num_superpages:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.superpages_needed(num_tokens, middle) <= self.num_superpages
            low, high = (middle, high) if fits else (low, middle)
        return low

    def longest_sequence(self, limit: int) -> int:
        """Tokens of the longest single sequence that fits, at most `limit`; 0 when none does."""
        low, high = 0, limit + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.users_at(middle) >= 1 else (low, middle)
        return low


def plan_cache(layers: Sequence[Mapping[str, Spec]], nbytes: int, *, block_size: int = 16, max_chunk: int = 2048) -> CachePlan:
    """Divide `nbytes` among the caches that the layers' specs name. Raises DoesNotFitError when not one superpage fits."""
    members: dict[Spec, list[tuple[int, str]]] = {}
    for layer, specs in enumerate(layers):
        for name, spec in specs.items():
            members.setdefault(spec, []).append((layer, name))
    drafts = [_lay_out(index, spec, where, block_size) for index, (spec, where) in enumerate(members.items())]
    superpage = superpage_nbytes([draft.page_nbytes for draft in drafts])
    groups = []
    for draft in drafts:
        pages = pages_within(superpage, draft.page_nbytes)
        groups.append(replace(draft, page_nbytes=superpage // pages, pages_per_superpage=pages))
    num_superpages = nbytes // superpage if groups else 0
    if groups and num_superpages < 1:
        raise DoesNotFitError(
            f"cache memory is {nbytes:,} bytes, less than one superpage of {superpage:,}; give --kv-cache-memory at least that"
        )
    match_unit = math.gcd(*(group.block_size for group in groups if group.is_paged)) or block_size
    return CachePlan(tuple(groups), superpage, num_superpages, block_size, max_chunk, match_unit)


def superpage_nbytes(pages: Sequence[int]) -> int:
    """Smallest size that every page divides after rounding up by at most 3 %; if there is none, the one that wastes least.

    Sizes are multiples of the smallest page, which therefore stays exact. `pages_within` tells how often a page divides one.
    """
    if not pages:
        return ALIGN_NBYTES
    # The largest page has the fewest divisors to choose from, so it refuses most sizes at once.
    distinct = sorted(set(pages), reverse=True)
    smallest, first = distinct[-1], -(-distinct[0] // distinct[-1])
    for multiple in range(first, first + min(first * (_MAX_SUPERPAGE_FACTOR - 1), _MAX_CANDIDATES) + 1):
        size = multiple * smallest
        if all(_divides(size, page, 1 + MAX_ROUNDING) for page in distinct):
            return size
    few = range(first, first + min(first, _MAX_FALLBACKS) + 1)
    return min((multiple * smallest for multiple in few), key=lambda size: _waste(size, distinct))


def pages_within(superpage: int, page: int) -> int:
    """How many pages a superpage is divided into: the most that are at least this large, of equal size, and aligned."""
    units = superpage // ALIGN_NBYTES
    return next(count for count in range(superpage // page, 0, -1) if units % count == 0)


def _divides(size: int, page: int, most: float) -> bool:
    """Whether a page that is made larger by a factor of at most `most` divides a size, aligned."""
    units = size // ALIGN_NBYTES
    return any(units % count == 0 for count in range(size // page, math.ceil(size / (page * most)) - 1, -1))


def _waste(size: int, pages: Sequence[int]) -> float:
    """What rounding adds to the page that it adds most to."""
    return max(size / pages_within(size, page) / page for page in pages) - 1


class Arena:
    """Owner of the superpages that no group holds."""

    def __init__(self, num_superpages: int) -> None:
        self.num_superpages = num_superpages
        # Popped from the end: low addresses are used first, so a lightly used arena stays untouched at its far end.
        self._free = list(range(num_superpages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free superpage, or None."""
        return self._free.pop() if self._free else None

    def give(self, superpage: int) -> None:
        """Return an empty superpage."""
        self._free.append(superpage)

    def free_set(self) -> set[int]:
        """The free superpages, for checks."""
        return set(self._free)


def _lay_out(index: int, spec: Spec, members: list[tuple[int, str]], block_size: int) -> GroupPlan:
    """Place every tensor of every member layer in a page, layer after layer."""
    paged = spec if isinstance(spec, PagedSpec) else None
    if paged is not None and block_size % paged.tokens_per_entry:
        raise DoesNotFitError(
            f"block_size is {block_size}, not a multiple of the {paged.tokens_per_entry} tokens of one entry; change --block-size"
        )
    entries = block_size // paged.tokens_per_entry if paged is not None else 0
    places, offset, natural = [], 0, 0
    for layer, name in members:
        for tensor in spec.tensors:
            shape = (entries, *tensor.shape) if paged is not None else tensor.shape
            places.append(TensorPlace(layer, name, tensor.name, tensor.dtype, shape, offset))
            nbytes = tensor.nbytes * (entries if paged is not None else 1)
            natural += nbytes
            offset += -(-nbytes // 16) * 16
    page = -(-offset // ALIGN_NBYTES) * ALIGN_NBYTES
    return GroupPlan(
        index=index,
        kind="paged" if paged is not None else "state",
        spec=spec,
        layers=tuple(layer for layer, _ in members),
        places=tuple(places),
        natural_nbytes=natural,
        page_nbytes=page,
        pages_per_superpage=1,
        block_size=block_size if paged is not None else 0,
        window=paged.window if paged is not None else None,
        num_constant=1 if isinstance(spec, StateSpec) and spec.is_learned else 0,
    )
