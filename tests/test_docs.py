"""The documents name only what exists: identifiers, flags, files, routes, links, tests, and tables as the code makes them."""

import argparse
import ast
import builtins
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from docs import tables
from hybridserve.cli import COMMANDS
from hybridserve.config import ENV_PREFIX, EngineSettings, ServerSettings, resolve
from hybridserve.request import Reason
from hybridserve.server.openapi import openapi

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BY_NAME = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

#: Hosts that a page may name, beside this machine: where papers and code are.
HOSTS = {"127.0.0.1:8000", "arxiv.org", "github.com"}
#: Names of other projects and of examples that a page tells the reader to choose for themselves.
FOREIGN = {"openai", "my_package", "MyModelForCausalLM", "FILE.py", "trace.py"}

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of one language."""
    return [body for info, body in _FENCE.findall(page.read_text(encoding="utf-8")) if info.split(" ")[0] == language]


def sources() -> Iterator[Path]:
    for folder in ("hybridserve", "tests", "docs", "benchmarks"):
        # Names in the table of releases would vouch for themselves, and so would those in this file.
        yield from (path for path in sorted((ROOT / folder).rglob("*.py")) if path not in (Path(__file__), Path(tables.__file__)))


@cache
def known_names() -> frozenset[str]:
    """Every identifier of the code, and every word inside its strings (keys, fields, kinds) but not inside its docstrings."""
    names = set(dir(builtins))
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {id(node.body[0].value) for node in ast.walk(tree) if is_documented(node)}
        for node in ast.walk(tree):
            names.update(names_in(node, docs))
        names.update(part for part in path.relative_to(ROOT).with_suffix("").parts)
    return frozenset(names)


@cache
def known_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def is_documented(node: ast.AST) -> bool:
    has_body = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return has_body and ast.get_docstring(node) is not None


def names_in(node: ast.AST, docs: set[int]) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.Name():
            yield node.id
        case ast.Attribute():
            yield node.attr
        case ast.arg() | ast.keyword() if node.arg:
            yield node.arg
        case ast.alias():
            yield from node.name.split(".")
        case ast.Constant(value=str(text)) if id(node) not in docs:
            yield from _NAME.findall(text)


@cache
def known_flags() -> frozenset[str]:
    """Option strings of all commands and their subcommands."""
    flags = {"--help", "--version"}
    for _, module in COMMANDS.values():
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add_arguments(parser)
        waiting = [parser]
        while waiting:
            for action in waiting.pop()._actions:
                flags.update(action.option_strings)
                if isinstance(action, argparse._SubParsersAction):
                    waiting += action.choices.values()
    return frozenset(flags)


@cache
def known_routes() -> frozenset[str]:
    return frozenset({"/", "/openapi.json", *openapi("")["paths"]})


def fault_in(span: str) -> str | None:
    """What is wrong with a back-ticked piece of text, if it looks like something of the code."""
    if span.startswith("--"):
        flag = re.split(r"[ =]", span)[0]
        return None if flag in known_flags() or flag == "--no-" else f"no command has the flag {flag}"
    if route := re.fullmatch(r"(?:(?:GET|POST) )?(/[\w./-]*)", span):
        return None if route[1] in known_routes() else f"there is no route {route[1]}"
    if found := re.fullmatch(r"(tests/[\w/]+\.py)::(\w+)", span):
        return None if has_test(found[1], found[2]) else f"there is no test {span}"
    if re.fullmatch(r"[\w.-]+(/[\w.-]*)+", span):
        return None if (ROOT / span).exists() or (ROOT / "docs" / span).exists() else f"there is no file {span}"
    if span.startswith(ENV_PREFIX) and span != ENV_PREFIX:
        fields = {*EngineSettings.__struct_fields__, *ServerSettings.__struct_fields__}
        return None if span.removeprefix(ENV_PREFIX).lower() in fields else f"{span} is no setting"
    if span.startswith("hybridserve "):
        return None if span.split(" ")[1] in COMMANDS else f"there is no command {span.split(' ')[1]}"
    if span.startswith("make "):
        return None if span.split(" ")[1] in known_targets() else f"there is no target {span.split(' ')[1]}"
    if looks_like_a_name(span):
        missing = [name for name in _NAME.findall(span.partition("(")[0]) if name not in known_names() | FOREIGN]
        return f"nothing in the code is called {missing[0]}" if missing else None
    return None


def looks_like_a_name(span: str) -> bool:
    """`a.b`, `CamelCase`, `snake_case`, `call(...)`, `UPPER_CASE`."""
    head, call, _ = span.partition("(")
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\[.*)?", head):
        return False
    return bool(call) or bool(re.search(r"[a-z][A-Z]|_|\.", head))


def has_test(path: str, name: str) -> bool:
    file = ROOT / path
    return file.is_file() and re.search(rf"^(?:async )?def {name}\(", file.read_text(encoding="utf-8"), re.MULTILINE) is not None


@BY_NAME
def test_what_is_named_exists(page: Path) -> None:
    spans = _SPAN.findall(prose(page))
    faults = {span: fault for span in spans if (fault := fault_in(span)) is not None}
    assert not faults, faults


@pytest.mark.parametrize(
    "span",
    [
        "--max-model-length", "/v1/nothing", "hybridserve/nothing.py", "tests/test_docs.py::test_nothing", "HYBRIDSERVE_NOTHING",
        "hybridserve nothing", "NothingLikeThis", "nothing_like_this()", "EngineSettings.nothing_of_this", "make nothing",
    ],
)  # fmt: skip
def test_the_check_finds_what_does_not_exist(span: str) -> None:
    assert fault_in(span) is not None


@BY_NAME
def test_links_resolve(page: Path) -> None:
    for target in _LINK.findall(prose(page)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = page.parent / file if file else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}; {linked.name} has {sorted(anchors(linked))}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made from the text."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@BY_NAME
def test_only_known_hosts_are_named(page: Path) -> None:
    for host in re.findall(r"https?://([^/\s)>\"'`]+)", page.read_text(encoding="utf-8")):
        assert host in HOSTS, f"{page.name} names {host}"


def test_the_first_commands_are_the_two_that_set_everything_up() -> None:
    info, body = _FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))[0]
    assert info == "bash"
    assert body.splitlines() == ["make demo", "make test"]
    assert {"demo", "test"} <= known_targets()


@BY_NAME
def test_commands_in_examples_have_only_flags_that_exist(page: Path) -> None:
    for body in blocks(page, "bash"):
        for line in body.splitlines():
            words = line.partition(" # ")[0].split()
            if words[:1] == ["hybridserve"]:
                assert words[1] in COMMANDS, f"{page.name}: {line}"
                unknown = [word for word in words if word.startswith("--") and word not in known_flags()]
                assert not unknown, f"{page.name}: {line}"


@BY_NAME
def test_examples_are_well_formed(page: Path) -> None:
    for body in blocks(page, "python"):
        ast.parse(body if not body.startswith("    ") else "class Part:\n" + body)
    for body in blocks(page, "yaml"):
        content = {name.replace("-", "_"): value for name, value in yaml.safe_load(body).items()}
        for kind in (EngineSettings, ServerSettings):
            resolve(kind, {name: value for name, value in content.items() if name in kind.__struct_fields__})
        assert set(content) <= {*EngineSettings.__struct_fields__, *ServerSettings.__struct_fields__}


@BY_NAME
def test_tables_are_as_the_code_makes_them(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.filled(text) == text, f"{page.name} is older than the code; run: python -m docs.tables"


def test_every_reason_code_is_explained() -> None:
    for page in ("docs/architecture.md", "docs/prefix-cache.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        missing = [reason for reason in Reason.__args__ if f"| `{reason}` |" not in text]
        assert not missing


def test_every_promise_has_a_row() -> None:
    rows = re.findall(r"^\| P(\d+) \|(.*)\|$", (ROOT / "docs/promises.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 15))
    for number, row in rows:
        _, held_by, missing = row.split("|")
        assert "::" in held_by or missing.strip(), f"P{number} names neither a test nor what is missing"
