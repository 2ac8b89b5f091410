"""The mixture-of-experts feed-forward part of a layer.

Owns routing, expert storage and the shared expert. Must not know layers, configs or weights on disk; the experts' arithmetic is
`ops.moe`. Built by the files of the architectures.

Letters: T rows, D hidden, E experts, I expert width, k experts per row.
"""

from typing import Literal, TypeAlias

import msgspec
import torch
from torch import Tensor, nn

from hybridserve.backends.ops import Ops
from hybridserve.mixers.base import empty_parameter
from hybridserve.mixers.linear import Linear
from hybridserve.models.mlp import SwiGLU

#: Order of softmax and choice: over all experts before it (Qwen), or over the chosen ones after it (Granite).
Routing: TypeAlias = Literal["softmax_topk", "topk_softmax"]


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shapes and routing. `renormalise` makes the chosen weights sum to 1 after `softmax_topk`."""

    hidden_size: int
    num_experts: int
    num_chosen: int
    width: int
    routing: Routing
    renormalise: bool = True
    shared_width: int | None = None  # width of an expert that every row takes
    shared_gate: bool = False  # whether that one is weighted by sigmoid(gate x)


class MoE(nn.Module):
    """Router, experts and, if there is one, the shared expert. Source: published Qwen3-Next and Granite 4 layers."""

    def __init__(self, config: MoeConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self._moe = ops.moe
        self.router = Linear(config.hidden_size, config.num_experts, ops, dtype)
        self.gate_up = empty_parameter(config.num_experts, 2 * config.width, config.hidden_size, dtype=dtype)
        self.down = empty_parameter(config.num_experts, config.hidden_size, config.width, dtype=dtype)
        self.shared = None if config.shared_width is None else SwiGLU(config.hidden_size, config.shared_width, ops, dtype)
        self.shared_gate = Linear(config.hidden_size, 1, ops, dtype) if config.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, D]. Returns [T, D]."""
        expert_ids, weights = self.route(x)
        y = self._moe(x, expert_ids, weights, self.gate_up, self.down, activation="silu")
        if self.shared is None:
            return y
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(x)) * shared
        return y + shared

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts. x: [T, D]. Returns ids int64 [T, k] and weights [T, k] in x's dtype; softmax in fp32."""
        scores = self.router(x).float()
        if self.config.routing == "topk_softmax":
            chosen, ids = scores.topk(self.config.num_chosen, dim=-1)
            return ids, chosen.softmax(dim=-1).to(x.dtype)
        chosen, ids = scores.softmax(dim=-1).topk(self.config.num_chosen, dim=-1)
        if self.config.renormalise:
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        return ids, chosen.to(x.dtype)
