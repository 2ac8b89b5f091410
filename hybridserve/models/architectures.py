"""The table of architectures, and building a model from a config.

Owns the table, the choice by the config's `architectures`, and the refusal of what is not in it. Must not know any architecture
itself: their files register themselves. Called by `loader.py` and `check-model`.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import torch

from hybridserve.backends.ops import Ops
from hybridserve.errors import ModelError, UnsupportedModelError
from hybridserve.models.decoder import CausalLM
from hybridserve.models.quantisation import read_quantisation
from hybridserve.models.reader import ConfigReader, Fault, refusal
from hybridserve.models.relatives import inner_config, nearest_of
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
    """Why an architecture is not served: what it wraps, the nearest one that is, and what stands between."""
    wrapped = inner_config(config)
    where, inner = ("", config) if wrapped is None else wrapped
    own_code = "Its own code (auto_map) is never run. " if config.get("auto_map") is not None else ""
    stated = inner.get("architectures")
    names = [*(stated if isinstance(stated, list) else []), inner.get("model_type"), name, config.get("model_type")]
    return (
        f"architecture {name!r} is none of the {len(architectures.names())} that are implemented, which docs/models.md lists. "
        f"{_inside(where, inner)}{_next_to(names, inner, ops, dtype)} {own_code}"
        "A plug-in can add it, with an entry point in 'hybridserve.models' or --plugin FILE.py"
    )


def _inside(where: str, inner: Mapping[str, object]) -> str:
    """What a wrapper holds; empty for a config that wraps nothing."""
    if not where:
        return ""
    stated = inner.get("architectures")
    kind = stated[0] if isinstance(stated, list) and stated else inner.get("model_type")
    alone = (
        f", which is implemented where a release has it alone, with {where} as its config.json"
        if isinstance(kind, str) and kind in architectures
        else ""
    )
    return f"It wraps the language model in {where}, {kind!r:.80}{alone}. "


def _next_to(names: Sequence[object], config: Mapping[str, object], ops: Ops, dtype: torch.dtype) -> str:
    """The nearest architecture and what differs, by reading the config as one of it."""
    nearest = next((one for one in names if isinstance(one, str) and one in architectures), None)
    nearest = nearest or nearest_of(names, architectures.loaded())
    if nearest is None:
        return "None of them is known to be near to it."
    try:
        _build(nearest, config, ops, dtype, ())
    except ModelError as error:
        differs = str(error).partition(". To serve it unread")[0].partition("; take the config.json that was published")[0]
    else:
        differs = "the code of the class, for its config shows nothing; weights of another class are not taken on trust"
    return f"The nearest is {nearest!r}; what differs: {differs}."
