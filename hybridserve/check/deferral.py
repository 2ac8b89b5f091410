"""torch without what laying a model out never runs, so that a config alone is answered sooner.

Owns the list of torch's modules that wait until somebody asks for them, and their loading. Nothing is replaced: a module that
waits is torch's own, executed on first use. Must not know models. Called by the command before torch is imported, and by
`layout.py` where laying out needs one of them after all.
"""

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

#: Kernels in Python for tracing and for operations on "meta" tensors: a quarter of torch's import. Layouts only create tensors.
WAITING = ("torch._meta_registrations",)


class _Waiting(ModuleType):
    """A module that was found but not executed. Python asks here only for what it does not have yet."""

    def __getattr__(self, name: str) -> object:
        # Names like __file__ are looked for in every module there is, without meaning this one.
        if name.startswith("__") or not _execute(self):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self, name)


class _Loader(importlib.abc.Loader):
    """Makes modules wait for the loader that would have executed them."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Waiting


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in WAITING:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def import_torch() -> None:
    """Import torch with some of its modules waiting; nothing if it is there already. For a process that only lays models out."""
    if "torch" in sys.modules:
        return
    finder, collects = _Finder(), gc.isenabled()
    sys.meta_path.insert(0, finder)
    # A million new objects and none of them garbage: not looked through while they are made, nor when the process ends.
    gc.disable()
    try:
        importlib.import_module("torch")
    finally:
        sys.meta_path.remove(finder)
        gc.freeze()
        if collects:
            gc.enable()


def load_waiting() -> bool:
    """Execute all modules that still wait. Returns whether there were any."""
    executed = [_execute(sys.modules[name]) for name in WAITING if name in sys.modules]
    return any(executed)


def _execute(module: ModuleType) -> bool:
    loader = module.__spec__.loader if module.__spec__ is not None else None
    waits = type(module) is _Waiting
    if not waits or not isinstance(loader, _Loader):
        return False
    module.__class__ = ModuleType
    loader.loader.exec_module(module)
    return True
