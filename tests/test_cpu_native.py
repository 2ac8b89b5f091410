"""What is particular to the native CPU backend: bits that do not depend on the batch, views, compilation and its refusals.

Shapes are chosen around what kernels are built from: blocks of K of 1024, panels of 24 weight rows, tiles of 4 rows, segments of
512 keys, chunks of 16 rows. That the operations compute the right thing is in `test_ops*.py`, for every backend.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridserve.backends.activations import ACTIVATIONS
from hybridserve.backends.cpu import offer
from hybridserve.backends.cpu.build import built_library, library_path
from hybridserve.backends.cpu.experts import NativeMoe
from hybridserve.backends.cpu.heads import NativeHeadLinear
from hybridserve.backends.cpu.library import Library
from hybridserve.backends.cpu.linear import NativeLinear
from hybridserve.backends.offer import Operation
from hybridserve.backends.ops import Activation
from hybridserve.batch import Batch, PagedTable, StateTable
from hybridserve.config import user_cache_folder
from hybridserve.errors import MissingDependencyError
from hybridserve.kv.spec import PagedSpec, StateSpec, TensorSpec
from tests.conformance import Rows, build_batch

CPU = torch.device("cpu")
OFFER = offer(CPU, torch.float32)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

compiled = pytest.mark.skipif(not OFFER.ops, reason=OFFER.reason)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def op(name: str) -> Operation:
    return OFFER.ops[name]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear_kernel() -> NativeLinear:
    """The kernel for any number of rows, whatever this processor would hand over to torch."""
    return NativeLinear(Library(library_path(user_cache_folder())), bf16_hardware=False)


# Linear: ragged in every way, with and without whole blocks.
LINEAR_SIZES = [(1, 1), (25, 7), (70, 96), (24, 1024), (51, 1061), (3, 2100)]  # (out, in)


@compiled
@DTYPES
@pytest.mark.parametrize(("size_out", "size_in"), LINEAR_SIZES)
def test_linear_of_any_size_is_right(size_out: int, size_in: int, dtype: torch.dtype) -> None:
    weight, bias = random(size_out, size_in, dtype=dtype), random(size_out, dtype=dtype, seed=1)
    for rows in (1, 2, 3, 4, 9, 17, 300):
        x = random(rows, size_in, dtype=dtype, seed=2)
        exact = F.linear(x.double(), weight.double(), bias.double())
        scale = (x.double().abs() @ weight.double().abs().T).max()
        error = (linear_kernel()(x, weight, bias).double() - exact).abs().max()
        assert error <= scale * (2e-7 if dtype == torch.float32 else 4e-3)


@compiled
@DTYPES
@pytest.mark.parametrize(("size_out", "size_in"), LINEAR_SIZES)
def test_linear_of_a_row_has_the_same_bits_in_any_batch(size_out: int, size_in: int, dtype: torch.dtype) -> None:
    linear, weight = linear_kernel(), random(size_out, size_in, dtype=dtype)
    x = random(300, size_in, dtype=dtype, seed=1)
    single = torch.cat([linear(row[None], weight, None) for row in x])
    for rows in (2, 3, 4, 5, 16, 17, 31, 257, 300):
        assert torch.equal(linear(x[:rows], weight, None), single[:rows]), f"{rows} rows"


@compiled
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_linear_takes_views_and_mixed_types(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x = random(2, 5, 3, 90, dtype=x_dtype)[:, :, 1, 4:84]  # [2, 5, 80], rows far apart
    weight = random(40, 200, dtype=weight_dtype, seed=1)[::2, 50:130]  # [20, 80]
    y = linear_kernel()(x, weight, None)
    assert y.dtype == x_dtype
    assert y.shape == (2, 5, 20)
    torch.testing.assert_close(y.double(), F.linear(x.double(), weight.double()), atol=0.05, rtol=1e-2)
    transposed = random(80, 20, dtype=x_dtype, seed=2).T  # rows are not dense
    expected = F.linear(transposed.double(), weight[:, :80].double())
    torch.testing.assert_close(linear_kernel()(transposed, weight[:, :80], None).double(), expected, atol=0.05, rtol=1e-2)


@compiled
def test_linear_hands_over_what_it_does_not_read() -> None:
    x, weight = random(3, 32), random(32, 8, seed=1).T  # columns of the weight are dense, rows are not
    assert torch.equal(linear_kernel()(x, weight, None), F.linear(x, weight))
    half = random(3, 32, dtype=torch.float16), random(8, 32, dtype=torch.float16, seed=1)
    assert torch.equal(linear_kernel()(*half, None), F.linear(*half))


@compiled
def test_linear_beside_bf16_instructions_is_torch_beyond_four_rows() -> None:
    linear = NativeLinear(Library(library_path(user_cache_folder())), bf16_hardware=True)
    x, weight = random(5, 1500, dtype=torch.bfloat16), random(33, 1500, dtype=torch.bfloat16, seed=1)
    assert torch.equal(linear(x, weight, None), F.linear(x, weight))
    assert torch.equal(linear(x[:4], weight, None), linear_kernel()(x[:4], weight, None))


@compiled
def test_linear_refuses_rows_of_another_size() -> None:
    with pytest.raises(ValueError, match=r"64 .* 32"):
        linear_kernel()(random(2, 64), random(8, 32), None)


# Bits that do not depend on threads, chunks and neighbours.


@compiled
@DTYPES
def test_threads_change_no_bit(dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    x, weight = random(40, 1061, dtype=dtype), random(130, 1061, dtype=dtype, seed=1)
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append((linear_kernel()(x, weight, None), attend([Rows(1, context=2100)], dtype), *run_delta(20, (20,))))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def attend(
    sequences: list[Rows], dtype: torch.dtype = torch.float32, *, window: int | None = None, nan_at: int | None = None
) -> Tensor:
    """Attention of the last rows of one text that all sequences share, whose blocks lie in reverse order. Returns [T, 6, 24]."""
    tokens, heads, key_heads, dims = 2128, 6, 2, (40, 24)
    blocks = tuple(range(tokens // 16))[::-1]
    k_cache, v_cache = (random(len(blocks), 16, key_heads, dim, dtype=dtype, seed=dim) for dim in dims)
    if nan_at is not None:
        k_cache[blocks[nan_at // 16], nan_at % 16] = torch.nan
    spec = PagedSpec((TensorSpec("k", (key_heads, dims[0]), "float32"),))
    batch = build_batch([Rows(s.length, context=s.context, blocks=blocks) for s in sequences], [spec], block_size=16)
    q = random(tokens, heads, dims[0], dtype=dtype, seed=1)[batch.positions]
    y = op("paged_attention")(q, k_cache, v_cache, batch, batch.paged[0], scale=0.5, window=window, softcap=None, sinks=None)
    assert y is not None
    return y


@compiled
@DTYPES
@pytest.mark.parametrize("window", [None, 7, 600])
def test_attention_of_a_row_has_the_same_bits_in_decode_verify_and_prefill(dtype: torch.dtype, window: int | None) -> None:
    whole = attend([Rows(1300)], dtype, window=window)
    for position in (0, 3, 511, 512, 513, 1040, 1299):
        alone = attend([Rows(1, context=position)], dtype, window=window)
        assert torch.equal(alone[0], whole[position]), f"decode at {position}"
    mixed = attend([Rows(5, context=508), Rows(1, context=77), Rows(300, context=1000)], dtype, window=window)
    assert torch.equal(mixed, torch.cat((whole[508:513], whole[77:78], whole[1000:1300])))


@compiled
@pytest.mark.parametrize("at", [3, 700])
def test_a_nan_key_shows_in_every_row_that_sees_it_and_in_no_other(at: int) -> None:
    y = attend([Rows(1300)], nan_at=at)
    assert y[at:].isnan().all()
    assert torch.equal(y[:at], attend([Rows(at)]))


def run_delta(rows: int, passes: tuple[int, ...], *, per_channel: bool = False, scan: bool = False) -> tuple[Tensor, Tensor]:
    """A sequence in passes of given lengths. Returns y: [rows, 2, 19] and the states after: [2, 19, 40]."""
    q, k = random(rows, 1, 40, seed=1), random(rows, 1, 40, seed=2)
    v, log_decay = random(rows, 2, 19, seed=3), -random(rows, 2, 40, seed=4).abs()
    log_decay = log_decay if per_channel else log_decay[..., 0]
    beta, pool = random(rows, 2, seed=5).sigmoid(), random(3, 2, 19, 40)
    outputs, done = [], 0
    for length in passes:
        here = slice(done, done + length)
        batch, table = one_state_pass(Rows(length, start=1, writes=((length - 1, 1),)))
        inputs = (q[here], k[here], v[here], log_decay[here])
        if scan:
            outputs.append(op("linear_scan")(*inputs, pool, batch, table))
        else:
            outputs.append(op("delta_rule")(*inputs, beta[here], pool, batch, table, scale=0.3, qk_l2norm=True))
        done += length
    return torch.cat([y for y in outputs if y is not None]), pool[1]


def one_state_pass(rows: Rows) -> tuple[Batch, StateTable]:
    batch = build_batch([rows], [StateSpec((TensorSpec("state", (1,), "float32"),))])
    return batch, batch.states[0]


@compiled
@pytest.mark.parametrize("kind", [{}, {"per_channel": True}, {"scan": True}], ids=["delta", "per channel", "scan"])
@pytest.mark.parametrize("passes", [(1,) * 50, (16, 34), (7, 1, 2, 40)], ids=str)
def test_a_recurrence_has_the_same_bits_however_it_is_cut(passes: tuple[int, ...], kind: dict[str, bool]) -> None:
    whole, cut = run_delta(50, (50,), **kind), run_delta(50, passes, **kind)
    assert torch.equal(whole[0], cut[0])
    assert torch.equal(whole[1], cut[1])


def run_selective(passes: tuple[int, ...], channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A sequence in passes of given lengths. Returns y: [50, channels] and the state after: [channels, 7]."""
    x, dt = random(50, channels, dtype=dtype, seed=1), random(50, channels, seed=2).abs()
    b, c, A = random(50, 7, dtype=dtype, seed=3), random(50, 7, dtype=dtype, seed=4), -random(channels, 7, seed=5).abs()
    pool = random(3, channels, 7)
    outputs, done = [], 0
    for length in passes:
        here = slice(done, done + length)
        batch, table = one_state_pass(Rows(length, start=1, writes=((length - 1, 1),)))
        outputs.append(op("selective_scan")(x[here], dt[here], A, b[here], c[here], pool, batch, table))
        done += length
    return torch.cat([y for y in outputs if y is not None]), pool[1]


