"""Which tensors on disk fill which parameters, as data.

Owns the vocabulary (`WeightMap`, `Spelling`, layouts) and the check that every element of every parameter is filled exactly once
and every tensor on disk is used whole. Must not know files or architectures: those hand over names and shapes. Called by
`loader.py`; the maps themselves are written in the files of the architectures.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from hybridserve.errors import WeightsError

Shape: TypeAlias = tuple[int, ...]
Index: TypeAlias = tuple[int | slice, ...]
_SHOWN = 6


class Layout(Protocol):
    """How a tensor lies on disk, relative to the part of a parameter that it fills."""

    def disk_shape(self, shape: Shape) -> Shape:
        """The shape on disk of what fills a part of `shape`."""
        ...

    def arrange(self, tensor: Tensor, shape: Shape) -> Tensor:
        """The part, of `shape`, as a view of the tensor on disk where possible."""
        ...


@dataclass(frozen=True, slots=True)
class Same:
    """As the parameter."""

    def disk_shape(self, shape: Shape) -> Shape:
        return shape

    def arrange(self, tensor: Tensor, shape: Shape) -> Tensor:
        return tensor


@dataclass(frozen=True, slots=True)
class Depthwise:
    """A depthwise convolution's weight: [C, 1, W] on disk, [C, W] here."""

    def disk_shape(self, shape: Shape) -> Shape:
        return (shape[0], 1, *shape[1:])

    def arrange(self, tensor: Tensor, shape: Shape) -> Tensor:
        return tensor.view(shape)


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Rows of several projections taken in turn, group by group: [G * sum(widths), D] on disk.

    `parts` picks those of each group, in order, that the parameter has one after the other (all groups of the first, then of the
    second). Qwen3-Next stores `in_proj_qkvz` so, with one group per key head.
    """

    num_groups: int
    widths: Shape
    parts: tuple[int, ...]

    def disk_shape(self, shape: Shape) -> Shape:
        return (self.num_groups * sum(self.widths), *shape[1:])

    def arrange(self, tensor: Tensor, shape: Shape) -> Tensor:
        grouped = tensor.view(self.num_groups, sum(self.widths), *shape[1:])
        split = torch.split_with_sizes(grouped, self.widths, 1)
        return _stacked([split[part] for part in self.parts], shape)


def _stacked(parts: Sequence[Tensor], shape: Shape) -> Tensor:
    """parts: each [G, w, ...]. Returns all rows of the first, then of the next: `shape`."""
    return torch.cat([part.reshape(-1, *shape[1:]) for part in parts])


SAME = Same()
DEPTHWISE = Depthwise()


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor on disk and the part of one parameter that it fills."""

    tensor: str
    parameter: str
    index: Index
    shape: Shape  # of the part
    layout: Layout


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way to find a parameter on disk: `names`, each an equal share of its rows, in order, or as many as `rows` says.

    With `per_expert` the first dimension counts experts, each of which has its own tensors; a name then holds `{expert}`.
    Names may refer to groups of the rule's pattern (`\\1`).
    """

    names: tuple[str, ...]
    layout: Layout = SAME
    per_expert: bool = False
    rows: Shape | None = None

    def pieces(self, parameter: str, shape: Shape, match: re.Match[str]) -> list[Piece]:
        """The tensors that fill `parameter`, of `shape`, between them."""
        names = [match.expand(name) for name in self.names]
        if not self.per_expert:
            return self._share(parameter, shape, names, ())
        return [
            piece
            for expert in range(shape[0])
            for piece in self._share(parameter, shape[1:], [name.replace("{expert}", str(expert)) for name in names], (expert,))
        ]

    def _share(self, parameter: str, shape: Shape, names: Sequence[str], at: Index) -> list[Piece]:
        if len(names) == 1:
            return [Piece(names[0], parameter, at, shape, self.layout)]
        counts = self.rows or (shape[0] // len(names),) * len(names)
        ends = tuple(itertools.accumulate(counts))
        return [
            Piece(name, parameter, (*at, slice(end - count, end)), (count, *shape[1:]), self.layout)
            for name, count, end in zip(names, counts, ends, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Rule:
    """Parameters whose name on disk isn't their own: the spellings in use, the one that was released first."""

    pattern: str  # of the whole parameter name, after renaming
    spellings: tuple[Spelling, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Tensors on disk that say again what another holds: of no use if they do, a contradiction if they don't.

    `pattern` matches the names of the copies; `original` is a parameter, or the other's name on disk, and may refer to groups of
    the pattern. `remedy` tells a user what to do about copies that differ.
    """

    pattern: str
    original: str
    remedy: str


_TIED_HEAD = Copy(
    r"(?:.*\.)?lm_head\.weight",
    "embed_tokens.weight",
    "tie_word_embeddings in config.json says that the two are one. To serve the stored head set tie_word_embeddings to false; to "
    "serve the embedding take the head out of the file",
)


@dataclass(frozen=True)
class WeightMap:
    """An architecture's names on disk.

    A parameter is looked for under its own name with `renames` (regular expression, replacement) applied in order; then the first
    rule whose pattern matches the result tells the spellings. One of `prefixes`, the same for all, stands before every name
    except those of `rooted`. Tensors that match `ignored` are left alone. `stated` are tensors that no parameter holds since
    their values follow from the config, `copies` those that say again what others hold: the loader compares them.
    """

    renames: tuple[tuple[str, str], ...] = ()
    rules: tuple[Rule, ...] = ()
    prefixes: tuple[str, ...] = ("model.",)
    rooted: tuple[str, ...] = ("lm_head.",)
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    stated: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    copies: tuple[Copy, ...] = ()

    def with_tied_head(self) -> "WeightMap":
        """The same map for a model whose head is its embedding: a head on disk must be a copy of it."""
        return replace(self, copies=(*self.copies, _TIED_HEAD))

    def plan(self, wanted: Mapping[str, Shape], found: Mapping[str, Shape]) -> list[Piece]:
        """Match parameters (`wanted`) with tensors on disk (`found`), both name -> shape.

        Raises WeightsError that names missing, unexpected and mismatched tensors.
        """
        prefix = self._prefix(found)
        found_ways = [self._find(name, shape, prefix) for name, shape in wanted.items()]
        pieces = [piece for pieces in _in_one_spelling(found_ways, found) for piece in pieces]
        missing = sorted({piece.tensor for piece in pieces if piece.tensor not in found})
        used = {piece.tensor for piece in pieces}
        stated = self.stated_in(found)
        unexpected = sorted(name for name in found if name not in used and name not in stated and not self.is_ignored(name))
        mismatched = _mismatches(pieces, found)
        if missing or unexpected or mismatched:
            raise WeightsError(_report(missing, unexpected, mismatched))
        _check_coverage(wanted, pieces)
        return pieces

    def stated_in(self, found: Iterable[str]) -> dict[str, tuple[float, ...]]:
        """Those tensors on disk whose values are `stated`, and the values."""
        names = list(found)
        prefix = self._prefix(names)
        return {prefix + name: values for name, values in self.stated.items() if prefix + name in names}

    def copies_in(self, found: Iterable[str], pieces: Iterable[Piece]) -> dict[str, tuple[str, str]]:
        """Those tensors on disk that are `copies`: the name of the original, and the remedy if the two differ."""
        by_parameter = {piece.parameter: piece.tensor for piece in pieces}
        copies = {}
        for name in found:
            for copy in self.copies:
                match = re.fullmatch(copy.pattern, name)
                if match is not None:
                    original = match.expand(copy.original)
                    copies[name] = (by_parameter.get(original, original), copy.remedy)
        return copies

    def _prefix(self, found: Collection[str]) -> str:
        counts = {prefix: sum(name.startswith(prefix) for name in found) for prefix in self.prefixes}
        # Prefixes are listed from the longest: a shorter one counts the longer one's names too.
        return next((prefix for prefix, count in counts.items() if count), self.prefixes[-1])

    def _find(self, parameter: str, shape: Shape, prefix: str) -> "_Ways":
        """Pieces in each spelling of a parameter."""
        name = parameter
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return {
            spelling: [self._with_prefix(piece, prefix) for piece in spelling.pieces(parameter, shape, match)]
            for spelling, match in self._spellings(name)
        }

    def _spellings(self, name: str) -> Iterable[tuple[Spelling, re.Match[str]]]:
        for rule in self.rules:
            match = re.fullmatch(rule.pattern, name)
            if match is not None:
                return [(spelling, match) for spelling in rule.spellings]
        whole = re.fullmatch("(.*)", name)
        assert whole is not None, f"parameter name {name!r} has a line break"
        return [(Spelling((r"\1",)), whole)]

    def _with_prefix(self, piece: Piece, prefix: str) -> Piece:
        return piece if piece.tensor.startswith(self.rooted) else replace(piece, tensor=prefix + piece.tensor)

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor on disk is one that a text decoder leaves alone, or compares only."""
        return any(re.fullmatch(pattern, name) for pattern in (*self.ignored, *(copy.pattern for copy in self.copies)))


#: The pieces of a parameter by spelling.
_Ways: TypeAlias = Mapping[Spelling, list[Piece]]


def _in_one_spelling(ways: Iterable[_Ways], found: Mapping[str, Shape]) -> Iterator[list[Piece]]:
    """Of each parameter, the pieces in the spelling that is on disk; of one that is missing, in that of its like."""
    ways = list(ways)
    used = Counter(spelling for each in ways for spelling, pieces in each.items() if any(one.tensor in found for one in pieces))
    for each in ways:
        yield max(each.items(), key=lambda way: (any(one.tensor in found for one in way[1]), used[way[0]]))[1]


def _mismatches(pieces: Sequence[Piece], found: Mapping[str, Shape]) -> list[str]:
    """Tensors of another shape than wanted, or used only in part, as text."""
    texts = {}
    taken: dict[str, int] = {}
    for piece in pieces:
        shape = found.get(piece.tensor)
        want = piece.layout.disk_shape(piece.shape)
        taken[piece.tensor] = taken.get(piece.tensor, 0) + math.prod(piece.shape)
        if shape is not None and shape != want:
            texts[piece.tensor] = f"{piece.tensor} is {list(shape)} on disk, wanted {list(want)}"
    for name, count in taken.items():
        if name in found and name not in texts and count != math.prod(found[name]):
            texts[name] = f"{name} has {math.prod(found[name])} elements on disk, of which {count} are wanted"
    return sorted(texts.values())


def _check_coverage(wanted: Mapping[str, Shape], pieces: Sequence[Piece]) -> None:
    """Assert that the pieces of each parameter fill it once: a wrong map is our mistake, not the file's."""
    filled: dict[str, list[tuple[int, int]]] = {name: [] for name in wanted}
    for piece in pieces:
        start = _offset(piece.index, wanted[piece.parameter])
        filled[piece.parameter].append((start, start + math.prod(piece.shape)))
    for name, spans in filled.items():
        at = 0
        for start, end in sorted(spans):
            assert start == at, f"the weight map fills {name} twice, or not, at element {min(start, at)}"
            at = end
        assert at == math.prod(wanted[name]), f"the weight map fills {at} of {math.prod(wanted[name])} elements of {name}"


def _offset(index: Index, shape: Shape) -> int:
    """Flat position of the first element of a part; parts are runs of rows."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return sum((at.start if isinstance(at, slice) else at) * stride for at, stride in zip(index, strides, strict=False))


def _report(missing: Sequence[str], unexpected: Sequence[str], mismatched: Sequence[str]) -> str:
    parts = [
        f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", mismatched))
        if names
    ]
    return (
        f"the weights file does not fit the model that config.json describes. Tensors {'; '.join(parts)}. "
        "Take config.json and weights from the same release, all shards included"
    )
