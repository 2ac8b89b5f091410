"""Layers and architectures of installed packages: found by entry points, held to a version, in nobody's way otherwise."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridserve.cli import main
from hybridserve.errors import HybridServeError, MissingDependencyError, UnsupportedModelError, UsageError
from hybridserve.mixers import mixers
from hybridserve.mixers.short_conv import ShortConv
from hybridserve.models import architectures
from hybridserve.registry import PLUGIN_API, load_plugin
from tests.registries import forgetting

ROOT = Path(__file__).parent.parent
EXAMPLE, CONFIG, PAGE = (ROOT / "docs" / name for name in ("examples/rg_lru.py", "examples/griffin.json", "add-a-layer.md"))


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    """What plug-ins register, and their modules, are forgotten after each test."""
    with forgetting("mine"):
        yield


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lay a module and its entry points where an installed package has them."""

    def put(code: str, *, package: str = "mine", mixer: str = "mine", model: str = "MineForCausalLM", at: str = "") -> None:
        folder = tmp_path / package
        info = folder / f"{package}-2.5.dist-info"
        info.mkdir(parents=True)
        (folder / f"{package}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.5\n")
        (info / "entry_points.txt").write_text(
            f"[hybridserve.mixers]\n{mixer} = {package}{at or ':Mine'}\n\n[hybridserve.models]\n{model} = {package}:build\n"
        )
        monkeypatch.syspath_prepend(str(folder))

    return put


def layer(version: str) -> str:
    """A module with a layer and an architecture, both registered by decorators too."""
    return f"""
{version}
from hybridserve.mixers import mixers
from hybridserve.mixers.short_conv import ShortConv
from hybridserve.models import architectures
from hybridserve.models.lfm2 import build as lfm2

@mixers.register("mine")
class Mine(ShortConv):
    kind = "mine"

@architectures.register("MineForCausalLM")
def build(config, ops, dtype):
    return lfm2(config, ops, dtype)
"""


# --- a package that is really installed ---


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip put the package that the page tells how to make."""
    project, target = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("target")
    (toml,) = re.findall(r"^```toml pyproject.toml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (project / "pyproject.toml").write_text(toml)
    (project / "rg_lru.py").write_text(EXAMPLE.read_text())
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", str(target), str(project)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def test_a_package_is_used_by_name(installed: Path, tmp_path: Path) -> None:
    """No flag says where it is: a config asks for its architecture, `check-layer` for its layer, `LLM` runs it."""
    code = f"""
import sys
sys.path.insert(0, {str(installed)!r})
from hybridserve.cli import main
from hybridserve import LLM
checked = main(["check-model", {str(CONFIG)!r}, "--memory", "1GiB", "--backend", "reference"])
proven = main(["check-layer", "rg_lru", "--config", '{{"hidden_size": 16, "num_heads": 2}}'])
assert "rg_lru" in sys.modules and sys.modules["rg_lru"].__file__.startswith({str(installed)!r})
with LLM({str(CONFIG)!r}, load_format="dummy", max_num_seqs=2, kv_cache_memory=2**23) as llm:
    tokens = llm.generate({{"prompt_token_ids": [5, 6, 7]}})[0].outputs[0].token_ids
print("codes", checked, proven, len(tokens) > 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120)
    assert done.stdout.splitlines()[-1] == "codes 0 0 True", done.stdout + done.stderr
    assert "architecture: GriffinForCausalLM, served by rg_lru" in done.stdout
    assert "0-1,3-4: rg_lru" in done.stdout


# --- the version ---


def test_the_right_version_is_taken(install: Install) -> None:
    install(layer(f"PLUGIN_API = {PLUGIN_API}"))
    assert "mine" in mixers.names()
    assert "mine" not in mixers.loaded()
    assert mixers["mine"].__module__ == "mine"
    assert architectures["MineForCausalLM"].__module__ == "mine"


WRONG = {
    f"PLUGIN_API = {PLUGIN_API + 1}": (f"plug-in API {PLUGIN_API + 1}", "update hybridserve"),
    "PLUGIN_API = 0": ("plug-in API 0", "update the plug-in"),
    "": ("is None", f"set PLUGIN_API = {PLUGIN_API}"),
    "PLUGIN_API = '1'": ("is '1'", f"set PLUGIN_API = {PLUGIN_API}"),
    "PLUGIN_API = True": ("is True", f"set PLUGIN_API = {PLUGIN_API}"),
}


@pytest.mark.parametrize("version", WRONG)
def test_another_version_is_refused_each_time_it_is_asked_for(version: str, install: Install) -> None:
    install(layer(version))
    for _ in range(2):  # decorators have filled the tables by the second time
        for table, name in ((mixers, "mine"), (architectures, "MineForCausalLM")):
            with pytest.raises(MissingDependencyError) as error:
                table[name]
            for words in (f"this hybridserve has {PLUGIN_API}", *WRONG[version]):
                assert words in str(error.value)
            assert repr(name) in str(error.value)


