"""Runs the checks on a layer and writes down what came of each.

Owns the order and what counts as a failure: an exception of the layer's own is one, and does not end the run. Called by the
command and by tests.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from hybridserve.conformance.checks import ALL_CHECKS, Check, name_of
from hybridserve.conformance.conduct import Oracle, check_oracle
from hybridserve.conformance.report import LayerReport, Outcome
from hybridserve.conformance.subjects import Subject
from hybridserve.conformance.tolerance import FP32, ConformanceError, Tolerance
from hybridserve.errors import UsageError
from hybridserve.mixers.base import Mixer


def judge(
    subject: Subject,
    checks: Sequence[Check] = ALL_CHECKS,
    tolerance: Tolerance = FP32,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> LayerReport:
    """Every check, and the oracle if there is one. Each outcome is told as it comes. Raises UsageError from a wrong oracle."""
    mixer = subject.build()
    outcomes = []
    for check in (*checks, *_against(subject.oracle)):
        outcomes.append(_outcome(check, mixer, tolerance))
        on_outcome(outcomes[-1])
    config: dict[str, object] = msgspec.to_builtins(subject.config)
    return LayerReport(layer=subject.name, config=config, has_oracle=subject.oracle is not None, checks=outcomes)


def _against(oracle: Oracle | None) -> tuple[Check, ...]:
    if oracle is None:
        return ()
    known = oracle

    def check_against_oracle(mixer: Mixer, tolerance: Tolerance) -> None:
        check_oracle(mixer, known, tolerance)

    return (check_against_oracle,)


def _outcome(check: Check, mixer: Mixer, tolerance: Tolerance) -> Outcome:
    """Run one check."""
    begin = time.perf_counter()
    detail, difference, failed = "", None, True
    try:
        check(mixer, tolerance)
        failed = False
    except ConformanceError as error:
        detail, difference = str(error), error.difference
    except UsageError:
        raise
    except Exception as error:
        detail = f"raised {type(error).__name__}: {error} ({_place_of(error)})"
    seconds = round(time.perf_counter() - begin, 3)
    return Outcome(
        check=name_of(check), status="FAIL" if failed else "PASS", seconds=seconds, detail=detail, difference=difference
    )


def _place_of(error: Exception) -> str:
    """Where an exception of the layer's own came from: some say nothing else."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
