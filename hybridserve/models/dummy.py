"""Random weights at a model's real shapes, for measuring speed and memory without a download.

Owns what such weights look like. Must not know architectures. Called by `loader.py`. Values are drawn once and tiled: a model of
billions of parameters is filled at the speed of memory, and every activation stays finite.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hybridserve.mixers.norm import GroupedRMSNorm, RMSNorm

#: A prime, so that tiling it never lines up with the rows of a matrix.
_BLOCK = 1_000_003
_STD = 0.02


class DummyWeights:
    """Makes the parameters of a model one after the other, on `device`; the same for the same `seed`."""

    def __init__(self, model: nn.Module, device: torch.device, seed: int) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)
        self._normal = torch.randn(_BLOCK, generator=self._generator) * _STD
        self._blocks: dict[torch.dtype, Tensor] = {}
        self._at = 0
        # Norms that add 1 to their weight are neutral at 0, the others at 1.
        self._centred = {
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, GroupedRMSNorm) or (isinstance(module, RMSNorm) and module.zero_centred)
        }

    def make(self, name: str, parameter: Tensor) -> Tensor:
        """A tensor of the shape and dtype of `parameter`, whose `name` tells what it is."""
        leaf = name.rpartition(".")[2]
        special: dict[str, Callable[[int], Tensor]] = {"A_log": self._log_decay, "dt_bias": self._time_step, "D": torch.ones}
        if leaf in special:
            return special[leaf](parameter.numel()).view(parameter.shape).to(self._device, parameter.dtype)
        if parameter.dim() == 1:
            value = 0.0 if leaf == "bias" or name in self._centred else 1.0
            return torch.full(parameter.shape, value, dtype=parameter.dtype, device=self._device)
        return self._tiled(parameter)

    def _tiled(self, parameter: Tensor) -> Tensor:
        """Normal values, each parameter from its own place in the block."""
        block = self._blocks.get(parameter.dtype)
        if block is None:
            block = self._blocks[parameter.dtype] = self._normal.to(self._device, parameter.dtype)
        out = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
        flat, filled = out.view(-1), 0
        while filled < flat.numel():
            count = min(flat.numel() - filled, _BLOCK - self._at)
            flat[filled : filled + count] = block[self._at : self._at + count]
            filled += count
            self._at = (self._at + count) % _BLOCK
        return out

    def _log_decay(self, count: int) -> Tensor:
        """log of a rate from 1 to 16, as these layers are initialised."""
        return (torch.rand(count, generator=self._generator) * 15 + 1).log()

    def _time_step(self, count: int) -> Tensor:
        """Inverse softplus of a step from 0.001 to 0.1, spread evenly in its logarithm."""
        step = torch.exp(torch.rand(count, generator=self._generator) * math.log(100) + math.log(1e-3))
        return step + torch.log(-torch.expm1(-step))
