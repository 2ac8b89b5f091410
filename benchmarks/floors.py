"""What this machine could do at best, measured: the floor that every other figure stands beside."""

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rates:
    """Measured rates of this machine with the threads that torch uses now."""

    read_nbytes_per_s: float
    fp32_flop_per_s: float
    bf16_flop_per_s: float
    threads: int

    def __str__(self) -> str:
        return (
            f"{self.threads} threads, read {self.read_nbytes_per_s / 1e9:.1f} GB/s, matrix product "
            f"{self.fp32_flop_per_s / 1e9:.0f} GFLOP/s in fp32, {self.bf16_flop_per_s / 1e9:.0f} in bf16"
        )


def best_of(run: object, times: int = 5) -> float:
    """Seconds of the fastest of some calls: a floor is what nothing can beat."""
    assert callable(run)
    found = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return min(found)


def measure() -> Rates:
    """Measure reading far beyond the last-level cache, and square matrix products."""
    large = torch.ones(96 * 2**20)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    half_a, half_b = a.bfloat16(), b.bfloat16()
    return Rates(
        read_nbytes_per_s=large.nbytes / best_of(large.sum),
        fp32_flop_per_s=2 * 1024**3 / best_of(lambda: a @ b),
        bf16_flop_per_s=2 * 1024**3 / best_of(lambda: half_a @ half_b, times=2),
        threads=torch.get_num_threads(),
    )
