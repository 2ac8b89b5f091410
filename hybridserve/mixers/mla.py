"""Multi-head latent attention: one short vector per token stands for the keys and values of all heads.

Owns its parameters, its spec and its mathematics. Must not know pools, models or the scheduler. Built by architectures by the
name "mla"; `indexed_mla.py` adds an index. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, with the up-projections absorbed
into query and output; options as published in transformers (deepseek_v3, kimi_linear, bailing_hybrid, glm5_next).

Letters: T rows, D hidden, H heads, N and P the head's plain and rotary part, V value dim, R latent rank, B blocks.
"""

from typing import Literal

import torch
from torch import Tensor

from hybridserve.backends.ops import Ops
from hybridserve.batch import Batch, LayerCaches
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import PagedSpec, Spec, TensorSpec
from hybridserve.mixers.base import Mixer, MixerConfig, dtype_name, mixers
from hybridserve.mixers.linear import Linear
from hybridserve.mixers.norm import RMSNorm
from hybridserve.mixers.rotary import Rotary, RotaryConfig


class MLAConfig(MixerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shapes and options.

    `q_rank` None: queries come from one projection. `rotary` None with a `rope_dim`: that part is shared by all heads but not
    rotated (Kimi Linear). `scale` None: (nope_dim + rope_dim) ** -0.5. `output_gate` "head" adds g_proj with one sigmoid gate a
    head (Ling). `bias` is of the projections that come from the hidden row or give one. `eps` is of the inner norms.
    """

    num_heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None = None
    rotary: RotaryConfig | None = None
    scale: float | None = None
    bias: bool = False
    eps: float = 1e-6
    output_gate: Literal["none", "head"] = "none"

    def __post_init__(self) -> None:
        if self.rotary is not None and self.rotary.rotary_dim > self.rope_dim:
            raise UnsupportedModelError(
                f"rotary_dim is {self.rotary.rotary_dim}; it must not exceed rope_dim, which is {self.rope_dim}"
            )


@mixers.register("mla")
class MLA(Mixer):
    """Attention of H query heads to one latent entry per token, which is key and value at once.

    A head's key is W_k latent beside the shared rotary part, its value W_v latent. W_k is multiplied into the query and W_v into
    the output, so that prefill and decode alike attend to what is stored, without expanding it.
    """

    Config = MLAConfig
    config: MLAConfig
    kind = "mla"

    def __init__(self, config: MLAConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        hidden, heads, rank = config.hidden_size, config.num_heads, config.q_rank
        head_dim = config.nope_dim + config.rope_dim
        self.q_proj = Linear(hidden, heads * head_dim, ops, dtype) if rank is None else None
        self.q_a_proj = None if rank is None else Linear(hidden, rank, ops, dtype, bias=config.bias)
        self.q_a_layernorm = None if rank is None else RMSNorm(rank, config.eps, ops, dtype)
        self.q_b_proj = None if rank is None else Linear(rank, heads * head_dim, ops, dtype)
        self.kv_a_proj_with_mqa = Linear(hidden, config.kv_rank + config.rope_dim, ops, dtype, bias=config.bias)
        self.kv_a_layernorm = RMSNorm(config.kv_rank, config.eps, ops, dtype)
        self.kv_b_proj = Linear(config.kv_rank, heads * (config.nope_dim + config.v_dim), ops, dtype)
        self.g_proj = Linear(hidden, heads, ops, dtype) if config.output_gate == "head" else None
        self.o_proj = Linear(heads * config.v_dim, hidden, ops, dtype, bias=config.bias)
        self.rotary = None if config.rotary is None else Rotary(config.rotary)
        self.scale = head_dim**-0.5 if config.scale is None else config.scale

    def specs(self) -> dict[str, Spec]:
        """One entry of each token: the normed latent [R], then the rotary part [P]."""
        entry = TensorSpec("latent", (self.config.kv_rank + self.config.rope_dim,), dtype_name(self.dtype))
        return {"kv": PagedSpec((entry,))}

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Mix rows. x: [T, D]. Returns [T, D]."""
        query_row = self.query_row(x)
        q = self.write(x, query_row, batch, caches)
        return self.output(self.attend(q, x, query_row, batch, caches), x)

    def attend(self, q: Tensor, x: Tensor, query_row: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """What queries find among the cached tokens, the rows' own included. q: [T, H, R + P]; x: [T, D]; query_row: see there.

        Returns [T, H, R].
        """
        cache = caches["kv"]
        entries = cache.tensors["latent"].unsqueeze(2)
        values = entries[..., : self.config.kv_rank]
        return self.ops.paged_attention(q, entries, values, batch, batch.paged[cache.group], scale=self.scale)

    def query_row(self, x: Tensor) -> Tensor:
        """What queries are projected from: the normed low-rank row, or x itself. x: [T, D]. Returns [T, q_rank or D]."""
        if self.q_a_proj is None or self.q_a_layernorm is None:
            return x
        return self.q_a_layernorm(self.q_a_proj(x))

    def write(self, x: Tensor, query_row: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Store the rows' entries and make their queries. x: [T, D]; query_row: [T, q_rank or D].

        Returns [T, H, R + P]: queries in the space of the entries.
        """
        config = self.config
        project = self.q_proj if self.q_b_proj is None else self.q_b_proj
        assert project is not None, "a query is projected in one step or in two"
        q = torch.unflatten(project(query_row), -1, (config.num_heads, -1))
        absorbed = q.new_empty(*q.shape[:2], config.kv_rank + config.rope_dim)
        absorbed[..., : config.kv_rank] = self.ops.head_linear(q[..., : config.nope_dim], self._up(0, config.nope_dim).mT)
        absorbed[..., config.kv_rank :] = q[..., config.nope_dim :]
        entry = self.kv_a_proj_with_mqa(x)
        entry[..., : config.kv_rank] = self.kv_a_layernorm(entry[..., : config.kv_rank])
        if self.rotary is not None:
            self.rotary(absorbed[..., config.kv_rank :], entry[:, None, config.kv_rank :], batch)
        cache = caches["kv"]
        self.ops.kv_write({"latent": entry}, cache.tensors, batch.paged[cache.group])
        return absorbed

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        """Values from mixed latents, gated and projected. y: [T, H, R]; x: [T, D]. Returns [T, D]."""
        values = self.ops.head_linear(y, self._up(self.config.nope_dim, self.config.v_dim))
        if self.g_proj is not None:
            values = values * self.g_proj(x).float().sigmoid().to(values.dtype)[..., None]
        return self.o_proj(values.flatten(-2))

    def _up(self, first: int, count: int) -> Tensor:
        """Rows of each head's up-projection, a view: [H, count, R]. Keys come first, values after them."""
        return torch.unflatten(self.kv_b_proj.weight, 0, (self.config.num_heads, -1))[:, first : first + count]
