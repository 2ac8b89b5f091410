"""Implementations of the operations that models and mixers are made of, one signature each.

`ops.py` has the signatures, `select.py` chooses among the backends once at load, `reference/` defines every operation
in plain torch, `cpu/` has native kernels. Must not know pools, the scheduler, mixers or models. Called by `engine/`.
"""
