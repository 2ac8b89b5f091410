"""The prefix index: which text, and which states inside it, can be resumed from.

Owns a tree of runs. A run is a stretch of text without a fork, any number of match units long, with a block of every paged group
for each unit; it is cut in two where a request goes on from its middle. Where states were kept, or where texts part inside a
unit, a run has a `Point`. So what a lookup costs follows the forks and checkpoints on its way, not the tokens. Knows page ids
only as numbers; it never decides what to compute. `PrefixCache` is its only caller.

Every unit of text has a key: a chained SHA-256 over canonical bytes, the same in every process and on every machine:

    root key = SHA-256(b"hybridserve-prefix-1" | for salt, adapter, fingerprint: length as u32 LE, UTF-8 bytes)
    unit key = SHA-256(key before it | the unit's token ids as i32 LE)

Lookups inside one process compare the tokens themselves, so nothing is ever trusted to a hash alone; a unit is hashed once, when
its key is first asked for.
"""

import hashlib
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridserve.kv.entries import LEAST_MISSED, MOST_LOST, TOKEN_NBYTES, Checkpoint, Lost, Run, WindowSpan, kind_of

KEY_NBYTES: Final = 32


@dataclass(slots=True)
class TextMatch:
    """How far a prompt's text is known: whole units, then the most similar continuation inside the next unit."""

    data: bytes  # the prompt's tokens, i32 LE
    path: list[Run]  # from the root to the run where the text parts, all but the last in full
    depth: int  # tokens in whole units
    tail_tokens: int = 0  # further tokens that some entry behind them shares
    tail_blocks: Sequence[int] = field(default_factory=list)  # where those tokens' entries are

    @property
    def num_tokens(self) -> int:
        return self.depth + self.tail_tokens


