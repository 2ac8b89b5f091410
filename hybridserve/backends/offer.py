"""What a backend says it can do for one device and dtype: operations, and refusals with their reasons.

Owns the data class and the list of operation names. Must not know any backend. Every backend package has a function
``offer(device, dtype) -> Offer``, imported and called by `select.py` once at load.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from hybridserve.backends.ops import Ops

#: Implementation of an operation; its parameters are those of the protocol of that name in `ops.py`.
Operation: TypeAlias = Callable[..., Tensor | None]

#: Names of all operations, in the order of `Ops`.
OPERATIONS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Ops))


@dataclass(frozen=True)
class Offer:
    """What one backend offers for a device and dtype.

    An operation is in `ops`, or in `refused` with its reason, or in neither: then `reason` says why. Backends that do
    not implement an operation at all simply leave it out.
    """

    ops: Mapping[str, Operation]  # operation -> implementation
    refused: Mapping[str, str]  # operation -> why this backend does not offer it here
    reason: str  # one line about the backend here: "g++ 13, AVX2", or why all is refused

    def __post_init__(self) -> None:
        unknown = sorted({*self.ops, *self.refused} - set(OPERATIONS))
        if unknown:
            raise ValueError(f"an offer names {unknown}, which are no operations; known: {', '.join(OPERATIONS)}")
        both = sorted(set(self.ops) & set(self.refused))
        if both:
            raise ValueError(f"an offer both has and refuses {both}; an operation is one or the other")
