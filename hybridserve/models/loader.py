"""From what the user named to a model with weights on its device.

Owns the order: find the files, read the config, lay out the model, check every tensor's name and shape, and only then read data.
Must not know any architecture. Called by the engine at start and by `check-model`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from hybridserve.backends.ops import Ops
from hybridserve.config import EngineSettings
from hybridserve.errors import WeightsError
from hybridserve.mixers.host_table import HostTable
from hybridserve.models.architectures import build_model
from hybridserve.models.decoder import CausalLM
from hybridserve.models.dummy import DummyWeights
from hybridserve.models.quantised import Quantisation, Stored
from hybridserve.models.shards import DTYPE_NBYTES, TensorEntry, read_entries, read_tensors
from hybridserve.models.source import ModelFolder, resolve
from hybridserve.models.weights import Piece

#: Told how much of the weights is loaded, from 0 to 1.
Progress: TypeAlias = Callable[[float], None]

_FLOAT_DTYPES = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class MatchedWeights:
    """Which tensors fill which parameters, and where those lie on disk."""

    pieces: list[Piece]
    stored: dict[str, Stored]  # by the names in `pieces`
    entries: Mapping[str, TensorEntry]

    def nbytes(self, name: str) -> int:
        """Bytes on disk of a tensor, its scale included."""
        one = self.stored[name]
        return self.entries[one.values].nbytes + (0 if one.scale is None else self.entries[one.scale].nbytes)

    def parameter_nbytes(self, model: CausalLM) -> dict[str, int]:
        """Bytes of each parameter once it is loaded: in the model's dtypes, but a table of the host's in that of the file."""
        widths = {piece.parameter: DTYPE_NBYTES[self.entries[self.stored[piece.tensor].values].dtype] for piece in self.pieces}
        on_host = host_parameters(model)
        return {name: p.numel() * widths[name] if name in on_host else p.nbytes for name, p in model.named_parameters()}

    def quantised(self) -> dict[str, Stored]:
        """Those tensors that are not stored as the numbers that they stand for, and are used."""
        return {piece.tensor: self.stored[piece.tensor] for piece in self.pieces if self.stored[piece.tensor].scale is not None}


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading came to."""

    num_parameters: int
    num_tensors: int  # tensors read from disk
    weights_nbytes: int  # of all parameters, in the dtype they are used in
    mapped_nbytes: int  # of those, how many are views of the files, which cost no memory of their own


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, and where it came from."""

    model: CausalLM
    folder: ModelFolder
    report: LoadReport


def load(settings: EngineSettings, ops: Ops, device: torch.device, progress: Progress | None = None) -> LoadedModel:
    """Load the model that `settings` name onto `device`. Raises ModelError or UsageError; plug-ins must be imported before."""
    folder = resolve(settings.model, load_format=settings.load_format)
    model = build_model(folder.config, ops, folder.dtype(settings.dtype), ignore_keys=settings.ignore_config_keys)
    if settings.load_format == "dummy":
        return LoadedModel(model, folder, load_dummy(model, device, seed=settings.seed, progress=progress))
    return LoadedModel(model, folder, load_weights(model, folder, device, progress=progress))


def plan_weights(model: CausalLM, folder: ModelFolder) -> MatchedWeights:
    """Match a folder's tensors with a model's parameters, from headers alone. Raises WeightsError naming what does not fit."""
    return match_weights(model, read_entries(folder.path))


def match_weights(model: CausalLM, entries: Mapping[str, TensorEntry]) -> MatchedWeights:
    """Match tensors on disk with a model's parameters. Raises WeightsError naming what does not fit."""
    if model.quantisation is None:
        stored = {name: Stored(name, entry.shape) for name, entry in entries.items()}
    else:
        stored = model.quantisation.pair(entries, model.weight_map.is_ignored)
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    pieces = model.weight_map.plan(wanted, {name: one.shape for name, one in stored.items()})
    matched = MatchedWeights(pieces, stored, entries)
    for name in {piece.tensor for piece in pieces}:
        _check_dtype(name, stored[name], entries, model.quantisation)
    for name in host_parameters(model):
        _check_table(name, matched)
    return matched


