"""What the prefix index consists of: runs of text, the points and checkpoints on them, and what is remembered of evicted ones.

Owns these records and what each can tell of itself. Knows page ids only as numbers. Written by `PrefixIndex` and `PrefixCache`.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

TOKEN_NBYTES: Final = 4
#: In the place of a block that was evicted or never kept.
NO_BLOCK: Final = -1

#: Evicted checkpoints that a run remembers, and tokens that one must have saved: prompts that happen to begin with the same token
#: miss nothing.
MOST_LOST: Final = 64
LEAST_MISSED: Final = 4

#: Why a checkpoint was written. How often each kind is resumed from is learned (`PrefixCache`).
Origin: TypeAlias = Literal["prompt_end", "answer_end", "boundary", "junction", "spacing", "last_spacing", "optional"]


class Run:
    """A stretch of text without a fork. Requests that run, and children, go on from its end."""

    __slots__ = (
        "blocks",
        "children",
        "depths",
        "evicted",
        "keys",
        "lost",
        "num_users",
        "parent",
        "points",
        "priority",
        "spans",
        "stamp",
        "start",
        "ticket",
        "tokens",
    )

    def __init__(self, parent: "Run | None", start: int, tokens: bytes, blocks: "list[array[int]]") -> None:
        self.parent = parent
        self.start = start  # tokens of text before it
        self.tokens = bytearray(tokens)  # i32 LE, whole units
        self.blocks = blocks  # by paged group: a block per unit, NO_BLOCK where there is none
        self.children: dict[bytes, Run] = {}  # by the token bytes of their first unit
        self.points: dict[int, Point] = {}  # by tokens from the start of the prompt, a whole number of units
        self.depths: list[int] = []  # of the points, ascending
        self.spans: list[WindowSpan] = []  # of window blocks that wait for eviction
        self.keys = bytearray()  # of its first units: those that were asked for; a root has its own
        self.num_users = 0  # running requests whose text goes on from its end
        self.evicted = False
        self.lost: list[Lost] = []  # checkpoints that were evicted from it
        self.stamp = 0.0  # the eviction clock when it was last used
        self.priority = 0.0  # of its place in the eviction queue
        self.ticket = 0  # of that place; its places with other tickets are stale

    @property
    def end(self) -> int:
        """Tokens from the start of the prompt to its end."""
        return self.start + len(self.tokens) // TOKEN_NBYTES

    def point(self, depth: int) -> "Point":
        """The point `depth` tokens from the start of the prompt, made if there is none."""
        point = self.points.get(depth)
        if point is None:
            point = self.points[depth] = Point()
            insort(self.depths, depth)
        return point

    def drop_point(self, depth: int) -> None:
        """Forget a point that nothing hangs from any more."""
        del self.points[depth]
        del self.depths[bisect_left(self.depths, depth)]

    @property
    def kept(self) -> int:
        """Where the text ends that states on this run need; what lies behind may be evicted once nobody goes on from it."""
        for depth in reversed(self.depths):
            if self.points[depth].checkpoints:
                return depth
        return self.start


class Point:
    """A place between two units where states were kept, or where text parts inside the unit that follows."""

    __slots__ = ("checkpoints", "edges")

    def __init__(self) -> None:
        self.checkpoints: dict[bytes, Checkpoint] = {}  # by the tail's token bytes
        self.edges: list[bytes] = []  # tails and children's first units, sorted: the most similar one is a neighbour

    def on_way(self, following: bytes) -> "Iterator[Checkpoint]":
        """Checkpoints whose tails `following` begins with, the longest first."""
        if not self.checkpoints:
            return
        if len(self.checkpoints) == 1:
            for tail, checkpoint in self.checkpoints.items():
                if following.startswith(tail):
                    yield checkpoint
            return
        if len(self.checkpoints) <= 4:
            tails: Iterable[bytes] = sorted((t for t in self.checkpoints if following.startswith(t)), key=len, reverse=True)
        else:
            slices = (following[:length] for length in range(len(following), -1, -TOKEN_NBYTES))
            tails = (tail for tail in slices if tail in self.checkpoints)
        for tail in tails:
            yield self.checkpoints[tail]


@dataclass(eq=False, slots=True)
class Checkpoint:
    """The states after `position` tokens: the run's text up to `depth` and `tail`, fewer tokens than a match unit.

    `blocks` hold the tail's entries, one page per paged group; there are none when the tail is empty. Without state groups it
    marks a partly filled block that may be resumed from at any of its tokens.
    """

    run: Run
    depth: int
    tail: bytes
    position: int
    slots: list[int]
    blocks: list[int]
    origin: Origin
    follows: Origin | None = None  # origin of the checkpoint that the request which wrote it resumed from, or would have
    pinned: bool = False
    before: "Checkpoint | None" = None  # the nearest one on the way to it, when that was last looked for
    is_passed: bool = False  # a later request resumed from it or from further on
    num_late_hits: int = 0  # how often it was resumed from after that
    stamp: float = 0.0
    priority: float = 0.0
    ticket: int = 0
    evicted: bool = False


#: What is learned of a checkpoint's chance goes by its origin, by that of the one which its request had resumed from, and by
#: whether a later request has gone on from it or from further on. A conversation that went on from its last answer once will do
#: so again; one whose history drops part of the answer will not.
Kind: TypeAlias = tuple[Origin, Origin | None, bool]


def kind_of(checkpoint: Checkpoint) -> Kind:
    """The kind that a checkpoint is of by now."""
    return checkpoint.origin, checkpoint.follows, checkpoint.is_passed


class Lost(NamedTuple):
    """A checkpoint that was evicted."""

    position: int
    depth: int
    tail: bytes
    kind: Kind
    stamp: float  # of its last use


@dataclass(eq=False, slots=True)
class WindowSpan:
    """Blocks of one window group from `start` to `end` tokens on a run, which may go while deeper text stays."""

    run: Run
    order: int  # of the group among the paged ones
    start: int
    end: int
    stamp: float
    priority: float = 0.0
    ticket: int = 0

    @property
    def evicted(self) -> bool:
        return self.run.evicted
