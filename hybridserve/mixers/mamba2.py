"""Mamba-2 layer (Granite 4, Falcon-H1, Nemotron-H, Bamba): a selective state space with one decay per head.

Owns its parameters, its specs and its mathematics. Must not know pools, models or the scheduler. Built by architectures
by the name "mamba2". Source: Dao and Gu 2024 (arXiv 2405.21060), as published in transformers
(`GraniteMoeHybridMambaLayer`, `FalconH1Mixer`).

Letters: T rows, S sequences, D hidden, H heads, P head dim, G groups, N state size, I = H P, C = I + 2 G N channels, W
width.
"""

import math

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
from hybridserve.mixers.norm import GatedRMSNorm


class Mamba2Config(MixerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shapes and options.

    `gated_norm` false: the output is only gated (Falcon-H1). `norm_group_size` None: I // num_groups. `out_bias` None:
    as `proj_bias`. `ssm_multipliers` scale the five parts of the input projection, in its order: gate, x, B, C, dt; the
    input itself is scaled by `in_multiplier` (muP, Falcon-H1).
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    out_bias: bool | None = None
    eps: float = 1e-5
    gated_norm: bool = True
    norm_first: bool = False
    norm_group_size: int | None = None
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    ssm_multipliers: tuple[float, ...] | None = None
    in_multiplier: float = 1.0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise UnsupportedModelError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_groups, which is {self.num_groups}"
            )
        if self.inner % self.group_size:
            raise UnsupportedModelError(f"norm_group_size is {self.group_size}; it must divide {self.inner}, the inner size")
        if self.ssm_multipliers is not None and len(self.ssm_multipliers) != 5:
            raise UnsupportedModelError(f"ssm_multipliers has {len(self.ssm_multipliers)} values; it needs 5: gate, x, B, C, dt")
        if self.conv_width < 2:
            raise UnsupportedModelError(f"conv_width is {self.conv_width}; it must be at least 2")

    @property
    def inner(self) -> int:
        """I, the width between the projections."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Elements that are normed together."""
        return self.inner // self.num_groups if self.norm_group_size is None else self.norm_group_size


