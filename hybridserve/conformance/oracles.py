"""Independent forms of the built-in layers: one sequence at once, in fp64, without caches, states, operations or `step`.

Owns the mathematics as papers write it, quadratic in the length. Must not call the layers that it judges: an oracle is given a
mixer for its config and its parameters alone. Called through `cases.py`.

Letters: T rows, D hidden, H heads, K and V their dims, C channels, W width.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import Mixer
from hybridserve.mixers.gated_delta import GatedDeltaConfig
from hybridserve.mixers.kda import KDAConfig
from hybridserve.mixers.mamba2 import Mamba2Config
from hybridserve.mixers.mla import MLAConfig
from hybridserve.mixers.rotary import RotaryConfig

_ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}


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
    q, gate = _queries_and_gate(config, w, x)
    k, v = (w.project(name, x).unflatten(-1, (config.num_kv_heads, -1)) for name in ("k_proj", "v_proj"))
    q, k = (_head_norm(config, w, name, h) for name, h in (("q_norm", q), ("k_norm", k)))
    q, k = rotate(q, config.rotary), rotate(k, config.rotary) * config.key_multiplier
    k, v = (h.repeat_interleave(config.num_heads // config.num_kv_heads, 1) for h in (k, v))
    scale = config.head_dim**-0.5 if config.scale is None else config.scale
    sinks = w["sinks"] if config.sinks else None
    y = softmax_attention(q * scale, k, v, seen_by(len(x), config.window), sinks, config.softcap or 0.0)
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


def short_conv(mixer: Mixer, x: Tensor) -> Tensor:
    """x: [T, D]. Returns [T, D]."""
    w = Weights(mixer)
    b, c, u = w.project("in_proj", x.double()).chunk(3, -1)
    return w.project("out_proj", c * w.convolve("conv", b * u))
