"""The causal depthwise convolution that recurrent mixers share: its parameters, its state and one step of it.

Owns `weight [C, W]`, `bias [C]` and the spec of the window of past inputs. Must not know what is convolved. Called by
`gated_delta.py`, `kda.py`, `mamba2.py` and `short_conv.py`.

Letters: T rows, S sequences, C channels, W width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridserve.backends.ops import Activation, Ops
from hybridserve.batch import Batch, StateTable
from hybridserve.kv.spec import TensorSpec
from hybridserve.mixers.base import dtype_name, empty_parameter


class DepthwiseConv(nn.Module):
    """act(conv(x) + bias), each channel by its own W weights; `act` is silu, or nothing.

    `weight_dtype` is of the weights where they are not in the dtype of the inputs (Ling and GLM keep them in fp32).
    """

    def __init__(
        self,
        channels: int,
        width: int,
        ops: Ops,
        dtype: torch.dtype,
        *,
        bias: bool,
        silu: bool,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._short_conv = ops.short_conv
        self._dtype = dtype
        self.silu = silu
        self.weight = empty_parameter(channels, width, dtype=weight_dtype or dtype)
        self.bias = empty_parameter(channels, dtype=weight_dtype or dtype) if bias else None

    def spec(self, name: str) -> TensorSpec:
        """The last W - 1 inputs, oldest first."""
        channels, width = self.weight.shape
        return TensorSpec(name, (width - 1, channels), dtype_name(self._dtype))

    def forward(self, x: Tensor, window: Tensor, batch: Batch, table: StateTable) -> Tensor:
        """Convolve rows. x: [T, C]; window: [L, W - 1, C], in place where `table` says. Returns [T, C] in x's dtype."""
        activation: Activation = "silu" if self.silu else "identity"
        return self._short_conv(x, self.weight, self.bias, window, batch, table, activation=activation)

    def step(self, x: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve one token of each sequence, in fp32. x: [S, C]; window: [S, W - 1, C].

        Returns [S, C] in x's dtype and the window afterwards.
        """
        inputs = torch.cat((window, x[:, None].to(window.dtype)), dim=1)
        y = (inputs.float() * self.weight.float().T).sum(1)
        if self.bias is not None:
            y = y + self.bias.float()
        return (F.silu(y) if self.silu else y).to(x.dtype), inputs[:, 1:]
