"""Registries as they were: what a test or a file of tests registers is forgotten after it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hybridserve.mixers import mixers
from hybridserve.models import architectures


@contextmanager
def forgetting(*modules: str) -> Iterator[None]:
    """Registers nothing for good, and keeps no module whose name begins like a plug-in file's or one of `modules`."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for table in (mixers, architectures):
            patch.setattr(table, "_items", dict(table._items))
        yield
    for name in set(sys.modules) - before:
        if name.startswith(("hybridserve_plugin_", *modules)):
            del sys.modules[name]
