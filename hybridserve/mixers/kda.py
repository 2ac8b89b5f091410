"""Kimi delta attention (Kimi Linear, Ling 3, GLM-5.3-Flash): a gated delta rule that forgets each channel at its own rate.

Owns its parameters, its specs and its mathematics. Must not know pools, models or the scheduler. Built by architectures by the
name "kda". Source: Kimi Linear (arXiv 2510.26692), as published in transformers (`KimiLinearDeltaAttention`,
`BailingHybridDeltaAttention`, `Glm5NextTextLinearAttention`).

Letters: T rows, S sequences, D hidden, H heads, K head dim of keys and values alike, W width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridserve.backends.ops import Ops
from hybridserve.batch import Batch, LayerCaches
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import Spec, StateSpec, TensorSpec
from hybridserve.mixers.base import MixerConfig, RecurrentMixer, States, empty_parameter, mixers
from hybridserve.mixers.conv import DepthwiseConv
from hybridserve.mixers.gated_delta import delta_step
from hybridserve.mixers.linear import Linear
from hybridserve.mixers.norm import GatedRMSNorm


class KDAConfig(MixerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shapes and options.

    `lower_bound` None: log decay is -exp(A_log) softplus(f(x) + dt_bias); else lower_bound sigmoid(exp(A_log) (f(x) + dt_bias)).
    `gate_rank` is that of both gates, f and the output's; None: each is one full projection. `conv_fp32` keeps the
    convolution's weights in fp32 whatever the model's dtype.
    """

    num_heads: int
    head_dim: int
    conv_width: int = 4
    eps: float = 1e-6
    lower_bound: float | None = None
    gate_rank: int | None = None
    conv_fp32: bool = False

    def __post_init__(self) -> None:
        if self.conv_width < 2:
            raise UnsupportedModelError(f"conv_width is {self.conv_width}; it must be at least 2")
        if self.lower_bound is not None and self.lower_bound >= 0:
            raise UnsupportedModelError(f"lower_bound is {self.lower_bound}; a log decay is negative")


class LowRank(nn.Module):
    """b(a(x)): a projection in two steps."""

    def __init__(self, in_features: int, rank: int, out_features: int, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = Linear(in_features, rank, ops, dtype)
        self.b = Linear(rank, out_features, ops, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out]."""
        return self.b(self.a(x))


@mixers.register("kda")
class KDA(RecurrentMixer):
    """S <- S diag(exp(g)); S <- S + beta (v - S k) k^T; y = S q / sqrt(K), with S: [K, K] of each head and g: [K].

    q, k, v pass a short convolution and silu; q and k are unit vectors; y is normed, and gated by a sigmoid, per head.
    """

    Config = KDAConfig
    config: KDAConfig
    kind = "kda"

    def __init__(self, config: KDAConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        hidden, inner = config.hidden_size, config.num_heads * config.head_dim
        conv_dtype = torch.float32 if config.conv_fp32 else dtype
        self.in_proj_qkv = Linear(hidden, 3 * inner, ops, dtype)
        self.conv1d = DepthwiseConv(3 * inner, config.conv_width, ops, dtype, bias=False, silu=True, weight_dtype=conv_dtype)
        self.f_proj = self._gate(inner)
        self.g_proj = self._gate(inner)
        self.b_proj = Linear(hidden, config.num_heads, ops, dtype)
        self.dt_bias = empty_parameter(inner, dtype=torch.float32)
        self.A_log = empty_parameter(config.num_heads, dtype=torch.float32)
        self.o_norm = GatedRMSNorm(config.head_dim, config.eps, ops, dtype, norm_first=True, activation="sigmoid")
        self.o_proj = Linear(inner, hidden, ops, dtype)

    def _gate(self, inner: int) -> Linear | LowRank:
        hidden, rank = self.config.hidden_size, self.config.gate_rank
        if rank is None:
            return Linear(hidden, inner, self.ops, self.dtype)
        return LowRank(hidden, rank, inner, self.ops, self.dtype)

    def specs(self) -> dict[str, Spec]:
        """The window of the last W - 1 inputs of the convolution, and the memory in fp32."""
        head_dim = self.config.head_dim
        memory = TensorSpec("recurrent", (self.config.num_heads, head_dim, head_dim), "float32")
        return {"state": StateSpec((self.conv1d.spec("conv"), memory))}

    def step(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        """One token of each sequence. x: [S, D]. Returns [S, D] and the states afterwards."""
        qkv, window = self.conv1d.step(self.in_proj_qkv(x), states["state"]["conv"])
        q, k, v = (part.float() for part in self._heads(qkv).unbind(1))
        y, memory = delta_step(q, k, v, self._log_decay(x), self._beta(x), states["state"]["recurrent"].float())
        return self._output(y.to(x.dtype), x), {"state": {"conv": window, "recurrent": memory}}

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Mix rows. x: [T, D]. Returns [T, D]."""
        cache = caches["state"]
        table = batch.states[cache.group]
        q, k, v = self._heads(self.conv1d(self.in_proj_qkv(x), cache.tensors["conv"], batch, table)).unbind(1)
        y = self.ops.delta_rule(
            q,
            k,
            v,
            self._log_decay(x),
            self._beta(x),
            cache.tensors["recurrent"],
            batch,
            table,
            scale=self.config.head_dim**-0.5,
            qk_l2norm=True,
        )
        return self._output(y, x)

    def _heads(self, x: Tensor) -> Tensor:
        """Split parts and heads, a view. x: [T, n H K]. Returns [T, n, H, K]."""
        return torch.unflatten(x, -1, (-1, self.config.num_heads, self.config.head_dim))

    def _log_decay(self, x: Tensor) -> Tensor:
        """How much each channel forgets, at most 0, in fp32. x: [T, D]. Returns [T, H, K]."""
        # The fp32 bias lifts a lower-precision activation to fp32.
        logits = self._heads(self.f_proj(x) + self.dt_bias).squeeze(1)
        rate = self.A_log.exp()[:, None]
        if self.config.lower_bound is None:
            return F.softplus(logits) * -rate
        return self.config.lower_bound * (rate * logits).sigmoid()

    def _beta(self, x: Tensor) -> Tensor:
        """How much of the error is corrected. x: [T, D]. Returns [T, H]."""
        return self.b_proj(x).sigmoid()

    def _output(self, y: Tensor, x: Tensor) -> Tensor:
        """Norm and gate each head, project. y: [T, H, K]; x: [T, D]. Returns [T, D]."""
        gate = self._heads(self.g_proj(x)).squeeze(1)
        return self.o_proj(self.o_norm(y, gate).flatten(-2))
