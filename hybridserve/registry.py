"""Name tables for mixers and architectures, filled by decorators and, on a miss, by entry points.

Owns the lookup and its error messages. Must not know what is registered. Called by `mixers/`, `models/` and plug-ins.
"""

import difflib
import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from hybridserve.errors import MissingDependencyError, UnsupportedModelError, UsageError

T = TypeVar("T")


class Registry(Generic[T]):
    """Table of one kind of thing: ``@mixers.register("mamba2")`` puts a class in, ``mixers["mamba2"]`` gets it.

    A name that is not in the table is looked for among the installed entry points of `group`; a plug-in is imported only then.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that stores its target as `name`. Raises UsageError if the name is taken by something else."""

        def add(item: T) -> T:
            taken = self._items.get(name)
            if taken is not None and taken is not item:
                raise UsageError(f"{self.kind} {name!r} is registered twice: by {taken!r} and by {item!r}; rename one of them")
            self._items[name] = item
            return item

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            self._load_entry_point(name)
        if name not in self._items:
            close = difflib.get_close_matches(name, self.names(), n=1, cutoff=0.3)
            hint = f"the nearest is {close[0]!r}" if close else "nothing similar is known"
            raise UnsupportedModelError(
                f"unknown {self.kind} {name!r}; {hint}; known: {', '.join(self.names())}. "
                f"A plug-in can add it with an entry point in {self.group!r} or --plugin FILE.py"
            )
        return self._items[name]

    def __contains__(self, name: str) -> bool:
        return name in self._items or any(point.name == name for point in self._entry_points())

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        """All names, those of plug-ins that are installed but not yet imported included."""
        return sorted({*self._items, *(point.name for point in self._entry_points())})

    def _entry_points(self) -> importlib.metadata.EntryPoints:
        return importlib.metadata.entry_points(group=self.group)

    def _load_entry_point(self, name: str) -> None:
        for point in self._entry_points():
            if point.name != name:
                continue
            try:
                item = point.load()
            except Exception as error:
                owner = point.dist.name if point.dist else "an unnamed distribution"
                raise MissingDependencyError(
                    f"plug-in {point.value!r} of {owner}, which provides {self.kind} {name!r}, failed to import: "
                    f"{type(error).__name__}: {error}; repair or uninstall it"
                ) from error
            self._items.setdefault(name, item)


def load_plugin(path: str) -> ModuleType:
    """Import one Python file named by the user (`--plugin path.py`), whose decorators fill the tables. Returns the module.

    A file that this process has imported already is left as it is: a second `LLM` with the same plug-in uses the same classes.
    Raises UsageError when the file does not exist, MissingDependencyError when importing it fails.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise UsageError(f"--plugin {path!r}: no such file; give the path of a Python file")
    # Two files of one name are two plug-ins.
    name = f"hybridserve_plugin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"--plugin {path!r}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise MissingDependencyError(f"plug-in {path!r} failed to import: {type(error).__name__}: {error}; repair it") from error
    return module
