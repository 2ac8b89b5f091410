"""Gated short convolution (LFM2, LFM3): the mixer whose state is nearly free.

Owns its parameters, its spec and its mathematics. Must not know pools, models or the scheduler. Built by architectures
by the name "short_conv". Source: Liquid AI's LFM2, as published in transformers (`Lfm2ShortConv`).

Letters: T rows, S sequences, D hidden, W width.
"""

import torch
from torch import Tensor

from hybridserve.backends.ops import Ops
from hybridserve.batch import Batch, LayerCaches
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import Spec, StateSpec
from hybridserve.mixers.base import MixerConfig, RecurrentMixer, States, mixers
from hybridserve.mixers.conv import DepthwiseConv
from hybridserve.mixers.linear import Linear


class ShortConvConfig(MixerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Width of the convolution; `bias` is for the convolution and both projections."""

    width: int
    bias: bool = False

    def __post_init__(self) -> None:
        if self.width < 2:
            raise UnsupportedModelError(f"width is {self.width}; a short convolution needs at least 2")


@mixers.register("short_conv")
class ShortConv(RecurrentMixer):
    """y = out(c * conv(b * u)), with b, c, u = in(x)."""

    Config = ShortConvConfig
    config: ShortConvConfig
    kind = "short_conv"

    def __init__(self, config: ShortConvConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        dim = config.hidden_size
        self.in_proj = Linear(dim, 3 * dim, ops, dtype, bias=config.bias)
        self.conv = DepthwiseConv(dim, config.width, ops, dtype, bias=config.bias, silu=False)
        self.out_proj = Linear(dim, dim, ops, dtype, bias=config.bias)

    def specs(self) -> dict[str, Spec]:
        """The window of the last W - 1 products b * u."""
        return {"state": StateSpec((self.conv.spec("conv"),))}

    def step(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        """One token of each sequence. x: [S, D]. Returns [S, D] and the states afterwards."""
        b, c, u = self.in_proj(x).chunk(3, dim=-1)
        y, window = self.conv.step(b * u, states["state"]["conv"])
        return self.out_proj(c * y), {"state": {"conv": window}}

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Mix rows. x: [T, D]. Returns [T, D]."""
        cache = caches["state"]
        b, c, u = self.in_proj(x).chunk(3, dim=-1)
        y = self.conv(b * u, cache.tensors["conv"], batch, batch.states[cache.group])
        return self.out_proj(c * y)
