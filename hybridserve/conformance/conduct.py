"""Checks of how a layer behaves as an object: built on meta, saved and loaded, in bfloat16, without global state.

Each check takes a built mixer with its parameters filled and raises `ConformanceError`. Called through `checks.py`.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from safetensors.torch import load, save
from torch import Tensor

from hybridserve.conformance.bench import Bench, build_again, rows_of, run_whole
from hybridserve.conformance.tolerance import FP32, ConformanceError, Tolerance, require
from hybridserve.mixers.base import Mixer

#: An independent form of a layer: a mixer, for its config and parameters, and the rows of one sequence [T, D]. Returns [T, D].
Oracle: TypeAlias = Callable[[Mixer, Tensor], Tensor]


def check_meta(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Built on the meta device, filled later, a mixer computes the same: it keeps no tensor but its parameters there."""
    del tolerance
    x = rows_of(mixer, 7)
    with torch.device("meta"):
        twin = build_again(mixer)
    require(all(p.is_meta for p in twin.parameters()), "a parameter ignores the default device")
    require(not list(twin.buffers()), "a buffer would be left without values when parameters are loaded")
    require(twin.specs() == mixer.specs(), "built on meta, the layer has other specs")
    require(not any(p.requires_grad for p in twin.parameters()), "a parameter requires gradients; parameters are not trained")
    twin = twin.to_empty(device="cpu")
    twin.load_state_dict(mixer.state_dict())
    require(
        torch.equal(run_whole(twin, x)[0], run_whole(mixer, x)[0]), "built on meta and filled, the layer computes something else"
    )


def check_serialise(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Its parameters are all that it is: written as safetensors and read again, another mixer computes the same."""
    del tolerance
    x = rows_of(mixer, 7)
    state = mixer.state_dict()
    parameters = dict(mixer.named_parameters())
    require(set(state) == set(parameters), f"state_dict has more than parameters: {sorted(set(state) - set(parameters))}")
    twin = build_again(mixer)
    twin.load_state_dict(load(save({name: tensor.clone().contiguous() for name, tensor in state.items()})))
    require(
        torch.equal(run_whole(twin, x)[0], run_whole(mixer, x)[0]), "written and read again, the layer computes something else"
    )


def check_global_state(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """Building and running use no global random numbers and no gradient, leave input and parameters alone, and repeat exactly."""
    del tolerance
    x = rows_of(mixer, 12)
    kept, seed = x.clone(), torch.get_rng_state()
    parameters = {name: tensor.clone() for name, tensor in mixer.state_dict().items()}
    settings = (torch.is_grad_enabled(), torch.get_default_dtype())
    build_again(mixer)
    (first, state), bench = run_whole(mixer, x), Bench(mixer)
    second = bench.run_chunks(x, [12])
    require(torch.equal(torch.get_rng_state(), seed), "the global random generator was used")
    require((torch.is_grad_enabled(), torch.get_default_dtype()) == settings, "a global setting of torch has changed")
    require(torch.equal(x, kept), "the input was changed in place")
    for name, tensor in mixer.state_dict().items():
        require(torch.equal(tensor, parameters[name]), f"parameter {name} was changed by running")
    require(torch.equal(first, second), "12 rows, twice: two equal runs differ")
    for name, tensor in bench.state(0).items():
        require(torch.equal(tensor, state[name]), f"12 rows, twice: state {name} differs")
    require(not first.requires_grad, "the output requires gradients")


def check_bfloat16(mixer: Mixer, tolerance: Tolerance = FP32) -> None:
    """In bfloat16 it gives bfloat16, at a bounded error, also token by token, where a state that is too coarse drifts."""
    low = build_again(mixer, torch.bfloat16)
    exact = build_again(mixer)
    low.load_state_dict(mixer.state_dict())
    exact.load_state_dict(low.state_dict())
    x = rows_of(low, 70)
    expected = run_whole(exact, x.float())[0]
    whole, single = (Bench(low).run_chunks(x, lengths) for lengths in ([70], [1] * 70))
    for actual in (whole, single):
        require(actual.dtype == torch.bfloat16, f"70 rows in bfloat16: the output is in {actual.dtype}")
    _check_rows(whole.float(), expected, tolerance.bfloat16, "70 rows in bfloat16 against fp32")
    # Rounded alike, both ways come to the same, unless what is kept between rows is coarser than the arithmetic.
    _check_rows(single.float(), whole.float(), tolerance.bfloat16 / 30, "70 rows in bfloat16, one by one against at once")


def _check_rows(actual: Tensor, expected: Tensor, allowed: float, what: str) -> None:
    """Bounds the error of the median row: where a layer chooses tokens by scores, rounding may change the choice of some rows."""
    error = float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median())
    if not error < allowed:
        raise ConformanceError(f"{what}: rows are off by {error:.3g} of their norm (allowed: {allowed:g})", error)


def check_oracle(mixer: Mixer, oracle: Oracle, tolerance: Tolerance = FP32) -> None:
    """The layer computes what its independent form does, at once and in chunks."""
    x = rows_of(mixer, 70)
    kept = x.clone()
    with torch.no_grad():
        expected = oracle(mixer, x)
    require(torch.equal(x, kept), "the oracle changed its input")
    require(bool(expected.abs().mean() > 1e-3), "the oracle's output is too small to tell anything")
    for lengths in ([70], [3, 64, 1, 2]):
        tolerance.check(Bench(mixer).run_chunks(x, lengths), expected, f"70 rows in chunks {lengths} against the oracle")
