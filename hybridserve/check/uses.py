"""Which operations of the backends a layer calls, read off its code: `self.ops.NAME` and `ops.NAME`.

Owns that reading. Must not know any kind of layer, so it serves those of plug-ins too, and none has to declare what it calls.
Called by `layout.py`.
"""

import dis
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType

from torch import nn

from hybridserve.backends.offer import OPERATIONS

_OPS = "ops"


def operations_of(modules: Iterable[nn.Module]) -> list[str]:
    """Operations that these modules and all below them may call, in the order of `Ops`."""
    kinds = {type(part) for module in modules for part in module.modules()}
    named = {name for kind in kinds for name in _named_by(kind)}
    return [operation for operation in OPERATIONS if operation in named]


def _named_by(kind: type[nn.Module]) -> frozenset[str]:
    """Operations that the methods of a class name, inherited ones included; those of torch's own classes name none."""
    own = {name for parent in kind.__mro__ if parent not in nn.Module.__mro__ for name in vars(parent)}
    members = (inspect.getattr_static(kind, name) for name in own)
    functions = (member.fget if isinstance(member, property) else getattr(member, "__func__", member) for member in members)
    return frozenset(name for one in functions if isinstance(one, FunctionType) for name in _named_in(one.__code__))


def _named_in(code: CodeType) -> Iterator[str]:
    """Attributes of something called `ops`, comprehensions and inner functions included."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _named_in(inner)
    # Most functions have no such name, and taking one apart is slow.
    if _OPS not in (*code.co_names, *code.co_varnames, *code.co_freevars):
        return
    before: object = None
    for instruction in dis.get_instructions(code):
        if before == _OPS and instruction.argval in OPERATIONS:
            yield instruction.argval
        # Newer Pythons load two names at once.
        before = instruction.argval[1] if instruction.opname == "LOAD_FAST_LOAD_FAST" else instruction.argval
