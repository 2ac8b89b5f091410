"""The prefix index: which text, and which states inside it, can be resumed from.

Owns the tree of nodes (one per match unit of text) and the checkpoints that hang from it. Knows page ids only as numbers to hold
and drop; it never decides what to compute. `KVCacheCoordinator` is its only caller.

A node stands for the text from the start of a prompt to the end of one match unit. Its key is a chained SHA-256 over canonical
bytes, the same in every process and on every machine:

    root key = SHA-256(b"hybridserve-prefix-1" | for salt, adapter, fingerprint: length as u32 LE, UTF-8 bytes)
    node key = SHA-256(parent's key | the unit's token ids as i32 LE)

Lookups inside one process walk from parent to child by the unit's own bytes, so nothing is ever trusted to a hash alone, and
only text that no node stands for yet is hashed.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

TOKEN_NBYTES = 4


class Node:
    """Text up to the end of one match unit. `blocks` has a page per paged group, None where it was evicted or never kept."""

    __slots__ = (
        "blocks",
        "checkpoints",
        "children",
        "depth",
        "edges",
        "evicted",
        "key",
        "lost_state",
        "num_users",
        "parent",
        "priority",
        "stamp",
        "ticket",
        "tokens",
    )

    def __init__(self, key: bytes, parent: "Node | None", tokens: bytes, depth: int, blocks: list[int | None]) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.depth = depth  # tokens from the start of the prompt to the end of this unit
        self.blocks = blocks
        self.children: dict[bytes, Node] = {}  # by the unit's token bytes
        self.checkpoints: dict[bytes, Checkpoint] = {}  # by the tail's token bytes
        self.edges: list[bytes] = []  # both kinds of key, sorted: the most similar one is a neighbour
        self.num_users = 0  # running requests whose text goes on from here
        self.evicted = False
        self.lost_state = False  # a checkpoint hung from it and was evicted
        self.stamp = 0.0  # the eviction clock when it was last used
        self.priority = 0.0  # of its place in the eviction queue
        self.ticket = 0  # of that place; its places with other tickets are stale


#: Why a checkpoint was written. How often each kind is resumed from is learned (`PrefixCache`).
Origin: TypeAlias = Literal["prompt_end", "answer_end", "boundary", "junction", "spacing"]


@dataclass(eq=False)
class Checkpoint:
    """The states after `position` tokens: the node's text and `tail`, fewer tokens than a match unit.

    `blocks` hold the tail's entries, one page per paged group; there are none when the tail is empty. Without state groups it
    marks a partly filled block that may be resumed from at any of its tokens.
    """

    node: Node
    tail: bytes
    slots: list[int]
    blocks: list[int]
    origin: Origin
    pinned: bool = False
    is_passed: bool = False  # a later request resumed from it or from further on
    num_late_hits: int = 0  # how often it was resumed from after that
    stamp: float = 0.0
    priority: float = 0.0
    ticket: int = 0
    evicted: bool = False

    @property
    def position(self) -> int:
        return self.node.depth + len(self.tail) // TOKEN_NBYTES


@dataclass(eq=False)
class WindowBlock:
    """A node's block of one window group, which may go while deeper text stays."""

    node: Node
    order: int  # of the group among the paged ones
    stamp: float
    priority: float = 0.0
    ticket: int = 0


@dataclass
class TextMatch:
    """How far a prompt's text is known: whole units, then the most similar continuation inside the next unit."""

    path: list[Node]  # from the root to the last whole unit that matches
    tail_tokens: int = 0  # further tokens that some entry below the last node shares
    tail_blocks: Sequence[int | None] = field(default_factory=list)  # where those tokens' entries are

    @property
    def node(self) -> Node:
        return self.path[-1]

    @property
    def num_tokens(self) -> int:
        return self.path[-1].depth + self.tail_tokens


