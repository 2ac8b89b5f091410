"""Recurrences that need more than a row and a state, through the kit and through the engine, against plain loops."""

import pytest
import torch
from torch import Tensor

from hybridserve.conformance.conduct import check_oracle
from hybridserve.conformance.filling import fill
from hybridserve.kv.spec import StateSpec, TensorSpec
from hybridserve.mixers.base import MixerConfig, RecurrentMixer, mixers
from hybridserve.mixers.linear import Linear
from tests import recurrences
from tests.conformance import ALL_CHECKS, FP32, ConformanceError, check_chunking, check_far_positions
from tests.registries import forgetting


class Tide(RecurrentMixer):
    """h <- sigmoid(1 + sin(position)) h + x; y = out(h): what is remembered depends on where in the text it is."""

    Config = MixerConfig
    kind = "tide"
    needs_positions = True

    def __init__(self, config, ops, dtype):
        super().__init__(config, ops, dtype)
        self.out = Linear(config.hidden_size, config.hidden_size, ops, dtype)

    def specs(self):
        return {"state": StateSpec((TensorSpec("h", (self.config.hidden_size,), "float32"),))}

    def step(self, x, states, positions):
        h = (1 + positions.float().sin()).sigmoid()[:, None] * states["state"]["h"] + x.float()
        return self.out(h.to(x.dtype)), {"state": {"h": h}}


def tide_loop(mixer, x: Tensor) -> Tensor:
    h, rows = torch.zeros(x.shape[1]), []
    for position, row in enumerate(x):
        h = (1 + torch.tensor(float(position)).sin()).sigmoid() * h + row
        rows.append(mixer.out.weight @ h)
    return torch.stack(rows)


def built(layer):
    return fill(layer(MixerConfig(hidden_size=recurrences.HIDDEN), recurrences.reference_ops(), torch.float32))


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_step_with_positions_conforms(check):
    check(built(Tide), FP32)


def test_a_step_with_positions_is_its_loop():
    check_oracle(built(Tide), tide_loop)


class CountsFromTheChunk(Tide):
    def step(self, x, states, positions):
        return super().step(x, states, positions - self.first)

    def forward(self, x, batch, caches):
        self.first = batch.positions[0]
        return super().forward(x, batch, caches)


class RoundsPositions(Tide):
    is_rounding = False

    def step(self, x, states, positions):
        return super().step(x, states, positions.bfloat16() if self.is_rounding else positions)

    def forward(self, x, batch, caches):
        self.is_rounding = True
        y = super().forward(x, batch, caches)
        self.is_rounding = False
        return y


@pytest.mark.parametrize(("layer", "check"), [(CountsFromTheChunk, check_chunking), (RoundsPositions, check_far_positions)])
def test_the_kit_finds_wrong_positions(layer, check):
    with pytest.raises(ConformanceError):
        check(built(layer), FP32)


@pytest.mark.parametrize(("layer", "loop"), [(Tide, tide_loop)])
def test_served_in_chunks_after_hits_and_preempted_it_is_the_loop(layer, loop, tmp_path):
    with forgetting():
        mixers.register(layer.kind)(layer)
        recurrences.register(layer.kind)
        recurrences.check_served(tmp_path, recurrences.save(tmp_path), loop)
