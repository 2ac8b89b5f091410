"""The decoder that every architecture is laid out in: embedding, layers of norm + mixers + norm + MLP, final norm, head.

Owns the residual stream, the naming of caches within a layer and the multipliers that some families put in it. Must not know
architectures, configs, pools or what a mixer does. Laid out by the files of the architectures, run by `engine/runner.py`.

Letters: T rows of the batch, D hidden, R rows whose logits are wanted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridserve.backends.ops import Ops
from hybridserve.batch import Batch, LayerCaches
from hybridserve.errors import EngineError
from hybridserve.kv.spec import Spec
from hybridserve.mixers.base import Mixer, States, empty_parameter
from hybridserve.mixers.linear import Linear
from hybridserve.models.quantised import Quantisation
from hybridserve.models.weights import WeightMap


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine needs to know of a model beside its layers."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_positions: int  # longest context that the config allows


class Branch(nn.Module):
    """One of the mixers of a layer: y = after * mix(before * x). Most layers have one; Falcon-H1 has two side by side."""

    def __init__(self, mixer: Mixer, *, before: float = 1.0, after: float = 1.0) -> None:
        super().__init__()
        self.mixer = mixer
        self.before = before
        self.after = after

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """x: [T, D]. Returns [T, D]."""
        y = self.mixer(_scaled(x, self.before), batch, caches)
        if y.shape != x.shape:  # one row would be added to all rows of all sequences without a word
            raise EngineError(f"mixer {self.mixer.kind} returned {list(y.shape)} for an input of {list(x.shape)}")
        return _scaled(y, self.after)


class Layer(nn.Module):
    """What a model is a sequence of. A subclass sets `kind` and its caches; most architectures need `DecoderLayer` only."""

    kind: str  # the mixers, joined by +

    def cache_specs(self) -> dict[str, Spec]:
        """The caches of this layer by name."""
        raise NotImplementedError

    def initial_states(self) -> States:
        """What fresh sequences start from where a mixer has learned it, by the names of `cache_specs`: see `named_states`."""
        return {}

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """x: [T, ...], what the layers pass on; caches by the names of `cache_specs`, written as `batch` says. Returns as x."""
        raise NotImplementedError


def named_states(*mixers: Mixer) -> States:
    """The learned initial states of a layer's mixers, each named `mixer kind.name within the mixer`."""
    return {f"{mixer.kind}.{name}": states for mixer in mixers for name, states in mixer.initial_states().items()}


