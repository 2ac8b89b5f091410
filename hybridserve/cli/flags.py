"""Flags made from the settings models, and settings made from flags, environment and file.

Owns the translation only; names, types, help and the order of sources are `hybridserve.config`'s.
"""

import argparse
import sys
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from hybridserve.config import EngineSettings, ServerSettings, read_environment, read_file, resolve
from hybridserve.errors import UsageError

S = TypeVar("S", bound=msgspec.Struct)

_ALL_SETTINGS: tuple[type[msgspec.Struct], ...] = (EngineSettings, ServerSettings)


def add_settings(
    parser: argparse.ArgumentParser,
    kind: type[msgspec.Struct],
    *,
    positional: str | None = None,
    without: Collection[str] = (),
) -> None:
    """Add a flag for every field of `kind` but those in `without`; the one named `positional` is an argument, if it is not
    said elsewhere.
    """
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType), "settings are structs"
    group = parser.add_argument_group(_title(kind))
    for field in info.fields:
        text, inner = _help_and_type(field.type)
        if field.name in without:
            continue
        if field.name == positional:
            parser.add_argument(field.name, nargs="?", metavar=field.name.upper(), help=text)
        else:
            _add_flag(group, field.name, inner, text, None if field.required else field.default)


def at_least(least: int) -> Callable[[str], int]:
    """A type of argparse: whole numbers from `least` on."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small; at least {least}")
        return value

    parse.__name__ = "number"  # in argparse's message for what is no number
    return parse


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add `--config`."""
    parser.add_argument("--config", metavar="FILE", help="a YAML file whose keys are the long flags")


class Sources:
    """Where settings of one command come from. Warns once about environment variables that are no setting."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Read environment and file. Raises UsageError for a file that is not readable or names what does not exist."""
        every = {field for kind in _ALL_SETTINGS for field in kind.__struct_fields__}
        environment, strange = read_environment(every)
        for name in strange:
            print(f"warning: {name} is no setting; see --help for the names", file=sys.stderr)
        content = read_file(arguments.config) if arguments.config else {}
        unknown = sorted(set(content) - every)
        if unknown:
            raise UsageError(f"--config {arguments.config!r}: unknown setting {unknown[0]!r}; the keys are the long flags")
        flags = {name: value for name, value in vars(arguments).items() if value is not None}
        self._sources = (flags, environment, content)

    def settings(self, kind: type[S]) -> S:
        """Settings of one kind: flags, then `HYBRIDSERVE_*`, then the file. Raises UsageError."""
        if kind is EngineSettings and not any("model" in source for source in self._sources):
            raise UsageError("no model is named; give a folder, a Hugging Face repo id or `demo`")
        return resolve(kind, *(_part(source, kind) for source in self._sources))


def changed(settings: msgspec.Struct) -> dict[str, object]:
    """The fields of settings that are not at their default, for the log and for `LLM`."""
    fields = msgspec.structs.fields(type(settings))
    return {
        field.name: getattr(settings, field.name)
        for field in fields
        if field.required or getattr(settings, field.name) != field.default
    }


def _part(source: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {name: value for name, value in source.items() if name in kind.__struct_fields__}


def _title(kind: type[msgspec.Struct]) -> str:
    return "engine" if kind is EngineSettings else "server"


def _help_and_type(kind: inspect.Type) -> tuple[str, inspect.Type]:
    """The help text of a field and its type without annotations and None."""
    text = ""
    while True:
        if isinstance(kind, inspect.Metadata):
            text = text or (kind.extra_json_schema or {}).get("description", "")
            kind = kind.type
        elif isinstance(kind, inspect.UnionType):
            kind = next(member for member in kind.types if not isinstance(member, inspect.NoneType))
        else:
            return text, kind


def _add_flag(group: argparse._ArgumentGroup, name: str, kind: inspect.Type, text: str, default: object) -> None:
    """Flags have no default of their own: what is not given must not hide the environment."""
    flag = "--" + name.replace("_", "-")
    text = text.replace("%", "%%")
    if default not in (None, ()):
        text += f" (default: {str(default).lower() if isinstance(default, bool) else default})"
    if isinstance(kind, inspect.BoolType):
        group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
    elif isinstance(kind, inspect.VarTupleType):
        group.add_argument(flag, dest=name, action="append", default=argparse.SUPPRESS, metavar="VALUE", help=text)
    elif isinstance(kind, inspect.LiteralType):
        group.add_argument(flag, dest=name, choices=list(kind.values), default=argparse.SUPPRESS, help=text)
    else:
        metavar = "N" if isinstance(kind, inspect.IntType | inspect.FloatType) else "VALUE"
        group.add_argument(flag, dest=name, default=argparse.SUPPRESS, metavar=metavar, help=text)
