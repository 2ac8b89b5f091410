"""Independent forms of the built-in layers: one sequence at once, in fp64, without caches, states, operations or `step`.

Owns the mathematics as papers write it, quadratic in the length. Must not call the layers that it judges: an oracle is given a
mixer for its config and its parameters alone. Called through `cases.py`.

Letters: T rows, D hidden, H heads, K and V their dims, C channels, W width.
"""

# mypy: allow-untyped-calls
# torch leaves methods such as unflatten and split without types.
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import Mixer
from hybridserve.mixers.gated_delta import GatedDeltaConfig
from hybridserve.mixers.index import IndexConfig
from hybridserve.mixers.indexed_attention import IndexedAttentionConfig
from hybridserve.mixers.indexed_mla import IndexedMLAConfig
from hybridserve.mixers.kda import KDAConfig
from hybridserve.mixers.lightning import LightningConfig
from hybridserve.mixers.mamba1 import Mamba1Config
from hybridserve.mixers.mamba2 import Mamba2Config
from hybridserve.mixers.mla import MLAConfig
from hybridserve.mixers.ngram import NgramConfig
from hybridserve.mixers.rotary import RotaryConfig

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


class Weights:
    """A mixer's parameters in fp64, by name."""

    def __init__(self, mixer: Mixer) -> None:
        self._tensors: Mapping[str, Tensor] = {name: tensor.double() for name, tensor in mixer.state_dict().items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def project(self, name: str, x: Tensor) -> Tensor:
        """x W^T + b, without b where there is none. x: [T, in]. Returns [T, out]."""
        return F.linear(x, self[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def convolve(self, name: str, x: Tensor) -> Tensor:
        """Each channel with the W - 1 rows before its own. x: [T, C]. Returns [T, C]."""
        weight = self[f"{name}.weight"]
        padded = F.pad(x.T, (weight.shape[1] - 1, 0))[None]
        return F.conv1d(padded, weight[:, None], self._tensors.get(f"{name}.bias"), groups=len(weight))[0].T


def rms(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square. x: [..., N]."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotate(x: Tensor, config: RotaryConfig | None) -> Tensor:
    """The first R of each head turned as complex numbers, without scaling. x: [T, H, K]. Returns the same shape."""
    if config is None:
        return x
    half = config.rotary_dim // 2
    turned = x[..., : config.rotary_dim]
    pairs = turned.unflatten(-1, (half, 2)) if config.interleaved else turned.unflatten(-1, (2, half)).transpose(-1, -2)
    angle = torch.outer(torch.arange(len(x)).double(), config.theta ** (-torch.arange(half).double() / half))
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None])
    turned = turned.flatten(-2) if config.interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat((turned, x[..., config.rotary_dim :]), -1)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None = None, softcap: float = 0.0) -> Tensor:
    """q: [T, H, K], scaled; k: [T, H, K]; v: [T, H, V]; seen: bool [T, T] or [H, T, T]; sinks: [H]. Returns [T, H, V]."""
    scores = torch.einsum("ihk,jhk->hij", q, k)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hij,jhv->ihv", scores.softmax(-1)[..., : len(k)], v)


def seen_by(num_rows: int, window: int | None = None) -> Tensor:
    """Which rows j a row i sees: bool [T, T]."""
    behind = torch.arange(num_rows)[:, None] - torch.arange(num_rows)
    return (behind >= 0) & (behind < (window or num_rows))


def attention(mixer: Mixer, x: Tensor) -> Tensor:
    """Softmax attention with the options of `AttentionConfig`. x: [T, D]. Returns [T, D]."""
    config, w, x = mixer.config, Weights(mixer), x.double()
    assert isinstance(config, AttentionConfig)
    return grouped_attention(config, w, x, seen_by(len(x), config.window))


def grouped_attention(config: AttentionConfig, w: Weights, x: Tensor, seen: Tensor) -> Tensor:
    """x: [T, D]; seen: bool [T, T]. Returns [T, D]."""
    q, gate = _queries_and_gate(config, w, x)
    k, v = (w.project(name, x).unflatten(-1, (config.num_kv_heads, -1)) for name in ("k_proj", "v_proj"))
    q, k = (_head_norm(config, w, name, h) for name, h in (("q_norm", q), ("k_norm", k)))
    q, k = rotate(q, config.rotary), rotate(k, config.rotary) * config.key_multiplier
    k, v = (h.repeat_interleave(config.num_heads // config.num_kv_heads, 1) for h in (k, v))
    scale = config.head_dim**-0.5 if config.scale is None else config.scale
    sinks = w["sinks"] if config.sinks else None
    y = softmax_attention(q * scale, k, v, seen, sinks, config.softcap or 0.0)
    return w.project("o_proj", (y * gate.sigmoid() if gate is not None else y).flatten(1))


def _queries_and_gate(config: AttentionConfig, w: Weights, x: Tensor) -> tuple[Tensor, Tensor | None]:
    q = w.project("q_proj", x).unflatten(-1, (config.num_heads, -1))
    if config.output_gate == "head":
        return q, w.project("g_proj", x)[..., None]
    if config.output_gate == "element":
        return q[..., : config.head_dim], q[..., config.head_dim :]
    return q, None


def _head_norm(config: AttentionConfig, w: Weights, name: str, x: Tensor) -> Tensor:
    if config.qk_norm == "none":
        return x
    weight = w[f"{name}.weight"] + (1 if config.zero_centred_norm else 0)
    if config.qk_norm == "head":
        return rms(x, config.qk_norm_eps) * weight
    return (rms(x.flatten(1), config.qk_norm_eps) * weight).view(x.shape)


def mla(mixer: Mixer, x: Tensor) -> Tensor:
    """Latent attention with keys and values expanded for each head, as the paper first writes it. x: [T, D]. Returns [T, D]."""
    config, w, x = mixer.config, Weights(mixer), x.double()
    assert isinstance(config, MLAConfig)
    y = latent_attention(config, w, x, seen_by(len(x)))
    return w.project("o_proj", y.flatten(1))


def latent_attention(config: MLAConfig, w: Weights, x: Tensor, seen: Tensor) -> Tensor:
    """Heads before the last projection, gated. x: [T, D]; seen: bool [T, T]. Returns [T, H, V]."""
    q = w.project("q_proj", x) if config.q_rank is None else w.project("q_b_proj", low_rank_query(config, w, x))
    q = q.unflatten(-1, (config.num_heads, -1))
    latent, shared = w.project("kv_a_proj_with_mqa", x).split((config.kv_rank, config.rope_dim), -1)
    expanded = w.project("kv_b_proj", rms(latent, config.eps) * w["kv_a_layernorm.weight"])
    k, v = expanded.unflatten(-1, (config.num_heads, -1)).split((config.nope_dim, config.v_dim), -1)
    shared = rotate(shared[:, None], config.rotary if config.rope_dim else None).expand(-1, config.num_heads, -1)
    q = torch.cat((q[..., : config.nope_dim], rotate(q[..., config.nope_dim :], config.rotary)), -1)
    scale = (config.nope_dim + config.rope_dim) ** -0.5 if config.scale is None else config.scale
    y = softmax_attention(q * scale, torch.cat((k, shared), -1), v, seen)
    return y * w.project("g_proj", x).sigmoid()[..., None] if config.output_gate == "head" else y


def low_rank_query(config: MLAConfig, w: Weights, x: Tensor) -> Tensor:
    """x: [T, D]. Returns [T, q_rank]."""
    return rms(w.project("q_a_proj", x), config.eps) * w["q_a_layernorm.weight"]


def indexed_attention(mixer: Mixer, x: Tensor) -> Tensor:
    """Grouped attention to the tokens that the mean keys of their groups choose. x: [T, D]. Returns [T, D]."""
    config, w, x = mixer.config, Weights(mixer), x.double()
    assert isinstance(config, IndexedAttentionConfig)
    index = config.index
    inner = index.num_heads * index.head_dim
    q, raw = (x @ w["indexer.index_qk_proj.weight"].T).split((inner, index.head_dim), -1)
    q = rotate(rms(q.unflatten(-1, (-1, index.head_dim)), index.eps) * (1 + w["indexer.q_layernorm.weight"]), index.rotary)
    keys = rms(_full_groups(raw, index.group).mean(1), index.eps) * (1 + w["indexer.k_layernorm.weight"])
    scores = torch.einsum("ihk,ek->ihe", q, _turn_groups(keys, index)).relu().sum(1)
    return grouped_attention(config, w, x, _chosen(scores, index))


def indexed_mla(mixer: Mixer, x: Tensor) -> Tensor:
    """Latent attention to the tokens that an index of one key per token, or per learned pool, chooses. x: [T, D]."""
    config, w, x = mixer.config, Weights(mixer), x.double()
    assert isinstance(config, IndexedMLAConfig)
    index = config.index
    assert index is not None
    row = x if config.q_rank is None else low_rank_query(config, w, x)
    q = rotate(w.project("indexer.wq_b", row).unflatten(-1, (index.num_heads, -1)), index.rotary)
    norm = w["indexer.k_norm.weight"], w["indexer.k_norm.bias"]
    keys = F.layer_norm(w.project("indexer.wk", x), (index.head_dim,), *norm, index.eps)
    if index.group == 1:
        keys = rotate(keys[:, None], index.rotary)[:, 0]
    else:
        gates = x @ w["indexer.index_kpool_compress_gate"].T
        shares = (_full_groups(gates, index.group) + w["indexer.index_kpool_compress_ape"]).softmax(1)
        keys = (shares * _full_groups(keys, index.group)).sum(1)
    scores = torch.einsum("ihe,ih->ie", torch.einsum("ihk,ek->ihe", q, keys).relu(), w.project("indexer.weights_proj", x))
    return w.project("o_proj", latent_attention(config, w, x, _chosen(scores, index)).flatten(1))


def _full_groups(x: Tensor, group: int) -> Tensor:
    """x: [T, K]. Returns [T // n, n, K]."""
    return x[: len(x) // group * group].unflatten(0, (-1, group))


def _turn_groups(keys: Tensor, index: IndexConfig) -> Tensor:
    """Each pooled key turned at its group's first position. keys: [E, K]."""
    spread = keys[:, None].repeat_interleave(index.group, 0)
    return rotate(spread, index.rotary)[:: index.group, 0]


def _chosen(scores: Tensor, index: IndexConfig) -> Tensor:
    """Tokens of the best groups among those that are full, and of the open group. scores: [T, E]. Returns bool [T, T]."""
    seen = torch.zeros(len(scores), len(scores), dtype=torch.bool)
    for i, row in enumerate(scores):
        full = (i + 1) // index.group
        for entry in row[:full].topk(min(full, index.budget // index.group)).indices.tolist():
            seen[i, entry * index.group : (entry + 1) * index.group] = True
        seen[i, full * index.group : i + 1] = True
    return seen


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule as one triangular system over all rows (Yang et al. 2024, arXiv 2406.06484, section 3).

    q, k: [T, H, K]; v: [T, H, V]; log_decay: [T, H, 1 or K]; beta: [T, H]. Returns [T, H, V].
    """
    q, k = (h / (h.square().sum(-1, keepdim=True) + 1e-6).sqrt() for h in (q, k))
    total = log_decay.expand_as(k).cumsum(0)
    lower = seen_by(len(q))[:, :, None, None]
    decay = (total[:, None] - total[None]).masked_fill(~lower, -torch.inf).exp()  # [i, j, H, K]
    overlap = torch.einsum("ihk,jhk,ijhk->hij", k, k, decay).tril(-1) * beta.T[..., None]
    corrections = torch.linalg.solve_triangular(
        overlap + torch.eye(len(q)), (beta[..., None] * v).transpose(0, 1), upper=False, unitriangular=True
    )
    return torch.einsum("ihk,jhk,ijhk,hjv->ihv", q, k, decay, corrections) * q.shape[-1] ** -0.5


def gated_delta(mixer: Mixer, x: Tensor) -> Tensor:
    """x: [T, D]. Returns [T, D]."""
    config, w, x = mixer.config, Weights(mixer), x.double()
    assert isinstance(config, GatedDeltaConfig)
    key_dim, value_dim = config.num_k_heads * config.k_dim, config.num_v_heads * config.v_dim
    mixed = F.silu(w.convolve("conv1d", w.project("in_proj_qkv", x)))
    q, k, v = mixed.split((key_dim, key_dim, value_dim), -1)
    group = config.num_v_heads // config.num_k_heads
    q, k = (h.unflatten(-1, (config.num_k_heads, -1)).repeat_interleave(group, 1) for h in (q, k))
    log_decay = -w["A_log"].exp() * F.softplus(w.project("in_proj_a", x) + w["dt_bias"])
    beta = w.project("in_proj_b", x).sigmoid() * (2 if config.allow_neg_eigval else 1)
    y = delta_rule(q, k, v.unflatten(-1, (config.num_v_heads, -1)), log_decay[..., None], beta)
    gate = _ACTIVATIONS[config.gate_activation](w.project("in_proj_z", x)).view(y.shape)
    return w.project("out_proj", (rms(y, config.eps) * w["norm.weight"] * gate).flatten(1))


def kda(mixer: Mixer, x: Tensor) -> Tensor:
    """x: [T, D]. Returns [T, D]."""
    config, w, x = mixer.config, Weights(mixer), x.double()
    assert isinstance(config, KDAConfig)
    heads = (config.num_heads, config.head_dim)
    mixed = F.silu(w.convolve("conv1d", w.project("in_proj_qkv", x)))
    q, k, v = mixed.unflatten(-1, (3, *heads)).unbind(1)
    logits = (_full_or_low_rank(config, w, "f_proj", x) + w["dt_bias"]).unflatten(-1, heads)
    rate = w["A_log"].exp()[:, None]
    bound = config.lower_bound
    log_decay = -rate * F.softplus(logits) if bound is None else bound * (rate * logits).sigmoid()
    y = delta_rule(q, k, v, log_decay, w.project("b_proj", x).sigmoid())
    gate = _full_or_low_rank(config, w, "g_proj", x).sigmoid().unflatten(-1, heads)
    return w.project("o_proj", (rms(y, config.eps) * w["o_norm.weight"] * gate).flatten(1))


def _full_or_low_rank(config: KDAConfig, w: Weights, name: str, x: Tensor) -> Tensor:
    if config.gate_rank is None:
        return w.project(name, x)
    return w.project(f"{name}.b", w.project(f"{name}.a", x))


def mamba2(mixer: Mixer, x: Tensor) -> Tensor:
    """The masked product of Dao and Gu 2024 (arXiv 2405.21060, section 3). x: [T, D]. Returns [T, D]."""
    config, w, x = mixer.config, Weights(mixer), x.double()
    assert isinstance(config, Mamba2Config)
    inner, shared = config.inner, config.num_groups * config.state_size
    parts = w.project("in_proj", x * config.in_multiplier).split((inner, inner, shared, shared, config.num_heads), -1)
    gate, *mixed, dt = (part * m for part, m in zip(parts, config.ssm_multipliers or [1.0] * 5, strict=True))
    u, b, c = F.silu(w.convolve("conv1d", torch.cat(mixed, -1))).split((inner, shared, shared), -1)
    u = u.unflatten(-1, (config.num_heads, -1))
    group = config.num_heads // config.num_groups
    b, c = (h.unflatten(-1, (config.num_groups, -1)).repeat_interleave(group, 1) for h in (b, c))
    dt = F.softplus(dt + w["dt_bias"]).clamp(*config.time_step_limit)
    total = (-w["A_log"].exp() * dt).cumsum(0)
    decay = (total[:, None] - total[None]).masked_fill(~seen_by(len(x))[..., None], -torch.inf).exp()  # [i, j, H]
    y = torch.einsum("ihn,jhn,ijh,jh,jhp->ihp", c, b, decay, dt, u) + w["D"][:, None] * u
    return w.project("out_proj", _gated(config, w, y.flatten(1), F.silu(gate)))


def _gated(config: Mamba2Config, w: Weights, y: Tensor, gate: Tensor) -> Tensor:
    """y, gate: [T, I]. Returns [T, I]."""
    if not config.gated_norm:
        return y * gate
    if not config.norm_first:
        y = y * gate
    y = rms(y.unflatten(-1, (-1, config.group_size)), config.eps).flatten(-2) * w["norm.weight"]
    return y * gate if config.norm_first else y


def mamba1(mixer: Mixer, x: Tensor) -> Tensor:
    """Every pair of rows weighed by the decay between them (Gu and Dao 2023, arXiv 2312.00752). x: [T, D]. Returns [T, D]."""
    config, w, x = mixer.config, Weights(mixer), x.double()
    assert isinstance(config, Mamba1Config)
    u, gate = w.project("in_proj", x).chunk(2, -1)
    u = F.silu(w.convolve("conv1d", u))
    selected = w.project("x_proj", u).split((config.dt_rank, config.state_size, config.state_size), -1)
    if config.inner_norms != "none":
        selected = [rms(part, config.eps) for part in selected]
    if config.inner_norms == "weighted":
        selected = [part * w[f"{name}_norm_weight"] for name, part in zip(("dt", "b", "c"), selected, strict=True)]
    low, b, c = selected
    dt = F.softplus(w.project("dt_proj", low) + w["dt_bias"])
    total = (dt[..., None] * -w["A_log"].exp()).cumsum(0)
    decay = (total[:, None] - total[None]).masked_fill(~seen_by(len(x))[..., None, None], -torch.inf).exp()  # [i, j, I, N]
    y = torch.einsum("in,jn,ijpn,jp->ip", c, b, decay, dt * u) + w["D"] * u
    return w.project("out_proj", y * F.silu(gate))


def lightning(mixer: Mixer, x: Tensor) -> Tensor:
    """x: [T, D]. Returns [T, D]."""
    config, w, x = mixer.config, Weights(mixer), x.double()
    assert isinstance(config, LightningConfig)
    q, k, v = F.silu(w.project("qkv_proj", x)).unflatten(-1, (config.num_heads, 3, config.head_dim)).unbind(2)
    behind = torch.arange(len(x))[:, None] - torch.arange(len(x))
    decay = (-torch.tensor(config.slopes).double()[:, None, None] * behind).exp() * seen_by(len(x))
    y = torch.einsum("ihk,jhk,hij,jhv->ihv", q, k, decay, v).flatten(1)
    return w.project("out_proj", rms(y, config.eps) * w["norm.weight"] * w.project("output_gate", x).sigmoid())


def short_conv(mixer: Mixer, x: Tensor) -> Tensor:
    """x: [T, D]. Returns [T, D]."""
    w = Weights(mixer)
    b, c, u = w.project("in_proj", x.double()).chunk(3, -1)
    return w.project("out_proj", c * w.convolve("conv", b * u))


def ngram(mixer: Mixer, x: Tensor) -> Tensor:
    """The layer on token 0 throughout, as the kit's batches have it. x: [T, n D]. Returns [T, n D]."""
    config, w, x = mixer.config, Weights(mixer), x.double()
    assert isinstance(config, NgramConfig)
    table = torch.cat([w[name] for name in mixer.state_dict() if name.startswith("table.parts")])
    embedded = torch.stack([table[_ngram_rows(config, min(i + 1, len(config.multipliers)))].flatten() for i in range(len(x))])
    query, key = (_stream_norm(config, w, name, h) for name, h in (("query", x), ("key", w.project("key_proj", embedded))))
    logit = (query * key).sum(-1, keepdim=True) / query.shape[-1] ** 0.5
    gate = (logit.sign() * logit.abs().clamp_min(1e-6).sqrt()).sigmoid()
    gated = gate * w.project("value_proj", embedded)[:, None]
    normed, apart = _stream_norm(config, w, "conv", gated.flatten(1)).flatten(1), len(config.multipliers)
    width = config.conv_width
    padded = F.pad(normed, (0, 0, (width - 1) * apart, 0))
    mixed = sum(padded[tap * apart : tap * apart + len(x)] * w["conv_weight"][:, tap] for tap in range(width))
    assert isinstance(mixed, Tensor)
    return gated.flatten(1) + F.silu(mixed)


def _stream_norm(config: NgramConfig, w: Weights, name: str, x: Tensor) -> Tensor:
    """x: [T, n D]. Returns [T, n, D]."""
    weight = (1 + w[f"norm_{name}.weight"]).view(config.num_streams, -1)
    return rms(x.unflatten(-1, (config.num_streams, -1)), config.eps) * weight


def _ngram_rows(config: NgramConfig, known: int) -> list[int]:
    """Rows of the table for token 0 behind `known` - 1 others like it; what is before the beginning counts as an end of text."""
    heads_per_order = len(config.head_sizes) // (len(config.multipliers) - 1)
    rows, first = [], 0
    for head, size in enumerate(config.head_sizes):
        order, mixed = head // heads_per_order + 2, 0
        for back in range(order):
            mixed ^= (0 if back < known else config.end_token) * config.multipliers[back]
        rows.append(first + mixed % size)
        first += size
    return rows
