"""Strict reading of a config.json: every key is read, expected, known to be harmless, or refused by name.

Owns the rules of reading and the wording of a refusal. Must not know any architecture. Called by the files of the
architectures; `architectures.py` calls `finish` once a model is laid out. The config is hostile input: sizes have bounds.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import isfinite, isnan
from typing import Final, TypeVar

import msgspec

from hybridserve.errors import UnsupportedModelError
from hybridserve.models.config_keys import HARMLESS_KEYS, Family

T = TypeVar("T")

_SHOWN = 12
_UNREAD = "To serve it unread, at your own risk:"
#: Of any whole number in a config; the longest contexts are far below.
MAX_INT = 2**48
MAX_SIZE = 2**24
MAX_LAYERS = 2048
#: Of any other number: what floats of 32 bits hold.
MAX_FLOAT = 3.4e38
#: Keys of numbers that divide, or that something is raised to: they must be over 0. So must every epsilon, which is at most 1.
_POSITIVE = frozenset({
    "logits_scaling", "query_pre_attn_scalar", "final_logit_softcapping", "swiglu_limit", "rope_theta", "rope_local_base_freq",
    "factor", "attention_factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "beta_fast", "beta_slow",
})  # fmt: skip
_LEAST = 1e-30
#: Of numbers that may be infinite: bounds that bind nothing.
_UNBOUNDED = ("time_step_limit",)


class _Required(Enum):
    TOKEN = auto()


REQUIRED: Final = _Required.TOKEN


@dataclass(frozen=True)
class Fault:
    """A key whose value is not implemented, and that in words; `more` are keys of the same fault."""

    key: str
    text: str
    more: tuple[str, ...] = ()


class ConfigReader:
    """One JSON object of a config, which remembers what has been read. `architecture` and `path` are for messages.

    With a list for `faults`, what `expect` finds is collected there, and refused by `finish` all at once.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        *,
        architecture: str,
        path: str = "",
        accepted: Collection[str] = (),
        faults: list[Fault] | None = None,
        family: Family | None = None,
    ) -> None:
        self.architecture = architecture
        self.family = family or Family()
        self._values = values
        self._path = path
        self._accepted = frozenset(accepted)
        self._faults = faults
        self._seen: set[str] = set()
        self._spellings: dict[str, tuple[str, ...]] = {}
        self._nested: list[ConfigReader] = []

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null. Does not count as reading it."""
        return self._values.get(self._spelled(key)) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key is there as null, for the few where that differs from its absence. Does not count as reading it."""
        key = self._spelled(key)
        return key in self._values and self._values[key] is None

    def read(self, key: str, kind: type[T], default: T | _Required = REQUIRED) -> T:
        """The value at `key`; null counts as absent, but turns off a flag that is on by default.

        Raises UnsupportedModelError if it is missing or of another type.
        """
        value = self._take(key)
        if value is None:
            if default is True and self.is_null(key):
                return False  # type: ignore[return-value]  # T is bool
            if default is REQUIRED:
                spellings = " or ".join(repr(self._full(one)) for one in self._spellings.get(key, (key,)))
                raise UnsupportedModelError(
                    f"config.json has no {spellings}, which {self.architecture} needs; "
                    "take the config.json that was published with the weights"
                )
            return default
        try:
            found = msgspec.convert(value, kind)
        except (msgspec.ValidationError, UnicodeError, OverflowError) as error:
            raise UnsupportedModelError(f"config.json: {self.name(key)} is {value!r:.200}: {error}; correct the file") from error
        _check_numbers(found, self.name(key))
        return found

    def read_optional(self, key: str, kind: type[T]) -> T | None:
        """The value at `key`, or None when it is absent or null."""
        if self.has(key):
            return self.read(key, kind)
        self._seen.add(key)
        return None

    def read_size(self, key: str, default: int | _Required = REQUIRED, *, most: int = MAX_SIZE) -> int:
        """A dimension or count: a whole number from 1 to `most`."""
        value = self.read(key, int, default)
        if not 1 <= value <= most:
            raise UnsupportedModelError(f"config.json: {self.name(key)} is {value}; it must be from 1 to {most}")
        return value

    def spell(self, key: str, *others: str) -> None:
        """From now on `key` may be spelled otherwise, and messages name the spelling that the config has.

        Raises UnsupportedModelError if two spellings are there and disagree.
        """
        used = [one for one in (key, *others) if self.has(one)]
        for other in used[1:]:
            self.expect(other, self._values[used[0]], given=used[0])
        self._seen.update((key, *others))
        self._spellings[key] = (key, *others)

    def _spelled(self, key: str) -> str:
        """The spelling of `key` that the config has; `key` if it has none."""
        spellings = self._spellings.get(key, (key,))
        there = [one for one in spellings if one in self._values]
        return next((one for one in there if self._values[one] is not None), there[0] if there else key)

    def expect(self, key: str, *allowed: object, given: str = "") -> None:
        """Accept `key` only with a value that is implemented; absent or null is accepted. It may follow from the key `given`.

        Raises UnsupportedModelError naming the key, its value and what is implemented.
        """
        value = self._take(key)
        if value is None or self.name(key) in self._accepted:
            return
        if _is_one_of(value, allowed):
            return
        known = ", ".join(repr(one) for one in allowed) or "nothing but null"
        text = f"{self.name(key)} is {value!r:.200}; for {self.architecture} hybridserve implements {known}"
        if given:
            text += f", what {self.name(given)} gives"
        fault = Fault(self.name(key), text)
        if self._faults is None:
            raise refusal([fault])
        if fault not in self._faults:
            self._faults.append(fault)

    def ignore(self, *keys: str) -> None:
        """Accept these keys whatever they hold: this architecture's text decoder does not depend on them."""
        self._seen.update(keys)

    def declare(self, family: Family) -> None:
        """Tell what is true of this architecture whatever its config says; before any object inside is read."""
        assert not self._nested, "an object inside was read before"
        self.family = family

    def nested(self, key: str) -> "ConfigReader":
        """A reader of the object at `key` (empty when absent), which `finish` of this one finishes too."""
        child = ConfigReader(
            self.read(key, dict[str, object], {}),
            architecture=self.architecture,
            path=self.name(key),
            accepted=self._accepted,
            faults=self._faults,
            family=self.family,
        )
        self._nested.append(child)
        return child

    def finish(self) -> None:
        """Refuse what nobody has read, and what was collected. Raises UnsupportedModelError naming each key and its value."""
        unread, faults = self._unread(), list(self._faults or ())
        if unread:
            listed = ", ".join(f"{key}={value!r:.80}" for key, value in list(unread.items())[:_SHOWN])
            more = " and more" if len(unread) > _SHOWN else ""
            text = f"{self.architecture} does not define here, and they may change the mathematics, the keys {listed}{more}"
            first, *others = unread
            faults.append(Fault(first, text, tuple(others)))
        if faults:
            raise refusal(faults)

    def numbers(self) -> dict[str, int | float]:
        """The numbers that have been read, by their full names."""
        mine = {
            self._full(key): value
            for key, value in self._values.items()
            if key in self._seen and isinstance(value, int | float) and not isinstance(value, bool)
        }
        for child in self._nested:
            mine |= child.numbers()
        return mine

    def _unread(self) -> dict[str, object]:
        mine = {
            self.name(key): value
            for key, value in self._values.items()
            if key not in self._seen and self.name(key) not in self._accepted and not self._may_stay_unread(key, value)
        }
        for child in self._nested:
            mine |= child._unread()
        return mine

    def _may_stay_unread(self, key: str, value: object) -> bool:
        """Whether a key that nobody read changes nothing, with this value, for this architecture. A null says nothing at all."""
        if value is None or key in HARMLESS_KEYS:
            return True
        family = self.family
        if key in family.unused:
            return True
        if key in family.same:
            other, default = family.same[key]
            return value == self._values.get(other, default)
        return _is_one_of(value, family.values_of(key))

    def name(self, key: str) -> str:
        """`key` as the config spells it, with the path that leads to it, as in `text_config.rope_theta`."""
        return self._full(self._spelled(key))

    def _full(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def _take(self, key: str) -> object:
        self._seen.add(key)
        return self._values.get(self._spelled(key))


def refusal(faults: Sequence[Fault], cause: str = "") -> UnsupportedModelError:
    """The error that names all faults. `cause` is where laying out the model stumbled because of them."""
    texts = "; ".join([*(fault.text for fault in faults), *([cause] if cause else [])])
    flags = " ".join(f"--ignore-config-keys {key}" for fault in faults for key in (fault.key, *fault.more))
    return UnsupportedModelError(f"config.json: {texts}. {_UNREAD} {flags}")


def _is_one_of(value: object, allowed: Sequence[object]) -> bool:
    """Whether a value is among these; true is not 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


def _check_numbers(value: object, name: str) -> None:
    """Raise UnsupportedModelError for a number, however deep, that no model can have: not finite, or outside of its range."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_numbers(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_numbers(inner, name)
    elif isinstance(value, int) and abs(value) > MAX_INT:
        raise UnsupportedModelError(f"config.json: {name} is {value}, beyond {MAX_INT}; correct the file")
    elif isinstance(value, float) and not (isfinite(value) or (not isnan(value) and name.endswith(_UNBOUNDED))):
        raise UnsupportedModelError(f"config.json: {name} is {value}; it must be a finite number; correct the file")
    if isinstance(value, int | float) and not isinstance(value, bool) and not name.endswith(_UNBOUNDED):
        least, most = _range_of(name.rpartition(".")[2])
        if not least <= value <= most:
            said = f"over 0 and at most {most:g}" if least > 0 else f"from {least:g} to {most:g}"
            raise UnsupportedModelError(f"config.json: {name} is {value}; it must be {said}; correct the file")


def _range_of(key: str) -> tuple[float, float]:
    """The least and the greatest that a number may be."""
    if key.rpartition("_")[2] in ("eps", "epsilon"):
        return _LEAST, 1.0
    return (_LEAST if key in _POSITIVE else -MAX_FLOAT), MAX_FLOAT


#: Spellings of layer kinds before transformers 5, and what they became.
_LAYER_TYPES = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}


