"""Threads of the test process: tiny models gain nothing from more, and a spinning OpenMP runtime starves the engine processes."""

import os

# Both must be set before torch is imported, which the first test file does.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
