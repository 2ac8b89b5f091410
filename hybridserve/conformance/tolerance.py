"""How far two runs of one mixer may differ, and what is said when they differ more.

Owns the comparison and the fault that it raises. Must not know what was run. Called by every check.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


class ConformanceError(AssertionError):
    """A check failed. The message names the inputs; `difference` is the largest that was found, where one was measured."""

    def __init__(self, message: str, difference: float | None = None) -> None:
        super().__init__(message)
        self.difference = difference


def require(holds: bool, message: str) -> None:
    """Raise ConformanceError unless something holds."""
    if not holds:
        raise ConformanceError(message)


@dataclass(frozen=True)
class Tolerance:
    """Allowed difference: absolute, plus relative to the expected value, plus relative to the largest value of the tensor.

    The last is for what order of summation does: a small sum of large terms is as wrong as the terms were rounded, and processors
    add in different orders. `bfloat16` bounds the error of a row in bfloat16, as norms, relative to the same row in fp32.
    """

    atol: float = 2e-5
    rtol: float = 1e-4
    of_largest: float = 4e-6
    bfloat16: float = 0.03

    def check(self, actual: Tensor, expected: Tensor, what: str) -> None:
        """Raise ConformanceError with `what`, the largest difference and its place, unless they are close and without NaN."""
        require(actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
        require(not actual.isnan().any(), f"{what}: NaN, so something was read that this sequence never wrote")
        actual, expected = actual.double(), expected.double()
        difference = (actual - expected).abs()
        finite = expected[expected.isfinite()]
        largest = finite.abs().max().item() if finite.numel() else 0.0
        atol = self.atol + self.of_largest * largest
        if torch.allclose(actual, expected, atol=atol, rtol=self.rtol):
            return
        place = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
        count = int((difference > atol + self.rtol * expected.abs()).sum())
        raise ConformanceError(
            f"{what}: {count} of {difference.numel()} values differ, by up to {difference.max():.3g} at {place}: "
            f"{actual[place]:.6g} instead of {expected[place]:.6g} (allowed: {atol:.3g} + {self.rtol:g} relative)",
            float(difference.max()),
        )

    def check_states(self, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
        """The same for two states."""
        require(actual.keys() == expected.keys(), f"{what}: states {sorted(actual)} instead of {sorted(expected)}")
        for name, tensor in actual.items():
            self.check(tensor, expected[name], f"{what}, state {name}")


FP32 = Tolerance()
