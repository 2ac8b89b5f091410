"""Operations without a cache, of every backend: linear, the norms and the experts."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from hybridserve.backends.reference import offer
from hybridserve.backends.reference.linear import linear, slow_at, widened_linear
from tests.operations import CPU, operation, over_backends, strided

DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int = 0) -> Tensor:
    return strided(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Within rounding of the actual dtype, relative to the largest value."""
    tolerance = {torch.float32: 5e-6, torch.bfloat16: 1e-2}[actual.dtype]
    bound = tolerance * max(expected.abs().max().item(), 1.0)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=bound)


def assert_rounded_alike(actual: Tensor, expected: Tensor) -> None:
    """A rounding in between shows in every third element of bfloat16; a sum in another order in hardly any."""
    if actual.dtype is torch.bfloat16:
        assert (actual == expected.bfloat16()).double().mean() > 0.95


@over_backends("linear")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 16), (2, 3, 33), (5, 64), (70, 129)])
def test_linear(backend: str, dtype: torch.dtype, with_bias: bool, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape).to(dtype), random(37, shape[-1], seed=1).to(dtype)
    bias = random(37, seed=2).to(dtype) if with_bias else None
    y = operation(backend, "linear", dtype)(x, weight, bias)
    assert y.dtype == dtype
    assert_near(y, x.double() @ weight.double().T + (0 if bias is None else bias.double()))


@over_backends("head_linear")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size_in", "size_out"), [(1, 16, 24), (2, 33, 7), (5, 5, 70), (9, 64, 48)])
def test_each_head_has_a_matrix_of_its_own(backend: str, dtype: torch.dtype, rows: int, size_in: int, size_out: int) -> None:
    """Weights stored by outputs and by inputs, as parts of one matrix, and without order; rows that are part of wider ones."""
    x, whole = random(rows, 3, size_in).to(dtype), random(3, 2 * size_out, size_in, seed=1).to(dtype)
    by_outputs = whole[:, size_out:]
    by_inputs = random(3, size_in, size_out, seed=2).to(dtype).mT
    for weight in (by_outputs, by_inputs, random(3, size_out, 2 * size_in, seed=3).to(dtype)[..., ::2]):
        y = operation(backend, "head_linear", dtype)(x, weight)
        assert y.dtype == dtype
        assert_near(y, torch.einsum("thi,hoi->tho", x.double(), weight.double()))


@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widened_linear_rounds_once(num_rows: int, dtype: torch.dtype) -> None:
    # The weight has several parts at this width, the last one a short one.
    x, weight, bias = random(num_rows, 8192).to(dtype), random(150, 8192, seed=1).to(dtype), random(150).to(dtype)
    exact = x.double() @ weight.double().T + bias.double()
    error = (widened_linear(x, weight, bias).double() - exact).abs() / exact.abs().clamp(min=1)
    assert error.max() < 1.01 * torch.finfo(dtype).eps


def test_linear_is_widened_where_the_cpu_is_slow_and_the_reason_says_so() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        offered = offer(CPU, dtype)
        assert (offered.ops["linear"] is widened_linear) == slow_at(CPU, dtype)
        assert ("widened" in offered.reason) == slow_at(CPU, dtype)
    assert offer(CPU, torch.float32).ops["linear"] is linear


@over_backends("rms_norm")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_equals_transformers(backend: str, dtype: torch.dtype) -> None:
    x, weight = random(3, 50, 24).to(dtype) * 3, random(24, seed=1).to(dtype)
    plain, centred = LlamaRMSNorm(24, eps=1e-5), Qwen3NextRMSNorm(24, eps=1e-5)
    plain.weight.data, centred.weight.data = weight, weight
    op = operation(backend, "rms_norm", dtype)
    for y, expected in (
        (op(x, weight, 1e-5), plain(x)),
        (op(x, weight, 1e-5, zero_centred=True), centred(x)),
        (op(x, None, 1e-5), x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-5).sqrt()),
    ):
        assert y.dtype == dtype
        assert_near(y, expected.detach())
        assert_rounded_alike(y, expected)


@over_backends("rms_norm")
def test_rms_norm_is_computed_in_fp32(backend: str) -> None:
    x = torch.full((2, 256), 3000.0, dtype=torch.float16)  # its square is beyond float16
    y = operation(backend, "rms_norm", torch.float16)(x, torch.ones(256, dtype=torch.float16), 1e-6)
    assert torch.equal(y, torch.ones_like(y))