class PrefixIndex:
    """Tree of nodes for each combination of salt, adapter and model fingerprint."""

    def __init__(self, unit: int, num_paged_groups: int, fingerprint: str) -> None:
        self.unit = unit
        self._unit_nbytes = unit * TOKEN_NBYTES
        self._num_paged = num_paged_groups
        self._fingerprint = fingerprint
        self._roots: dict[tuple[str, str], Node] = {}
        self.num_nodes = 0
        self.num_checkpoints = 0

    def root(self, salt: str, adapter: str = "") -> Node:
        """The root for a salt and adapter; requests under different roots share nothing."""
        node = self._roots.get((salt, adapter))
        if node is None:
            digest = hashlib.sha256(b"hybridserve-prefix-1")
            for text in (salt, adapter, self._fingerprint):
                encoded = text.encode()
                digest.update(len(encoded).to_bytes(4, "little") + encoded)
            node = Node(digest.digest(), None, b"", 0, [None] * self._num_paged)
            self._roots[salt, adapter] = node
        return node

    def forget_root(self, node: Node) -> None:
        """Drop a root that nothing hangs from any more, so that salts do not pile up."""
        for name, root in self._roots.items():
            if root is node and not node.children and not node.checkpoints and not node.num_users:
                del self._roots[name]
                return

    def match_text(self, root: Node, tokens: bytes) -> TextMatch:
        """The longest known text that `tokens` (i32 LE) begins with."""
        step, node, at = self._unit_nbytes, root, 0
        path = [root]
        while (child := node.children.get(tokens[at : at + step])) is not None:
            node = child
            path.append(node)
            at += step
        match = TextMatch(path)
        rest = tokens[at : at + step]
        if rest:
            self._match_tail(match, rest)
        return match

    def _match_tail(self, match: TextMatch, rest: bytes) -> None:
        node = match.node
        at = bisect_left(node.edges, rest)
        for edge in node.edges[max(at - 1, 0) : at + 1]:
            shared = _common_tokens(edge, rest)
            if shared > match.tail_tokens:
                entry = node.children.get(edge) or node.checkpoints[edge]
                match.tail_tokens, match.tail_blocks = shared, entry.blocks

    def checkpoints_on(self, match: TextMatch, tokens: bytes, limit: int) -> Iterator[Checkpoint]:
        """Checkpoints that `tokens` passes through, the deepest first, at most `limit` tokens deep."""
        for node in reversed(match.path):
            if not node.checkpoints:
                continue
            start = node.depth * TOKEN_NBYTES
            for num_tail in range(min(self.unit - 1, limit - node.depth), -1, -1):
                checkpoint = node.checkpoints.get(tokens[start : start + num_tail * TOKEN_NBYTES])
                # Near the end of the text a longer slice equals a shorter one; its own length decides.
                if checkpoint is not None and checkpoint.position == node.depth + num_tail:
                    yield checkpoint

    def add_node(self, parent: Node, tokens: bytes, blocks: list[int | None]) -> tuple[Node, bool]:
        """The node for one more unit of text, and whether it is new. An existing one is left as it is."""
        node = parent.children.get(tokens)
        if node is not None:
            return node, False
        node = Node(self.child_key(parent.key, tokens), parent, tokens, parent.depth + self.unit, blocks)
        parent.children[tokens] = node
        insort(parent.edges, tokens)
        self.num_nodes += 1
        return node, True

    @staticmethod
    def child_key(parent: bytes, tokens: bytes) -> bytes:
        """Key of the text that continues `parent`'s by one unit."""
        return hashlib.sha256(parent + tokens).digest()

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Hang a checkpoint from its node, which has none at that text yet."""
        checkpoint.node.checkpoints[checkpoint.tail] = checkpoint
        insort(checkpoint.node.edges, checkpoint.tail)
        self.num_checkpoints += 1

    def remove_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out of the tree."""
        node = checkpoint.node
        del node.checkpoints[checkpoint.tail]
        del node.edges[bisect_left(node.edges, checkpoint.tail)]
        checkpoint.evicted = True
        self.num_checkpoints -= 1

    @staticmethod
    def position_before(checkpoint: Checkpoint) -> int:
        """Position of the nearest checkpoint on the way to this one, 0 if there is none."""
        node, tail = checkpoint.node, checkpoint.tail
        nearest = max((c.position for c in node.checkpoints.values() if c.tail != tail and tail.startswith(c.tail)), default=None)
        while nearest is None:
            if node.parent is None:
                return 0
            edge, node = node.tokens, node.parent
            nearest = max((c.position for c in node.checkpoints.values() if edge.startswith(c.tail)), default=None)
        return nearest

    def remove_node(self, node: Node) -> None:
        """Take a node without children and checkpoints out of the tree."""
        assert node.parent is not None, "a root is not evicted"
        assert not node.children, "a parent may not go before its children"
        assert not node.checkpoints, "text may not go before the states that need it"
        del node.parent.children[node.tokens]
        del node.parent.edges[bisect_left(node.parent.edges, node.tokens)]
        node.evicted = True
        self.num_nodes -= 1

    def roots(self) -> list[Node]:
        return list(self._roots.values())

    def walk(self) -> Iterator[Node]:
        """Every node, roots included."""
        stack = self.roots()
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _common_tokens(a: bytes, b: bytes) -> int:
    """Tokens that two i32 LE byte strings share from the start."""
    if a == b:
        return len(a) // TOKEN_NBYTES
    length = min(len(a), len(b))
    left: NDArray[np.int32] = np.frombuffer(a, np.int32, length // TOKEN_NBYTES)
    right: NDArray[np.int32] = np.frombuffer(b, np.int32, length // TOKEN_NBYTES)
    different = np.flatnonzero(left != right)
    return int(different[0]) if len(different) else length // TOKEN_NBYTES
