"""Mamba layer (Jamba, Falcon Mamba, Mamba): a selective state space with a decay for every channel and state element.

Owns its parameters, its specs and its mathematics. Must not know pools, models or the scheduler. Built by architectures
by the name "mamba1". Source: Gu and Dao 2023 (arXiv 2312.00752), as published in transformers (`MambaMixer`,
`JambaMambaMixer`, `FalconMambaMixer`).

Letters: T rows, S sequences, D hidden, I inner channels, N state size, R rank of the time step, W width.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridserve.backends.ops import Ops
from hybridserve.batch import Batch, LayerCaches
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import Spec, StateSpec, TensorSpec
from hybridserve.mixers.base import MixerConfig, RecurrentMixer, States, empty_parameter, mixers
from hybridserve.mixers.conv import DepthwiseConv
from hybridserve.mixers.linear import Linear


class Mamba1Config(MixerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shapes and options. `inner_norms`: the time step's low rank, B and C are normed, with weights (Jamba) or without."""

    inner: int
    state_size: int
    dt_rank: int
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    inner_norms: Literal["none", "plain", "weighted"] = "none"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.conv_width < 2:
            raise UnsupportedModelError(f"conv_width is {self.conv_width}; it must be at least 2")


@mixers.register("mamba1")
class Mamba1(RecurrentMixer):
    """h <- h exp(dt A) + dt x B; y = h . C + D x, with h: [N] of each channel, then a gate.

    x passes a short convolution and silu; dt, B and C are projected from what comes out of it.
    """

    Config = Mamba1Config
    config: Mamba1Config
    kind = "mamba1"

    def __init__(self, config: Mamba1Config, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        inner, size, rank = config.inner, config.state_size, config.dt_rank
        self.x_parts = (rank, size, size)
        self.in_proj = Linear(config.hidden_size, 2 * inner, ops, dtype, bias=config.proj_bias)
        self.conv1d = DepthwiseConv(inner, config.conv_width, ops, dtype, bias=config.conv_bias, silu=True)
        self.x_proj = Linear(inner, sum(self.x_parts), ops, dtype)
        self.dt_proj = Linear(rank, inner, ops, dtype)
        self.dt_bias = empty_parameter(inner, dtype=torch.float32)
        self.A_log = empty_parameter(inner, size, dtype=torch.float32)
        self.D = empty_parameter(inner, dtype=torch.float32)
        weighted = config.inner_norms == "weighted"
        self.dt_norm_weight = empty_parameter(rank, dtype=dtype) if weighted else None
        self.b_norm_weight = empty_parameter(size, dtype=dtype) if weighted else None
        self.c_norm_weight = empty_parameter(size, dtype=dtype) if weighted else None
        self.out_proj = Linear(inner, config.hidden_size, ops, dtype, bias=config.proj_bias)

    def specs(self) -> dict[str, Spec]:
        """The window of the last W - 1 inputs of the convolution, and the state in fp32."""
        state = TensorSpec("ssm", (self.config.inner, self.config.state_size), "float32")
        return {"state": StateSpec((self.conv1d.spec("conv"), state))}

    def step(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        """One token of each sequence. x: [S, D]. Returns [S, D] and the states afterwards."""
        u, gate = self.in_proj(x).chunk(2, dim=-1)
        u, window = self.conv1d.step(u, states["state"]["conv"])
        dt, b, c = self._select(u)
        decay = (dt[..., None] * -self.A_log.exp()).exp()
        ssm = states["state"]["ssm"].float() * decay + (dt * u.float())[..., None] * b.float()[:, None]
        y = torch.einsum("sin,sn->si", ssm, c.float())
        return self._output(y, u, gate), {"state": {"conv": window, "ssm": ssm}}

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Mix rows. x: [T, D]. Returns [T, D]."""
        cache = caches["state"]
        table = batch.states[cache.group]
        u, gate = self.in_proj(x).chunk(2, dim=-1)
        u = self.conv1d(u, cache.tensors["conv"], batch, table)
        dt, b, c = self._select(u)
        y = self.ops.selective_scan(u, dt, -self.A_log.exp(), b, c, cache.tensors["ssm"], batch, table)
        return self._output(y, u, gate)

    def _select(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The time step in fp32, B and C. u: [T, I]. Returns [T, I] and two of [T, N]."""
        low, b, c = torch.split_with_sizes(self.x_proj(u), self.x_parts, -1)
        if self.config.inner_norms != "none":
            low, b, c = (
                self.ops.rms_norm(part, weight, self.config.eps)
                for part, weight in ((low, self.dt_norm_weight), (b, self.b_norm_weight), (c, self.c_norm_weight))
            )
        # The fp32 bias lifts a lower-precision activation to fp32.
        return F.softplus(self.dt_proj(low) + self.dt_bias), b, c

    def _output(self, y: Tensor, u: Tensor, gate: Tensor) -> Tensor:
        """Add the direct path, gate and project. y: [T, I] fp32; u, gate: [T, I]. Returns [T, D] in gate's dtype."""
        y = torch.addcmul(y, u, self.D)
        return self.out_proj((y * F.silu(gate)).to(gate.dtype))
