"""From what the user named to a model with weights on its device.

Owns the order: find the files, read the config, lay out the model, check every tensor's name and shape, and only then read data.
Must not know any architecture. Called by the engine at start and by `check-model`.
"""

from collections.abc import Callable, Mapping
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
from hybridserve.models.shards import TensorEntry, read_entries, read_tensors
from hybridserve.models.source import ModelFolder, resolve
from hybridserve.models.weights import Piece

#: Told how much of the weights is loaded, from 0 to 1.
Progress: TypeAlias = Callable[[float], None]

_FLOAT_DTYPES = {"F64", "F32", "F16", "BF16"}


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


def plan_weights(model: CausalLM, folder: ModelFolder) -> tuple[list[Piece], dict[str, TensorEntry]]:
    """Match a folder's tensors with a model's parameters, from headers alone. Raises WeightsError naming what does not fit."""
    entries = read_entries(folder.path)
    return match_weights(model, entries), entries


def match_weights(model: CausalLM, entries: Mapping[str, TensorEntry]) -> list[Piece]:
    """Match tensors on disk with a model's parameters. Raises WeightsError naming what does not fit."""
    pieces = model.weight_map.plan(
        {name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        {name: entry.shape for name, entry in entries.items()},
    )
    for piece in pieces:
        entry = entries[piece.tensor]
        if entry.dtype not in _FLOAT_DTYPES:
            raise WeightsError(
                f"{piece.tensor} in {entry.file.name} has dtype {entry.dtype}; only float weights of 16 bits and more can be "
                "loaded: take the release that is not quantised"
            )
    return pieces


def load_weights(model: CausalLM, folder: ModelFolder, device: torch.device, *, progress: Progress | None = None) -> LoadReport:
    """Fill a laid-out model from safetensors files.

    On the CPU a tensor that is used as it lies on disk stays a view of the mapped file. Raises WeightsError, before any
    data is read.
    """
    pieces, entries = plan_weights(model, folder)
    _check_stated(model, entries)
    wanted, on_host = dict(model.named_parameters()), host_parameters(model)
    by_tensor: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_tensor.setdefault(piece.tensor, []).append(piece)
    used = {name: entries[name] for name in by_tensor}
    total, done, mapped = sum(entry.nbytes for entry in used.values()), 0, 0
    made: dict[str, Tensor] = {}
    for name, tensor in read_tensors(used):
        for piece in by_tensor[name]:
            parameter = wanted[piece.parameter]
            if piece.parameter in on_host:
                # In the dtype of the file: converting would read all of it.
                mapped += _place(tensor, piece, parameter.to(tensor.dtype), torch.device("cpu"), made)
            else:
                mapped += _place(tensor, piece, parameter, device, made)
        done += entries[name].nbytes
        if progress is not None:
            progress(done / total if total else 1.0)
    _install(model, made)
    return _report(model, num_tensors=len(used), mapped_nbytes=mapped)


def host_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that stay in host memory whatever the device is."""
    tables = {name for name, module in model.named_modules() if isinstance(module, HostTable)}
    return {name for name, _ in model.named_parameters() if name.partition(".parts.")[0] in tables}


def _check_stated(model: CausalLM, entries: Mapping[str, TensorEntry]) -> None:
    """Compare the tensors whose values follow from the config. Raises WeightsError naming the first that differs."""
    stated = model.weight_map.stated_in(entries)
    for name, tensor in read_tensors({name: entries[name] for name in stated}):
        if tuple(tensor.flatten().tolist()) != stated[name]:
            raise WeightsError(
                f"{name} in {entries[name].file.name} holds other numbers than config.json gives; take both from the same release"
            )


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
