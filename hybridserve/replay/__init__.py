"""Replaying traces: the real scheduler and cache on a virtual clock, with a modelled executor and oracles beside it."""