def test_the_refusal_names_package_and_release(install: Install) -> None:
    install(layer("PLUGIN_API = 99"))
    with pytest.raises(MissingDependencyError, match=r"'mine:Mine' of mine 2\.5, which provides mixer 'mine'"):
        mixers["mine"]


def test_a_file_may_leave_the_version_out_but_not_have_another(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(layer(""))
    load_plugin(str(path))
    assert mixers["mine"].kind == "mine"
    other = tmp_path / "other.py"
    other.write_text(layer("PLUGIN_API = 7").replace("mine", "other").replace("MineFor", "OtherFor"))
    for _ in range(2):
        with pytest.raises(MissingDependencyError, match="plug-in API 7, but this hybridserve has 1; update hybridserve"):
            load_plugin(str(other))


# --- what a broken package costs ---

BROKEN = {
    "crashes": "PLUGIN_API = 1\nfrom hybridserve.mixers import no_such_name\n",
    "exits": "PLUGIN_API = 1\nraise SystemExit(3)\n",
    "half": layer("PLUGIN_API = 1") + "\n1 / 0\n",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_package_fails_who_asks_for_it_and_nobody_else(
    how: str, install: Install, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install(BROKEN[how])
    for _ in range(2):
        with pytest.raises(MissingDependencyError, match=r"'mine:Mine' of mine 2\.5.* failed to import: .*uninstall it"):
            mixers["mine"]
    assert main(["check-layer", "short_conv", "--json"]) == 0
    # An architecture that nobody has, whose nearest name is that of the broken package.
    config = tmp_path / "config.json"
    for name, code in (("MineForCausalLMs", 3), ("MineForCausalLM", 6)):
        config.write_text(json.dumps({**json.loads(CONFIG.read_text()), "architectures": [name]}))
        capsys.readouterr()
        found = main(["check-model", str(config), "--memory", "1GiB", "--json"])
        printed = capsys.readouterr()
        assert found == code, printed
        (failure,) = (one for one in json.loads(printed.out)["checks"] if one["status"] == "FAIL")
        assert name in failure["detail"]
        assert failure["fix"]
    with pytest.raises(UnsupportedModelError, match="mine"):
        mixers["mined"]


def test_a_module_that_failed_half_way_can_be_repaired(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(BROKEN["half"])
    with pytest.raises(MissingDependencyError, match="ZeroDivisionError"):
        load_plugin(str(path))
    with pytest.raises(UnsupportedModelError, match="unknown mixer 'mine'"):
        mixers["mine"]
    path.write_text(layer("PLUGIN_API = 1"))
    load_plugin(str(path))
    assert mixers["mine"].kind == "mine"


def test_a_cell_of_a_notebook_can_be_run_again() -> None:
    for size in (1, 2):

        @mixers.register("mine_of_a_cell")
        class Mine(ShortConv):
            kind = f"mine_{size}"

    assert mixers["mine_of_a_cell"].kind == "mine_2"
    with pytest.raises(UsageError, match="registered twice"):
        mixers.register("mine_of_a_cell")(ShortConv)


# --- names ---


def test_two_packages_of_one_name_are_an_error_for_who_asks(install: Install) -> None:
    install(layer("PLUGIN_API = 1"))
    install(layer("PLUGIN_API = 1"), package="mine_too")
    with pytest.raises(UsageError, match=r"of mine_too 2\.5 and by 'mine:Mine' of mine 2\.5; uninstall all but one"):
        mixers["mine"]
    assert mixers["short_conv"].kind == "short_conv"


def test_a_built_in_name_stays_built_in(install: Install) -> None:
    install("raise RuntimeError", mixer="attention", model="LlamaForCausalLM")
    assert mixers["attention"].__module__ == "hybridserve.mixers.attention"
    assert architectures["LlamaForCausalLM"].__module__ == "hybridserve.models.llama"
    assert mixers.names().count("attention") == 1


def test_an_entry_point_may_name_the_module_alone(install: Install) -> None:
    install(layer("PLUGIN_API = 1"), at=" ")
    assert mixers["mine"].kind == "mine"


def test_a_module_that_registers_nothing_is_told(install: Install) -> None:
    install("PLUGIN_API = 1", at=" ")
    with pytest.raises(MissingDependencyError, match="registers nothing of that name"):
        mixers["mine"]


@pytest.mark.parametrize("kind", [MissingDependencyError, UsageError, UnsupportedModelError])
def test_all_of_these_are_errors_with_an_exit_code(kind: type[HybridServeError]) -> None:
    assert kind.exit_code in (2, 3, 6)


def test_an_installed_layer_brings_its_own_oracle(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    code = layer(f"PLUGIN_API = {PLUGIN_API}")
    install(code + "\nfrom hybridserve.conformance.oracles import short_conv as whole\n")
    arguments = ["check-layer", "mine", "--config", '{"hidden_size": 16, "width": 3}', "--json"]
    assert main([*arguments, "--oracle", "mine:whole"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "verified"
    for wrong, told in (("mine:nothing", "no function called 'nothing'"), ("missing:whole", "cannot be imported")):
        assert main([*arguments, "--oracle", wrong]) == 2
        assert told in capsys.readouterr().err
