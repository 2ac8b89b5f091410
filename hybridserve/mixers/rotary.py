"""Rotary position embedding: plain, partial, interleaved and with the published scalings.

Owns frequencies and the rotation of queries and keys. Must not know layers or models. Called by attention mixers;
architectures read their `rope_parameters` with `rope_scaling`. Text-only mrope needs nothing here: its three position
components are equal.

Letters: T rows, H heads, D head dim, R rotary dim (R <= D). Source: Su et al. 2021 (arXiv 2104.09864); scalings as in
the published transformers library.
"""

import math
from collections.abc import Mapping
from typing import TypeAlias

import msgspec
import torch
from torch import Tensor

from hybridserve.batch import Batch
from hybridserve.errors import UnsupportedModelError


class LinearScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="linear", tag_field="rope_type"):
    """Positions divided by `factor`."""

    factor: float

    def inv_freq(self, dim: int, theta: float) -> Tensor:
        """Angle per position of each rotated pair: [dim // 2] fp32."""
        return _plain_inv_freq(dim, theta) / self.factor

    def amplitude(self) -> float:
        """What cosine and sine are multiplied by."""
        return 1.0


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="llama3", tag_field="rope_type"):
    """Long waves divided by `factor`, short ones kept, a linear blend between. Source: Llama 3.1."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def inv_freq(self, dim: int, theta: float) -> Tensor:
        """Angle per position of each rotated pair: [dim // 2] fp32."""
        plain = _plain_inv_freq(dim, theta)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return plain * kept + plain / self.factor * (1 - kept)

    def amplitude(self) -> float:
        """What cosine and sine are multiplied by."""
        return 1.0


class YarnScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="yarn", tag_field="rope_type"):
    """Interpolation by parts. Source: Peng et al. 2023 (arXiv 2309.00071), sections 3.2 and 3.4."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def inv_freq(self, dim: int, theta: float) -> Tensor:
        """Angle per position of each rotated pair: [dim // 2] fp32."""
        plain = _plain_inv_freq(dim, theta)
        low = self._pair_that_turns(self.beta_fast or 32, dim, theta)
        high = self._pair_that_turns(self.beta_slow or 1, dim, theta)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        # A ramp of no length would divide by zero; transformers widens it by the same amount.
        span = high - low or 0.001
        pairs = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
        interpolated = ((pairs - low) / span).clamp(0, 1)
        return plain / self.factor * interpolated + plain * (1 - interpolated)

    def _pair_that_turns(self, turns: float, dim: int, theta: float) -> float:
        """Index of the pair that turns `turns` times within the original context."""
        return dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def amplitude(self) -> float:
        """What cosine and sine are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.mscale_of(self.mscale) / self.mscale_of(self.mscale_all_dim)
        return self.mscale_of(1.0)

    def mscale_of(self, weight: float) -> float:
        """What a weight of the config (`mscale`, `mscale_all_dim`) comes to at this factor."""
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0


class LongRopeScaling(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="longrope", tag_field="rope_type"
):
    """One divisor per pair. Source: Ding et al. 2024 (arXiv 2402.13753).

    Which of the two lists applies is fixed when the model is built. Choosing by the length of the moment, as
    transformers does, would make a token's key depend on how its prompt was chunked.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float
    use_long: bool
    attention_factor: float | None = None

    def inv_freq(self, dim: int, theta: float) -> Tensor:
        """Angle per position of each rotated pair: [dim // 2] fp32."""
        divisors = self.long_factor if self.use_long else self.short_factor
        if len(divisors) != dim // 2:
            raise UnsupportedModelError(
                f"longrope has {len(divisors)} factors for {dim // 2} rotated pairs; they must be as many"
            )
        return _plain_inv_freq(dim, theta) / torch.tensor(divisors, dtype=torch.float32, device="cpu")

    def amplitude(self) -> float:
        """What cosine and sine are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))


class ProportionalScaling(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="proportional", tag_field="rope_type"
):
    """Angles of the whole head's pairs, of which only the first `partial_rotary_factor` turn. Source: Gemma 4, LFM3."""

    partial_rotary_factor: float = 1.0
    factor: float = 1.0

    def inv_freq(self, dim: int, theta: float) -> Tensor:
        """Angle per position of each rotated pair: [dim // 2] fp32."""
        turned = torch.arange(dim // 2, device="cpu") < int(self.partial_rotary_factor * dim // 2)
        return torch.where(turned, _plain_inv_freq(dim, theta) / self.factor, 0.0)

    def amplitude(self) -> float:
        """What cosine and sine are multiplied by."""
        return 1.0


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling

_SCALINGS = ("linear", "llama3", "yarn", "longrope", "proportional")
#: Keys of `rope_parameters` that are not about scaling.
_OTHER_KEYS = ("rope_theta", "partial_rotary_factor", "type", "rope_type", "mrope_section", "mrope_interleaved")


def rope_scaling(parameters: Mapping[str, object], max_positions: int) -> RopeScaling | None:
    """The scaling part of a published `rope_parameters` (once `rope_scaling`) object; None when there is none.

    `max_positions` is the longest context of the model: it stands in for an absent `factor`, and decides which list
    longrope uses. Raises UnsupportedModelError for a kind or a key that is not implemented.
    """
    kind = parameters.get("rope_type", parameters.get("type")) or "default"
    if kind in ("default", "mrope"):
        return None
    if kind not in _SCALINGS:
        raise UnsupportedModelError(f"rope_type {kind!r} is not implemented; known: default, {', '.join(_SCALINGS)}")
    fields = {key: value for key, value in parameters.items() if key not in _OTHER_KEYS}
    if kind == "proportional" and "partial_rotary_factor" in parameters:
        fields["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    original = fields.get("original_max_position_embeddings")
    if kind in ("yarn", "longrope") and isinstance(original, int) and original > 0:
        if fields.get("factor") is None:
            fields["factor"] = max_positions / original
        if kind == "longrope":
            fields["use_long"] = max_positions > original
    return _scaling(str(kind), fields)


def _scaling(kind: str, fields: Mapping[str, object]) -> RopeScaling:
    try:
        return msgspec.convert({"rope_type": kind, **fields}, RopeScaling)
    except msgspec.ValidationError as error:
        raise UnsupportedModelError(
            f"rope_parameters (or rope_scaling) of rope_type {kind!r}: {error}; it is not implemented"
        ) from error


class RotaryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How queries and keys are rotated. `rotary_dim` is the rotated part of the head; the rest passes through.

    Pairs are (i, i + R / 2), or (2i, 2i + 1) when `interleaved`.
    """

    rotary_dim: int
    theta: float
    interleaved: bool = False
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise UnsupportedModelError(f"rotary_dim is {self.rotary_dim}; it must be even and at least 2")


class Rotary:
    """Rotates queries and keys by their positions; layers with equal configs share the angles of a batch."""

    def __init__(self, config: RotaryConfig) -> None:
        self.config = config
        scaling = config.scaling
        dim, theta = config.rotary_dim, config.theta
        self._amplitude = 1.0 if scaling is None else scaling.amplitude()
        # Made on the CPU whatever the default device is: a model is built on "meta" before its weights are read.
        self._inv_freq = _plain_inv_freq(dim, theta) if scaling is None else scaling.inv_freq(dim, theta)

    @property
    def inv_freq(self) -> Tensor:
        """Angle per position of each rotated pair: [R // 2] fp32."""
        return self._inv_freq

    def __call__(self, q: Tensor, k: Tensor, batch: Batch) -> None:
        """Rotate in place. q: [T, Hq, D]; k: [T, Hk, D]; the first R of D turn by `batch.positions`."""
        self.turn(q, batch)
        self.turn(k, batch)

    def turn(self, x: Tensor, batch: Batch) -> None:
        """Rotate one of them in place. x: [T, H, D]; the first R of D turn by `batch.positions`."""
        key = (self.config, x.dtype)
        angles = batch.derived.get(key)
        if angles is None:
            angles = batch.derived[key] = self.angles(batch.positions, x.dtype)
        self._rotate(x, *angles)

    def turn_at(self, x: Tensor, positions: Tensor) -> None:
        """Rotate in place at positions of their own. x: [R, H, D]; positions: [R]."""
        self._rotate(x, *self.angles(positions, x.dtype))

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of every rotated element. positions: [T]. Returns two of [T, 1, R] in `dtype`.

        The sine is negative for the first of each pair, so that rotating is ``x * cos + swapped(x) * sin``.
        """
        if self._inv_freq.device != positions.device:
            self._inv_freq = self._inv_freq.to(positions.device)
        angle = positions[:, None, None].float() * self._inv_freq
        cos, sin = angle.cos(), angle.sin()
        if self._amplitude != 1.0:
            cos, sin = cos * self._amplitude, sin * self._amplitude
        if self.config.interleaved:
            return torch.stack((cos, cos), -1).flatten(-2).to(dtype), torch.stack((-sin, sin), -1).flatten(-2).to(dtype)
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate in place. x: [T, H, D]; cos, sin: [T, 1, R]."""
        turned = x[..., : self.config.rotary_dim]
        if self.config.interleaved:
            swapped = torch.unflatten(turned, -1, (-1, 2)).flip(-1).flatten(-2)
        else:
            swapped = turned.roll(self.config.rotary_dim // 2, -1)
        turned.mul_(cos).addcmul_(swapped, sin)


def _plain_inv_freq(dim: int, theta: float) -> Tensor:
    """theta^(-2i / dim): [dim // 2] fp32, on the CPU."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