def _check_dtype(name: str, stored: Stored, entries: Mapping[str, TensorEntry], quantisation: Quantisation | None) -> None:
    """Raise WeightsError if a tensor's numbers are neither floats nor decoded."""
    entry = entries[stored.values]
    if stored.scale is not None or entry.dtype in _FLOAT_DTYPES:
        return
    said = "has no quantization_config" if quantisation is None else f"speaks of {quantisation.describe()}"
    raise WeightsError(
        f"{name} in {entry.file.name} has dtype {entry.dtype}, and config.json {said}, so what its numbers stand for is unknown; "
        "take config.json and weights from the same release, or the release that is not quantised"
    )


def _check_table(parameter: str, matched: MatchedWeights) -> None:
    """Raise WeightsError if a table that is never decoded as a whole has a scale other than one number."""
    for piece in matched.pieces:
        stored = matched.stored[piece.tensor]
        if piece.parameter == parameter and stored.scale is not None and math.prod(matched.entries[stored.scale].shape) != 1:
            entry = matched.entries[stored.scale]
            raise WeightsError(
                f"{stored.scale} in {entry.file.name} is {list(entry.shape)}; a table that stays in host memory can have one "
                "scale only. Take the release whose table is not quantised"
            )


def load_weights(model: CausalLM, folder: ModelFolder, device: torch.device, *, progress: Progress | None = None) -> LoadReport:
    """Fill a laid-out model from safetensors files, one tensor after the other.

    On the CPU a tensor that is used as it lies on disk stays a view of the mapped file. Raises WeightsError, before any
    data is read.
    """
    matched = plan_weights(model, folder)
    check_stated(model, matched)
    filling = _Filling(model, device)
    by_tensor: dict[str, list[Piece]] = {}
    for piece in matched.pieces:
        by_tensor.setdefault(piece.tensor, []).append(piece)
    names = {matched.stored[name].values: name for name in by_tensor}
    scale_names = {one.scale for one in matched.quantised().values() if one.scale is not None}
    scales = dict(read_tensors({name: matched.entries[name] for name in scale_names}))
    total, done = sum(matched.nbytes(name) for name in by_tensor), 0
    for on_disk, tensor in read_tensors({on_disk: matched.entries[on_disk] for on_disk in names}):
        name = names[on_disk]
        scale = matched.stored[name].scale
        filling.place(tensor, None if scale is None else scales[scale], by_tensor[name])
        done += matched.nbytes(name)
        if progress is not None:
            progress(min(done / total, 1.0) if total else 1.0)
    _install(model, filling.made)
    return _report(model, num_tensors=len(names), mapped_nbytes=filling.mapped_nbytes)


class _Filling:
    """Parameters in the making."""

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self.made: dict[str, Tensor] = {}
        self.mapped_nbytes = 0
        self._model = model
        self._device = device
        self._wanted = dict(model.named_parameters())
        self._on_host = host_parameters(model)

    def place(self, tensor: Tensor, scale: Tensor | None, pieces: Sequence[Piece]) -> None:
        """Put a tensor read from disk, with its scale if it is quantised, where `pieces` say."""
        if any(piece.parameter in self._on_host for piece in pieces):
            self._place_table(tensor, scale, pieces)
            return
        if scale is None:
            for piece in pieces:
                self.mapped_nbytes += _place(tensor, piece, self._wanted[piece.parameter], self._device, self.made)
            return
        assert self._model.quantisation is not None, "a scale was found for weights that are not quantised"
        dtypes = (self._wanted[piece.parameter].dtype for piece in pieces)
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        decoded = self._model.quantisation.decode(tensor.to(self._device), scale.to(self._device), widest)
        for piece in pieces:
            _place(decoded, piece, self._wanted[piece.parameter], self._device, self.made)

    def _place_table(self, tensor: Tensor, scale: Tensor | None, pieces: Sequence[Piece]) -> None:
        """In the dtype of the file: converting would read all of it."""
        for piece in pieces:
            parameter = self._wanted[piece.parameter].to(tensor.dtype)
            self.mapped_nbytes += _place(tensor, piece, parameter, torch.device("cpu"), self.made)
            if scale is not None:
                table, _, part = piece.parameter.rpartition(".parts.")
                module = self._model.get_submodule(table)
                assert isinstance(module, HostTable), f"{table} is no table"
                module.set_scale(int(part), float(scale.float()))


