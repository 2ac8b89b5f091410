"""The kit as a plug-in of pytest: one test for each check of each layer that a mark names.

    @pytest.mark.layer("my_layer.py:MyLayer", config={"hidden_size": 32}, oracle="my_layer.py:quadratic")
    def test_my_layer(layer_check):
        layer_check()

Owns the mark `layer`. pytest loads it by its entry point in every run of an environment that has hybridserve, so it imports
nothing (torch least of all) before a test has the mark. The checks are `layer_check.py`'s.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hybridserve.conformance.layer_check import LayerCheck


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line("markers", "layer(target, config=None, oracle=None): a layer that `layer_check` checks")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each check of the marked layers."""
    # Somebody else's mark may have the same name: without asking for `layer_check`, a test is none of ours.
    if "layer_check" not in metafunc.fixturenames or metafunc.definition.get_closest_marker("layer") is None:
        return
    from hybridserve.conformance.layer_check import layer_checks

    find: Callable[..., list[LayerCheck]] = layer_checks
    found = [check for mark in metafunc.definition.iter_markers("layer") for check in find(*mark.args, **mark.kwargs)]
    metafunc.parametrize("layer_check", found, ids=map(str, found))
