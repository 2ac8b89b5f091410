"""A config alone is answered sooner than torch is imported, by leaving out what laying out never runs, and answered the same."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hybridserve.cli import main
from tests.releases import RELEASES
from tests.test_check_model import write_config

ROOT = Path(__file__).parent.parent
ARGUMENTS = ("--memory", "4TiB", "--device", "cpu", "--backend", "reference", "--json")

#: Checks every config that it is told of, then says what became of the module that waited.
CHECK = f"""
import sys
from hybridserve.cli import main
for path in sys.argv[1:]:
    main(["check-model", path, *{ARGUMENTS!r}])
    print("---")
print(type(sys.modules["torch._meta_registrations"]).__name__)
"""

#: An architecture from outside, whose layout computes on "meta" what needs the module that waits.
COMPUTES = """
import sys
import hybridserve.cli
from hybridserve.check.deferral import import_torch, load_waiting
import_torch()
import torch
from hybridserve.models import architectures
from hybridserve.models.lfm2 import build

@architectures.register("MineForCausalLM")
def mine(config, ops, dtype):
    torch.empty(3, 3).index_select(0, torch.zeros(2, dtype=torch.int64))
    return build(config, ops, dtype)

code = hybridserve.cli.main(["check-model", sys.argv[1], "--memory", "1TiB", "--device", "cpu", "--backend", "reference"])
print(type(sys.modules["torch._meta_registrations"]).__name__, load_waiting())
sys.exit(code)
"""


def run(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=240, check=False
    )


FEW = ["Qwen3.5-4B", "GLM-5.3-Flash", "Zamba2-7B"]


@pytest.mark.parametrize("names", [FEW, pytest.param(list(RELEASES), marks=pytest.mark.slow)], ids=["few", "all"])
def test_a_report_is_that_of_torch_as_a_whole(names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = [str(write_config(name, tmp_path / str(place))) for place, name in enumerate(names)]
    done = run(CHECK, *configs)
    *reports, last = done.stdout.split("---\n")
    assert last.strip() == "_Waiting", done.stderr
    assert len(reports) == len(configs)
    for config, report in zip(configs, reports, strict=True):
        capsys.readouterr()
        main(["check-model", config, *ARGUMENTS])
        assert json.loads(report) == json.loads(capsys.readouterr().out)


def test_what_waits_is_loaded_when_a_layout_needs_it(tmp_path: Path) -> None:
    config = write_config("LFM2-350M", tmp_path, architectures=["MineForCausalLM"])
    done = run(COMPUTES, str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "module False"


def seconds(code: str, *arguments: str) -> float:
    """Processor time of a process, the least of three: others on the machine make it longer, never shorter."""
    found = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(code, *arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


@pytest.mark.slow
def test_a_config_is_checked_before_torch_alone_would_be_imported(tmp_path: Path) -> None:
    config = str(write_config("Qwen3.5-4B", tmp_path))
    whole = seconds("import torch")
    checked = seconds("import sys; from hybridserve.cli import main; main(sys.argv[1:])", "check-model", config, "--json")
    assert checked < whole, f"{checked:.2f} s of processor time, torch alone {whole:.2f} s"
