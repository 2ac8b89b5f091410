"""Choice of the backend of every operation, made once at load and kept with its reasons.

Owns the table of backends and their order. Must not know what an operation does. Called by `engine/` and `check-model`
with a device, a dtype and what the user forces. Nothing falls back in silence: `Selection.reasons` has every refusal.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch

from hybridserve.backends.offer import OPERATIONS, Offer, Operation
from hybridserve.backends.ops import Ops
from hybridserve.errors import MissingDependencyError, UsageError

OfferFunction: TypeAlias = Callable[[torch.device, torch.dtype], Offer]


@dataclass(frozen=True)
class Backend:
    """A row of the table."""

    name: str
    devices: tuple[str, ...]  # device types on which it is asked at all
    offer: OfferFunction
    foresee: OfferFunction | None = None  # what `offer` will say, found out faster; its operations are not for use


@dataclass(frozen=True)
class Choice:
    """The backend chosen for one operation."""

    backend: str
    reason: str
    refused: Mapping[str, str]  # backend -> why it was not taken, for those that come earlier in the table

    def __str__(self) -> str:
        passed_over = "".join(f"; not {name}: {reason}" for name, reason in self.refused.items())
        return f"{self.backend}: {self.reason}{passed_over}"


@dataclass(frozen=True)
class Selection:
    """The operations to use, and for each of them why this one."""

    ops: Ops
    reasons: Mapping[str, Choice]  # operation -> choice


def _imported(module: str, function: str = "offer") -> OfferFunction:
    """A function of a backend that is imported only when asked; if its packages are missing, an offer of nothing."""

    def offer(device: torch.device, dtype: torch.dtype) -> Offer:
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            return Offer(ops={}, refused={}, reason=f"cannot be imported: {error}")
        return cast(Offer, getattr(found, function)(device, dtype))

    return offer


#: All backends, the preferred first. The last one has every operation on every device.
BACKENDS: tuple[Backend, ...] = (
    Backend("cpu", ("cpu",), _imported("hybridserve.backends.cpu"), _imported("hybridserve.backends.cpu", "foresee")),
    Backend("reference", ("cpu", "cuda"), _imported("hybridserve.backends.reference")),
)

#: The same as a plan has them: nothing is compiled to find out, and the operations are not for use.
FORESEEN: tuple[Backend, ...] = tuple(replace(backend, offer=backend.foresee or backend.offer) for backend in BACKENDS)


class _Offers:
    """Offers for one device and dtype, each asked for once and only when it matters: a native backend compiles to answer."""

    def __init__(self, backends: Sequence[Backend], device: torch.device, dtype: torch.dtype) -> None:
        self._backends = {backend.name: backend for backend in backends}
        self._device = device
        self._dtype = dtype
        self._asked: dict[str, Offer] = {}

    @property
    def names(self) -> list[str]:
        """All backends, the preferred first."""
        return list(self._backends)

    def of(self, name: str) -> Offer:
        """What a backend offers; nothing on a device that is not its own."""
        if name not in self._asked:
            backend = self._backends[name]
            if self._device.type in backend.devices:
                self._asked[name] = backend.offer(self._device, self._dtype)
            else:
                where = f"runs on {' and '.join(backend.devices)}, not on {self._device.type}"
                self._asked[name] = Offer(ops={}, refused={}, reason=where)
        return self._asked[name]

    def check_usable(self, name: str) -> None:
        """Raise UsageError or MissingDependencyError if a forced backend offers nothing here."""
        offer = self.of(name)
        if self._device.type not in self._backends[name].devices:
            raise UsageError(f"--backend names {name!r}, which {offer.reason}; leave it out or change --device")
        if not offer.ops:
            raise MissingDependencyError(
                f"--backend names {name!r}, which is not usable here: {offer.reason}; repair that or leave it out"
            )


def select(device: torch.device, dtype: torch.dtype, forced: Sequence[str], backends: Sequence[Backend] = BACKENDS) -> Selection:
    """Choose a backend for every operation: the first in `backends` that offers it, or the forced one.

    An entry of `forced` is `operation=backend`, or `backend` for all operations that this backend has. Raises
    UsageError for an unknown name or a backend that refuses the operation, MissingDependencyError for one that is not
    usable at all.
    """
    offers = _Offers(backends, device, dtype)
    for_all, for_one = _parse(forced, offers.names)
    for name in (*for_all, *for_one.values()):
        offers.check_usable(name)
    ops: dict[str, Operation] = {}
    reasons: dict[str, Choice] = {}
    for operation in OPERATIONS:
        wanted = for_one.get(operation)
        if wanted is None and for_all:
            wanted = _if_it_has(for_all[0], offers.of(for_all[0]), operation)
        choice = _first(operation, offers) if wanted is None else _forced(operation, wanted, offers.of(wanted))
        ops[operation] = offers.of(choice.backend).ops[operation]
        reasons[operation] = choice
    return Selection(Ops(**cast("dict[str, Any]", ops)), reasons)


def _parse(forced: Sequence[str], backends: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The backend forced for all operations, if any (in a tuple), and those for single ones. Raises UsageError."""
    for_all: list[str] = []
    for_one: dict[str, str] = {}
    for entry in forced:
        operation, separator, name = entry.rpartition("=")
        if name not in backends:
            raise UsageError(f"--backend {entry!r}: unknown backend {name!r}; known: {', '.join(backends)}")
        if not separator:
            for_all.append(name)
        elif operation not in OPERATIONS:
            raise UsageError(f"--backend {entry!r}: unknown operation {operation!r}; known: {', '.join(OPERATIONS)}")
        elif for_one.setdefault(operation, name) != name:
            raise UsageError(f"--backend forces {operation} to both {for_one[operation]!r} and {name!r}; keep one of them")
    if len(set(for_all)) > 1:
        raise UsageError(f"--backend forces all operations to both {for_all[0]!r} and {for_all[1]!r}; keep one of them")
    return tuple(for_all[:1]), for_one


def _if_it_has(name: str, offer: Offer, operation: str) -> str | None:
    """The backend forced for all operations, unless it does not implement this one."""
    return name if operation in offer.ops or operation in offer.refused else None


def _forced(operation: str, name: str, offer: Offer) -> Choice:
    if operation not in offer.ops:
        raise UsageError(
            f"--backend forces {operation} to {name!r}, which refuses it: {_why_not(operation, offer)}; "
            f"drop the flag, or force another backend with {operation}=NAME"
        )
    return Choice(name, f"forced; {offer.reason}", {})


def _first(operation: str, offers: _Offers) -> Choice:
    """The first offer that has the operation. Raises UsageError with all refusals if none has."""
    refused: dict[str, str] = {}
    for name in offers.names:
        offer = offers.of(name)
        if operation in offer.ops:
            return Choice(name, offer.reason, refused)
        refused[name] = _why_not(operation, offer)
    listed = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise UsageError(f"no backend offers {operation} here ({listed}); choose another device or dtype")


def _why_not(operation: str, offer: Offer) -> str:
    if operation in offer.refused:
        return offer.refused[operation]
    return offer.reason if not offer.ops else "does not implement it"
