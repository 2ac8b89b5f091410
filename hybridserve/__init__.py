"""hybridserve: a serving engine for hybrid-architecture language models.

Importing the package is cheap; `LLM` brings torch in when it is first touched.
"""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridserve.llm import LLM
    from hybridserve.request import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"
_log = logging.getLogger(__name__)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from hybridserve.config import let_idle_threads_sleep

        if not let_idle_threads_sleep():
            _log.warning("torch was imported before hybridserve.LLM: its idle threads spin; set OMP_WAIT_POLICY=passive before")
        from hybridserve.llm import LLM

        return LLM
    if name == "SamplingParams":
        from hybridserve.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'hybridserve' has no attribute {name!r}")
