"""Walks the keys of configs: what a changed, added, removed or null key does here and in transformers.

Owns which variants of a tiny model's config there are, and how one is judged: the same logits as transformers with the same
weights, or refused by the key's name. Keys are those of every config class and every key that any reader of ours asks for. Used
by `test_config_walk.py`; `python -m tests.config_walk NAME... --out FILE` walks whole bases and writes every outcome.
"""

import argparse
import copy
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias
from unittest.mock import patch

import torch
import transformers as tf
from torch import Tensor

from hybridserve.backends.select import select
from hybridserve.errors import ModelError, UnsupportedModelError
from hybridserve.models import CausalLM, build_model, load_weights, reader, resolve
from hybridserve.models.config_keys import HARMLESS_KEYS, NEUTRAL, Family
from tests.checkpoints import TINY, VOCAB_SIZE, fill, read_config, released_config, rewrite_config, save
from tests.driver import Driver

Config: TypeAlias = dict[str, object]
Path_: TypeAlias = tuple[str, ...]
CPU = torch.device("cpu")
OPS = select(CPU, torch.float32, ["reference"]).ops
#: Longer than every window and index budget of the tiny models, and no multiple of a group.
NUM_TOKENS = 30
#: Of the largest logit. Other orders of summing come to 1e-5; keys that matter to 1e-2 and more.
TOLERANCE = 1e-3
#: Of a variant; defaults of some classes are those of a large release.
MAX_PARAMETERS = 40_000_000
#: What they say is not mathematics: identity, the type of the numbers, and how weights are stored.
NOT_WALKED = frozenset({
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "quantization_config", "auto_map",
    "vision_config", "audio_config", "id2label", "label2id",
})  # fmt: skip


class _Removed:
    def __repr__(self) -> str:
        return "(removed)"


REMOVED = _Removed()


@dataclass(frozen=True)
class Variant:
    """One config: a base with some keys set to other values."""

    base: str
    changes: tuple[tuple[Path_, object], ...]

    def __str__(self) -> str:
        return f"{self.base}: " + ", ".join(f"{'.'.join(path)}={value!r:.80}" for path, value in self.changes)

    def config(self) -> Config:
        """The whole config."""
        config = copy.deepcopy(base_config(self.base))
        for path, value in self.changes:
            at = config
            for key in path[:-1]:
                inner = at.setdefault(key, {})
                if not isinstance(inner, dict):
                    inner = at[key] = {}
                at = inner
            if value is REMOVED:
                at.pop(path[-1], None)
            else:
                at[path[-1]] = copy.deepcopy(value)
        return config


@dataclass(frozen=True)
class Outcome:
    """What came of a variant: `kind` is equal, refused, incomparable (transformers cannot compute it), or what is wrong."""

    variant: Variant
    kind: str
    detail: str = ""

    @property
    def is_good(self) -> bool:
        return self.kind in ("equal", "refused", "incomparable")


# --- bases ---


def bases() -> list[str]:
    """Every tiny model as transformers saves it, and in the keys of before transformers 5 where those differ."""
    return [name for one in TINY for name in (one, f"{one}/released")]


@cache
def _saved(name: str) -> tuple[Config, Config]:
    """The config of a tiny model as it is saved, and with every key of its class."""
    with torch.device("meta"):
        model = TINY[name]()
    model.config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        saved = read_config(Path(folder))
    return saved, json.loads(json.dumps(model.config.to_dict()))


@cache
def base_config(name: str) -> Config:
    tiny, _, spelling = name.partition("/")
    saved, _ = _saved(tiny)
    return released_config(saved) if spelling else saved


def model_class(name: str) -> type[tf.PreTrainedModel]:
    (architecture,) = base_config(name)["architectures"]  # type: ignore[misc]
    return getattr(tf, architecture)  # type: ignore[no-any-return]


def _sections(config: Mapping[str, object]) -> list[Path_]:
    """Where keys are: the top, and a wrapper's text model."""
    return [(), *([("text_config",)] if isinstance(config.get("text_config"), dict) else [])]


def _at(config: Mapping[str, object], path: Path_) -> Config:
    found: object = config
    for key in path:
        assert isinstance(found, dict)
        found = found[key]
    assert isinstance(found, dict)
    return found


