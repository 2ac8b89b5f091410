"""The model that a config describes, laid out without memory, and its layers in the report's words.

Owns nothing of any architecture: it asks the table of architectures, and describes layers by their specs alone. Called by
`checker.py`.
"""

import msgspec
import torch

from hybridserve.backends.select import select
from hybridserve.check.report import CacheTensor, Finding, LayerRun, passed
from hybridserve.check.source import Source
from hybridserve.config import EngineSettings
from hybridserve.kv.spec import PagedSpec, Spec
from hybridserve.models import CausalLM, architectures, build_model, format_layer_plan
from hybridserve.models.architectures import architecture_of

#: Short names, for lines that people read.
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def lay_out(source: Source, settings: EngineSettings) -> CausalLM:
    """The model on the device "meta". Raises UnsupportedModelError naming the architecture or the key."""
    dtype = source.folder.dtype(settings.dtype)
    # Shapes do not depend on the backend, and the reference is always there.
    ops = select(torch.device("cpu"), dtype, ["reference"]).ops
    return build_model(source.folder.config, ops, dtype, ignore_keys=settings.ignore_config_keys)


def is_served(source: Source) -> bool:
    """Whether the architecture's name is in the table. Raises UnsupportedModelError when the config names none."""
    return architecture_of(source.folder.config) in architectures


def check_architecture(source: Source) -> Finding:
    """Which class serves it."""
    name = architecture_of(source.folder.config)
    return passed("architecture", f"{name}, served by {architectures[name].__module__}")


def check_config(source: Source, settings: EngineSettings) -> Finding:
    """That every key was read: those that change the mathematics are implemented."""
    accepted = settings.ignore_config_keys
    note = f", {', '.join(accepted)} unread as told" if accepted else ""
    return passed("config", f"all {len(source.folder.config)} keys are understood{note}")


def layer_runs(model: CausalLM) -> list[LayerRun]:
    """Layers of one kind and with the same caches, in the order of their first layer."""
    members: dict[tuple[str, tuple[tuple[str, Spec], ...]], list[int]] = {}
    for index, (kind, specs) in enumerate(zip(model.layer_kinds(), model.cache_specs(), strict=True)):
        members.setdefault((kind, tuple(specs.items())), []).append(index)
    return [
        LayerRun(
            layers=_ranges(indices, len(model.layers)),
            num_layers=len(indices),
            kind=kind,
            mixers=_configurations(model, indices[0]),
            caches=[tensor for name, spec in specs for tensor in _describe(name, spec)],
        )
        for (kind, specs), indices in members.items()
    ]


def check_layers(runs: list[LayerRun]) -> list[Finding]:
    """One line for each run."""
    return [passed("layers", f"{run.layers}: {run.kind}  {'; '.join(map(_text, run.caches)) or 'keeps nothing'}") for run in runs]


def _configurations(model: CausalLM, index: int) -> dict[str, dict[str, object]]:
    mixers = model.layers[index].mixers
    return {kind: _plain(msgspec.to_builtins(branch.mixer.config)) for kind, branch in mixers.items()}


def _plain(config: dict[str, object]) -> dict[str, object]:
    """A configuration without what JSON has no word for (infinity)."""
    return {key: value if msgspec.json.decode(msgspec.json.encode(value)) is not None else None for key, value in config.items()}


def _describe(name: str, spec: Spec) -> list[CacheTensor]:
    paged = spec if isinstance(spec, PagedSpec) else None
    return [
        CacheTensor(
            cache=name,
            kind="state" if paged is None else "paged",
            name=tensor.name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            tokens_per_entry=None if paged is None else paged.tokens_per_entry,
            window=None if paged is None else paged.window,
        )
        for tensor in spec.tensors
    ]


def _text(tensor: CacheTensor) -> str:
    text = f"{tensor.name} {'x'.join(map(str, tensor.shape))} {SHORT_DTYPES.get(tensor.dtype, tensor.dtype)}"
    if tensor.kind == "paged":
        text += " a token" if tensor.tokens_per_entry == 1 else f" every {tensor.tokens_per_entry} tokens"
    return text if tensor.window is None else f"{text}, window {tensor.window}"


def _ranges(indices: list[int], num_layers: int) -> str:
    """`0-2,4-6` of indices."""
    marks = ["x" if index in set(indices) else "-" for index in range(num_layers)]
    plan = format_layer_plan(marks)
    return next(part.removesuffix(": x") for part in plan.split("  ") if part.endswith(": x"))
