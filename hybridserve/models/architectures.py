"""The table of architectures, and building a model from a config.

Owns the table, the choice by the config's `architectures`, and the refusal of what is not in it. Must not know any architecture
itself: their files register themselves. Called by `loader.py` and `check-model`.
"""

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

import torch

from hybridserve.backends.ops import Ops
from hybridserve.errors import ModelError, UnsupportedModelError
from hybridserve.models.decoder import CausalLM
from hybridserve.models.quantisation import read_quantisation
from hybridserve.models.reader import ConfigReader, Fault, refusal
from hybridserve.registry import Registry

#: Lays out a model: reads the config, makes mixers, MLPs and the weight map. Parameters have no memory yet.
Builder: TypeAlias = Callable[[ConfigReader, Ops, torch.dtype], CausalLM]

#: Architectures by the class name that a config.json states. A plug-in adds one with an entry point or ``--plugin``.
architectures: Registry[Builder] = Registry("architecture", group="hybridserve.models")


def architecture_of(config: Mapping[str, object]) -> str:
    """The one class name that the config states. Raises UnsupportedModelError if there is none, or more."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UnsupportedModelError(
            f"config.json: architectures is {names!r:.200}; it must name one class, such as {architectures.names()[0]!r}. "
            "model_type alone does not tell which mathematics the weights were trained with"
        )
    return names[0]


def build_model(config: Mapping[str, object], ops: Ops, dtype: torch.dtype, *, ignore_keys: Collection[str] = ()) -> CausalLM:
    """Lay out the model that a config.json describes, without memory for its parameters (on the device "meta").

    `ignore_keys` are dotted config keys to accept unread. Raises UnsupportedModelError naming the architecture or the key.
    """
    name = architecture_of(config)
    if name not in architectures:
        raise UnsupportedModelError(_refusal(name, config, ops, dtype))
    return _build(name, config, ops, dtype, ignore_keys)


def _build(name: str, config: Mapping[str, object], ops: Ops, dtype: torch.dtype, ignore_keys: Collection[str]) -> CausalLM:
    faults: list[Fault] = []
    reader = ConfigReader(config, architecture=name, accepted=ignore_keys, faults=faults)
    try:
        with torch.device("meta"):
            model = architectures[name](reader, ops, dtype)
    except Exception as error:
        # What is not implemented says more than what laying out stumbled over because of it.
        if faults:
            raise refusal(faults, str(error) if isinstance(error, ModelError) else "") from error
        # What torch says of impossible shapes; the one that it says of missing kernels is somebody else's matter.
        if isinstance(error, ArithmeticError | RuntimeError) and not isinstance(error, NotImplementedError):
            raise UnsupportedModelError(
                f"config.json: no {name} can have these values: {error}; take the file that was published with the weights"
            ) from error
        if isinstance(error, UnsupportedModelError) and not str(error).startswith("config.json"):
            raise UnsupportedModelError(f"config.json: {error}{_origin(str(error), reader)}") from error
        raise
    reader.finish()
    model.quantisation = read_quantisation(config, architecture=name, ignore_keys=ignore_keys)
    return model.requires_grad_(False).eval()


def _origin(text: str, reader: ConfigReader) -> str:
    """Which keys hold the numbers that a layer's refusal speaks of: it knows its own names only."""
    numbers = {float(one) for one in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", text)}
    keys = [f"{key} is {value}" for key, value in reader.numbers().items() if value in numbers]
    return f" ({', '.join(keys)})" if keys else ""


def _refusal(name: str, config: Mapping[str, object], ops: Ops, dtype: torch.dtype) -> str:
    """Why an architecture is not served: the nearest one that is, and what stands between."""
    nearest = _nearest(name, config.get("model_type"))
    try:
        _build(nearest, config, ops, dtype, ())
    except ModelError as error:
        differs = str(error).partition(". To serve it unread")[0]
    else:
        differs = "its config reads the same, but weights of another class are not taken on trust"
    own_code = "Its own code (auto_map) is never run. " if config.get("auto_map") is not None else ""
    return (
        f"architecture {name!r} is none of the {len(architectures.names())} that are implemented, which docs/models.md lists. "
        f"The nearest is {nearest!r}; what differs: {differs}. {own_code}"
        "A plug-in can add it, with an entry point in 'hybridserve.models' or --plugin FILE.py"
    )


def _nearest(name: str, model_type: object) -> str:
    """The architecture that is called most alike, or as the config's `model_type`: releases often keep that of a relative."""
    wanted = {_stem(name), _stem(str(model_type).removesuffix("_text"))}
    return max(
        architectures.loaded(), key=lambda one: max(difflib.SequenceMatcher(None, _stem(one), each).ratio() for each in wanted)
    )


def _stem(name: str) -> str:
    """What is particular in a name: without its task, case and underscores."""
    return name.partition("For")[0].replace("_", "").lower()
