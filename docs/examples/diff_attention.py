"""Differential attention: one softmax map less another. Source: Ye et al. 2024 (arXiv 2410.05258), as in `DiffLlamaAttention`.

Letters: T rows, D hidden, H query heads, G key heads, both in two halves; K head dim.
"""

import math

import torch
from torch import Tensor

from hybridserve.backends.ops import Ops
from hybridserve.batch import Batch, LayerCaches
from hybridserve.kv.spec import PagedSpec, Spec, TensorSpec
from hybridserve.mixers.base import Mixer, MixerConfig, dtype_name, empty_parameter, mixers
from hybridserve.mixers.linear import Linear
from hybridserve.mixers.rotary import Rotary, RotaryConfig

PLUGIN_API = 1


class DiffAttentionConfig(MixerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    num_heads: int = 8  # of both halves together
    num_kv_heads: int = 4
    head_dim: int = 8
    layer_index: int = 1  # the subtracted map starts out weaker in early layers
    theta: float = 10_000.0
    eps: float = 1e-5

    @property
    def base(self) -> float:
        """The part of lambda that is not learned."""
        return 0.8 - 0.6 * math.exp(-0.3 * self.layer_index)


@mixers.register("diff_attention")
class DiffAttention(Mixer):
    """y = (softmax(q1 k1) - lambda softmax(q2 k2)) v, normed per head; a head's value is as wide as both its keys."""

    Config = DiffAttentionConfig
    config: DiffAttentionConfig
    kind = "diff_attention"

    def __init__(self, config: DiffAttentionConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        inner, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, inner, ops, dtype)
        self.k_proj = Linear(config.hidden_size, kv_dim, ops, dtype)
        self.v_proj = Linear(config.hidden_size, kv_dim, ops, dtype)
        self.o_proj = Linear(inner, config.hidden_size, ops, dtype)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            empty_parameter(config.head_dim, dtype=dtype) for _ in range(4)
        )
        self.rotary = Rotary(RotaryConfig(rotary_dim=config.head_dim, theta=config.theta))

    def specs(self) -> dict[str, Spec]:
        """Of each token: the keys of both maps, and half as many values of twice the width."""
        pairs, dim = self.config.num_kv_heads // 2, self.config.head_dim
        shapes = {"k1": (pairs, dim), "k2": (pairs, dim), "v": (pairs, 2 * dim)}
        return {"kv": PagedSpec(tuple(TensorSpec(name, shape, dtype_name(self.dtype)) for name, shape in shapes.items()))}

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Mix rows. x: [T, D]. Returns [T, D]."""
        config, cache = self.config, caches["kv"]
        table = batch.paged[cache.group]
        q, k, v = (torch.unflatten(project(x), -1, (-1, config.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        self.rotary(q, k, batch)
        (k1, k2), (v1, v2) = k.chunk(2, dim=1), v.chunk(2, dim=1)
        self.ops.kv_write({"k1": k1, "k2": k2, "v": torch.cat((v1, v2), -1)}, cache.tensors, table)
        first, second = (
            self.ops.paged_attention(part, cache.tensors[keys], cache.tensors["v"], batch, table, scale=config.head_dim**-0.5)
            for part, keys in zip(q.chunk(2, dim=1), ("k1", "k2"), strict=True)
        )
        y = self.ops.rms_norm(first - self._weight() * second, None, config.eps) * (1 - config.base)
        return self.o_proj(y.flatten(1))

    def _weight(self) -> Tensor:
        """lambda, in the model's dtype: a scalar."""
        one, two = (
            (q.float() * k.float()).sum().exp() for q, k in ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
        )
        return (one - two + self.config.base).to(self.dtype)


def quadratic(mixer: DiffAttention, x: Tensor) -> Tensor:
    """One sequence at once, in fp64, without a cache: what `check-layer --oracle` compares with. x: [T, D]. Returns [T, D]."""
    c, w = mixer.config, {name: tensor.double() for name, tensor in mixer.state_dict().items()}
    q, k, v = ((x.double() @ w[f"{name}_proj.weight"].T).unflatten(-1, (2, -1, c.head_dim)) for name in "qkv")
    angle = torch.arange(len(x))[:, None] * c.theta ** (-torch.arange(c.head_dim // 2).double() * 2 / c.head_dim)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None, None]
    q, k = (torch.complex(*h.chunk(2, -1)) * turn for h in (q, k))
    k, v = (h.repeat_interleave(c.num_heads // c.num_kv_heads, 2) for h in (k, torch.cat(v.split(1, dim=1), -1)))
    scores = torch.einsum("imhk,jmhk->mhij", q, k.conj()).real * c.head_dim**-0.5  # m: which of the two maps
    first, second = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf).softmax(-1)
    weight = (w["lambda_q1"] @ w["lambda_k1"]).exp() - (w["lambda_q2"] @ w["lambda_k2"]).exp() + c.base
    y = torch.einsum("hij,jhv->ihv", first - weight * second, v[:, 0])
    y = y / (y.square().mean(-1, keepdim=True) + c.eps).sqrt() * (1 - c.base)
    return y.flatten(1) @ w["o_proj.weight"].T
