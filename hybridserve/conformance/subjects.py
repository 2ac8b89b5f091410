"""The layers that a user names: built-in kinds, kinds of plug-ins, and classes in a file.

Owns how names, configs and oracles are found and what is said when they are not. Called by the command and the pytest plug-in.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import msgspec
import torch

from hybridserve.backends.select import select
from hybridserve.conformance.cases import CASES, HIDDEN
from hybridserve.conformance.conduct import Oracle
from hybridserve.conformance.filling import fill
from hybridserve.errors import UsageError
from hybridserve.mixers.base import Mixer, MixerConfig, mixers
from hybridserve.registry import load_plugin


@dataclass(frozen=True)
class Subject:
    """One layer under test: a class, a config for it, and its independent form, if there is any."""

    name: str
    layer: type[Mixer]
    config: MixerConfig
    oracle: Oracle | None

    def build(self) -> Mixer:
        """The layer in fp32 on the reference operations, its parameters filled."""
        ops = select(torch.device("cpu"), torch.float32, ["reference"]).ops
        return fill(self.layer(self.config, ops, torch.float32)).eval()


def find_subjects(target: str, config: str | None = None, oracle: str | None = None) -> list[Subject]:
    """The layers that `target` names: a kind, or `file.py:Class`.

    `config` is JSON, or the path of a JSON file; without it a built-in kind is checked in all its cases. `oracle` is
    `file.py:function` or `module:function`. Raises UsageError, or what a plug-in raises.
    """
    layer = _layer_in_file(target) if _names_a_file(target) else mixers[target]
    function = None if oracle is None else _find_oracle(oracle)
    cases = CASES.get(target, ())
    if config is None and cases:
        return [Subject(f"{target}: {case.name}", layer, case.config, function or case.oracle) for case in cases]
    known = cases[0].oracle if cases else None
    return [Subject(target, layer, read_config(layer, _read_json(config)), function or known)]


def _names_a_file(target: str) -> bool:
    return target.partition(":")[0].endswith(".py")


def _layer_in_file(target: str) -> type[Mixer]:
    path, _, name = target.partition(":")
    module = load_plugin(path)
    found = {
        key: item
        for key, item in vars(module).items()
        if isinstance(item, type) and issubclass(item, Mixer) and item.__module__ == module.__name__
    }
    if not name and len(found) == 1:
        return next(iter(found.values()))
    if name not in found:
        wanted = f"no layer called {name!r}" if name else "no one layer to be meant"
        raise UsageError(f"{path} has {wanted}; it has {', '.join(found) or 'none'}; give {path}:CLASS")
    return found[name]


def _find_oracle(target: str) -> Oracle:
    path, _, name = target.partition(":")
    if not path or not name:
        raise UsageError(f"--oracle {target}: it must name a function; give FILE.py:FUNCTION, or MODULE:FUNCTION")
    module = load_plugin(path) if _names_a_file(target) else _module(path, target)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"--oracle {target}: {path} has no function called {name!r}; give FILE.py:FUNCTION, or MODULE:FUNCTION")

    def oracle(mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
        y = function(mixer, x)
        if not isinstance(y, torch.Tensor):
            raise UsageError(f"--oracle {target} returned {type(y).__name__}; it must return a tensor of the shape of its input")
        return y

    return oracle


def _module(name: str, target: str) -> ModuleType:
    """An installed module. A layer that pip installed has its oracle there, where its file is imported once, not twice."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UsageError(
            f"--oracle {target}: module {name!r} cannot be imported: {type(error).__name__}: {error}; "
            "install it, or give FILE.py:FUNCTION"
        ) from error


def _read_json(config: str | None) -> Mapping[str, object]:
    if config is None:
        return {"hidden_size": HIDDEN}
    try:
        text = config if config.lstrip().startswith("{") else Path(config).read_text(encoding="utf-8")
        return msgspec.json.decode(text, type=dict[str, object])
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise UsageError(f"--config {config!r}: {error}; give JSON, or the path of a JSON file") from error


def read_config(layer: type[Mixer], fields: Mapping[str, object]) -> MixerConfig:
    """A layer's config. Raises UsageError that names what it may hold."""
    if not isinstance(getattr(layer, "Config", None), type):
        raise UsageError(
            f"{layer.__name__} has no Config; give it one, a subclass of MixerConfig with the fields it is built from"
        )
    try:
        return msgspec.convert(fields, layer.Config)
    except msgspec.ValidationError as error:
        known = ", ".join(f"{field.name}{'' if field.required else '?'}" for field in msgspec.structs.fields(layer.Config))
        raise UsageError(
            f"{layer.Config.__name__} cannot be made of {dict(fields)}: {error}; give --config JSON with the fields {known}"
        ) from error