class DecoderLayer(Layer):
    """x += r * after(sum of mixers(norm(x))); x += r * mlp_after(mlp(mlp_norm(x))), with Granite's residual multiplier r.

    Norms may be absent: most families have no norm after a half, Olmo none before it. So may a whole half: a layer of
    Nemotron-H is a mixer, or an MLP.
    """

    def __init__(
        self,
        branches: Sequence[Branch],
        norm: nn.Module | None,
        mlp: nn.Module | None,
        mlp_norm: nn.Module | None,
        *,
        after_norm: nn.Module | None = None,
        after_mlp_norm: nn.Module | None = None,
        residual_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.mixers = nn.ModuleDict({branch.mixer.kind: branch for branch in branches})
        assert len(self.mixers) == len(branches), "two mixers of one kind in a layer would share cache and parameter names"
        self.norm = norm
        self.after_norm = after_norm
        self.mlp = mlp
        self.mlp_norm = mlp_norm
        self.after_mlp_norm = after_mlp_norm
        self.residual_multiplier = residual_multiplier
        self.kind = "+".join(branch.mixer.kind for branch in branches) or "mlp"
        self._mixers = tuple(branch.mixer for branch in branches)
        specs = {mixer.kind: mixer.specs() for mixer in self._mixers}
        self._specs = {f"{kind}.{name}": spec for kind, named in specs.items() for name, spec in named.items()}
        self._cache_names = {kind: {name: f"{kind}.{name}" for name in named} for kind, named in specs.items()}

    def cache_specs(self) -> dict[str, Spec]:
        """The caches of all mixers of this layer, each named `mixer kind.name within the mixer`."""
        return dict(self._specs)

    def initial_states(self) -> States:
        """Those of all mixers."""
        return named_states(*self._mixers)

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """x: [T, D]; caches by the names of `cache_specs`, written as `batch` says. Returns [T, D]."""
        if self._cache_names:
            normed = _through(self.norm, x)
            mixed = [
                branch(normed, batch, {name: caches[full] for name, full in self._cache_names[kind].items()})
                for kind, branch in self.mixers.items()
            ]
            x = x + _scaled(_through(self.after_norm, sum(mixed[1:], mixed[0])), self.residual_multiplier)
        if self.mlp is None:
            return x
        y = _through(self.after_mlp_norm, self.mlp(_through(self.mlp_norm, x)))
        return x + _scaled(y, self.residual_multiplier)


class Streams(nn.Module):
    """What layers pass on where it is more than one hidden row of each token. A subclass is used by one architecture."""

    def open(self, x: Tensor) -> Tensor:
        """What the first layer is given. x: [T, D], the embeddings."""
        raise NotImplementedError

    def close(self, x: Tensor) -> Tensor:
        """What the final norm is given: [T, D]. x: [T, ...], from the last layer."""
        raise NotImplementedError


class Embedding(nn.Module):
    """Rows of a table [vocab, D]."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: int64 [T]. Returns [T, D]."""
        return F.embedding(input_ids, self.weight)


class CausalLM(nn.Module):
    """A decoder-only language model over packed rows. With `tied`, the head is the embedding's table."""

    def __init__(
        self,
        info: ModelInfo,
        layers: Sequence[Layer],
        norm: nn.Module,
        ops: Ops,
        dtype: torch.dtype,
        *,
        tied: bool,
        weight_map: WeightMap,
        embedding_multiplier: float = 1.0,
        logits_multiplier: float = 1.0,
        logits_softcap: float | None = None,
        streams: Streams | None = None,
    ) -> None:
        super().__init__()
        self.info = info
        self.dtype = dtype
        self.weight_map = weight_map.with_tied_head() if tied else weight_map
        self.quantisation: Quantisation | None = None  # of the weights on disk; what is loaded is in `dtype`
        self.embed_tokens = Embedding(info.vocab_size, info.hidden_size, dtype)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.lm_head = None if tied else Linear(info.hidden_size, info.vocab_size, ops, dtype)
        self.embedding_multiplier = embedding_multiplier
        self.logits_multiplier = logits_multiplier
        self.logits_softcap = logits_softcap
        self.streams = streams
        self._linear = ops.linear
        self._layers = tuple(layers)  # typed, and without ModuleList's indexing on every pass

    def cache_specs(self) -> list[dict[str, Spec]]:
        """The caches of each layer by name; names are unique within a layer."""
        return [layer.cache_specs() for layer in self._layers]

    def initial_states(self) -> list[States]:
        """What fresh sequences of each layer start from where it is learned, by the names of `cache_specs`."""
        return [layer.initial_states() for layer in self._layers]

    def layer_kinds(self) -> list[str]:
        """The mixers of each layer, joined by +."""
        return [layer.kind for layer in self._layers]

    def forward(self, batch: Batch, caches: Sequence[LayerCaches]) -> Tensor:
        """Run all layers. caches: per layer, by the names of `cache_specs`; written in place. Returns [T, D] after the norm."""
        x = _scaled(self.embed_tokens(batch.input_ids), self.embedding_multiplier)
        if self.streams is not None:
            x = self.streams.open(x)
        for layer, layer_caches in zip(self._layers, caches, strict=True):
            y = layer(x, batch, layer_caches)
            if y.shape != x.shape:
                raise EngineError(f"layer {layer.kind} returned {list(y.shape)} for an input of {list(x.shape)}")
            x = y
        if self.streams is not None:
            x = self.streams.close(x)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token. hidden: [R, D], rows of what `forward` returned. Returns fp32 [R, vocab]."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        logits = _scaled(self._linear(hidden, weight, None).float(), self.logits_multiplier)
        return logits if self.logits_softcap is None else self.logits_softcap * torch.tanh(logits / self.logits_softcap)


def format_layer_plan(kinds: Sequence[str]) -> str:
    """One line that says which layers are what, as in `0-2,4-6: gated_delta  3,7: attention`."""
    runs: Mapping[str, list[list[int]]] = {kind: [] for kind in kinds}
    for i, kind in enumerate(kinds):
        if runs[kind] and runs[kind][-1][1] == i - 1:
            runs[kind][-1][1] = i
        else:
            runs[kind].append([i, i])
    return "  ".join(f"{','.join(str(a) if a == b else f'{a}-{b}' for a, b in spans)}: {kind}" for kind, spans in runs.items())


def _scaled(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1.0 else x * multiplier


def _through(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
