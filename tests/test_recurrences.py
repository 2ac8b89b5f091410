"""Recurrences that need more than a row and a state, through the kit and through the engine, against plain loops."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridserve.batch import NO_SLOT
from hybridserve.cli import main
from hybridserve.conformance.conduct import check_oracle
from hybridserve.conformance.filling import fill
from hybridserve.engine.runner import Runner
from hybridserve.errors import EngineError
from hybridserve.kv.arena import plan_cache
from hybridserve.kv.spec import PagedSpec, StateSpec, TensorSpec
from hybridserve.mixers.base import MixerConfig, RecurrentMixer, empty_parameter, mixers
from hybridserve.mixers.linear import Linear
from hybridserve.models.decoder import DecoderLayer, Layer
from tests import recurrences
from tests.conformance import ALL_CHECKS, FP32, ConformanceError, check_chunking, check_far_positions, check_initial_state
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


class Primed(RecurrentMixer):
    """h <- 0.9 h + x, from a learned h; y = out(h + the row before): one tensor starts from a parameter, the other from zeros."""

    Config = MixerConfig
    kind = "primed"

    def __init__(self, config, ops, dtype):
        super().__init__(config, ops, dtype)
        self.out = Linear(config.hidden_size, config.hidden_size, ops, dtype)
        self.start = empty_parameter(config.hidden_size, dtype=dtype)

    def specs(self):
        size = (self.config.hidden_size,)
        return {"state": StateSpec((TensorSpec("h", size, "float32", initial="start"), TensorSpec("last", size, "float32")))}

    def step(self, x, states):
        state = states["state"]
        h = 0.9 * state["h"] + x.float()
        return self.out((h + state["last"]).to(x.dtype)), {"state": {"h": h, "last": x.float()}}


def primed_loop(mixer, x: Tensor) -> Tensor:
    h, last, rows = mixer.start, torch.zeros(x.shape[1]), []
    for row in x:
        h = 0.9 * h + row
        rows.append(mixer.out.weight @ (h + last))
        last = row
    return torch.stack(rows)


def built(layer):
    return fill(layer(MixerConfig(hidden_size=recurrences.HIDDEN), recurrences.reference_ops(), torch.float32))


BOTH = pytest.mark.parametrize(("layer", "loop"), [(Tide, tide_loop), (Primed, primed_loop)])


@pytest.mark.parametrize("layer", [Tide, Primed])
@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_it_conforms(layer, check):
    check(built(layer), FP32)


@BOTH
def test_it_is_its_loop(layer, loop):
    check_oracle(built(layer), loop)


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


class StartsFromZeros(Primed):
    def forward(self, x, batch, caches):
        (table,) = batch.states.values()
        fresh = torch.tensor([stop - n for stop, n in zip(batch.kv_lens_host, lengths_of(batch), strict=True)]) == 0
        slots = table.start_slots.masked_fill(fresh, NO_SLOT)
        states = {g: replace(t, start_slots=slots, starts_host=tuple(slots.tolist())) for g, t in batch.states.items()}
        return super().forward(x, replace(batch, states=states), caches)


class ReadsTheParameterItself(Primed):
    def forward(self, x, batch, caches):
        (table,) = batch.states.values()
        fresh = [s for s, stop in enumerate(batch.kv_lens_host) if stop == lengths_of(batch)[s]]
        caches["state"].tensors["h"][table.start_slots[fresh]] = self.start
        return super().forward(x, batch, caches)


class SpoilsTheConstantSlot(Primed):
    def forward(self, x, batch, caches):
        y = super().forward(x, batch, caches)
        (table,) = batch.states.values()
        fresh = [s for s, stop in enumerate(batch.kv_lens_host) if stop == lengths_of(batch)[s]]
        caches["state"].tensors["h"][table.start_slots[fresh]] += 1.0
        return y


def lengths_of(batch):
    return [stop - start for start, stop in zip(batch.cu_seqlens_host, batch.cu_seqlens_host[1:], strict=False)]


@pytest.mark.parametrize(
    ("layer", "check"),
    [
        (CountsFromTheChunk, check_chunking),
        (RoundsPositions, check_far_positions),
        (StartsFromZeros, check_initial_state),
        (ReadsTheParameterItself, check_initial_state),
        (SpoilsTheConstantSlot, check_initial_state),
    ],
)
def test_the_kit_finds_the_fault(layer, check):
    with pytest.raises(ConformanceError):
        check(built(layer), FP32)


@BOTH
def test_served_in_chunks_after_hits_and_preempted_it_is_the_loop(layer, loop, tmp_path):
    with serving(layer, tmp_path) as model:
        recurrences.check_served(tmp_path, model, loop)


@contextmanager
def serving(layer, folder):
    """A model of the layer, saved to `folder`, which can be served meanwhile."""
    with forgetting():
        mixers.register(layer.kind)(layer)
        recurrences.register(layer.kind)
        yield recurrences.save(folder)


def test_without_its_constant_slot_the_engine_gives_something_else(tmp_path, monkeypatch):
    """That the comparison above could tell: fresh requests that start from zeros answer otherwise."""
    with serving(Primed, tmp_path) as model:
        (prompt,) = recurrences.prompts((23,))
        expected = recurrences.greedy(model, primed_loop, prompt, 8)
        assert recurrences.run(recurrences.engine(tmp_path), {"right": prompt}, 8)[0]["right"] == expected
        monkeypatch.setattr(Runner, "fill_constant_slots", lambda self, slots: None)
        assert recurrences.run(recurrences.engine(tmp_path), {"wrong": prompt}, 8)[0]["wrong"] != expected


def test_the_constant_slot_is_counted_and_never_given_away(tmp_path):
    with serving(Primed, tmp_path):
        core = recurrences.engine(tmp_path)
        assert core.stats().slots_used == 1
        (prompt,) = recurrences.prompts((40,))
        recurrences.run(core, {"a": prompt, "b": prompt[:7]}, 4)
        assert (core.stats().slots_used, core.stats().slots_cached > 0) == (1, True)
        core.clear_cache()
        core.check()
        assert (core.stats().slots_used, core.stats().slots_cached) == (1, 0)


def test_a_learned_state_takes_one_users_slot():
    zeros = StateSpec((TensorSpec("h", (64,), "float32"),))
    learned = StateSpec((TensorSpec("h", (64,), "float32", initial="start"),))
    sizes = [plan_cache([{"state": spec}], 10 * 256).users_at(100) for spec in (zeros, learned)]
    assert sizes == [10, 9]
    plan = plan_cache([{"state": learned}], 256)
    assert plan.longest_sequence(100) == 0


def test_a_paged_spec_has_no_initial_state():
    with pytest.raises(ValueError, match="only states may have it"):
        PagedSpec((TensorSpec("k", (8,), "float32", initial="start"),))


@pytest.mark.parametrize(("name", "found"), [("absent", "there is none"), ("out.weight", r"its shape is \[32, 32\]")])
def test_an_initial_state_without_a_parameter_of_its_shape_is_refused(name, found):
    class Wrong(Primed):
        def specs(self):
            return {"state": StateSpec((TensorSpec("h", (self.config.hidden_size,), "float32", initial=name),))}

    with pytest.raises(EngineError, match=rf"'{name}', but {found}; it must have the tensor's shape \[32\]"):
        built(Wrong).initial_states()


def test_check_model_counts_the_constant_slot(tmp_path, capsys):
    with serving(Primed, tmp_path):
        core = recurrences.engine(tmp_path, kv_cache_memory=2**17)
        arguments = ("--kv-cache-memory", str(2**17), "--max-num-seqs", "8", "--max-model-len", "96", "--backend", "reference")
        main(["check-model", str(tmp_path), *arguments, "--json"])
    report = json.loads(capsys.readouterr().out)
    groups = [one["detail"] for one in report["checks"] if one["id"] == "memory.group"]
    assert sum("1 of them for the learned initial state" in group for group in groups) == 1, groups
    assert report["memory"]["users_at"] == core.info.users_at


def test_a_layer_that_does_not_hand_on_the_learned_state_is_refused(tmp_path, monkeypatch):
    with serving(Primed, tmp_path):
        monkeypatch.setattr(DecoderLayer, "initial_states", Layer.initial_states)
        with pytest.raises(EngineError, match=r"layer 0: initial_states\(\) leaves out 'primed.state'"):
            recurrences.engine(tmp_path)
