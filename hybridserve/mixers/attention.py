"""Softmax attention over a paged cache, with the options by which published models differ.

Owns its parameters, its spec and its mathematics. Must not know pools, models or the scheduler. Built by architectures
by the name "attention". Source: Vaswani et al. 2017 (arXiv 1706.03762) with grouped heads (arXiv 2305.13245); options
as published in transformers (llama, qwen3, qwen3_next, olmo3, gpt_oss, gemma2, falcon_h1, lfm3).

Letters: T rows, D hidden, Hq and Hk query and key heads, K head dim.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from hybridserve.backends.ops import Ops
from hybridserve.batch import Batch, LayerCaches
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import PagedSpec, Spec, TensorSpec
from hybridserve.mixers.base import Mixer, MixerConfig, dtype_name, empty_parameter, mixers
from hybridserve.mixers.linear import Linear
from hybridserve.mixers.norm import RMSNorm
from hybridserve.mixers.rotary import Rotary, RotaryConfig


class AttentionConfig(MixerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shapes and options.

    `scale` None: head_dim ** -0.5. `qk_norm`: "head" norms each query and key head (Qwen3), "full" the whole projection
    (Olmo). `output_gate`: "element" doubles q_proj to [q | gate] of each head (Qwen3-Next), "head" adds g_proj with one
    gate a head (LFM3); the gate is a sigmoid. `window`: tokens seen, the row's own included. `sinks`: one more logit
    per head without a value (gpt-oss). `key_multiplier` scales the keys (Falcon-H1).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    qk_norm_eps: float = 1e-6
    zero_centred_norm: bool = False
    output_gate: Literal["none", "element", "head"] = "none"
    rotary: RotaryConfig | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    key_multiplier: float = 1.0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads, which is {self.num_kv_heads}"
            )
        if self.rotary is not None and self.rotary.rotary_dim > self.head_dim:
            raise UnsupportedModelError(
                f"rotary_dim is {self.rotary.rotary_dim}; it must not exceed head_dim, which is {self.head_dim}"
            )


@mixers.register("attention")
class Attention(Mixer):
    """Causal attention of grouped query heads, optionally within a window."""

    Config: ClassVar[type[MixerConfig]] = AttentionConfig
    config: AttentionConfig
    kind = "attention"

    def __init__(self, config: AttentionConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        hidden, inner, kv_dim = (
            config.hidden_size,
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        )
        q_dim = 2 * inner if config.output_gate == "element" else inner
        self.q_proj = Linear(hidden, q_dim, ops, dtype, bias=config.qkv_bias)
        self.k_proj = Linear(hidden, kv_dim, ops, dtype, bias=config.qkv_bias)
        self.v_proj = Linear(hidden, kv_dim, ops, dtype, bias=config.qkv_bias)
        self.o_proj = Linear(inner, hidden, ops, dtype, bias=config.out_bias)
        self.g_proj = Linear(hidden, config.num_heads, ops, dtype) if config.output_gate == "head" else None
        self.q_norm = self._norm(config.num_heads)
        self.k_norm = self._norm(config.num_kv_heads)
        self.sinks = empty_parameter(config.num_heads, dtype=dtype) if config.sinks else None
        self.rotary = None if config.rotary is None else Rotary(config.rotary)
        # Scores are linear in the keys, so their multiplier needs no operation of its own.
        self.scale = (config.head_dim**-0.5 if config.scale is None else config.scale) * config.key_multiplier

    def _norm(self, num_heads: int) -> RMSNorm | None:
        config = self.config
        if config.qk_norm == "none":
            return None
        dim = config.head_dim if config.qk_norm == "head" else num_heads * config.head_dim
        return RMSNorm(dim, config.qk_norm_eps, self.ops, self.dtype, zero_centred=config.zero_centred_norm)

    def specs(self) -> dict[str, Spec]:
        """Key and value of each token."""
        shape = (self.config.num_kv_heads, self.config.head_dim)
        tensors = tuple(TensorSpec(name, shape, dtype_name(self.dtype)) for name in ("k", "v"))
        return {"kv": PagedSpec(tensors, window=self.config.window)}

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Mix rows. x: [T, D]. Returns [T, D]."""
        cache = caches["kv"]
        q, gate = self._query_and_gate(x)
        k = self._heads(self.k_proj(x), self.k_norm)
        v = torch.unflatten(self.v_proj(x), -1, (-1, self.config.head_dim))
        if self.rotary is not None:
            self.rotary(q, k, batch)
        self.ops.kv_write({"k": k, "v": v}, cache.tensors, batch.paged[cache.group])
        y = self.attend(q, x, batch, caches)
        if gate is not None:
            y = y * gate.sigmoid()
        return self.o_proj(y.flatten(-2))

    def attend(self, q: Tensor, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """What queries find among the cached tokens, the rows' own included. q: [T, Hq, K]; x: [T, D]. Returns [T, Hq, K]."""
        cache = caches["kv"]
        return self.ops.paged_attention(
            q,
            cache.tensors["k"],
            cache.tensors["v"],
            batch,
            batch.paged[cache.group],
            scale=self.scale,
            window=self.config.window,
            softcap=self.config.softcap,
            sinks=self.sinks,
        )

    def _query_and_gate(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Normed queries [T, Hq, K] and the output gate's logits, if any: [T, Hq, K] or [T, Hq, 1]. x: [T, D]."""
        projected = self.q_proj(x)
        if self.config.output_gate != "element":
            gate = None if self.g_proj is None else self.g_proj(x)[..., None]
            return self._heads(projected, self.q_norm), gate
        q, gate = torch.unflatten(projected, -1, (-1, 2 * self.config.head_dim)).chunk(2, dim=-1)
        if self.q_norm is None:
            return q, gate
        if self.config.qk_norm == "head":
            return self.q_norm(q), gate
        return self._heads(q.flatten(-2), self.q_norm), gate

    def _heads(self, projected: Tensor, norm: RMSNorm | None) -> Tensor:
        """Split a projection into normed heads. projected: [T, H K]. Returns [T, H, K]."""
        if norm is not None and self.config.qk_norm == "full":
            projected = norm(projected)
        heads = torch.unflatten(projected, -1, (-1, self.config.head_dim))
        return norm(heads) if norm is not None and self.config.qk_norm == "head" else heads
