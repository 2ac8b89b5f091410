"""How long a pass would take: bytes and FLOPs of a model over the rates of a device.

Owns the arithmetic, the table of devices and the file of measured rates. Called by `simulate.py` for its virtual clock, and by
the benchmark that measures the rates.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from hybridserve.errors import UsageError
from hybridserve.kv.arena import CachePlan

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates that kernels reach in practice, not those of the data sheet."""

    nbytes_per_s: _Positive
    flop_per_s: _Positive
    step_s: Annotated[float, msgspec.Meta(ge=0)]  # host and launch cost of a pass, whatever its size


DEVICES = {
    "h200": Device(4.3e12, 7.9e14, 5e-4),
    "h100": Device(3.0e12, 7.0e14, 5e-4),
    "a100": Device(1.7e12, 2.6e14, 5e-4),
    "cpu": Device(2.0e10, 7.0e10, 2e-3),
}


def read_device(path: str) -> Device:
    """Rates that were measured, from a JSON file (`python -m benchmarks.calibrate` writes one). Raises UsageError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Device)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"calibration {path!r}: {error}; give a JSON file with nbytes_per_s, flop_per_s and step_s, as "
            "python -m benchmarks.calibrate writes it"
        ) from error


class Work(msgspec.Struct, frozen=True):
    """What one pass has to do."""

    num_tokens: int
    num_sequences: int
    num_context: int  # tokens of the caches that it reads, over all sequences
    num_pairs: int  # of a token and one that it attends to


class Roofline(msgspec.Struct, frozen=True):
    """Cost of a pass of one model on one device."""

    device: Device
    dense_nbytes: float  # weights that every pass reads
    expert_nbytes: float  # weights of all experts
    expert_share: float  # share of the experts that one token uses
    flop_per_token: float
    flop_per_pair: float  # scores and values of all attention layers
    kv_nbytes_per_token: float
    state_nbytes: float

    def seconds(self, work: Work) -> float:
        """Time of a pass."""
        return max(self.nbytes(work) / self.device.nbytes_per_s, self.flop(work) / self.device.flop_per_s) + self.device.step_s

    def nbytes(self, work: Work) -> float:
        """Bytes that a pass moves: weights, caches read, states read and written."""
        experts = self.expert_nbytes * (1.0 - (1.0 - self.expert_share) ** work.num_tokens)
        caches = work.num_context * self.kv_nbytes_per_token + 2 * work.num_sequences * self.state_nbytes
        return self.dense_nbytes + experts + caches

    def flop(self, work: Work) -> float:
        """Floating-point operations of a pass."""
        return work.num_tokens * self.flop_per_token + work.num_pairs * self.flop_per_pair

    @classmethod
    def of(
        cls,
        plan: CachePlan,
        device: Device,
        *,
        dense: int,
        experts: int,
        expert_share: float,
        itemsize: int,
        attention_width: int = 0,
    ) -> "Roofline":
        """From parameter counts and a cache plan. `attention_width`: heads x head size of all layers that attend to all text."""
        return cls(
            device=device,
            dense_nbytes=float(dense * itemsize),
            expert_nbytes=float(experts * itemsize),
            expert_share=expert_share,
            flop_per_token=2.0 * (dense + experts * expert_share),
            flop_per_pair=4.0 * attention_width,
            kv_nbytes_per_token=float(plan.kv_nbytes_per_token),
            state_nbytes=float(plan.state_nbytes_per_sequence),
        )