def read_layer_types(
    config: ConfigReader, num_layers: int, allowed: tuple[str, ...], default: list[str], key: str = "layer_types"
) -> list[str]:
    """The kind of each layer, in today's spelling; `default` where the config has no list. Raises UnsupportedModelError."""
    raw = config.read_optional(key, list[str])
    types = default if raw is None else [_LAYER_TYPES.get(one, one) for one in raw]
    if len(types) != num_layers:
        raise UnsupportedModelError(
            f"config.json: {config.name(key)} names {len(types)} layers, num_hidden_layers is {num_layers}; correct the file"
        )
    for i, one in enumerate(types):
        if one not in allowed:
            raise UnsupportedModelError(
                f"config.json: {config.name(key)}[{i}] is {(raw or types)[i]!r}; for {config.architecture} hybridserve "
                f"implements {', '.join(repr(kind) for kind in allowed)}"
            )
    return types


def read_spelled_layer_types(
    config: ConfigReader, num_layers: int, allowed: tuple[str, ...], default: list[str], keys: tuple[str, str]
) -> list[str]:
    """As `read_layer_types`, under either of two keys, which must agree where both are there."""
    used = [key for key in keys if config.has(key)] or [keys[0]]
    config.ignore(*keys)
    found = [read_layer_types(config, num_layers, allowed, default, key) for key in used]
    if found[-1] != found[0]:
        raise UnsupportedModelError(
            f"config.json: {config.name(keys[0])} and {config.name(keys[1])} differ; the two are one list, so take one "
            "of them out"
        )
    return found[0]


