"""`hybridserve check-model MODEL`: whether a model will run, for how many users, and why not, before it is loaded.

Owns the flags and the printing: a table on a terminal, plain lines elsewhere, JSON on request. What is found out is
`hybridserve.check`'s matter.
"""

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from hybridserve.cli.flags import Sources, add_config, add_settings
from hybridserve.config import EngineSettings, parse_nbytes
from hybridserve.errors import HybridServeError, UsageError

if TYPE_CHECKING:
    from hybridserve.check.report import Finding, Report

_COLOURS: Mapping[str, str] = {"PASS": "green", "WARN": "yellow", "FAIL": "bold red"}
_VERDICTS: Mapping[int, str] = {
    0: "it runs",
    1: "it runs, with warnings",
    2: "the call is wrong",
    3: "it is not supported",
    4: "its files are corrupt or incomplete",
    5: "it does not fit",
    6: "something that it needs is not installed",
    7: "it is not safe",
    70: "the check itself failed",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the check, and those of the engine that would serve the model."""
    parser.add_argument(
        "--memory", metavar="BYTES", help="for weights and caches, such as 24GiB; default: the device's, or what is free"
    )
    parser.add_argument(
        "--device", metavar="DEVICE", default="auto", help="cpu, cuda, or one that is not here, such as cuda:h200 or cuda:4xh100"
    )
    parser.add_argument("--deep", action="store_true", help="look at every weight for NaN and infinity")
    parser.add_argument("--run", action="store_true", dest="is_run", help="load it here and compare every way to the same tokens")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when there are warnings")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_settings(parser, EngineSettings, positional="model", without=("device",))
    add_config(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Returns its exit code."""
    report = _make_report(arguments)
    code = report.exit_code(strict=arguments.strict)
    if arguments.json:
        sys.stdout.write(report.to_json(strict=arguments.strict).decode())
    elif sys.stdout.isatty():
        _print_table(report, code)
    else:
        _print_lines(report, code)
    return code


def _make_report(arguments: argparse.Namespace) -> "Report":
    """The report; one finding alone when the flags are wrong, so that --json always prints JSON."""
    from hybridserve.check.deferral import import_torch
    from hybridserve.check.report import Report, failed, plain

    device = arguments.device
    try:
        memory = None if arguments.memory is None else _memory(arguments.memory)
        arguments.device = None
        settings = Sources(arguments).settings(EngineSettings)
    except HybridServeError as error:
        return Report(model=plain(arguments.model or ""), device=plain(device), checks=[failed("usage", error)])
    if not (arguments.is_run or arguments.deep or settings.plugin):
        import_torch()
    from hybridserve.check.checker import Options, check_model  # brings torch in

    kind = device.partition(":")[0]
    known = kind if kind in ("cpu", "cuda") else "auto"
    settings = msgspec.structs.replace(settings, device=known)
    return check_model(Options(settings, device, memory, is_deep=arguments.deep, is_run=arguments.is_run))


def _memory(text: str) -> int:
    nbytes = parse_nbytes(text)
    if nbytes < 1:
        raise UsageError(f"--memory is {text}; give what weights and caches may take, such as 24GiB")
    return nbytes


def _print_table(report: "Report", code: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, title=f"{report.model} on {report.device}", title_justify="left")
    for name in ("", "check", "what was found"):
        table.add_column(name, overflow="fold", no_wrap=name == "check")
    for finding in report.checks:
        detail = Text(finding.detail)
        if finding.fix is not None:
            detail.append(f"\n-> {finding.fix}", style="cyan")
        table.add_row(Text(finding.status, style=_COLOURS[finding.status]), finding.id, detail)
    console = Console()
    console.print(table)
    for line in _last_lines(report, code):
        console.print(
            line, style=_COLOURS["PASS" if code == 0 else "WARN" if code == 1 else "FAIL"], markup=False, highlight=False
        )


def _print_lines(report: "Report", code: int) -> None:
    for finding in report.checks:
        print(_line(finding))
    print(*_last_lines(report, code), sep="\n")


def _line(finding: "Finding") -> str:
    fix = "" if finding.fix is None else f" -> {finding.fix}"
    return f"{finding.status} {finding.id}: {finding.detail}{fix}"


def _last_lines(report: "Report", code: int) -> list[str]:
    unchecked = [f"not checked, because of that: {', '.join(report.not_checked)}"] if report.not_checked else []
    is_unproven = code == 0 and any(finding.id == "target.unproven" for finding in report.checks)
    verdict = "it should run, but nothing has been run on such a device yet" if is_unproven else _VERDICTS[code]
    return [*unchecked, f"{report.model or 'check-model'}: {verdict} (exit {code})"]
