"""The kit itself: every built-in layer is enrolled and verified, the command's verdicts, the plug-in, the second example."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding

from hybridserve.cli import main
from hybridserve.conformance.bench import Bench, rows_of, run_whole
from hybridserve.conformance.cases import CASES
from hybridserve.conformance.checks import ALL_CHECKS, name_of
from hybridserve.conformance.conduct import check_oracle
from hybridserve.conformance.judge import judge
from hybridserve.conformance.layer_check import layer_checks
from hybridserve.conformance.subjects import Subject, find_subjects
from hybridserve.conformance.tolerance import FP32, ConformanceError, Tolerance
from hybridserve.mixers import mixers
from hybridserve.mixers.short_conv import ShortConv
from tests.registries import forgetting

ROOT = Path(__file__).parent.parent
EXAMPLE = str(ROOT / "docs/examples/diff_attention.py")
RG_LRU = str(ROOT / "docs/examples/rg_lru.py")
HEADS = '{"hidden_size": 32, "num_heads": 4}'


@pytest.fixture(scope="module", autouse=True)
def tables() -> Iterator[None]:
    """What examples register is forgotten after this file."""
    with forgetting():
        yield


# --- built-in layers ---


def test_every_registered_kind_has_a_case_with_an_oracle() -> None:
    own = {kind for kind in mixers if mixers[kind].__module__.startswith("hybridserve.mixers")}
    assert set(CASES) == own, "add a case to hybridserve/conformance/cases.py"
    assert all(case.oracle is not None for cases in CASES.values() for case in cases)
    assert all(isinstance(case.config, mixers[kind].Config) for kind, cases in CASES.items() for case in cases)


BUILT_IN = [subject for kind in CASES for subject in find_subjects(kind)]


@pytest.mark.parametrize("subject", BUILT_IN, ids=lambda subject: subject.name)
def test_a_built_in_layer_computes_what_its_oracle_does(subject: Subject) -> None:
    check_oracle(subject.build(), subject.oracle, FP32)


@pytest.mark.slow
@pytest.mark.parametrize("subject", BUILT_IN, ids=lambda subject: subject.name)
def test_a_built_in_layer_is_verified_within_a_minute(subject: Subject) -> None:
    report = judge(subject)
    assert report.verdict == "verified", report.failed
    assert sum(outcome.seconds for outcome in report.checks) < 60


# --- the command ---


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["check-layer", *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_built_in_layer_is_verified(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "short_conv", "--json")
    report = json.loads(text)
    assert (code, report["exit_code"], report["verdict"], report["schema_version"]) == (0, 0, "verified", 1)
    assert len(report["layers"]) == len(CASES["short_conv"])
    for layer in report["layers"]:
        assert [c["check"] for c in layer["checks"]] == [*map(name_of, ALL_CHECKS), "against oracle"]
        assert {c["status"] for c in layer["checks"]} == {"PASS"}
        assert mixers["short_conv"].Config(**layer["config"]) in [case.config for case in CASES["short_conv"]]


def test_without_an_oracle_a_layer_is_not_verified(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, f"{RG_LRU}:RgLru", "--config", HEADS)
    assert code == 0
    assert "self-consistent, not verified -> give --oracle" in text
    assert run(capsys, f"{RG_LRU}:RgLru", "--config", HEADS, "--strict")[0] == 1


FAULTY = """
import torch
from hybridserve.mixers.base import Mixer
from hybridserve.mixers.short_conv import ShortConv
class Forgets(ShortConv):
    def forward(self, x, batch, caches):
        y = super().forward(x, batch, caches)
        caches["state"].tensors["conv"][:, 0] = 0
        return y
class Raises(ShortConv):
    def specs(self):
        raise KeyError("conv")
class Bare(Mixer):
    pass
def other(mixer, x):
    return x
def nothing(mixer, x):
    return None
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("faulty") / "faulty.py"
    path.write_text(FAULTY)
    return str(path)


WIDTH = '{"hidden_size": 8, "width": 4}'


def test_a_fault_is_named_with_its_inputs_and_the_largest_difference(capsys: pytest.CaptureFixture[str], faulty: str) -> None:
    code, text = run(capsys, f"{faulty}:Forgets", "--config", WIDTH, "--json")
    report = json.loads(text)
    assert (code, report["verdict"]) == (8, "failed")
    failed = {c["check"]: c for c in report["layers"][0]["checks"] if c["status"] == "FAIL"}
    assert "chunks [1, 1, 1, 1, 1, 1, 1, 1, 1]" in failed["chunking"]["detail"]
    assert failed["chunking"]["difference"] > 0.01
    assert f"by up to {failed['chunking']['difference']:.3g}" in failed["chunking"]["detail"]
    assert "slot" in failed["slots"]["detail"]


