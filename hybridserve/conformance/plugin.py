"""The kit as a plug-in of pytest: one test for each check of each layer.

Loaded by `-p hybridserve.conformance.plugin`, or by `pytest_plugins` in the topmost conftest.py, it makes tests of

    @pytest.mark.layer("my_layer.py:MyLayer", config={"hidden_size": 32}, oracle="my_layer.py:quadratic")
    def test_my_layer(layer_check):
        layer_check()

Without loading anything, `pytest.mark.parametrize("layer_check", layer_checks("my_layer.py:MyLayer"))` does the same.

Owns the mark `layer` and what `layer_check` stands for. Must not know any layer. A layer without an oracle gets a test that is
skipped and says so.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from hybridserve.conformance.checks import ALL_CHECKS, Check, name_of
from hybridserve.conformance.conduct import check_oracle
from hybridserve.conformance.subjects import Subject, find_subjects
from hybridserve.conformance.tolerance import FP32
from hybridserve.mixers.base import Mixer


@dataclass(frozen=True)
class LayerCheck:
    """One check of one layer, or with `check` None its oracle. Call it in a test."""

    subject: Subject
    check: Check | None

    def __str__(self) -> str:
        return f"{self.subject.name}-{'against oracle' if self.check is None else name_of(self.check)}"

    def __call__(self) -> None:
        if self.check is not None:
            self.check(_built(self.subject), FP32)
        elif self.subject.oracle is not None:
            check_oracle(_built(self.subject), self.subject.oracle, FP32)
        else:
            pytest.skip(f"{self.subject.name} is self-consistent, not verified: it has no oracle")


@functools.lru_cache(maxsize=8)
def _built(subject: Subject) -> Mixer:
    return subject.build()


def layer_checks(target: str, *, config: Mapping[str, object] | None = None, oracle: str | None = None) -> list[LayerCheck]:
    """All checks of the layers that `target` names, as `hybridserve check-layer` would run them."""
    subjects = find_subjects(target, None if config is None else json.dumps(config), oracle)
    checks: tuple[Check | None, ...] = (*ALL_CHECKS, None)
    return [LayerCheck(subject, check) for subject in subjects for check in checks]


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line("markers", "layer(target, config=None, oracle=None): a layer that `layer_check` checks")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each check of the marked layers."""
    if metafunc.definition.get_closest_marker("layer") is None:
        return
    find: Callable[..., list[LayerCheck]] = layer_checks
    found = [check for mark in metafunc.definition.iter_markers("layer") for check in find(*mark.args, **mark.kwargs)]
    metafunc.parametrize("layer_check", found, ids=map(str, found))
