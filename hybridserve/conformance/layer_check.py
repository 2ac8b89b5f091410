"""The checks of a layer as a list, one entry for each: what the pytest plug-in makes tests of.

Owns what `layer_check` stands for. Must not know any layer. Called by `plugin.py`, and by tests that parametrise themselves. A
layer without an oracle gets an entry that skips its test and says so.
"""

import functools
import json
from collections.abc import Mapping
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
