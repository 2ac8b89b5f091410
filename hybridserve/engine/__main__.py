"""Entry of the engine process: ``python -m hybridserve.engine ADDRESS``.

Owns the imports' order: they are most of the time until an engine is ready. What the process does is `process.py`'s matter.
"""

import gc
import sys


def start(address: str) -> int:
    """Import the engine and run it. Returns the exit code."""
    # Imports make some hundred thousand objects that all live on: collections in between find nothing and take a tenth of it.
    gc.disable()
    from hybridserve.engine.process import main

    gc.freeze()
    gc.enable()
    return main(address)


if __name__ == "__main__":
    sys.exit(start(sys.argv[1]))
