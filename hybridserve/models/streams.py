"""Layers that pass on several residual streams of each token instead of one.

Owns the layer around a mixer and an MLP, each behind a connection that makes one row of the streams and puts the result back into
them. Must not know architectures, configs or how a connection weighs: those are in the files of the architectures. Laid out by
them, run by `decoder.py`.

Letters: T rows, n streams, D hidden.
"""

from torch import Tensor, nn

from hybridserve.batch import Batch, LayerCaches
from hybridserve.kv.spec import Spec
from hybridserve.mixers.base import Mixer, States
from hybridserve.models.decoder import Layer, named_states


class Connection(nn.Module):
    """How one half of a layer reads the streams and writes to them."""

    def enter(self, streams: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What the half is given: [T, D], and what `leave` needs beside its result. streams: [T, n, D]."""
        raise NotImplementedError

    def leave(self, streams: Tensor, y: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        """The streams afterwards: [T, n, D]. streams: as given to `enter`; y: [T, D], the half's result."""
        raise NotImplementedError


class StreamLayer(Layer):
    """streams = leave(mixer(norm(enter(streams)))), then the same with the MLP; norms may be absent.

    `first` is a mixer that sees all streams, [T, n D], and whose result is added to them before anything else.
    """

    def __init__(
        self,
        mixer: Mixer,
        mlp: nn.Module,
        connections: tuple[Connection, Connection],
        *,
        norms: tuple[nn.Module, nn.Module] | None = None,
        first: Mixer | None = None,
    ) -> None:
        super().__init__()
        every = [mixer] if first is None else [first, mixer]
        self.mixers = nn.ModuleDict({one.kind: one for one in every})
        self.mlp = mlp
        self.mixer_connection, self.mlp_connection = connections
        self.norm = None if norms is None else norms[0]
        self.mlp_norm = None if norms is None else norms[1]
        self.kind = "+".join(one.kind for one in every)
        self._every = tuple(every)
        self._own = {one.kind: {f"{one.kind}.{name}": name for name in one.specs()} for one in every}
        self._order = tuple(self._own)
        self._specs = {f"{one.kind}.{name}": spec for one in every for name, spec in one.specs().items()}

    def cache_specs(self) -> dict[str, Spec]:
        """The caches of the mixers, each named `mixer kind.name within the mixer`."""
        return dict(self._specs)

    def initial_states(self) -> States:
        """Those of the mixers."""
        return named_states(*self._every)

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """x: [T, n, D]; caches by the names of `cache_specs`, written as `batch` says. Returns [T, n, D]."""
        *first, last = self._order
        for kind in first:
            x = x + self._mix(kind, x.flatten(1), batch, caches).view_as(x)
        y, kept = self.mixer_connection.enter(x)
        y = self._mix(last, y if self.norm is None else self.norm(y), batch, caches)
        x = self.mixer_connection.leave(x, y, kept)
        y, kept = self.mlp_connection.enter(x)
        y = self.mlp(y if self.mlp_norm is None else self.mlp_norm(y))
        return self.mlp_connection.leave(x, y, kept)

    def _mix(self, kind: str, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """One of the mixers, on its own caches. x: [T, ...]. Returns the same shape."""
        y: Tensor = self.mixers[kind](x, batch, {name: caches[full] for full, name in self._own[kind].items()})
        return y
