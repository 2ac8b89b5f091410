"""The house keeps its floors: who may import whom, where torch may be, what may never be used. Read from the syntax trees."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hybridserve"

#: Lowest first. A module imports its own folder and lower floors, deferred and typing-only imports included.
FLOORS = [
    {"errors"},
    {"registry", "config", "origin", "json_files"},
    {"request", "batch", "kv.spec"},
    {"kv", "backends"},
    {"mixers"},
    {"models"},
    {"engine"},
    {"check", "conformance", "replay"},
    {"server"},
    {"llm"},
    {"cli"},
    {"__main__"},
]
#: The package root offers names from anywhere, lazily; it is on no floor.
ROOT_MODULE = ""


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), ast.parse(path.read_text(encoding="utf-8"))


MODULES = dict(modules())


def floor_of(name):
    for floor, members in reversed(list(enumerate(FLOORS))):
        if name in members:
            return floor
    head = name.split(".")[0]
    return next(floor for floor, members in enumerate(FLOORS) if head in members)


def imported(name, tree):
    """Names of our own modules that a module imports anywhere in its text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("hybridserve.") for alias in node.names if alias.name.startswith("hybridserve."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively in line {node.lineno}"
            if node.module == "hybridserve":
                yield from (alias.name for alias in node.names if alias.name != "__version__")
            elif (node.module or "").startswith("hybridserve."):
                base = node.module.removeprefix("hybridserve.")
                yield from (f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names)


@pytest.mark.parametrize("name", [name for name in MODULES if name != ROOT_MODULE])
def test_a_module_imports_only_its_folder_and_lower_floors(name):
    mine = floor_of(name)
    for other in imported(name, MODULES[name]):
        same_folder = "." in name and "." in other and name.split(".")[0] == other.split(".")[0]
        package_of_mine = other == name.split(".")[0] or name == other.split(".")[0]
        assert floor_of(other) < mine or same_folder or package_of_mine, f"{name} (floor {mine}) imports {other}"


def test_scheduler_and_cache_bookkeeping_never_import_torch():
    bookkeeping = [name for name in MODULES if name.startswith("kv") and name != "kv.storage"]
    bookkeeping += ["engine.scheduler", "engine.seats", "request", "config", "errors", "registry"]
    seen, queue = set(), list(bookkeeping)
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        for node in ast.walk(MODULES[name]):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(module.split(".")[0] == "torch" for module in found), f"{name} imports torch"
        queue += [other for other in imported(name, MODULES[name]) if other in MODULES]


def test_nothing_executes_or_unpickles_foreign_data():
    forbidden = {"eval", "exec", "compile", "__import__"}
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in forbidden, f"{name}:{node.lineno} calls {node.func.id}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                dotted = f"{node.value.id}.{node.attr}"
                assert dotted not in {"torch.load", "yaml.load", "socket.recv_pyobj"}, f"{name}:{node.lineno} uses {dotted}"
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in names:
                head = module.split(".")[0]
                assert head not in {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, f"{name} imports {module}"


def test_layer_kinds_are_never_told_apart_by_type():
    kinds = re.compile(r"(Attention|GatedDelta|Mamba2|ShortConv|Mixer|PagedSpec|StateSpec)$")
    for name, tree in MODULES.items():
        # The conformance kit builds caches and tables from specs, as storage and runner do, for a layer that is looked at alone.
        if name.startswith(("mixers", "kv.spec", "kv.arena", "conformance")):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"isinstance", "hasattr"}:
                text = ast.unparse(node)
                assert not kinds.search(text.rstrip(")").split(",")[-1].strip()), f"{name}:{node.lineno}: {text}"


def test_only_config_reads_settings_from_the_environment():
    for name, tree in MODULES.items():
        if name == "config":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith("HYBRIDSERVE_"), f"{name}:{node.lineno} names an environment variable of ours"