def test_an_exception_of_the_layer_is_a_failure_of_the_check(capsys: pytest.CaptureFixture[str], faulty: str) -> None:
    code, text = run(capsys, f"{faulty}:Raises", "--config", WIDTH)
    assert code == 8
    assert "FAIL specs" in text
    assert re.search(r"raised KeyError: 'conv' \(faulty.py, line \d+, in specs\)", text), text


def test_an_oracle_that_says_otherwise_fails_the_layer(capsys: pytest.CaptureFixture[str], faulty: str) -> None:
    code, text = run(capsys, "short_conv", "--config", WIDTH, "--oracle", f"{faulty}:other")
    assert code == 8
    assert "FAIL against oracle" in text


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("short_cnov",), 3, "short_conv"),
        (("short_conv", "--config", "{"), 2, "--config"),
        (("short_conv", "--config", "/nowhere.json"), 2, "nowhere.json"),
        (("short_conv", "--config", '{"hidden_size": 8}'), 2, "width"),
        (("short_conv", "--config", '{"hidden_size": 8, "width": 1}'), 3, "width is 1"),
        (("{faulty}:Missing",), 2, "Forgets, Raises, Bare"),
        (("{faulty}",), 2, "Forgets, Raises, Bare"),
        (("/nowhere.py:Layer",), 2, "nowhere.py"),
        (("short_conv", "--oracle", "nowhere"), 2, "--oracle nowhere"),
        (("short_conv", "--oracle", "{faulty}"), 2, "FILE.py:FUNCTION"),
        (("{faulty}:Bare",), 2, "Bare has no Config"),
        (("short_conv", "--config", WIDTH, "--oracle", "{faulty}:missing"), 2, "missing"),
        (("short_conv", "--config", WIDTH, "--oracle", "{faulty}:nothing"), 2, "NoneType"),
    ],
)
def test_a_wrong_call_is_told(
    capsys: pytest.CaptureFixture[str], faulty: str, arguments: tuple[str, ...], code: int, named: str
) -> None:
    found, text = run(capsys, *(argument.replace("{faulty}", faulty) for argument in arguments))
    assert (found, named in text) == (code, True), text


# --- the plug-in ---


@pytest.mark.parametrize("place", range(len(ALL_CHECKS) + 1))
def test_differential_attention_conforms(place: int) -> None:
    """Looked up in the test: at collection it would be registered for all files."""
    checks = layer_checks(f"{EXAMPLE}:DiffAttention", oracle=f"{EXAMPLE}:quadratic")
    assert len(checks) == len(ALL_CHECKS) + 1
    checks[place]()


MARKED = f"""
import pytest

@pytest.mark.layer("{EXAMPLE}:DiffAttention")
@pytest.mark.layer("{RG_LRU}:RgLru", config={HEADS})
def test_layers(layer_check):
    layer_check()
"""

MY_LAYER = """
from hybridserve.mixers.short_conv import ShortConv, ShortConvConfig


class MyConfig(ShortConvConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    width: int = 3


class MyLayer(ShortConv):
    Config = MyConfig


def quadratic(mixer, x):
    from hybridserve.conformance.oracles import short_conv
    return short_conv(mixer, x)
"""


