"""How long a pass would take: bytes and FLOPs of a model over the rates of a device.

Owns the arithmetic and the table of devices. A calibration (measured seconds over modelled ones) scales it. Called by
`simulate.py` for its virtual clock.
"""

from dataclasses import dataclass

from hybridserve.kv.arena import CachePlan


@dataclass(frozen=True)
class Device:
    """Rates that kernels reach in practice, not those of the data sheet."""

    nbytes_per_s: float
    flop_per_s: float
    step_s: float  # host and launch cost of a pass, whatever its size


DEVICES = {
    "h200": Device(4.3e12, 7.9e14, 5e-4),
    "h100": Device(3.0e12, 7.0e14, 5e-4),
    "a100": Device(1.7e12, 2.6e14, 5e-4),
    "cpu": Device(2.0e10, 7.0e10, 2e-3),
}


@dataclass(frozen=True)
class Roofline:
    """Cost of a pass of one model on one device."""

    device: Device
    dense_nbytes: float  # weights that every pass reads
    expert_nbytes: float  # weights of all experts
    expert_share: float  # share of the experts that one token uses
    flop_per_token: float
    kv_nbytes_per_token: float
    state_nbytes: float
    scale: float = 1.0  # measured over modelled, from a calibration

    def seconds(self, num_tokens: int, num_sequences: int, num_context: int) -> float:
        """Time of a pass over `num_tokens` tokens of `num_sequences` sequences that look at `num_context` cached tokens."""
        experts = self.expert_nbytes * (1.0 - (1.0 - self.expert_share) ** num_tokens)
        moved = self.dense_nbytes + experts + num_context * self.kv_nbytes_per_token + 2 * num_sequences * self.state_nbytes
        computing = num_tokens * self.flop_per_token / self.device.flop_per_s
        return self.scale * (max(moved / self.device.nbytes_per_s, computing) + self.device.step_s)

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
        scale: float = 1.0,
    ) -> "Roofline":
        """From parameter counts and a cache plan."""
        return cls(
            device=device,
            dense_nbytes=float(dense * itemsize),
            expert_nbytes=float(experts * itemsize),
            expert_share=expert_share,
            flop_per_token=2.0 * (dense + experts * expert_share),
            kv_nbytes_per_token=float(plan.kv_nbytes_per_token),
            state_nbytes=float(plan.state_nbytes_per_sequence),
            scale=scale,
        )