def host_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that stay in host memory whatever the device is."""
    tables = {name for name, module in model.named_modules() if isinstance(module, HostTable)}
    return {name for name, _ in model.named_parameters() if name.partition(".parts.")[0] in tables}


def check_stated(model: CausalLM, matched: MatchedWeights) -> None:
    """Compare the tensors that say again what the config or another tensor says. Raises WeightsError naming one that differs."""
    entries = matched.entries
    stated = model.weight_map.stated_in(entries)
    for name, tensor in read_tensors({name: entries[name] for name in stated}):
        if not _is_close(tensor.flatten().tolist(), stated[name]):
            raise WeightsError(
                f"{name} in {entries[name].file.name} holds other numbers than config.json gives; take both from the same release"
            )
    for name, (original, remedy) in model.weight_map.copies_in(entries, matched.pieces).items():
        if original not in entries or not _is_copy(name, original, entries):
            raise WeightsError(f"{name} in {entries[name].file.name} differs from {original}, which it must repeat: {remedy}")


def _is_close(found: Sequence[float], wanted: Sequence[float]) -> bool:
    """Whether whole numbers are equal, and others as far as 16 bits go."""
    return len(found) == len(wanted) and all(
        a == b if isinstance(b, int) else math.isclose(a, b, rel_tol=2**-7) for a, b in zip(found, wanted, strict=True)
    )


def _is_copy(name: str, original: str, entries: Mapping[str, TensorEntry]) -> bool:
    """Whether two tensors are equal, byte for byte."""
    a, b = entries[name], entries[original]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    tensors = dict(read_tensors({name: a, original: b}))
    return torch.equal(tensors[name].flatten().view(torch.uint8), tensors[original].flatten().view(torch.uint8))


def load_dummy(model: CausalLM, device: torch.device, *, seed: int, progress: Progress | None = None) -> LoadReport:
    """Fill a laid-out model with random weights of its real shapes."""
    weights, made, on_host = DummyWeights(model, device, seed), {}, host_parameters(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    done = 0
    for name, parameter in model.named_parameters():
        tensor = weights.make(name, parameter)
        made[name] = tensor.cpu() if name in on_host else tensor
        done += parameter.numel()
        if progress is not None:
            progress(done / total)
    _install(model, made)
    return _report(model, num_tensors=0, mapped_nbytes=0)


def _place(tensor: Tensor, piece: Piece, parameter: Tensor, device: torch.device, made: dict[str, Tensor]) -> int:
    """Put a tensor read from disk where `piece` says. Returns how many bytes of the mapped file the parameter now uses."""
    part = piece.layout.arrange(tensor, piece.shape)
    if piece.index == () and tensor.dtype == parameter.dtype and device.type == "cpu":
        made[piece.parameter] = part
        return part.nbytes if part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() else 0
    if piece.parameter not in made:
        made[piece.parameter] = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    made[piece.parameter][piece.index].copy_(part)
    return 0


def _install(model: CausalLM, made: Mapping[str, Tensor]) -> None:
    """Give a laid-out model its parameters. One that several modules share (Zamba2's blocks) stays shared."""
    filled = {id(parameter): nn.Parameter(made[name], requires_grad=False) for name, parameter in model.named_parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, filled[id(parameter)])


def _report(model: CausalLM, *, num_tensors: int, mapped_nbytes: int) -> LoadReport:
    parameters = list(model.parameters())
    return LoadReport(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_tensors=num_tensors,
        weights_nbytes=sum(parameter.nbytes for parameter in parameters),
        mapped_nbytes=mapped_nbytes,
    )
