"""The operations that `check-model` names for a kind of layer are those that the layer calls when it runs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybridserve.backends.offer import OPERATIONS
from hybridserve.backends.select import select
from hybridserve.check.uses import operations_of
from hybridserve.conformance.bench import Bench, rows_of
from hybridserve.conformance.cases import CASES
from hybridserve.conformance.filling import fill
from hybridserve.mixers import mixers
from hybridserve.mixers.linear import Linear


def counting(called: set[str]) -> Any:
    """The reference operations, which note that they were called."""
    ops = select(torch.device("cpu"), torch.float32, ["reference"]).ops

    def note(name: str) -> Callable[..., Any]:
        return lambda *arguments, **options: (called.add(name), getattr(ops, name)(*arguments, **options))[1]

    return dataclasses.replace(ops, **{name: note(name) for name in OPERATIONS})


@pytest.mark.parametrize("kind", CASES)
def test_what_is_named_is_what_is_called(kind: str) -> None:
    called: set[str] = set()
    named: set[str] = set()
    for case in CASES[kind]:
        mixer = fill(mixers[kind](case.config, counting(called), torch.float32))
        named.update(operations_of([mixer]))
        Bench(mixer).run_chunks(rows_of(mixer, 20), [9, 11])
    assert called
    # Code may name an operation that some configs do not come to, never the other way round.
    assert called == named


def test_inner_functions_properties_and_parents_are_read_too() -> None:
    class Parent(torch.nn.Module):
        def __init__(self, ops: Any) -> None:
            super().__init__()
            self.ops = ops
            self._experts = ops.moe

        def forward(self, x: Any) -> Any:
            return [self.ops.rms_norm(part, None, 1e-6) for part in x]

    class Child(Parent):
        @property
        def trailing(self) -> Any:
            return self.ops.trailing

        def linear(self) -> None:
            """Named like an operation, and none."""
            self.linear()

    assert operations_of([Child(counting(set()))]) == ["rms_norm", "trailing", "moe"]
    assert operations_of([torch.nn.Linear(2, 2)]) == []
    assert operations_of([Linear(2, 2, counting(set()), torch.float32)]) == ["linear"]