@cache
def asked_keys(base: str) -> tuple[frozenset[str], frozenset[str], Family]:
    """The keys whose values a reader asks for on a base, those that it ignores whatever they hold, and what its file declares."""
    asked: set[str] = set()
    readers: list[reader.ConfigReader] = []

    class Recording(dict[str, object]):
        def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
            asked.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            asked.add(str(key))
            return super().__contains__(key)

    start = reader.ConfigReader.__init__

    def record(self: reader.ConfigReader, values: Mapping[str, object], **rest: object) -> None:
        start(self, Recording(values), **rest)  # type: ignore[arg-type]
        readers.append(self)

    with patch.object(reader.ConfigReader, "__init__", record), tempfile.TemporaryDirectory() as folder:
        rewrite_config(Path(folder), base_config(base))
        lay_out(Path(folder))
    ignored = frozenset(key for one in readers for key in one._seen).difference(asked)
    return frozenset(asked), ignored, readers[0].family


@cache
def known_values() -> dict[str, list[object]]:
    """Every key of every class and reader, with the values that it has in any base or class."""
    found: dict[str, list[object]] = {key: [] for key in HARMLESS_KEYS}
    for base in bases():
        asked, ignored, family = asked_keys(base)
        found |= {key: [] for keys in (asked, ignored, family.unused, family.same) for key in keys if key not in found}
        for key, values in (*NEUTRAL.items(), *family.stated.items()):
            known = found.setdefault(key, [])
            known += [value for value in values if value not in known]
    for name in TINY:
        for config in (*_saved(name), base_config(f"{name}/released")):
            for section in _sections(config):
                for key, value in _at(config, section).items():
                    values = found.setdefault(key, [])
                    if value is not None and not isinstance(value, dict) and value not in values:
                        values.append(value)
    return {key: values for key, values in sorted(found.items()) if key not in NOT_WALKED and key != "text_config"}


# --- variants ---

_ACTIVATIONS = ("silu", "gelu", "relu", "gelu_pytorch_tanh")
_ROPE_VALUES: Mapping[str, tuple[object, ...]] = {
    "rope_type": ("default", "linear", "yarn", "dynamic", "other"),
    "type": ("default", "linear"),
    "rope_theta": (333.0, 0.5),
    "partial_rotary_factor": (0.5, 0.25, 1.0),
    "factor": (3.0,),
    "attention_factor": (1.7,),
    "beta_fast": (7.0,),
    "beta_slow": (3.0,),
    "mscale": (0.6,),
    "mscale_all_dim": (0.7,),
    "original_max_position_embeddings": (8,),
    "low_freq_factor": (2.0,),
    "high_freq_factor": (9.0,),
    "mrope_section": ([1, 1, 2],),
    "mrope_interleaved": (True, False),
    "llama_4_scaling_beta": (0.3,),
}
_LINEAR = {"rope_type": "linear", "factor": 3.0}
_YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32}


def others(key: str, value: object) -> list[object]:
    """Plausible other values of a key."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value or 2, value // 2, value + 1, 0]
    if isinstance(value, float):
        return [3 * value + 0.1, 0.0, 1.0]
    if isinstance(value, str):
        return [*_ACTIVATIONS] if "act" in key else [*known_values().get(key, ()), "other"]
    if isinstance(value, list):
        moved = value[1:] + value[:1]
        return [moved, value[:-1], [], *([[one + 1 for one in value]] if all(type(one) is int for one in value) else [])]
    return []


def _added(base: str, key: str) -> list[object]:
    """Values of a key that the base has not: one if no reader of its architecture knows it, some if one does."""
    values = known_values().get(key, [])
    if key not in asked_keys(base)[0]:
        return [True, False] if True in values or False in values else values[:1] or [True]
    return values[:2] + [other for value in values[:1] for other in others(key, value)[:2]] or [True, False, 2, 0.5, "other"]


def _distinct(values: Iterable[object], besides: object) -> list[object]:
    found: list[object] = []
    for value in values:
        if not any(value == one and type(value) is type(one) for one in (*found, besides)):
            found.append(value)
    return found


def variants(base: str) -> list[Variant]:
    """All of a base, in a fixed order; of one in older keys, those that it does not share with today's."""
    config = base_config(base)
    found = []
    for section in _sections(config):
        values = _at(config, section)
        saved = _at(base_config(base.removesuffix("/released")), section) if base.endswith("/released") else None
        absent = [key for key in known_values() if key not in values] if _is_first(base) else []
        for key in (*values, *absent):
            if key in NOT_WALKED or key == "text_config" or (saved is not None and saved.get(key) == values[key]):
                continue
            path = (*section, key)
            found += [Variant(base, ((path, value),)) for value in _values(base, key, values)]
            if isinstance(values.get(key), dict):
                found += _nested(base, path, _at(config, path))
        if saved is None:
            found += [Variant(base, changes) for changes in _rotary(section)]
    return found