def pytest_in(folder: Path, *arguments: str) -> str:
    """pytest in a process of its own. The entry point is that of `pyproject.toml`, whenever this environment was installed."""
    info = folder / "site" / "hybridserve_plugin-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hybridserve-plugin\nVersion: 1\n")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    (info / "entry_points.txt").write_text("[pytest11]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()))
    environment = {**os.environ, "PYTHONPATH": str(info.parent)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", "-q", "-rs", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_mark_makes_a_test_of_every_check(tmp_path: Path) -> None:
    (tmp_path / "test_marked.py").write_text(MARKED)
    printed = pytest_in(tmp_path)
    assert f"{2 * len(ALL_CHECKS)} passed, 2 skipped" in printed, printed
    assert "self-consistent, not verified" in printed


def test_the_test_on_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    page = (ROOT / "docs/check-layer.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python test_my_layer.py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "test_my_layer.py").write_text(example)
    (tmp_path / "my_layer.py").write_text(MY_LAYER)
    printed = pytest_in(tmp_path)
    assert f"{len(ALL_CHECKS) + 1} passed" in printed, printed


def test_the_plug_in_is_in_no_other_suites_way(tmp_path: Path) -> None:
    """Its mark may be somebody else's too, and torch is not imported for it."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    layer: of an onion\n")
    (tmp_path / "test_other.py").write_text(
        "import sys, pytest\n"
        "@pytest.mark.layer('outer')\n"
        "def test_other(request):\n"
        "    assert request.config.pluginmanager.has_plugin('hybridserve')\n"
        "    assert not {'torch', 'numpy', 'msgspec'} & set(sys.modules)\n"
    )
    assert "1 passed" in (printed := pytest_in(tmp_path)), printed
    assert "1 failed" in pytest_in(tmp_path, "-p", "no:hybridserve")


# --- the example ---


def published(config: Mapping[str, object], state: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The published layer on one sequence. x: [T, D]. Returns [T, D]."""
    theirs = transformers.DiffLlamaConfig(
        hidden_size=32,
        num_attention_heads=config["num_heads"],
        num_key_value_heads=config["num_kv_heads"],
        head_dim=config["head_dim"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        rms_norm_eps=1e-5,
        attention_bias=False,
    )
    theirs._attn_implementation = "eager"
    layer = DiffLlamaAttention(theirs, layer_idx=1).eval()
    layer.load_state_dict(state)
    mask = torch.full((len(x), len(x)), torch.finfo(torch.float32).min).triu(1)[None, None]
    angles = DiffLlamaRotaryEmbedding(theirs)(x[None], torch.arange(len(x))[None])
    with torch.no_grad():
        return layer(x[None], position_embeddings=angles, attention_mask=mask)[0][0]


@pytest.mark.parametrize("heads", [(8, 4, 8), (4, 4, 6)])
def test_differential_attention_is_the_published_layer(heads: tuple[int, int, int]) -> None:
    config = dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    (subject,) = find_subjects(f"{EXAMPLE}:DiffAttention", json.dumps({"hidden_size": 32, **config}), f"{EXAMPLE}:quadratic")
    mixer = subject.build()
    x = rows_of(mixer, 40)
    expected = published(config, mixer.state_dict(), x)
    assert expected.abs().mean() > 0.02
    FP32.check(run_whole(mixer, x)[0], expected, "DiffLlamaAttention")
    FP32.check(subject.oracle(mixer, x), expected, "the example's own oracle")


# --- the comparison ---


@pytest.mark.parametrize("group", [3, 8, 16, 32])
def test_the_block_size_suits_the_entries_of_a_layer(group: int) -> None:
    (case,) = CASES["indexed_attention"]
    index = msgspec.structs.replace(case.config.index, group=group, budget=2 * group)
    config = msgspec.structs.replace(case.config, index=index)
    subject = Subject(f"pools of {group}", mixers["indexed_attention"], config, case.oracle)
    checks = ALL_CHECKS if group == 3 else [check for check in ALL_CHECKS if check.__module__.endswith("places")]
    report = judge(subject, checks)
    assert not report.failed, [outcome.detail for outcome in report.failed]


def test_a_difference_is_said_with_its_place() -> None:
    actual = torch.ones(2, 3)
    actual[1, 2] = 1.5
    with pytest.raises(ConformanceError, match=r"rows: 1 of 6 values differ, by up to 0.5 at \(1, 2\): 1.5 instead of 1"):
        FP32.check(actual, torch.ones(2, 3), "rows")
    with pytest.raises(ConformanceError, match="NaN"):
        FP32.check(torch.tensor([float("nan")]), torch.ones(1), "rows")
    with pytest.raises(ConformanceError, match="shape"):
        FP32.check(torch.ones(2), torch.ones(3), "rows")
    Tolerance(atol=0.6).check(torch.tensor([1.5]), torch.ones(1), "rows")


def test_a_layer_that_forgets_at_once_is_told() -> None:
    class Forgetful(ShortConv):
        def forward(self, x, batch, caches):
            return self.out_proj(x)

    case = CASES["short_conv"][0]
    report = judge(Subject("forgetful", Forgetful, case.config, None))
    failed = {outcome.check: outcome.detail for outcome in report.failed}
    assert "nothing is remembered" in failed["memory"]
    assert "state.conv was not written whole" in failed["specs"]


def test_the_caches_of_a_bench_are_poisoned_and_apart() -> None:
    bench = Bench(BUILT_IN[0].build())
    for pool in bench.pools().values():
        assert pool.isnan().all()
        assert pool.stride(0) > pool[0].numel()
