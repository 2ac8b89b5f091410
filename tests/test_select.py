"""The choice of backends: order, forcing, and a reason for everything that is not taken."""

import sys
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from hybridserve.backends.offer import OPERATIONS, Offer
from hybridserve.backends.select import BACKENDS, Backend, Selection, select
from hybridserve.errors import MissingDependencyError, UsageError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    raise AssertionError("never called")


def plain(x: Tensor) -> Tensor:
    raise AssertionError("never called")


def fake(name: str, ops: Mapping[str, object], refused: Mapping[str, str], reason: str) -> Backend:
    return Backend(name, ("cpu",), lambda device, dtype: Offer(ops=ops, refused=refused, reason=reason))


FAST = fake("fast", {"linear": fast_linear, "rms_norm": plain}, {"moe": "needs AVX-512"}, "compiled for AVX2")
BROKEN = fake("broken", {}, {}, "g++ is missing")
PLAIN = Backend("plain", ("cpu", "cuda"), lambda device, dtype: Offer(dict.fromkeys(OPERATIONS, plain), {}, "plain"))
TABLE = (BROKEN, FAST, PLAIN)


def choose(*forced: str, device: torch.device = CPU) -> Selection:
    return select(device, torch.float32, forced, TABLE)


def test_the_first_that_offers_an_operation_is_taken_and_refusals_are_told() -> None:
    chosen = choose()
    assert chosen.ops.linear is fast_linear
    assert chosen.ops.moe is plain
    assert set(chosen.reasons) == set(OPERATIONS)
    linear, moe, conv = (chosen.reasons[name] for name in ("linear", "moe", "short_conv"))
    assert (linear.backend, linear.reason, linear.refused) == ("fast", "compiled for AVX2", {"broken": "g++ is missing"})
    assert moe.refused == {"broken": "g++ is missing", "fast": "needs AVX-512"}
    assert conv.refused["fast"] == "does not implement it"
    assert str(moe) == "plain: plain; not broken: g++ is missing; not fast: needs AVX-512"


def test_a_backend_of_another_device_is_refused_with_the_device() -> None:
    chosen = choose(device=CUDA)
    assert chosen.ops.linear is plain
    assert chosen.reasons["linear"].refused["fast"] == "runs on cpu, not on cuda"


def test_one_operation_is_forced() -> None:
    chosen = choose("linear=plain")
    assert chosen.ops.linear is plain
    assert chosen.ops.rms_norm is plain
    assert chosen.reasons["linear"].backend == "plain"
    assert chosen.reasons["rms_norm"].backend == "fast"
    assert "forced" in chosen.reasons["linear"].reason


def test_a_backend_is_forced_for_all_it_has() -> None:
    assert {choice.backend for choice in choose("plain").reasons.values()} == {"plain"}
    # What it refuses must be named away; what it has not at all is chosen as ever.
    chosen = choose("fast", "moe=plain")
    assert chosen.reasons["linear"].reason == "forced; compiled for AVX2"
    assert chosen.reasons["moe"].backend == "plain"
    assert chosen.reasons["short_conv"].backend == "plain"


def test_forcing_one_operation_wins_over_forcing_all() -> None:
    assert choose("fast", "moe=plain", "linear=plain").ops.linear is plain


@pytest.mark.parametrize(
    ("forced", "error", "told"),
    [
        (("moe=fast",), UsageError, "needs AVX-512"),
        (("fast",), UsageError, "needs AVX-512"),
        (("short_conv=fast",), UsageError, "does not implement it"),
        (("linear=broken",), MissingDependencyError, r"g\+\+ is missing"),
        (("broken",), MissingDependencyError, r"g\+\+ is missing"),
        (("linear=tritn",), UsageError, "known: broken, fast, plain"),
        (("",), UsageError, "known: broken, fast, plain"),
        (("lineal=fast",), UsageError, "known: linear, rms_norm"),
        (("=fast",), UsageError, "known: linear, rms_norm"),
        (("linear=fast", "linear=plain"), UsageError, "both 'fast' and 'plain'"),
        (("fast", "plain"), UsageError, "both 'fast' and 'plain'"),
    ],
)
def test_an_unusable_choice_is_an_error_with_the_reason(forced: tuple[str, ...], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        choose(*forced)


def test_a_backend_forced_on_another_device_is_an_error() -> None:
    with pytest.raises(UsageError, match="runs on cpu, not on cuda"):
        choose("linear=fast", device=CUDA)


def test_an_operation_that_nobody_offers_is_an_error_with_all_reasons() -> None:
    with pytest.raises(UsageError, match=r"(?s)no backend offers gated_rms_norm.*g\+\+ is missing.*does not implement"):
        select(CPU, torch.float32, (), (BROKEN, FAST))


def test_an_offer_that_names_no_operation_or_contradicts_itself_is_a_bug() -> None:
    with pytest.raises(ValueError, match="lineal"):
        Offer({"lineal": plain}, {}, "")
    with pytest.raises(ValueError, match="linear"):
        Offer({"linear": plain}, {"linear": "slow"}, "")


def test_a_backend_that_does_not_matter_is_not_asked() -> None:
    def never(device: torch.device, dtype: torch.dtype) -> Offer:
        raise AssertionError("asked, though everything is forced to another")

    chosen = select(CPU, torch.float32, ("plain",), (Backend("slow", ("cpu",), never), PLAIN))
    assert chosen.ops.linear is plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_the_real_table_has_every_operation(device: torch.device, dtype: torch.dtype) -> None:
    # The reference alone: what the native backend compiles is the matter of its own tests.
    chosen = select(device, dtype, ("reference",))
    assert {choice.backend for choice in chosen.reasons.values()} == {"reference"}
    assert all(callable(getattr(chosen.ops, name)) for name in OPERATIONS)


def test_a_backend_that_cannot_be_imported_is_refused_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hybridserve.backends.cpu", None)
    chosen = select(CPU, torch.float32, ())
    assert chosen.reasons["linear"].backend == "reference"
    assert "hybridserve.backends.cpu" in chosen.reasons["linear"].refused["cpu"]
    with pytest.raises(MissingDependencyError, match=r"hybridserve\.backends\.cpu"):
        select(CPU, torch.float32, ("cpu",))


def test_the_reference_is_the_last_resort_everywhere() -> None:
    assert BACKENDS[-1].name == "reference"
    assert set(BACKENDS[-1].devices) == {device for backend in BACKENDS for device in backend.devices}