def _is_first(base: str) -> bool:
    """Whether no base before it has the same class: keys that a base has not are added to one of each class."""
    return next(one for one in bases() if base_config(one)["architectures"] == base_config(base)["architectures"]) == base


def _values(base: str, key: str, values: Mapping[str, object]) -> list[object]:
    if key not in values:
        return [*_distinct(_added(base, key), None), *([None] if key in asked_keys(base)[0] else [])]
    value = values[key]
    if isinstance(value, dict):
        return [{}, None, REMOVED]
    new = _distinct(known_values().get(key, [])[:3] + others(key, value) if value is None else others(key, value), value)
    return [*new, *([] if value is None else [None]), REMOVED]


def _nested(base: str, path: Path_, values: Config) -> Iterator[Variant]:
    """Of an object within: rotary parameters, by kind of layer or not, or a release's sizes."""
    inner = [key for key, value in values.items() if isinstance(value, dict)]
    for key in inner:
        yield from _nested(base, (*path, key), _at(values, (key,)))
        yield Variant(base, (((*path, key), REMOVED),))
        yield Variant(base, (((*path, key), None),))
    if inner:
        return
    for key, value in values.items():
        for one in (*_distinct((*_ROPE_VALUES.get(key, ()), *others(key, value)), value), None, REMOVED):
            yield Variant(base, (((*path, key), one),))
    if path[-1] != "linear_attn_config":
        for key, ones in _ROPE_VALUES.items():
            if key not in values:
                yield from (Variant(base, (((*path, key), one),)) for one in ones)


def _rotary(section: Path_) -> Iterator[tuple[tuple[Path_, object], ...]]:
    """Pairs of the keys that say together how heads are turned."""
    theta = {"rope_type": "default", "rope_theta": 5e3}
    whole: tuple[object, ...] = (REMOVED, None, {}, theta, {**theta, "rope_theta": None}, {**_LINEAR, "rope_theta": 5e3})
    beside: tuple[tuple[str, object], ...] = (
        ("rope_scaling", _LINEAR), ("rope_scaling", _YARN), ("rope_scaling", {**_LINEAR, "rope_theta": 77.0}),
        ("rope_theta", 5e2), ("partial_rotary_factor", 0.5), ("rope_scaling", None), ("rope_theta", None),
    )  # fmt: skip
    for parameters in whole:
        for key, value in beside:
            yield (((*section, "rope_parameters"), parameters), ((*section, key), value))


# --- judging ---


def lay_out(folder: Path) -> CausalLM:
    """The model of a folder's config.json, without weights. Raises ModelError."""
    return build_model(resolve(str(folder / "config.json"), load_format="dummy").config, OPS, torch.float32)


def reference_logits(variant: Variant, folder: Path, ids: Sequence[int]) -> Tensor | str:
    """Save the variant with random weights, as transformers does, and compute. Returns [ids, vocab], or why it cannot."""
    kind = model_class(variant.base)
    rewrite_config(folder, variant.config())
    try:
        if any(value is REMOVED or value is None or isinstance(value, int | dict) for _, value in variant.changes):
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(kind.config_class.from_pretrained(folder)).parameters())
            if size > MAX_PARAMETERS:
                return f"{size} parameters"
        torch.manual_seed(0)
        model = fill(kind(kind.config_class.from_pretrained(folder)))
        _save_once(variant, model, folder)
        with torch.no_grad():
            out = model(torch.tensor([list(ids)]), use_cache=False)
        logits = (out[0] if isinstance(out, tuple) else out.logits)[0]
    except Exception as error:  # whatever it is, there is nothing to compare with
        return f"{type(error).__name__}: {error}"
    return logits if logits.isfinite().all() else "its logits are not finite"


def _save_once(variant: Variant, model: tf.PreTrainedModel, folder: Path) -> None:
    """Save what was not saved last: most changes leave every tensor as it was."""
    parameters = model.named_parameters()
    parts = _at(variant.config(), _sections(variant.config())[-1]).get("split_ngram_parts")  # it tells how a table is cut
    shapes = (variant.base, parts, *((name, tuple(tensor.shape), float(tensor.detach().sum())) for name, tensor in parameters))
    note = folder / "saved.txt"
    if not note.exists() or note.read_text() != str(shapes):
        for path in folder.glob("*.safetensors"):
            path.unlink()
        save(model, folder)
        note.write_text(str(shapes))
    rewrite_config(folder, variant.config())


