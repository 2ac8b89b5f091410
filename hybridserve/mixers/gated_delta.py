"""Gated delta rule layer (Qwen3-Next, Qwen3.5, Olmo-Hybrid): a memory that overwrites what it knew of a key.

Owns its parameters, its specs and its mathematics. Must not know pools, models or the scheduler. Built by architectures
by the name "gated_delta". Source: Yang et al. 2024 (arXiv 2412.06464), as published in transformers
(`Qwen3_5GatedDeltaNet`).

Letters: T rows, S sequences, D hidden, Hk and Hv key and value heads, K and V their dims, C = 2 Hk K + Hv V channels, W
width.
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
from hybridserve.mixers.norm import GatedRMSNorm

#: Added to the sum of squares of queries and keys, as every published model does.
L2_EPS = 1e-6


class GatedDeltaConfig(MixerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shapes and options. `allow_neg_eigval`: beta reaches 2 instead of 1 (Olmo-Hybrid)."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int = 4
    eps: float = 1e-6
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    allow_neg_eigval: bool = False

    def __post_init__(self) -> None:
        if self.num_v_heads % self.num_k_heads:
            raise UnsupportedModelError(
                f"num_v_heads is {self.num_v_heads}; it must be a multiple of num_k_heads, which is {self.num_k_heads}"
            )
        if self.conv_width < 2:
            raise UnsupportedModelError(f"conv_width is {self.conv_width}; it must be at least 2")


@mixers.register("gated_delta")
class GatedDelta(RecurrentMixer):
    """S <- S exp(g); S <- S + beta (v - S k) k^T; y = S q / sqrt(K), with S: [V, K] of each value head.

    q, k, v pass a short convolution and silu; q and k are unit vectors; y is normed and gated per head.
    """

    Config = GatedDeltaConfig
    config: GatedDeltaConfig
    kind = "gated_delta"

    def __init__(self, config: GatedDeltaConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        key_dim, value_dim = config.num_k_heads * config.k_dim, config.num_v_heads * config.v_dim
        self.parts = (key_dim, key_dim, value_dim)
        self.in_proj_qkv = Linear(config.hidden_size, sum(self.parts), ops, dtype)
        self.in_proj_z = Linear(config.hidden_size, value_dim, ops, dtype)
        self.in_proj_b = Linear(config.hidden_size, config.num_v_heads, ops, dtype)
        self.in_proj_a = Linear(config.hidden_size, config.num_v_heads, ops, dtype)
        self.conv1d = DepthwiseConv(sum(self.parts), config.conv_width, ops, dtype, bias=False, silu=True)
        self.dt_bias = empty_parameter(config.num_v_heads, dtype=torch.float32)
        self.A_log = empty_parameter(config.num_v_heads, dtype=torch.float32)
        self.norm = GatedRMSNorm(config.v_dim, config.eps, ops, dtype, norm_first=True, activation=config.gate_activation)
        self.out_proj = Linear(value_dim, config.hidden_size, ops, dtype)

    def specs(self) -> dict[str, Spec]:
        """The window of the last W - 1 inputs of the convolution, and the memory in fp32."""
        memory = TensorSpec("recurrent", (self.config.num_v_heads, self.config.v_dim, self.config.k_dim), "float32")
        return {"state": StateSpec((self.conv1d.spec("conv"), memory))}

    def step(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        """One token of each sequence. x: [S, D]. Returns [S, D] and the states afterwards."""
        qkv, window = self.conv1d.step(self.in_proj_qkv(x), states["state"]["conv"])
        q, k, v = (part.float() for part in self._heads(qkv))
        log_decay, beta = self._gates(x)
        group = self.config.num_v_heads // self.config.num_k_heads
        q, k = (h.repeat_interleave(group, dim=1) for h in (q, k))
        y, memory = delta_step(q, k, v, log_decay[..., None], beta, states["state"]["recurrent"].float())
        return self._output(y.to(x.dtype), x), {"state": {"conv": window, "recurrent": memory}}

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Mix rows. x: [T, D]. Returns [T, D]."""
        cache = caches["state"]
        table = batch.states[cache.group]
        qkv = self.conv1d(self.in_proj_qkv(x), cache.tensors["conv"], batch, table)
        q, k, v = self._heads(qkv)
        log_decay, beta = self._gates(x)
        memory, scale = cache.tensors["recurrent"], self.config.k_dim**-0.5
        y = self.ops.delta_rule(q, k, v, log_decay, beta, memory, batch, table, scale=scale, qk_l2norm=True)
        return self._output(y, x)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of q, k: [T, Hk, K] and v: [T, Hv, V]. qkv: [T, C]."""
        q, k, v = torch.split_with_sizes(qkv, self.parts, -1)
        by_key_head = (self.config.num_k_heads, self.config.k_dim)
        return (
            torch.unflatten(q, -1, by_key_head),
            torch.unflatten(k, -1, by_key_head),
            torch.unflatten(v, -1, (-1, self.config.v_dim)),
        )

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay, at most 0, in fp32, and beta. x: [T, D]. Returns two of [T, Hv]."""
        # The fp32 bias lifts a lower-precision activation to fp32.
        log_decay = F.softplus(self.in_proj_a(x) + self.dt_bias) * -self.A_log.exp()
        beta = self.in_proj_b(x).sigmoid()
        return log_decay, beta * 2 if self.config.allow_neg_eigval else beta

    def _output(self, y: Tensor, x: Tensor) -> Tensor:
        """Norm and gate each head, project. y: [T, Hv, V]; x: [T, D]. Returns [T, D]."""
        z = torch.unflatten(self.in_proj_z(x), -1, (-1, self.config.v_dim))
        return self.out_proj(self.norm(y, z).flatten(-2))


def delta_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each sequence, fp32, as `ops.DeltaRule` with unit queries and keys and the scale K ** -0.5.

    q, k: [S, Hv, K]; v: [S, Hv, V]; log_decay: [S, Hv, 1 or K]; beta: [S, Hv]; memory: [S, Hv, V, K]. Returns y: [S, Hv, V] and
    the memory afterwards.
    """
    q, k = (h * (h.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for h in (q, k))
    memory = memory * log_decay.exp()[..., None, :]
    error = v - torch.einsum("shvk,shk->shv", memory, k)
    memory = memory + torch.einsum("shv,shk->shvk", beta.float()[..., None] * error, k)
    return torch.einsum("shvk,shk->shv", memory, q) * q.shape[-1] ** -0.5, memory
