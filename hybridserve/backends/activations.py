"""The activation functions that operations are given by name.

Owns the table. Must not know who uses which. Called by the backends here, and by mixers and models for what is no
operation.
"""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from hybridserve.backends.ops import Activation


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * F.sigmoid(x * 1.702)


def _identity(x: Tensor) -> Tensor:
    return x


#: Elementwise functions, any shape and dtype. `relu2` is the square of relu (Nemotron-H), `quick_gelu` is x sigmoid(1.702 x)
#: (gpt-oss).
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": F.sigmoid,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
    "quick_gelu": _quick_gelu,
    "identity": _identity,
}