class PrefixIndex:
    """A tree of runs for each combination of salt, adapter and model fingerprint."""

    def __init__(self, unit: int, num_paged_groups: int, fingerprint: str) -> None:
        self.unit = unit
        self.unit_nbytes = unit * TOKEN_NBYTES
        self._num_paged = num_paged_groups
        self._fingerprint = fingerprint
        self._roots: dict[tuple[str, str], Run] = {}
        self._names: dict[Run, tuple[str, str]] = {}

    # -- lookup ---------------------------------------------------------------------------------------------------------

    def root(self, salt: str, adapter: str = "") -> Run:
        """The root for a salt and adapter; requests under different roots share nothing."""
        root = self.known_root(salt, adapter)
        if root not in self._names:
            self._roots[salt, adapter], self._names[root] = root, (salt, adapter)
        return root

    def known_root(self, salt: str, adapter: str = "") -> Run:
        """The same for a lookup: where there is no root yet, one that nothing is kept of."""
        root = self._roots.get((salt, adapter))
        if root is None:
            root = Run(None, 0, b"", [array("i") for _ in range(self._num_paged)])
            root.keys += self._root_key(salt, adapter)
        return root

    def forget_root(self, root: Run) -> None:
        """Drop a root that nothing hangs from any more, so that salts do not pile up."""
        if not root.points and not root.num_users and root in self._names:
            del self._roots[self._names.pop(root)]

    def match_text(self, root: Run, data: bytes) -> TextMatch:
        """The longest known text that `data` (token ids, i32 LE) begins with."""
        step, run, at = self.unit_nbytes, root, 0
        match = TextMatch(data, [root], 0)
        while (child := run.children.get(data[at : at + step])) is not None:
            match.path.append(child)
            run = child
            if data.startswith(child.tokens, at):
                at += len(child.tokens)
            else:
                at += common_units(child.tokens, memoryview(data)[at:], step) * step
                break
        match.depth = at // TOKEN_NBYTES
        rest = data[at : at + step]
        if rest:
            self._match_tail(match, run, rest)
        return match

    def _match_tail(self, match: TextMatch, run: Run, rest: bytes) -> None:
        """Find the entry behind the whole units that shares most tokens with `rest`."""
        at = (match.depth - run.start) // self.unit
        own = bytes(run.tokens[at * self.unit_nbytes : (at + 1) * self.unit_nbytes])
        if own:
            match.tail_tokens, match.tail_blocks = _common_tokens(own, rest), [blocks[at] for blocks in run.blocks]
        point = run.points.get(match.depth)
        if point is None:
            return
        near = bisect_left(point.edges, rest)
        for edge in point.edges[max(near - 1, 0) : near + 1]:
            shared = _common_tokens(edge, rest)
            if shared > match.tail_tokens:
                child = run.children.get(edge)
                blocks = [blocks[0] for blocks in child.blocks] if child is not None else point.checkpoints[edge].blocks
                match.tail_tokens, match.tail_blocks = shared, blocks

    def checkpoints_on(self, path: Sequence[Run], data: bytes, depth: int, limit: int) -> Iterator[Checkpoint]:
        """Checkpoints that a prompt passes whose text is known for `depth` tokens along `path`; the deepest first.

        At most `limit` tokens deep.
        """
        for run in reversed(path):
            for at in reversed(run.depths[: bisect_right(run.depths, min(depth, limit))]):
                most = min(self.unit - 1, limit - at)
                following = data[at * TOKEN_NBYTES : (at + most) * TOKEN_NBYTES]
                yield from run.points[at].on_way(following)

    def checkpoint_before(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """The nearest checkpoint on the way to this one."""
        run, depth = checkpoint.run, checkpoint.depth
        if checkpoint.tail:
            for nearest in run.points[depth].on_way(checkpoint.tail[:-TOKEN_NBYTES]):
                return nearest
        following = b""
        while True:
            for at in reversed(run.depths[: bisect_left(run.depths, depth)]):
                offset = (at - run.start) * TOKEN_NBYTES
                inside = bytes(run.tokens[offset : offset + self.unit_nbytes - TOKEN_NBYTES])
                for nearest in run.points[at].on_way(inside or following):
                    return nearest
            if run.parent is None:
                return None
            following = bytes(run.tokens[: self.unit_nbytes - TOKEN_NBYTES])
            run, depth = run.parent, run.start + 1

    # -- growth ---------------------------------------------------------------------------------------------------------

    def add_run(self, parent: Run, tokens: bytes, blocks: "list[array[int]]") -> Run:
        """A new run of whole units behind `parent`, where nothing begins with its first unit yet."""
        run = Run(parent, parent.end, tokens, blocks)
        first = tokens[: self.unit_nbytes]
        parent.children[first] = run
        insort(parent.point(parent.end).edges, first)
        return run

    def extend(self, run: Run, tokens: bytes, blocks: "list[array[int]]") -> None:
        """More whole units at the end of a run that nothing else goes on from."""
        run.tokens += tokens
        for mine, more in zip(run.blocks, blocks, strict=True):
            mine.extend(more)

    def cut(self, run: Run, depth: int) -> Run:
        """Cut a run in two at `depth`, inside it; returns the upper part. `run` remains as the lower one."""
        units = (depth - run.start) // self.unit
        nbytes = units * self.unit_nbytes
        parent = run.parent
        assert parent is not None, "a root has no inside"
        assert 0 < nbytes < len(run.tokens), f"depth {depth} is not inside the run from {run.start} to {run.end}"
        upper = Run(parent, run.start, bytes(run.tokens[:nbytes]), [blocks[:units] for blocks in run.blocks])
        upper.stamp = run.stamp
        upper.keys = run.keys[: units * KEY_NBYTES]
        at = bisect_right(run.depths, depth)
        upper.depths, run.depths = run.depths[:at], run.depths[at:]
        upper.lost, run.lost = [o for o in run.lost if o.depth <= depth], [o for o in run.lost if o.depth > depth]
        upper.points = {depth: run.points.pop(depth) for depth in upper.depths}
        for point in upper.points.values():
            for checkpoint in point.checkpoints.values():
                checkpoint.run = upper
        parent.children[bytes(run.tokens[: self.unit_nbytes])] = upper
        del run.tokens[:nbytes], run.keys[: units * KEY_NBYTES]
        for blocks in run.blocks:
            del blocks[:units]
        run.start, run.parent = depth, upper
        self._share_spans(run, upper)
        first = bytes(run.tokens[: self.unit_nbytes])
        upper.children[first] = run
        insort(upper.point(depth).edges, first)
        return upper

    @staticmethod
    def _share_spans(lower: Run, upper: Run) -> None:
        """Give the window blocks that wait for eviction to the part of the run that has them now."""
        spans, lower.spans = lower.spans, []
        for span in spans:
            if span.end <= upper.end:
                span.run = upper
                upper.spans.append(span)
                continue
            if span.start < upper.end:
                upper.spans.append(WindowSpan(upper, span.order, span.start, upper.end, span.stamp, span.priority))
                span.start = upper.end
            lower.spans.append(span)

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Hang a checkpoint from its run, which has none at that text yet."""
        point = checkpoint.run.point(checkpoint.depth)
        point.checkpoints[checkpoint.tail] = checkpoint
        if checkpoint.tail:
            insort(point.edges, checkpoint.tail)

    # -- removal --------------------------------------------------------------------------------------------------------

    def remove_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out of the tree."""
        run, point = checkpoint.run, checkpoint.run.points[checkpoint.depth]
        del point.checkpoints[checkpoint.tail]
        if checkpoint.tail:
            del point.edges[bisect_left(point.edges, checkpoint.tail)]
        if not point.checkpoints and not point.edges:
            run.drop_point(checkpoint.depth)
        position, tail = checkpoint.position, checkpoint.tail
        before = checkpoint.before.position if checkpoint.before is not None else 0
        if position - before >= LEAST_MISSED:
            run.lost = [one for one in run.lost[-MOST_LOST:] if one.position != position or one.tail != tail]
            run.lost.append(Lost(position, checkpoint.depth, tail, kind_of(checkpoint), checkpoint.stamp))
        checkpoint.evicted, checkpoint.before = True, None

    def trim(self, run: Run, depth: int) -> None:
        """Drop a run's text behind `depth`; the whole run when nothing is left of it."""
        assert not run.children, "a parent may not go before its children"
        assert depth >= run.kept, "text may not go before the states that need it"
        assert run.parent is not None, "a root is not evicted"
        units = (depth - run.start) // self.unit
        if not units:
            first = bytes(run.tokens[: self.unit_nbytes])
            del run.parent.children[first]
            point = run.parent.points[run.start]
            del point.edges[bisect_left(point.edges, first)]
            if not point.checkpoints and not point.edges:
                run.parent.drop_point(run.start)
            run.evicted = True
            return
        if run.spans:
            for span in run.spans:
                span.start, span.end = min(span.start, depth), min(span.end, depth)
            run.spans = [span for span in run.spans if span.start < span.end]
        if run.lost:
            run.lost = [one for one in run.lost if one.depth <= depth]
        del run.tokens[units * self.unit_nbytes :], run.keys[units * KEY_NBYTES :]
        for blocks in run.blocks:
            del blocks[units:]

    # -- keys -----------------------------------------------------------------------------------------------------------

    def keys(self, run: Run) -> bytearray:
        """The keys of all units of a run, KEY_NBYTES each. Hashes what was not hashed before."""
        chain = [run]
        while not chain[-1].keys and chain[-1].parent is not None:
            chain.append(chain[-1].parent)
        for one in reversed(chain):
            self._hash(one)
        return run.keys

    def last_key(self, run: Run, depth: int) -> bytes:
        """The key of a run's text up to `depth`; that of the text before it when `depth` is its start."""
        if run.parent is None:
            return bytes(run.keys)
        if depth == run.start:
            return self.last_key(run.parent, depth)
        at = (depth - run.start) // self.unit
        return bytes(self.keys(run)[(at - 1) * KEY_NBYTES : at * KEY_NBYTES])

    def _hash(self, run: Run) -> None:
        if run.parent is None:
            return
        key = bytes(run.keys[-KEY_NBYTES:] or run.parent.keys[-KEY_NBYTES:])
        step, found = self.unit_nbytes, list[bytes]()
        rest = bytes(run.tokens[len(run.keys) // KEY_NBYTES * step :])
        for at in range(0, len(rest), step):
            key = child_key(key, rest[at : at + step])
            found.append(key)
        run.keys += b"".join(found)

    def _root_key(self, salt: str, adapter: str) -> bytes:
        digest = hashlib.sha256(b"hybridserve-prefix-1")
        for text in (salt, adapter, self._fingerprint):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(4, "little") + encoded)
        return digest.digest()

    # -- checks ---------------------------------------------------------------------------------------------------------

    def walk(self) -> Iterator[Run]:
        """Every run, roots included."""
        stack = list(self._roots.values())
        while stack:
            run = stack.pop()
            yield run
            stack.extend(run.children.values())


_sha256 = hashlib.sha256


def child_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of the text that continues that of key `parent` by one unit."""
    return _sha256(parent + tokens).digest()


def common_units(a: bytes | bytearray | memoryview, b: bytes | bytearray | memoryview, unit_nbytes: int) -> int:
    """Whole units that two i32 LE byte strings share from the start."""
    return _common_tokens(a, b) * TOKEN_NBYTES // unit_nbytes


def _common_tokens(a: bytes | bytearray | memoryview, b: bytes | bytearray | memoryview) -> int:
    """Tokens that two i32 LE byte strings share from the start."""
    if a[:TOKEN_NBYTES] != b[:TOKEN_NBYTES]:
        return 0
    length = min(len(a), len(b)) // TOKEN_NBYTES
    left: NDArray[np.int32] = np.frombuffer(a, np.int32, length)
    right: NDArray[np.int32] = np.frombuffer(b, np.int32, length)
    different = left != right
    at = int(different.argmax()) if length else 0
    return at if length and different[at] else length