@mixers.register("mamba2")
class Mamba2(RecurrentMixer):
    """h <- h exp(dt A) + dt x B^T; y = h C + D x, with h: [P, N] of each head, then a gated norm.

    x, B and C pass a short convolution and silu; dt = softplus of its projection.
    """

    Config = Mamba2Config
    config: Mamba2Config
    kind = "mamba2"

    def __init__(self, config: Mamba2Config, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        inner, shared = config.inner, config.num_groups * config.state_size
        channels = inner + 2 * shared
        self.in_parts = (inner, channels, config.num_heads)
        self.conv_parts = (inner, shared, shared)
        out_bias = config.proj_bias if config.out_bias is None else config.out_bias
        self.in_proj = Linear(config.hidden_size, sum(self.in_parts), ops, dtype, bias=config.proj_bias)
        self.conv1d = DepthwiseConv(channels, config.conv_width, ops, dtype, bias=config.conv_bias, silu=True)
        self.dt_bias = empty_parameter(config.num_heads, dtype=torch.float32)
        self.A_log = empty_parameter(config.num_heads, dtype=torch.float32)
        self.D = empty_parameter(config.num_heads, dtype=torch.float32)
        self.norm = _gated_norm(config, ops, dtype) if config.gated_norm else None
        self.out_proj = Linear(inner, config.hidden_size, ops, dtype, bias=out_bias)
        self._multiplier = _part_multiplier(config, dtype)

    def specs(self) -> dict[str, Spec]:
        """The window of the last W - 1 inputs of the convolution, and the state in fp32."""
        state = TensorSpec("ssm", (self.config.num_heads, self.config.head_dim, self.config.state_size), "float32")
        return {"state": StateSpec((self.conv1d.spec("conv"), state))}

    def step(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        """One token of each sequence. x: [S, D]. Returns [S, D] and the states afterwards."""
        gate, xbc, dt = self._project(x)
        xbc, window = self.conv1d.step(xbc, states["state"]["conv"])
        u, b, c = (part.float() for part in self._heads(xbc))
        dt, log_decay = self._time_step(dt)
        group = self.config.num_heads // self.config.num_groups
        b, c = (part.repeat_interleave(group, dim=1) for part in (b, c))
        ssm = states["state"]["ssm"].float() * log_decay.exp()[..., None, None]
        ssm = ssm + torch.einsum("shp,shn->shpn", dt[..., None] * u, b)
        y = torch.einsum("shpn,shn->shp", ssm, c) + self.D[:, None] * u
        return self._output(y, gate), {"state": {"conv": window, "ssm": ssm}}

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Mix rows. x: [T, D]. Returns [T, D]."""
        cache = caches["state"]
        table = batch.states[cache.group]
        gate, xbc, dt = self._project(x)
        u, b, c = self._heads(self.conv1d(xbc, cache.tensors["conv"], batch, table))
        dt, log_decay = self._time_step(dt)
        y = self.ops.linear_scan(c, b, u * dt[..., None], log_decay, cache.tensors["ssm"], batch, table)
        return self._output(torch.addcmul(y, u, self.D[:, None]), gate)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the input projection: gate [T, I], x|B|C [T, C], dt [T, H]. x: [T, D]."""
        if self.config.in_multiplier != 1.0:
            x = x * self.config.in_multiplier
        projected = self.in_proj(x)
        if self._multiplier is not None:
            if self._multiplier.device != x.device:
                self._multiplier = self._multiplier.to(x.device)
            projected = projected * self._multiplier
        gate, xbc, dt = torch.split_with_sizes(projected, self.in_parts, -1)
        return gate, xbc, dt

    def _heads(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of x: [T, H, P] and B, C: [T, G, N]. xbc: [T, C]."""
        u, b, c = torch.split_with_sizes(xbc, self.conv_parts, -1)
        by_group = (self.config.num_groups, self.config.state_size)
        return (
            torch.unflatten(u, -1, (-1, self.config.head_dim)),
            torch.unflatten(b, -1, by_group),
            torch.unflatten(c, -1, by_group),
        )

    def _time_step(self, dt: Tensor) -> tuple[Tensor, Tensor]:
        """Time step and log decay dt A, at most 0, in fp32. dt: [T, H]. Returns two of [T, H]."""
        # The fp32 bias lifts a lower-precision activation to fp32.
        dt = F.softplus(dt + self.dt_bias)
        low, high = self.config.time_step_limit
        if low > 0 or high < math.inf:
            dt = dt.clamp(low, high)
        return dt, dt * -self.A_log.exp()

    def _output(self, y: Tensor, gate: Tensor) -> Tensor:
        """Gate, norm and project. y: [T, H, P] fp32; gate: [T, I]. Returns [T, D] in gate's dtype."""
        y = y.flatten(-2)
        if self.norm is not None:
            return self.out_proj(self.norm(y, gate))
        return self.out_proj((y * F.silu(gate)).to(gate.dtype))


def _gated_norm(config: Mamba2Config, ops: Ops, dtype: torch.dtype) -> GatedRMSNorm:
    return GatedRMSNorm(config.inner, config.eps, ops, dtype, config.group_size, norm_first=config.norm_first, activation="silu")


def _part_multiplier(config: Mamba2Config, dtype: torch.dtype) -> Tensor | None:
    """What each output of the input projection is multiplied by: [I + C + H], on the CPU until used; None for ones."""
    if config.ssm_multipliers is None or set(config.ssm_multipliers) == {1.0}:
        return None
    shared = config.num_groups * config.state_size
    sizes = (config.inner, config.inner, shared, shared, config.num_heads)
    parts = [torch.full((n,), m, dtype=dtype, device="cpu") for n, m in zip(sizes, config.ssm_multipliers, strict=True)]
    return torch.cat(parts)
