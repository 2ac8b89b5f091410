"""`hybridserve check-layer NAME|file.py:Class`: whether a layer keeps what every layer must, and computes what it should.

Owns the flags and the printing. What is found out is `hybridserve.conformance`'s matter.
"""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridserve.conformance.report import LayerReport, Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The layer, and what it is checked with."""
    parser.add_argument("layer", metavar="NAME|FILE.py:CLASS", help="a registered kind of layer, or a class in a Python file")
    parser.add_argument(
        "--config", metavar="JSON", help="the layer's config, or the path of one; default: the kit's cases of a built-in kind"
    )
    parser.add_argument(
        "--oracle",
        metavar="FILE.py:FUNCTION",
        help="an independent form, also MODULE:FUNCTION: called with the layer and rows [T, D], returns [T, D]",
    )
    parser.add_argument("--plugin", metavar="FILE.py", action="append", default=[], help="a file that registers layers")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a layer has no oracle")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print every outcome as it comes, then the verdict. Returns the exit code."""
    from hybridserve.conformance.judge import judge  # brings torch in
    from hybridserve.conformance.report import Report
    from hybridserve.conformance.subjects import find_subjects
    from hybridserve.registry import load_plugin

    for path in arguments.plugin:
        load_plugin(path)
    tell: Callable[[Outcome], None] = _ignore if arguments.json else _print_outcome
    layers = []
    for subject in find_subjects(arguments.layer, arguments.config, arguments.oracle):
        if not arguments.json:
            print(subject.name, flush=True)
        layers.append(judge(subject, on_outcome=tell))
    report = Report(target=arguments.layer, layers=layers)
    code = report.exit_code(strict=arguments.strict)
    if arguments.json:
        sys.stdout.write(report.to_json(strict=arguments.strict).decode())
    else:
        print(*map(_verdict, layers), sep="\n")
        print(f"{arguments.layer}: {report.verdict} (exit {code})")
    return code


def _ignore(outcome: "Outcome") -> None:
    del outcome


def _print_outcome(outcome: "Outcome") -> None:
    detail = f": {outcome.detail}" if outcome.detail else ""
    print(f"  {outcome.status} {outcome.check} ({outcome.seconds:.1f} s){detail}", flush=True)


def _verdict(layer: "LayerReport") -> str:
    if layer.failed:
        return f"{layer.layer}: {layer.verdict}: {', '.join(outcome.check for outcome in layer.failed)}"
    remedy = "" if layer.has_oracle else " -> give --oracle: the published layer, or a quadratic form in ten lines"
    return f"{layer.layer}: {layer.verdict}{remedy}"