@compiled
@DTYPES
def test_a_choice_is_the_same_in_decode_and_prefill_and_a_nan_chooses_something(dtype: torch.dtype) -> None:
    """And whoever sees no more entries than may be chosen sees them all, without a look at the scores."""
    q, weights, keys = random(60, 5, 18, dtype=dtype), random(60, 5, seed=1), random(8, 4, 18, dtype=dtype, seed=2)
    q[50] = torch.nan
    spec = PagedSpec((TensorSpec("k", (18,), "float32"),), tokens_per_entry=2)

    def choose(first: int, last: int) -> Tensor:
        batch = build_batch([Rows(last - first, context=first, blocks=tuple(range(8)))], [spec], block_size=8)
        chosen = op("index_select")(q[first:last], weights[first:last], keys, batch, batch.paged[0], num_selected=7)
        assert chosen is not None
        return chosen

    whole = choose(0, 60)
    for first, last in ((0, 1), (13, 16), (40, 41), (41, 60), (59, 60)):
        assert torch.equal(choose(first, last), whole[first:last])
    assert whole[:14].tolist() == [[*range((p + 1) // 2), *(-1,) * (7 - (p + 1) // 2)] for p in range(14)]
    assert whole[50].unique().numel() == 7
    assert ((whole[50] >= 0) & (whole[50] < 25)).all()


@compiled
@DTYPES
def test_a_head_s_product_of_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    x, weight = random(9, 3, 70, dtype=dtype), random(3, 70, 50, dtype=dtype, seed=1)
    native = NativeHeadLinear(Library(library_path(user_cache_folder())), bf16_hardware=False)
    for stored in (weight.mT, weight.mT.contiguous()):
        whole = native(x, stored)
        for first, last in ((0, 1), (1, 3), (3, 6), (2, 9)):
            assert torch.equal(native(x[first:last], stored), whole[first:last])
    with pytest.raises(ValueError, match="does not fit"):
        native(x[:, :2], weight.mT)


@compiled
@DTYPES
@pytest.mark.parametrize("channels", [1, 8, 67, 130])
def test_a_selective_scan_has_the_same_bits_however_it_is_cut(channels: int, dtype: torch.dtype) -> None:
    whole = run_selective((50,), channels, dtype)
    for passes in ((1,) * 50, (2, 16, 17, 15), (49, 1)):
        cut = run_selective(passes, channels, dtype)
        assert torch.equal(whole[0], cut[0])
        assert torch.equal(whole[1], cut[1])


@compiled
def test_a_selective_scan_of_other_types_is_the_reference_s() -> None:
    """And sizes that do not fit each other are an error, not a read beyond the end."""
    x, dt, A = random(5, 12, seed=1), random(5, 12, seed=2).abs(), -random(12, 3, seed=3).abs()
    b, c, pool = random(5, 3, seed=4), random(5, 3, seed=5), random(2, 12, 3)
    batch, table = one_state_pass(Rows(5, start=1, writes=((4, 0),)))
    expected = op("selective_scan")(x, dt, A, b, c, pool.clone(), batch, table)
    found = op("selective_scan")(x.double(), dt, A, b, c, pool, batch, table)
    assert expected is not None
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="do not fit"):
        op("selective_scan")(x, dt, A, b[:, :2], c, pool, batch, table)


def run_conv(passes: tuple[int, ...], dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor]:
    """A sequence in passes of given lengths. Returns y: [50, 300] and the window after: [width - 1, 300]."""
    x, weight, bias = random(50, 300, dtype=dtype), random(300, width, dtype=dtype, seed=1), random(300, dtype=dtype, seed=2)
    window = random(3, width - 1, 300, dtype=dtype, seed=3)
    outputs, done = [], 0
    for length in passes:
        batch, table = one_state_pass(Rows(length, start=2, writes=((length - 1, 2),)))
        y = op("short_conv")(x[done : done + length], weight, bias, window, batch, table, activation="silu")
        outputs.append(y)
        done += length
    return torch.cat([y for y in outputs if y is not None]), window[2]


@compiled
@DTYPES
@pytest.mark.parametrize("width", [1, 2, 4, 21])
def test_a_convolution_has_the_same_bits_however_it_is_cut(width: int, dtype: torch.dtype) -> None:
    whole = run_conv((50,), dtype, width)
    for passes in ((1,) * 50, (2, 16, 17, 15), (49, 1)):
        cut = run_conv(passes, dtype, width)
        assert torch.equal(whole[0], cut[0])
        assert torch.equal(whole[1], cut[1])


@compiled
def test_a_long_sequence_may_keep_a_state_where_it_started() -> None:
    """The start slot is written by a later chunk of the same sequence, while the first may still read it."""
    x, weight = random(40, 64), random(64, 4, seed=1)
    pools = [random(3, 3, 64, seed=2) for _ in range(2)]
    outputs = []
    for pool, kept_in in zip(pools, (1, 2), strict=True):
        batch, table = one_state_pass(Rows(40, start=1, writes=((0, kept_in), (20, kept_in), (39, kept_in))))
        outputs.append(op("short_conv")(x, weight, None, pool, batch, table, activation="silu"))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(pools[0][1], x[37:])
    assert torch.equal(pools[1][2], x[37:])


@compiled
@pytest.mark.parametrize("gated", [True, False])
def test_experts_with_bounds_shift_and_biases_are_right(gated: bool) -> None:
    x, gate_up, down = random(9, 50), random(5, 74 if gated else 37, 50, seed=1), random(5, 50, 37, seed=2)
    biases, weights = (random(5, gate_up.shape[1], seed=5), random(5, 50, seed=6)), random(9, 2, seed=4)
    ids = random(9, 5, seed=3).argsort(1)[:, :2]
    moe = NativeMoe(Library(library_path(user_cache_folder())), bf16_hardware=False)
    y = moe(x, ids, weights, gate_up, down, activation="quick_gelu", limit=3.0, up_shift=1.0, biases=biases)
    for row in range(9):
        expected = torch.zeros(50, dtype=torch.float64)
        for expert, weight in zip(ids[row].tolist(), weights[row].double(), strict=True):
            inner = gate_up[expert].double() @ x[row].double() + biases[0][expert]
            gate = inner[:37].clamp(max=3.0) if gated else inner
            inner = gate * torch.sigmoid(1.702 * gate) * ((inner[37:].clamp(-3.0, 3.0) + 1.0) if gated else 1.0)
            expected += weight * (down[expert].double() @ inner + biases[1][expert])
        torch.testing.assert_close(y[row].double(), expected, atol=1e-3, rtol=1e-5)


@compiled
@DTYPES
@pytest.mark.parametrize("gated", [True, False])
def test_experts_of_a_row_give_the_same_bits_in_any_batch(dtype: torch.dtype, gated: bool) -> None:
    opened = 2 * 37 if gated else 37
    x, gate_up, down = (
        random(530, 50, dtype=dtype),
        random(6, opened, 50, dtype=dtype, seed=1),
        random(6, 50, 37, dtype=dtype, seed=2),
    )
    biases = random(6, opened, seed=5), random(6, 50, dtype=dtype, seed=6)
    ids = random(530, 6, seed=3).argsort(1)[:, :2]  # not contiguous
    weights = random(530, 2, seed=4)
    choices = {"activation": "silu", "limit": 2.0, "up_shift": 0.5, "biases": biases}
    moe = NativeMoe(Library(library_path(user_cache_folder())), bf16_hardware=False)
    whole = moe(x, ids, weights, gate_up, down, **choices)
    for row in (0, 17, 511, 512, 529):
        here = slice(row, row + 1)
        assert torch.equal(whole[here], moe(x[here], ids[here], weights[here], gate_up, down, **choices))


@compiled
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_at_their_limits(activation: Activation) -> None:
    """By experts of one entry: gate 1, up 1, down 1, so that the result is x act(x)."""
    x = torch.tensor([-1e30, -200.0, -88.5, -87.0, -1.0, -1e-30, 0.0, 1e-3, 1.0, 10.0, 87.5, 89.0, 300.0, torch.nan])[:, None]
    one, ids = torch.ones(1, 1, 1), torch.zeros(len(x), 1, dtype=torch.int64)
    y = op("moe")(x, ids, torch.ones(len(x), 1), one.expand(1, 2, 1).contiguous(), one, activation=activation)
    assert y is not None
    expected = (ACTIVATIONS[activation](x.double()) * x.double()).float()
    torch.testing.assert_close(y, expected, atol=1e-30, rtol=2e-6, equal_nan=True)


# Compilation.


def fake_compiler(folder: Path, on_compile: str) -> str:
    """A program that answers what the macros are and then does `on_compile`."""
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\ncase "$*" in *-dM*) echo "#define FAKE"; exit 0;; esac\n{on_compile}\n')
    path.chmod(0o700)
    return str(path)


#: What a fake compiler does when it is to compile or to link.
BUILD = 'while [ "$1" != -o ]; do shift; done; echo built > "$2"'


def test_a_library_is_compiled_once_and_published_whole(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, f'echo x >> {tmp_path}/log; while [ "$1" != -o ]; do shift; done; echo built > "$2"')
    folder = tmp_path / "cache"
    path = library_path(folder, compiler)
    assert path.read_bytes().startswith(b"built\n")
    runs = (tmp_path / "log").read_text()
    assert library_path(folder, compiler) == path
    assert (tmp_path / "log").read_text() == runs
    assert list(folder.iterdir()) == [path]
    assert folder.stat().st_mode & 0o077 == 0


def test_another_compiler_has_another_library(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = fake_compiler(tmp_path / "other", BUILD)
    Path(other).write_text(Path(other).read_text().replace("FAKE", "NEWER"))
    folder = tmp_path / "cache"
    assert library_path(folder, fake_compiler(tmp_path, BUILD)) != library_path(folder, other)


def test_a_failing_compiler_is_a_refusal_with_its_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failing = "echo 'in file a.cpp:' >&2; echo 'a.cpp:7: error: no such thing' >&2; echo 'b: error: later' >&2; exit 1"
    found = offer(CPU, torch.float32, fake_compiler(tmp_path, failing))
    assert not found.ops
    assert "a.cpp:7: error: no such thing" in found.reason
    assert "later" not in found.reason
    assert not [path for path in (tmp_path / "hybridserve").iterdir() if path.suffix == ".so"]


def test_a_missing_compiler_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = offer(CPU, torch.bfloat16, "no-such-compiler")
    assert not found.ops
    assert "no-such-compiler not found" in found.reason


def test_a_library_that_cannot_be_loaded_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = offer(CPU, torch.float32, fake_compiler(tmp_path, BUILD))
    assert not found.ops
    assert "cannot be loaded" in found.reason


@pytest.mark.parametrize("built", [False, True], ids=["to be built", "built"])
@pytest.mark.parametrize("place", ["base", "base/cache", "the library"])
def test_code_is_not_loaded_from_where_others_may_write(tmp_path: Path, place: str, built: bool) -> None:
    compiler, folder = fake_compiler(tmp_path, BUILD), tmp_path / "base" / "cache"
    folder.mkdir(parents=True)
    path = library_path(folder, compiler)
    if not built and place != "the library":
        path.unlink()
    (path if place == "the library" else tmp_path / place).chmod(0o777)
    for find in (library_path, built_library):
        with pytest.raises(MissingDependencyError, match=r"writable by others.*chmod go-w"):
            find(folder, compiler)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("place", ["base", "base/cache", "the library", "a link"])
def test_code_is_not_loaded_from_what_belongs_to_others(tmp_path: Path, place: str) -> None:
    compiler, folder = fake_compiler(tmp_path, BUILD), tmp_path / "base" / "cache"
    path = library_path(folder, compiler)
    if place == "a link":
        path = path.rename(tmp_path / "elsewhere")
        (folder / library_path(tmp_path / "other", compiler).name).symlink_to(path)
    os.chown(path if place in ("the library", "a link") else tmp_path / place, 12345, -1)
    with pytest.raises(MissingDependencyError, match="belongs to user 12345"):
        library_path(folder, compiler)


def test_a_folder_where_only_owners_may_rename_is_as_good_as_one_s_own(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert library_path(tmp_path / "cache", fake_compiler(tmp_path, BUILD)).exists()


@pytest.mark.parametrize("kept", [0, 3, 40])
def test_a_library_that_was_cut_off_is_built_again(tmp_path: Path, kept: int) -> None:
    """To map one into the process would be its end, without an error to catch."""
    compiler, folder = fake_compiler(tmp_path, BUILD), tmp_path / "cache"
    path = library_path(folder, compiler)
    whole = path.read_bytes()
    path.write_bytes((whole + bytes(40))[:kept])
    assert built_library(folder, compiler) is None
    assert library_path(folder, compiler).read_bytes() == whole


def test_a_library_without_our_functions_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = 'while [ "$1" != -o ]; do shift; done; cp "$(ls /lib/*/libm.so.6 /lib64/libm.so.6 2>/dev/null | head -n 1)" "$2"'
    found = offer(CPU, torch.float32, fake_compiler(tmp_path, other))
    assert not found.ops
    assert "lack hs_linear" in found.reason


def test_a_compiler_that_writes_nothing_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = offer(CPU, torch.float32, fake_compiler(tmp_path, "exit 0"))
    assert not found.ops
    assert "wrote no library" in found.reason


def test_a_user_without_a_home_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    found = offer(CPU, torch.float32)
    assert not found.ops
    assert "set XDG_CACHE_HOME or HOME" in found.reason


def test_a_cache_folder_that_is_not_absolute_is_ignored(tmp_path: Path) -> None:
    home = user_cache_folder({"XDG_CACHE_HOME": "relative/cache"})
    assert home.is_absolute()
    assert home == user_cache_folder({})
    assert user_cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "hybridserve"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_made_is_a_refusal(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(MissingDependencyError, match="cannot use the cache folder"):
        library_path(tmp_path / "cache")


@compiled
def test_fp32_and_bf16_have_the_same_operations_and_none_is_refused() -> None:
    offers = [offer(CPU, dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert offers[0].ops.keys() == offers[1].ops.keys()
    assert {"linear", "moe", "paged_attention", "delta_rule", "linear_scan", "short_conv"} <= offers[0].ops.keys()
    assert not offers[0].refused


def test_other_types_and_devices_are_refused_with_the_reason() -> None:
    assert "float16" in offer(CPU, torch.float16).reason
    assert "cuda" in offer(torch.device("cuda"), torch.bfloat16).reason
    assert not offer(CPU, torch.float16).ops
    assert not offer(torch.device("cuda"), torch.bfloat16).ops


@compiled
def test_loading_leaves_the_processor_s_rounding_alone() -> None:
    """Code that is linked for fast mathematics makes denormals zero in the whole process."""
    assert (torch.tensor([1e-40]) * 1.0).item() > 0


@compiled
def test_kernels_leave_the_rounding_of_every_thread_as_it_was(threads: Callable[[int], None]) -> None:
    """Kernels take denormals for zero while they run, in threads that torch has for its own work, too."""
    threads(2)
    x, w = random(64, 256), random(512, 256, seed=1)
    faint = torch.full((1_000_000,), 1e-30)
    assert (faint * 1e-10 > 0).all()
    linear_kernel()(x, w, None)
    assert (faint * 1e-10 > 0).all()


def block_batch(blocks: list[int], kv_len: int) -> tuple[Batch, PagedTable]:
    """One row at the end of a sequence whose blocks of 4 tokens are as told."""
    batch = build_batch([Rows(1, context=kv_len - 1, blocks=tuple(range(9)))], [PagedSpec((TensorSpec("k", (1, 8), "float32"),))])
    return batch, PagedTable(torch.tensor([blocks], dtype=torch.int32), torch.zeros(1, dtype=torch.int64), 4)


@compiled
@pytest.mark.parametrize(
    ("blocks", "kv_len", "window", "words"),
    [
        ([0, 5, 1], 12, None, "block 1 of sequence 0 is 5; it must be from 0 to 4"),
        ([0, -1, 1], 12, None, "block 1 of sequence 0 is -1"),
        ([0, 1], 9, None, "block 2 of sequence 0 is missing"),
        ([-1, 7, 1], 12, 4, None),
        ([-1, 7, 1], 12, 5, "block 1 of sequence 0 is 7"),
        ([0, 1, 99], 8, None, None),
    ],
)
def test_only_blocks_that_exist_are_read(blocks: list[int], kv_len: int, window: int | None, words: str | None) -> None:
    batch, table = block_batch(blocks, kv_len)
    q, caches = torch.ones(1, 1, 8), [torch.ones(5, 4, 1, 8)] * 2
    if words is None:
        assert torch.equal(op("paged_attention")(q, *caches, batch, table, scale=1.0, window=window), q)
        return
    with pytest.raises(IndexError, match=words):
        op("paged_attention")(q, *caches, batch, table, scale=1.0, window=window)


@compiled
@pytest.mark.parametrize(
    ("starts", "rows", "slots", "words"),
    [
        ([4], [0], [0], "start slot of sequence 0 is 4; it must be from -1 to 3"),
        ([0], [1], [0], "row of write 0 is 1"),
        ([0], [0], [4], "slot of write 0 is 4"),
        ([0], [0], [-1], "slot of write 0 is -1"),
    ],
)
def test_only_slots_that_exist_are_read_and_written(starts: list[int], rows: list[int], slots: list[int], words: str) -> None:
    batch = build_batch([Rows(1)], [StateSpec((TensorSpec("state", (1,), "float32"),))])
    table = StateTable(torch.tensor(starts), torch.tensor(rows), torch.tensor(slots), tuple(rows), tuple(starts))
    ones, state = torch.ones(1, 1, 8), torch.ones(4, 1, 8, 8)
    calls = {
        "delta_rule": lambda op: op(
            ones, ones, ones, ones[..., 0], ones[..., 0], state, batch, table, scale=1.0, qk_l2norm=False
        ),
        "linear_scan": lambda op: op(ones, ones, ones, ones[..., 0], state, batch, table),
        "selective_scan": lambda op: op(
            ones[0], ones[0], torch.ones(8, 2), *[torch.ones(1, 2)] * 2, torch.ones(4, 8, 2), batch, table
        ),
        "short_conv": lambda op: op(ones[0], torch.ones(8, 3), None, torch.ones(4, 2, 8), batch, table, activation="silu"),
    }
    for name, call in calls.items():
        with pytest.raises(IndexError, match=words):
            call(op(name))
    assert (state == 1).all()


@compiled
def test_caches_of_another_type_are_written_by_the_reference() -> None:
    table = PagedTable(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3, 0]), 4)
    cache = torch.zeros(1, 4, 2, dtype=torch.float8_e4m3fn)
    op("kv_write")({"k": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, {"k": cache}, table)
    assert cache.float()[0].tolist() == [[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [1.0, 2.0]]


@compiled
@pytest.mark.parametrize(
    ("places", "block_size", "told"),
    [([3, 8], 4, "row 1 is 8"), ([-1, 0], 4, "row 0 is -1"), ([0, 1], 8, "4 entries in a block"), ([0], 4, "2 rows of k for 1")],
)
def test_a_cache_is_never_written_beside(places: list[int], block_size: int, told: str) -> None:
    table = PagedTable(torch.zeros(1, 1, dtype=torch.int32), torch.tensor(places), block_size)
    arena = torch.zeros(6, 4, 2)
    with pytest.raises(IndexError, match=told):
        op("kv_write")({"k": torch.ones(2, 2)}, {"k": arena[2:4]}, table)
    assert not arena.any()
