"""Name tables for mixers and architectures, filled by decorators and, on a miss, by entry points.

Owns the lookup, its error messages, and the version of what plug-ins are written against. Must not know what is registered.
Called by `mixers/`, `models/` and plug-ins.
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

#: Version of what `docs/add-a-layer.md` and `docs/add-a-model.md` use. Raised when plug-ins must change; additions leave it.
PLUGIN_API = 1
#: The oldest version whose plug-ins still work.
OLDEST_PLUGIN_API = 1
#: By this name a plug-in's module says which version it was written for.
_VERSION_NAME = "PLUGIN_API"


class Registry(Generic[T]):
    """Table of one kind of thing: ``@mixers.register("mamba2")`` puts a class in, ``mixers["mamba2"]`` gets it.

    A name that is not in the table is looked for among the installed entry points of `group`; a plug-in is imported only then.
    What is in the table comes first, so no installed package changes what a name of ours means.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that stores its target as `name`, in place of an earlier definition of the same.

        Raises UsageError if the name is taken by something else.
        """

        def add(item: T) -> T:
            taken = self._find(name)
            if taken is not None and _origin(taken) != _origin(item):
                raise UsageError(f"{self.kind} {name!r} is registered twice: by {taken!r} and by {item!r}; rename one of them")
            self._items[name] = item
            return item

        return add

    def __getitem__(self, name: str) -> T:
        item = self._find(name) or self._load_entry_point(name)
        if item is None:
            close = difflib.get_close_matches(name, self.names(), n=1, cutoff=0.3)
            hint = f"the nearest is {close[0]!r}" if close else "nothing similar is known"
            raise UnsupportedModelError(
                f"unknown {self.kind} {name!r}; {hint}; known: {', '.join(self.names())}. "
                f"A plug-in can add it with an entry point in {self.group!r} or --plugin FILE.py"
            )
        _check_version(sys.modules.get(item.__module__), f"{self.kind} {name!r}")
        return item

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None or any(point.name == name for point in self._entry_points())

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        """All names, those of plug-ins that are installed but not yet imported included."""
        return sorted({*self.loaded(), *(point.name for point in self._entry_points())})

    def loaded(self) -> list[str]:
        """Names whose code is imported: of a plug-in only when something asked for it."""
        return sorted(name for name in self._items if self._find(name) is not None)

    def _find(self, name: str) -> T | None:
        """What is in the table, unless its module was taken back because its import failed or was refused."""
        item = self._items.get(name)
        return item if item is not None and item.__module__ in sys.modules else None

    def _entry_points(self) -> importlib.metadata.EntryPoints:
        return importlib.metadata.entry_points(group=self.group)

    def _load_entry_point(self, name: str) -> T | None:
        points = {point.value: point for point in self._entry_points() if point.name == name}
        if len(points) > 1:
            raise UsageError(
                f"{self.kind} {name!r} is provided by {' and by '.join(map(_describe, points.values()))}; uninstall all but one"
            )
        return next(map(self._import, points.values()), None)

    def _import(self, point: importlib.metadata.EntryPoint) -> T:
        """Import a plug-in. It may register itself by the decorator, or leave that to its entry point."""
        who = f"plug-in {_describe(point)}, which provides {self.kind} {point.name!r},"
        try:
            item = point.load()
        except (Exception, SystemExit) as error:
            raise MissingDependencyError(
                f"{who} failed to import: {type(error).__name__}: {error}; repair or update it (this hybridserve has plug-in API "
                f"{PLUGIN_API}), or uninstall it"
            ) from error
        try:
            _check_version(sys.modules[point.module], who, is_required=True)
        except MissingDependencyError:
            del sys.modules[point.module]
            raise
        registered = self._find(point.name)
        if registered is None and isinstance(item, ModuleType):
            raise MissingDependencyError(f"{who} registers nothing of that name; repair or uninstall it")
        return registered or self._items.setdefault(point.name, item)


def load_plugin(path: str) -> ModuleType:
    """Import one Python file named by the user (`--plugin path.py`), whose decorators fill the tables. Returns the module.

    A file that this process has imported already is left as it is: a second `LLM` with the same plug-in uses the same classes.
    Raises UsageError when the file does not exist, MissingDependencyError when importing it fails or it is for another version.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise UsageError(f"{path!r}: no such file; give the path of a Python file")
    # Two files of one name are two plug-ins.
    name = f"hybridserve_plugin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    module = sys.modules.get(name) or _execute(path, file, name)
    _check_version(module, f"plug-in {path!r}")
    return module


def _execute(path: str, file: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path!r}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise MissingDependencyError(f"plug-in {path!r} failed to import: {type(error).__name__}: {error}; repair it") from error
    return module


def _origin(item: object) -> tuple[str, str]:
    """Where something was defined: a cell that is run again, or a module that is loaded again, defines the same anew."""
    return item.__module__, getattr(item, "__qualname__", repr(item))


def _describe(point: importlib.metadata.EntryPoint) -> str:
    owner = f"{point.dist.name} {point.dist.version}" if point.dist else "an unnamed distribution"
    return f"{point.value!r} of {owner}"


def _check_version(module: ModuleType | None, who: str, *, is_required: bool = False) -> None:
    """Raise MissingDependencyError if a plug-in's module was written for another version, or does not say for which."""
    version = getattr(module, _VERSION_NAME, None)
    if version is None and not is_required:
        return
    ours = f"this hybridserve has {PLUGIN_API}"
    if not isinstance(version, int) or isinstance(version, bool):
        raise MissingDependencyError(
            f"{who} does not say for which plug-in API it was written, {_VERSION_NAME} in its module is {version!r}, and {ours}; "
            f"install a release that does, or set {_VERSION_NAME} = {PLUGIN_API} there if it follows docs/add-a-layer.md"
        )
    if version > PLUGIN_API:
        raise MissingDependencyError(f"{who} was written for plug-in API {version}, but {ours}; update hybridserve")
    if version < OLDEST_PLUGIN_API:
        raise MissingDependencyError(
            f"{who} was written for plug-in API {version}, but {ours} and takes none older than {OLDEST_PLUGIN_API}; "
            "update the plug-in"
        )
