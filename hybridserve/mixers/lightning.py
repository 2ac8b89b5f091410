"""Lightning attention (MiniMax): linear attention whose decay is a constant of each head.

Owns its parameters, its specs and its mathematics. Must not know pools, models or the scheduler. Built by architectures
by the name "lightning". Source: Qin et al. 2024 (arXiv 2401.04658), as published in transformers
(`MiniMaxLightningAttention`).

Letters: T rows, S sequences, D hidden, H heads, K head dim.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridserve.backends.ops import Ops
from hybridserve.batch import Batch, LayerCaches
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import Spec, StateSpec, TensorSpec
from hybridserve.mixers.base import MixerConfig, RecurrentMixer, States, mixers
from hybridserve.mixers.linear import Linear
from hybridserve.mixers.norm import GatedRMSNorm


class LightningConfig(MixerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shapes, and how much of the memory each head forgets with a token: exp(-slope) is kept."""

    num_heads: int
    head_dim: int
    slopes: tuple[float, ...]
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if len(self.slopes) != self.num_heads or not all(math.isfinite(slope) and slope >= 0 for slope in self.slopes):
            raise UnsupportedModelError(
                f"slopes are {self.slopes}; {self.num_heads} numbers from 0 are needed, one for each head"
            )


@mixers.register("lightning")
class Lightning(RecurrentMixer):
    """S <- S exp(-slope) + v k^T; y = S q, with S: [K, K] of each head; q, k, v pass silu, y is normed and gated."""

    Config = LightningConfig
    config: LightningConfig
    kind = "lightning"

    def __init__(self, config: LightningConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        inner = config.num_heads * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, 3 * inner, ops, dtype)
        self.output_gate = Linear(config.hidden_size, inner, ops, dtype)
        self.norm = GatedRMSNorm(inner, config.eps, ops, dtype, norm_first=True, activation="sigmoid")
        self.out_proj = Linear(inner, config.hidden_size, ops, dtype)
        self._log_decay = -torch.tensor(config.slopes, dtype=torch.float32, device="cpu")

    def specs(self) -> dict[str, Spec]:
        """The memory, in fp32."""
        size = self.config.head_dim
        return {"state": StateSpec((TensorSpec("recurrent", (self.config.num_heads, size, size), "float32"),))}

    def step(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        """One token of each sequence. x: [S, D]. Returns [S, D] and the states afterwards."""
        q, k, v = (part.float() for part in self._heads(x))
        decay = self._decay_on(x.device).exp()[:, None, None]
        memory = states["state"]["recurrent"].float() * decay + torch.einsum("shv,shk->shvk", v, k)
        y = torch.einsum("shvk,shk->shv", memory, q)
        return self._output(y, x), {"state": {"recurrent": memory}}

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Mix rows. x: [T, D]. Returns [T, D]."""
        cache = caches["state"]
        q, k, v = self._heads(x)
        log_decay = self._decay_on(x.device).expand(len(x), -1)
        y = self.ops.linear_scan(q, k, v, log_decay, cache.tensors["recurrent"], batch, batch.states[cache.group])
        return self._output(y, x)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of q, k, v: [T, H, K], which lie together by head. x: [T, D]."""
        qkv = F.silu(self.qkv_proj(x))
        q, k, v = torch.unflatten(qkv, -1, (self.config.num_heads, 3 * self.config.head_dim)).chunk(3, dim=-1)
        return q, k, v

    def _decay_on(self, device: torch.device) -> Tensor:
        """The log decays [H], moved to a device once."""
        if self._log_decay.device != device:
            self._log_decay = self._log_decay.to(device)
        return self._log_decay

    def _output(self, y: Tensor, x: Tensor) -> Tensor:
        """Norm over all heads, gate, project. y: [T, H, K] fp32; x: [T, D]. Returns [T, D]."""
        return self.out_proj(self.norm(y.flatten(-2), self.output_gate(x)))
