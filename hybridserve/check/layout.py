"""The model that a config describes, laid out without memory, and its layers in the report's words.

Owns nothing of any architecture: it asks the table of architectures, and describes layers by their specs alone. Called by
`checker.py`.
"""

import torch

from hybridserve.backends.select import select
from hybridserve.check.deferral import load_waiting
from hybridserve.check.report import CacheTensor, Finding, LayerRun, passed, warned
from hybridserve.check.source import Source
from hybridserve.check.uses import operations_of
from hybridserve.config import EngineSettings
from hybridserve.kv.arena import CachePlan, GroupPlan, TensorPlace
from hybridserve.models import CausalLM, architectures, build_model, format_layer_plan
from hybridserve.models.architectures import architecture_of

#: Short names, for lines that people read.
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def lay_out(source: Source, settings: EngineSettings) -> CausalLM:
    """The model on the device "meta". Raises UnsupportedModelError naming the architecture or the key."""
    dtype = source.folder.dtype(settings.dtype)
    # Shapes do not depend on the backend, and the reference is always there.
    ops = select(torch.device("cpu"), dtype, ["reference"]).ops
    try:
        return build_model(source.folder.config, ops, dtype, ignore_keys=settings.ignore_config_keys)
    except NotImplementedError:  # a layer of somebody's that computes with its parameters where they have no values
        if not load_waiting():
            raise
        return build_model(source.folder.config, ops, dtype, ignore_keys=settings.ignore_config_keys)


def is_served(source: Source) -> bool:
    """Whether the architecture's name is in the table. Raises UnsupportedModelError when the config names none."""
    return architecture_of(source.folder.config) in architectures


def check_architecture(source: Source) -> Finding:
    """Which class serves it."""
    name = architecture_of(source.folder.config)
    return passed("architecture", f"{name}, served by {architectures[name].__module__}")


def check_config(source: Source, settings: EngineSettings) -> list[Finding]:
    """That every key was read: those that change the mathematics are implemented."""
    config, asked = source.folder.config, settings.ignore_config_keys
    accepted = [key for key in asked if _has(config, key)]
    if accepted:
        findings = [
            warned(
                "config",
                f"{', '.join(accepted)} unread as told: the model may compute something else than what was trained",
                "compare its answers with those of the published code",
            )
        ]
    else:
        findings = [passed("config", f"all {len(config)} keys are understood")]
    absent = [key for key in asked if key not in accepted]
    if absent:
        findings.append(
            warned("config", f"--ignore-config-keys {absent[0]}: there is no such key", "leave it out, or give its whole path")
        )
    return findings


def _has(config: object, path: str) -> bool:
    """Whether a config has a key, given with dots between those that lead to it."""
    head, _, rest = path.partition(".")
    if not isinstance(config, dict) or head not in config:
        return False
    return not rest or _has(config[head], rest)


def layer_runs(model: CausalLM, plan: CachePlan) -> list[LayerRun]:
    """Layers of one kind and with the same caches, in the order of their first layer. plan: any plan of this model."""
    kinds = model.layer_kinds()
    caches: list[list[CacheTensor]] = [[] for _ in kinds]
    for group in plan.groups:
        for place in group.places:
            caches[place.layer].append(_describe(group, place))
    members: dict[tuple[str, tuple[CacheTensor, ...]], list[int]] = {}
    for index, kind in enumerate(kinds):
        members.setdefault((kind, tuple(caches[index])), []).append(index)
    return [
        LayerRun(
            layers=_ranges(indices, len(kinds)),
            num_layers=len(indices),
            kind=kind,
            caches=list(tensors),
            operations=operations_of(model.layers[index] for index in indices),
        )
        for (kind, tensors), indices in members.items()
    ]


def check_layers(runs: list[LayerRun]) -> list[Finding]:
    """One line for each run."""
    return [passed("layers", f"{run.layers}: {run.kind}  {', '.join(map(_text, run.caches)) or 'keeps nothing'}") for run in runs]


def _describe(group: GroupPlan, place: TensorPlace) -> CacheTensor:
    if not group.is_paged:
        return CacheTensor(cache=place.spec_name, kind="state", name=place.tensor_name, shape=place.shape, dtype=place.dtype)
    return CacheTensor(
        cache=place.spec_name,
        kind="paged",
        name=place.tensor_name,
        shape=place.shape[1:],
        dtype=place.dtype,
        tokens_per_entry=group.block_size // place.shape[0],
        window=group.window,
    )


def _text(tensor: CacheTensor) -> str:
    text = f"{tensor.name} {'x'.join(map(str, tensor.shape))} {SHORT_DTYPES.get(tensor.dtype, tensor.dtype)}"
    if tensor.kind == "paged":
        text += " a token" if tensor.tokens_per_entry == 1 else f" every {tensor.tokens_per_entry} tokens"
    return text if tensor.window is None else f"{text} within {tensor.window}"


def _ranges(indices: list[int], num_layers: int) -> str:
    """`0-2,4-6` of indices."""
    chosen = set(indices)
    plan = format_layer_plan(["x" if index in chosen else "-" for index in range(num_layers)])
    return next(part.removesuffix(": x") for part in plan.split("  ") if part.endswith(": x"))