def refusal_of(variant: Variant, folder: Path) -> ModelError | None:
    """Why the layout of the variant is refused here, if it is."""
    rewrite_config(folder, variant.config())
    try:
        lay_out(folder)
    except ModelError as error:
        return error
    return None


def names_a_key(variant: Variant, error: ModelError) -> bool:
    """Whether a refusal names a key that the variant changed, or the object that it is in."""
    keys = {key for path, _ in variant.changes for key in path if key != "text_config"}
    return isinstance(error, UnsupportedModelError) and any(re.search(rf"\b{re.escape(key)}\b", str(error)) for key in keys)


def judge(variant: Variant, folder: Path) -> Outcome:
    """What came of a variant. `folder` is written to."""
    try:
        refused = refusal_of(variant, folder)
    except Exception as error:
        return Outcome(variant, "crashed", f"{type(error).__name__}: {error}")
    if refused is not None and names_a_key(variant, refused):
        return Outcome(variant, "refused", str(refused))
    ids = torch.randint(1, VOCAB_SIZE // 2, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference_logits(variant, folder, ids)
    if isinstance(expected, str):
        return Outcome(variant, "incomparable", expected)
    if refused is not None:
        return Outcome(variant, "refused without the key's name", str(refused))
    try:
        found = resolve(str(folder))
        model = build_model(found.config, OPS, torch.float32)
        load_weights(model, found, CPU)
        logits = Driver(model).step([("a", ids)])[0]
    except ModelError as error:
        if names_a_key(variant, error):
            return Outcome(variant, "refused", str(error))
        return Outcome(variant, "refused without the key's name", str(error))
    except Exception as error:
        return Outcome(variant, "crashed", f"{type(error).__name__}: {error}")
    difference = float((logits - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    if difference < TOLERANCE:
        return Outcome(variant, "equal", f"{difference:.1e}")
    return Outcome(variant, "differs", f"{difference:.2g} of the largest logit")


def is_unread(variant: Variant) -> bool:
    """Whether the variant only adds keys that are accepted whatever they hold."""
    unread = HARMLESS_KEYS | asked_keys(variant.base)[1]
    return len(variant.changes) == 1 and all(
        path[-1] in unread
        and path[:-1] in _sections(base_config(variant.base))
        and path[-1] not in _at(base_config(variant.base), path[:-1])
        for path, _ in variant.changes
    )


def walk(chosen: Sequence[Variant], folder: Path) -> Iterator[Outcome]:
    """Judge variants. Those that add keys without effect are judged together, and one by one only if that fails."""
    together: dict[str, list[Variant]] = {}
    for variant in chosen:
        if is_unread(variant):
            together.setdefault(variant.base, []).append(variant)
        else:
            yield judge(variant, folder)
    for group in together.values():
        yield from _judge_together(group, folder)


def _judge_together(group: Sequence[Variant], folder: Path) -> Iterator[Outcome]:
    if len(group) == 1:
        yield judge(group[0], folder)
        return
    merged = {path: value for variant in group for path, value in variant.changes}
    if len(merged) == len(group):
        outcome = judge(Variant(group[0].base, tuple(merged.items())), folder)
        if outcome.kind == "equal":
            yield from (Outcome(variant, "equal", outcome.detail) for variant in group)
            return
        half = len(group) // 2
        parts = [group[:half], group[half:]]
    else:  # several values of one key: one of each at a time
        rounds: dict[tuple[Path_, ...], list[Variant]] = {}
        for variant in group:
            rounds.setdefault(tuple(path for path, _ in variant.changes), []).append(variant)
        longest = max(len(values) for values in rounds.values())
        parts = [[values[i] for values in rounds.values() if i < len(values)] for i in range(longest)]
    for part in parts:
        if part:
            yield from _judge_together(part, folder)


def sample(base: str, fraction: float, seed: int) -> list[Variant]:
    """A seeded part of a base's variants."""
    found = variants(base)
    if fraction >= 1:
        return found
    return random.Random(f"{seed}/{base}").sample(found, round(len(found) * fraction))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bases", nargs="*", default=bases())
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    tf.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        for base in options.bases:
            for outcome in walk(sample(base, options.fraction, options.seed), Path(folder)):
                counts[outcome.kind] += 1
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.write(json.dumps([str(outcome.variant), outcome.kind, outcome.detail[:400]]) + "\n")
                elif not outcome.is_good:
                    print(f"{outcome.variant}: {outcome.kind}: {outcome.detail[:300]}", flush=True)
    print(dict(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
