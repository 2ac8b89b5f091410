"""Operations with a state, of every backend: the delta rule, the linear scan and the short convolution.

Held to token-serial oracles in fp64 and to what transformers publishes. Attention and the stateless operations have files of
their own beside this one.
"""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update, torch_recurrent_gated_delta_rule

from hybridserve.batch import NO_SLOT, Batch, StateTable
from tests.conformance import Rows
from tests.operations import (
    NUM_SLOTS,
    SITUATIONS,
    Recurrence,
    build,
    operation,
    over_backends,
    pool_for,
    random_situation,
    recurrence,
    strided,
)

over_recurrences = over_backends("delta_rule")
over_convolutions = over_backends("short_conv")

#: fp32 against fp64, relative to the largest value: sums of some hundred terms.
TOLERANCE = 2e-5
KINDS = {
    "delta_rule": {"delta": True},
    "delta_rule_per_channel": {"delta": True, "per_channel": True},
    "linear_scan": {"delta": False},
}


def op_of(backend: str, kind: str) -> object:
    return operation(backend, kind.removesuffix("_per_channel"))


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Equal to within a share of the largest value; NaN only where NaN is expected."""
    largest = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 1.0
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance * max(largest, 1.0), equal_nan=True)


def check_recurrence(backend: str, kind: str, inputs: Recurrence, sequences: list[Rows]) -> None:
    batch, table = build(sequences)
    state = pool_for(table, inputs.v.shape[1], inputs.v.shape[2], inputs.k.shape[2])
    y_expected, state_expected = inputs.oracle(state, batch, table)
    y = inputs.run(op_of(backend, kind), state, batch, table)
    assert y.dtype == inputs.v.dtype
    assert_near(y, y_expected)
    # Slots that are not written keep their bytes, NaN ones included: those are NaN in the expected pool as well.
    assert_near(state, state_expected)


@over_recurrences
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_recurrence_equals_the_token_serial_oracle(backend: str, kind: str, situation: str) -> None:
    sequences = SITUATIONS[situation]
    check_recurrence(backend, kind, recurrence(sum(s.length for s in sequences), **KINDS[kind]), sequences)


@over_recurrences
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decays", ["weak", "strong", "resets"])
def test_recurrence_under_any_decay(backend: str, kind: str, decays: str) -> None:
    sequences = SITUATIONS["mixed"]
    inputs = recurrence(sum(s.length for s in sequences), decays=decays, **KINDS[kind])
    check_recurrence(backend, kind, inputs, sequences)


@over_recurrences
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("passes", "rows"), [(19, 1), (1, 95), (1, 5)], ids=["decode", "chunks", "rows"])
def test_a_state_that_fades_becomes_zero_and_no_denormal_number(backend: str, kind: str, passes: int, rows: int) -> None:
    """Denormal numbers cost many processors a hundred times as much as others."""
    inputs = recurrence(rows, **KINDS[kind])
    inputs = replace(inputs, v=torch.zeros_like(inputs.v), log_decay=torch.full_like(inputs.log_decay, -95.0 / (passes * rows)))
    batch, table = build([Rows(rows, context=64, start=7, writes=((rows - 1, 7),))])
    state = pool_for(table, inputs.v.shape[1], inputs.v.shape[2], inputs.k.shape[2])
    for _ in range(passes):
        y = inputs.run(op_of(backend, kind), state, batch, table)
    for tensor in (state[7], y):
        assert not ((tensor != 0) & (tensor.abs() < torch.finfo(torch.float32).tiny)).any()
    assert (state[7].abs() < 1e-30).all()


@over_recurrences
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_recurrence_in_random_situations(backend: str, kind: str, seed: int) -> None:
    sequences = random_situation(seed)
    inputs = recurrence(sum(s.length for s in sequences), seed=seed, **KINDS[kind])
    check_recurrence(backend, kind, inputs, sequences)


@over_recurrences
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "dims"), [((1, 1), (8, 8)), ((3, 3), (32, 8)), ((1, 4), (7, 5)), ((2, 2), (128, 128)), ((1, 2), (20, 136))]
)
def test_recurrence_of_any_shape(backend: str, kind: str, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    sequences = SITUATIONS["65"] + SITUATIONS["decode"][1:2]
    check_recurrence(backend, kind, recurrence(66, heads=heads, dims=dims, **KINDS[kind]), sequences)


@over_recurrences
def test_delta_rule_without_l2norm(backend: str) -> None:
    inputs = recurrence(65, qk_l2norm=False)
    small = Recurrence(inputs.q * 0.2, inputs.k * 0.2, inputs.v, inputs.log_decay, inputs.beta, scale=0.7, qk_l2norm=False)
    check_recurrence(backend, "delta_rule", small, SITUATIONS["65"])


@over_recurrences
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 7, 63, 64, 65, 100, 129])
def test_I6_recurrence_in_two_passes_equals_one(backend: str, kind: str, cut: int) -> None:
    inputs = recurrence(130, **KINDS[kind])
    op = op_of(backend, kind)
    batch, table = build([Rows(130, writes=((129, 1),))])
    state = pool_for(table, 4, 24, 16)
    whole = inputs.run(op, state, batch, table)

    parts = []
    split_state = torch.full_like(state, torch.nan)
    for first, last, start in ((0, cut, NO_SLOT), (cut, 130, 1)):
        batch, table = build([Rows(last - first, context=first, start=start, writes=((last - first - 1, 1),))])
        parts.append(inputs.rows(first, last).run(op, split_state, batch, table))
    assert_near(torch.cat(parts), whole, 5e-6)
    assert_near(split_state, state, 5e-6)


@over_recurrences
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0, 40])
@pytest.mark.parametrize("cuts", [(64, 192), (128,), (64, 128, 192, 256)])
def test_passes_that_end_on_the_chunk_grid_round_alike(backend: str, kind: str, cuts: tuple[int, ...], first: int) -> None:
    inputs = recurrence(270, **KINDS[kind])
    op = op_of(backend, kind)
    batch, table = build([Rows(270 - first, context=first, start=1, writes=((100, 0), (269 - first, 1)))])
    state = pool_for(table, 4, 24, 16)
    split_state = state.clone()
    whole = inputs.rows(first, 270).run(op, state, batch, table)
    parts = []
    for begin, end in itertools.pairwise((first, *cuts, 270)):
        batch, table = build([Rows(end - begin, context=begin, start=1, writes=((end - begin - 1, 1),))])
        parts.append(inputs.rows(begin, end).run(op, split_state, batch, table))
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(split_state[1], state[1])


@over_recurrences
@pytest.mark.parametrize("kind", KINDS)
def test_I5_fresh_sequence_never_reads_a_slot(backend: str, kind: str) -> None:
    for length in (1, 4, 70):
        inputs = recurrence(length, **KINDS[kind])
        batch, table = build([Rows(length, writes=((length - 1, 0),))])
        state = torch.full((NUM_SLOTS, 4, 24, 16), torch.nan)
        y = inputs.run(op_of(backend, kind), state, batch, table)
        assert y.isfinite().all()
        assert state[0].isfinite().all()
        assert state[1:].isnan().all()


@over_recurrences
@pytest.mark.parametrize("kind", KINDS)
def test_I21_nan_rows_stay_in_their_sequence(backend: str, kind: str) -> None:
    sequences = [Rows(70, writes=((69, 0),)), Rows(1, writes=((0, 1),)), Rows(66, writes=((65, 2),)), Rows(5)]
    inputs = recurrence(142, **KINDS[kind])
    batch, table = build(sequences)
    state = torch.zeros(NUM_SLOTS, 4, 24, 16)
    clean = inputs.run(op_of(backend, kind), state.clone(), batch, table)
    for x in (inputs.q, inputs.k, inputs.v):
        x[0] = torch.nan
    y = inputs.run(op_of(backend, kind), state, batch, table)
    assert y[0].isnan().all()
    assert_near(y[70:], clean[70:], 1e-6)
    assert state[1:].isfinite().all()


@over_recurrences
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 70])
def test_recurrence_of_bfloat16_rows(backend: str, kind: str, length: int) -> None:
    inputs = recurrence(length, **KINDS[kind])
    half = Recurrence(
        *(x.bfloat16() for x in (inputs.q, inputs.k, inputs.v)),
        inputs.log_decay,
        inputs.beta,
        inputs.scale,
        inputs.qk_l2norm,
    )
    batch, table = build([Rows(length, start=2, writes=((length - 1, 1),))])
    state = pool_for(table, 4, 24, 16)
    y_expected, state_expected = half.oracle(state, batch, table)
    op = operation(backend, kind.removesuffix("_per_channel"), torch.bfloat16)
    y = half.run(op, state, batch, table)
    assert y.dtype == (torch.float32 if kind == "linear_scan" else torch.bfloat16)
    assert_near(y, y_expected, 1e-2)
    assert_near(state, state_expected)


@over_recurrences
def test_delta_rule_equals_transformers(backend: str) -> None:
    inputs = recurrence(100)
    batch, table = build([Rows(100, start=3, writes=((99, 4),))])
    state = pool_for(table, 4, 24, 16)
    y_expected, last = torch_recurrent_gated_delta_rule(
        *(x[None] for x in (inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta)),
        initial_state=state[3][None].mT.clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    y = inputs.run(operation(backend, "delta_rule"), state, batch, table)
    assert_near(y, y_expected[0])
    assert_near(state[4], last[0].mT)


@over_recurrences
def test_delta_rule_per_channel_equals_transformers(backend: str) -> None:
    inputs = recurrence(100, per_channel=True, heads=(3, 3))
    batch, table = build([Rows(100, start=3, writes=((99, 4),))])
    state = pool_for(table, 3, 24, 16)
    y_expected, last = recurrent_kimi_delta_attention(
        *(x[None] for x in (inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta)),
        initial_state=state[3][None].mT.clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    y = inputs.run(operation(backend, "delta_rule"), state, batch, table)
    assert_near(y, y_expected[0])
    assert_near(state[4], last[0].mT)


@over_recurrences
def test_linear_scan_equals_transformers_mamba2(backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(100, 6, 8, generator=generator)
    dt = torch.rand(100, 6, generator=generator)
    A = -torch.rand(6, generator=generator) * 4
    B, C = (torch.randn(100, 2, 16, generator=generator) for _ in range(2))
    batch, table = build([Rows(100, start=3, writes=((99, 4),))])
    state = pool_for(table, 6, 8, 16)
    y_expected, last = mamba2_chunk_scan(
        *(x[None], dt[None], A, B[None], C[None]),
        chunk_size=32,
        initial_states=state[3][None].clone(),
        return_final_states=True,
    )
    inputs = Recurrence(C, B, dt[..., None] * x, dt * A)
    y = inputs.run(operation(backend, "linear_scan"), state, batch, table)
    assert_near(y, y_expected[0])
    assert_near(state[4], last[0])


def conv_oracle(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, batch: Batch, table: StateTable
) -> tuple[Tensor, Tensor]:
    """Row by row in fp64, before the activation. Returns y: [T, C] and the pool afterwards."""
    after = window.double().clone()
    y = torch.zeros(x.shape, dtype=torch.float64)
    for sequence, start in enumerate(table.starts_host):
        past = torch.zeros(window.shape[1:], dtype=torch.float64) if start == NO_SLOT else window[start].double()
        for row in range(*batch.cu_seqlens_host[sequence : sequence + 2]):
            past = torch.cat((past, x[row].double()[None]))
            y[row] = (past * weight.double().T).sum(0) + (0 if bias is None else bias.double())
            past = past[1:]
            for written, slot in zip(table.write_rows_host, table.write_slots.tolist(), strict=True):
                if written == row:
                    after[slot] = past
    return y, after


def check_conv(backend: str, sequences: list[Rows], width: int, with_bias: bool, channels: int = 12) -> None:
    generator = torch.Generator().manual_seed(width)
    batch, table = build(sequences)
    x = strided(batch.num_tokens, channels, generator=generator)
    weight = torch.randn(channels, width, generator=generator)
    bias = torch.randn(channels, generator=generator) if with_bias else None
    window = pool_for(table, width - 1, channels)
    y_expected, window_expected = conv_oracle(x, weight, bias, window, batch, table)
    y = operation(backend, "short_conv")(x, weight, bias, window, batch, table, activation="silu")
    assert y.dtype == x.dtype
    assert_near(y, F.silu(y_expected), 1e-6)
    torch.testing.assert_close(window.double(), window_expected, rtol=0, atol=0, equal_nan=True)


@over_convolutions
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize(("width", "with_bias"), [(2, False), (4, True), (4, False), (3, True)])
def test_short_conv_equals_the_token_serial_oracle(backend: str, situation: str, width: int, with_bias: bool) -> None:
    check_conv(backend, SITUATIONS[situation], width, with_bias)


@over_convolutions
@pytest.mark.parametrize("seed", range(6))
def test_short_conv_in_random_situations(backend: str, seed: int) -> None:
    check_conv(backend, random_situation(seed), 4, with_bias=True, channels=19)


@over_convolutions
@pytest.mark.parametrize("width", [1, 7])
def test_short_conv_of_any_width(backend: str, width: int) -> None:
    check_conv(backend, SITUATIONS["mixed"], width, with_bias=True)


@over_convolutions
@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_short_conv_equals_transformers(backend: str, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((length, 8), (8, 4), (8,)))
    batch, table = build([Rows(length, start=3, writes=((length - 1, 4),))])
    window = pool_for(table, 3, 8)
    published = window[3].T[None].clone()
    y_expected = causal_conv1d_update(x.T[None], published, weight, bias, activation="silu")
    y = operation(backend, "short_conv")(x, weight, bias, window, batch, table, activation="silu")
    assert_near(y, y_expected[0].T, 1e-6)
    torch.testing.assert_close(window[4], published[0].T)


@over_convolutions
@pytest.mark.parametrize("activation", ["silu", "identity"])
def test_short_conv_of_bfloat16_rows(backend: str, activation: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((9, 8), (8, 4)))
    batch, table = build([Rows(8, start=3, writes=((7, 4),)), Rows(1)])
    window = pool_for(table, 3, 8).bfloat16()
    y_expected, _ = conv_oracle(x, weight, None, window, batch, table)
    op = operation(backend, "short_conv", torch.bfloat16)
    y = op(x, weight, None, window, batch, table, activation=activation)
    assert y.dtype == torch.bfloat16
    assert_near(y, F.silu(y_expected) if activation == "silu" else y_expected, 1e-2)
    assert torch.equal(window[4], x[5:8])
