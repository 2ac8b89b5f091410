"""What is installed: every package pinned, its hash locked, and both in step with what pyproject.toml asks for."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
}
LOCKED = {
    canonicalize_name(name): (version, rest)
    for name, version, rest in re.findall(
        r"^([\w.-]+)==(\S+)((?:.*\\\n)+.*)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE
    )
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_package_is_pinned_and_every_pin_is_locked_with_hashes() -> None:
    assert {name: version for name, (version, _) in LOCKED.items()} == PINS
    for name, (_, rest) in LOCKED.items():
        assert re.findall(r"--hash=sha256:[0-9a-f]{64}", rest), name


def test_the_pins_are_in_the_ranges_that_the_project_declares() -> None:
    for line in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]):
        wanted = Requirement(line)
        assert wanted.specifier.contains(PINS[canonicalize_name(wanted.name)]), line


def test_the_licence_is_there() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