#: Of experts in a layer.
MAX_EXPERTS = 65536


def read_choice(
    config: ConfigReader,
    experts: str,
    chosen: str,
    *,
    default_experts: int | _Required = REQUIRED,
    default_chosen: int | _Required = REQUIRED,
) -> tuple[int, int]:
    """How many experts there are and how many a row takes, under these keys. Raises UnsupportedModelError."""
    num_experts = config.read_size(experts, default_experts, most=MAX_EXPERTS)
    num_chosen = config.read(chosen, int, default_chosen)
    if not 1 <= num_chosen <= num_experts:
        raise UnsupportedModelError(
            f"config.json: {config.name(chosen)} is {num_chosen} of {config.name(experts)} {num_experts}; "
            "it must be from 1 to that"
        )
    return num_experts, num_chosen


def read_groups(
    config: ConfigReader, experts: str, num_experts: int, groups: str, chosen: str, default: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
    """Into how many groups experts are parted, and of how many they are chosen, under these keys."""
    num_groups = config.read_size(groups, default[0], most=MAX_EXPERTS)
    num_chosen = config.read(chosen, int, default[1])
    if num_experts % num_groups or not 1 <= num_chosen <= num_groups:
        raise UnsupportedModelError(
            f"config.json: {config.name(experts)} is {num_experts}, {config.name(groups)} {num_groups} and {config.name(chosen)} "
            f"{num_chosen}; groups must be of one size, and from 1 to all of them are chosen"
        )
    return num_groups, num_chosen