@over_backends("gated_rms_norm")
@pytest.mark.parametrize("groups", [1, 3])
def test_gated_rms_norm_equals_mamba2(backend: str, groups: int) -> None:
    x, gate, weight = random(7, 24), random(7, 24, seed=1), random(24, seed=2)
    published = MambaRMSNormGated(24, group_size=24 // groups, eps=1e-5)
    published.weight.data = weight
    op = operation(backend, "gated_rms_norm")
    y = op(x, gate, weight, 1e-5, group_size=24 // groups, norm_first=False, activation="silu")
    assert_near(y, published(x, gate).detach())


@over_backends("gated_rms_norm")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rms_norm_equals_qwen3_next(backend: str, dtype: torch.dtype) -> None:
    # The layer gives fp32 results of the recurrence per head, and a gate in the activations' dtype.
    x, gate, weight = random(50, 4, 24), random(50, 4, 24, seed=1).to(dtype), random(24, seed=2)
    published = Qwen3NextRMSNormGated(24, eps=1e-5)
    published.weight.data = weight
    op = operation(backend, "gated_rms_norm", dtype)
    y = op(x, gate, weight, 1e-5, group_size=24, norm_first=True, activation="silu")
    assert y.dtype == dtype
    assert_near(y, published(x, gate.float()).detach())
    assert_rounded_alike(y, published(x, gate.float()).detach())


@over_backends("gated_rms_norm")
@pytest.mark.parametrize("norm_first", [True, False])
def test_gated_rms_norm_with_sigmoid_and_no_weight(backend: str, norm_first: bool) -> None:
    x, gate = random(7, 24).double(), random(7, 24, seed=1).double()
    inner = x if norm_first else x * torch.sigmoid(gate)
    parts = inner.unflatten(-1, (2, 12))
    expected = (parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2)
    if norm_first:
        expected = expected * torch.sigmoid(gate)
    op = operation(backend, "gated_rms_norm")
    y = op(x.float(), gate.float(), None, 1e-5, group_size=12, norm_first=norm_first, activation="sigmoid")
    assert_near(y, expected)


def experts(dtype: torch.dtype, num_rows: int) -> tuple[Tensor, ...]:
    """x, expert_ids, expert_weights, gate_up and down for 8 experts, of which one gets no row."""
    ids = torch.rand(num_rows, 7, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :3]
    ids = ids + (ids >= 4)  # none to expert 4
    weights = random(num_rows, 3, seed=4).softmax(-1)
    return (random(num_rows, 16).to(dtype), ids, weights, random(8, 24, 16, seed=1).to(dtype), random(8, 16, 12).to(dtype))


@over_backends("moe")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 50])
def test_moe_equals_transformers(backend: str, dtype: torch.dtype, num_rows: int) -> None:
    x, ids, weights, gate_up, down = experts(dtype, num_rows)
    config = SimpleNamespace(
        num_experts=8, hidden_size=16, moe_intermediate_size=12, hidden_act="silu", _experts_implementation="eager"
    )
    published = Qwen3MoeExperts(config)
    published.gate_up_proj.data, published.down_proj.data = gate_up.float(), down.float()
    y = operation(backend, "moe", dtype)(x, ids, weights, gate_up, down, activation="silu")
    assert y.dtype == dtype
    assert_near(y, published(x.float(), ids, weights).detach())


@over_backends("moe")
def test_I7_moe_rows_do_not_depend_on_neighbours(backend: str) -> None:
    x, ids, weights, gate_up, down = experts(torch.float32, 20)
    op = operation(backend, "moe")
    whole = op(x, ids, weights, gate_up, down, activation="silu")
    for row in range(0, 20, 5):
        one = slice(row, row + 1)
        assert_near(op(x[one], ids[one], weights[one], gate_up, down, activation="silu"), whole[one])
    x[3] = torch.nan
    poisoned = op(x, ids, weights, gate_up, down, activation="silu")
    assert poisoned[3].isnan().all()
    assert poisoned[4:].isfinite().all()


@over_backends("moe")
@pytest.mark.parametrize("activation", ["silu", "sigmoid", "gelu", "gelu_tanh", "relu2", "identity"])
def test_activations_by_name(backend: str, activation: str) -> None:
    x, ids, weights, gate_up, down = experts(torch.float32, 6)
    published = {
        "silu": lambda z: z / (1 + torch.exp(-z)),
        "sigmoid": lambda z: 1 / (1 + torch.exp(-z)),
        "gelu": lambda z: z * 0.5 * (1 + torch.erf(z / 2**0.5)),
        "gelu_tanh": lambda z: 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))),
        "relu2": lambda z: z.clamp(min=0) ** 2,
        "identity": lambda z: z,
    }[activation]
    expected = torch.zeros(6, 16, dtype=torch.float64)
    for row in range(6):
        for choice in range(3):
            gate, up = (gate_up[ids[row, choice]].double() @ x[row].double()).chunk(2)
            expected[row] += weights[row, choice] * (down[ids[row, choice]].double() @ (published(gate) * up))
    y = operation(backend, "moe")(x, ids, weights, gate_up, down, activation=activation)
    assert_near(y, expected)
