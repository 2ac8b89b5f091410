"""The mixture-of-experts feed-forward part of a layer.

Owns routing, expert storage and the shared expert. Must not know layers, configs or weights on disk; the experts' arithmetic is
`ops.moe`. Built by the files of the architectures.

Letters: T rows, D hidden, E experts, I expert width, k experts per row.
"""

from typing import Literal, TypeAlias

import msgspec
import torch
from torch import Tensor, nn

from hybridserve.backends.ops import Activation, Ops
from hybridserve.errors import UnsupportedModelError
from hybridserve.mixers.base import empty_parameter
from hybridserve.mixers.linear import Linear
from hybridserve.models.mlp import PlainMLP, SwiGLU

#: How scores become a choice and weights: softmax over all experts before the choice (Qwen), over the chosen ones after it
#: (Granite), or a sigmoid of each (DeepSeek-V3).
Routing: TypeAlias = Literal["softmax_topk", "topk_softmax", "sigmoid"]


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shapes, routing and the arithmetic of an expert.

    `renormalise` makes the chosen weights sum to 1 (`renormalise_eps` is added to their sum), `weight_scale` multiplies them
    after that. With `choice_bias` each expert has a number that counts for the choice alone. With `num_groups` over 1 only
    experts of the best `num_chosen_groups` can be chosen; a group is as good as its two best experts.
    """

    hidden_size: int
    num_experts: int
    num_chosen: int
    width: int
    routing: Routing
    renormalise: bool = True
    renormalise_eps: float = 0.0
    weight_scale: float = 1.0
    choice_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    router_bias: bool = False
    router_fp32: bool = False  # weight and arithmetic of the router, whatever the model's dtype
    activation: Activation = "silu"
    gated: bool = True
    limit: float | None = None  # bounds of gate and up, see `ops.Moe`
    up_shift: float = 0.0
    expert_bias: bool = False
    latent_size: int | None = None  # width that the experts work in, between two projections (Nemotron-H)
    latent_bias: bool = False
    shared_width: int | None = None  # width of an expert that every row takes
    shared_gate: bool = False  # whether that one is weighted by sigmoid(gate x)
    shared_bias: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_chosen <= self.num_experts:
            raise UnsupportedModelError(
                f"{self.num_chosen} of {self.num_experts} experts are to be chosen; it must be from 1 to all"
            )
        if self.num_experts % self.num_groups or not 1 <= self.num_chosen_groups <= self.num_groups:
            raise UnsupportedModelError(
                f"{self.num_experts} experts in {self.num_groups} groups, of which {self.num_chosen_groups} are chosen; "
                "groups must be of one size, and from 1 to all are chosen"
            )


class MoE(nn.Module):
    """Router, experts and, if there is one, the shared expert. Source: published Qwen3-Next, Granite 4, gpt-oss, Nemotron-H
    and DeepSeek-V3 layers.
    """

    def __init__(self, config: MoeConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self._moe = ops.moe
        num_experts, hidden = config.num_experts, config.hidden_size
        size = hidden if config.latent_size is None else config.latent_size
        inner = config.width * (2 if config.gated else 1)
        router_dtype = torch.float32 if config.router_fp32 else dtype
        self.router = Linear(hidden, num_experts, ops, router_dtype, bias=config.router_bias)
        self.choice_bias = empty_parameter(num_experts, dtype=torch.float32) if config.choice_bias else None
        self.gate_up = empty_parameter(num_experts, inner, size, dtype=dtype)
        self.gate_up_bias = empty_parameter(num_experts, inner, dtype=dtype) if config.expert_bias else None
        self.down = empty_parameter(num_experts, size, config.width, dtype=dtype)
        self.down_bias = empty_parameter(num_experts, size, dtype=dtype) if config.expert_bias else None
        latent = config.latent_size
        self.latent_in = None if latent is None else Linear(hidden, latent, ops, dtype, bias=config.latent_bias)
        self.latent_out = None if latent is None else Linear(latent, hidden, ops, dtype, bias=config.latent_bias)
        self.shared = _shared_expert(config, ops, dtype)
        self.shared_gate = Linear(hidden, 1, ops, dtype) if config.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, D]. Returns [T, D]."""
        y = self._experts(x)
        if self.shared is None:
            return y
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(x)) * shared
        return y + shared

    def _experts(self, x: Tensor) -> Tensor:
        """What the chosen experts give. x: [T, D]. Returns [T, D]."""
        expert_ids, weights = self.route(x)
        config = self.config
        biases = None if self.gate_up_bias is None or self.down_bias is None else (self.gate_up_bias, self.down_bias)
        y = self._moe(
            x if self.latent_in is None else self.latent_in(x),
            expert_ids,
            weights,
            self.gate_up,
            self.down,
            activation=config.activation,
            limit=config.limit,
            up_shift=config.up_shift,
            biases=biases,
        )
        return y if self.latent_out is None else self.latent_out(y)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts. x: [T, D]. Returns ids int64 [T, k] and weights [T, k], in x's dtype or fp32 as the router is.

        Softmax and sigmoid are in fp32.
        """
        config = self.config
        scores = self.router(x.float() if config.router_fp32 else x).float()
        if config.routing == "topk_softmax":
            chosen, ids = scores.topk(config.num_chosen, dim=-1)
            chosen = chosen.softmax(dim=-1)
        else:
            scores = scores.sigmoid() if config.routing == "sigmoid" else scores.softmax(dim=-1)
            ids = self._choose(scores)
            chosen = scores.gather(-1, ids)
            if config.renormalise:
                chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + config.renormalise_eps)
        if config.weight_scale != 1.0:
            chosen = chosen * config.weight_scale
        return ids, chosen if config.router_fp32 else chosen.to(x.dtype)

    def _choose(self, scores: Tensor) -> Tensor:
        """Ids of the best experts, those of other than the best groups left out. scores: [T, E]. Returns int64 [T, k]."""
        config = self.config
        if self.choice_bias is not None:
            scores = scores + self.choice_bias
        if config.num_groups > 1:
            by_group = torch.unflatten(scores, -1, (config.num_groups, -1))
            worth = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
            best = torch.zeros_like(worth, dtype=torch.bool).scatter_(
                -1, worth.topk(config.num_chosen_groups, dim=-1).indices, True
            )
            scores = by_group.masked_fill(~best[..., None], -torch.inf).flatten(-2)
        return scores.topk(config.num_chosen, dim=-1).indices


def _shared_expert(config: MoeConfig, ops: Ops, dtype: torch.dtype) -> SwiGLU | PlainMLP | None:
    """An MLP of the experts' own kind."""
    hidden, width, activation, bias = config.hidden_size, config.shared_width, config.activation, config.shared_bias
    if width is None:
        return None
    if config.gated:
        return SwiGLU(hidden, width, ops, dtype, bias=bias, activation=activation, limit=config.limit)
    return PlainMLP(hidden, width, ops, dtype, activation=activation, bias=bias)
