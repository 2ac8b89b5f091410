"""Choice by an index, attention to what is chosen and rows with the ones before them, of every backend, against plain loops."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hybridserve.backends.reference import indexed
from hybridserve.batch import NO_SLOT, Batch, PagedTable
from hybridserve.kv.spec import PagedSpec, TensorSpec
from tests.conformance import Rows, build_batch
from tests.operations import SITUATIONS as STATE_SITUATIONS
from tests.operations import build, operation, over_backends, pool_for
from tests.test_ops_attention import make_pass, strided_cache

BLOCK_SIZE = 8
#: (rows here, tokens before) of each sequence of a pass.
SITUATIONS = {
    "decode": [(1, 0), (1, 3), (1, 40), (1, 200), (1, 2)],
    "mixed": [(1, 40), (17, 0), (3, 61), (1, 7), (40, 25), (2, 1)],
}


@dataclass(frozen=True)
class Scoring:
    """Queries and an index, with NaN where no whole group of tokens has been seen."""

    q: Tensor  # [T, H, K]
    weights: Tensor | None  # [T, H]
    k_cache: Tensor  # [B, entries of a block, K]
    keys: list[Tensor]  # of each sequence, [entries, K]
    batch: Batch
    table: PagedTable
    group: int

    def oracle(self, count: int) -> Tensor:
        """Entry by entry and row by row in fp64; sorted by score, then by position."""
        out = torch.full((len(self.q), count), -1, dtype=torch.int32)
        for sequence, end in enumerate(self.batch.kv_lens_host):
            first, last = self.batch.cu_seqlens_host[sequence : sequence + 2]
            for row in range(first, last):
                position = end - (last - row)
                scores = []
                for entry in range((position + 1) // self.group):
                    each = (self.q[row].double() @ self.keys[sequence][entry].double()).clamp(min=0)
                    factor = torch.ones_like(each) if self.weights is None else self.weights[row].double()
                    scores.append((-float(each @ factor), entry))
                chosen = sorted(entry for _, entry in sorted(scores)[:count])
                out[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        return out


def scoring(situation: Sequence[tuple[int, int]], group: int, *, weighted: bool, whole_numbers: bool = False) -> Scoring:
    """`whole_numbers` makes many scores equal, and all sums exact."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator)
        return x.round() if whole_numbers else x

    num_blocks = sum(-(-(rows + context) // BLOCK_SIZE) for rows, context in situation) + 1
    free = torch.randperm(num_blocks, generator=generator).tolist()
    per_block, K, H = BLOCK_SIZE // group, 6, 5
    k_cache = strided_cache(num_blocks, per_block, K)
    sequences, keys = [], []
    for rows, context in situation:
        blocks = tuple(free.pop() for _ in range(-(-(rows + context) // BLOCK_SIZE)))
        own = draw((rows + context) // group, K)
        for entry, key in enumerate(own):
            k_cache[blocks[entry // per_block], entry % per_block] = key
        keys.append(own)
        sequences.append(Rows(rows, context=context, blocks=blocks))
    spec = PagedSpec((TensorSpec("k", (K,), "float32"),), tokens_per_entry=group)
    batch = build_batch(sequences, [spec], block_size=BLOCK_SIZE)
    weights = draw(batch.num_tokens, H) if weighted else None
    return Scoring(draw(batch.num_tokens, H, K), weights, k_cache, keys, batch, batch.paged[0], group)


@over_backends("index_select")
@pytest.mark.parametrize("count", [1, 7, 300])
@pytest.mark.parametrize(("group", "weighted", "whole"), [(1, True, False), (4, False, False), (1, True, True), (2, False, True)])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_best_entries_are_chosen_and_of_equal_ones_the_lower(
    backend: str, situation: str, group: int, weighted: bool, whole: bool, count: int
) -> None:
    case = scoring(SITUATIONS[situation], group, weighted=weighted, whole_numbers=whole)
    op = operation(backend, "index_select")
    chosen = op(case.q, case.weights, case.k_cache, case.batch, case.table, num_selected=count)
    assert chosen is not None
    assert chosen.dtype == torch.int32
    assert torch.equal(chosen, case.oracle(count))


def test_long_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same choice, and the same attention, when a matrix would not fit."""
    case = scoring(SITUATIONS["mixed"], 2, weighted=True)
    calls = make_pass(SITUATIONS["mixed"])
    chosen = named(calls.batch, 9)
    expected = indexed.selected_attention(calls.q, calls.k_cache, calls.v_cache, chosen, calls.batch, calls.table, scale=0.3)
    monkeypatch.setattr(indexed, "TEMPORARY_NBYTES", 1000)
    found = indexed.index_select(case.q, case.weights, case.k_cache, case.batch, case.table, num_selected=3)
    assert torch.equal(found, case.oracle(3))
    y = indexed.selected_attention(calls.q, calls.k_cache, calls.v_cache, chosen, calls.batch, calls.table, scale=0.3)
    torch.testing.assert_close(y, expected)


def named(batch: Batch, count: int) -> Tensor:
    """Up to `count` tokens of each row's past in random order, with gaps, its own among them. Returns int32 [T, count + 2]."""
    generator = torch.Generator().manual_seed(3)
    out = torch.full((batch.num_tokens, count + 2), -1, dtype=torch.int32)
    for row, position in enumerate(batch.positions.tolist()):
        past = torch.randperm(position, generator=generator)[: count - 1].tolist()
        places = torch.randperm(count + 2, generator=generator)[: len(past) + 1]
        out[row, places] = torch.tensor([position, *past], dtype=torch.int32)
    return out


@over_backends("selected_attention")
@pytest.mark.parametrize(("heads", "dims"), [((4, 2), (16, 16)), ((6, 1), (20, 12)), ((3, 3), (8, 24))])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_attention_reads_what_is_named(backend: str, situation: str, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    case = make_pass(SITUATIONS[situation], heads=heads, dims=dims)
    chosen = named(case.batch, 9)
    op = operation(backend, "selected_attention")
    y = op(case.q, case.k_cache, case.v_cache, chosen, case.batch, case.table, scale=0.3)
    assert y is not None
    for sequence in range(case.batch.num_sequences):
        for row in range(*case.batch.cu_seqlens_host[sequence : sequence + 2]):
            tokens = chosen[row][chosen[row] >= 0].long()
            for head in range(heads[0]):
                of = head // (heads[0] // heads[1])
                keys, values = (x[sequence][tokens, of].double() for x in (case.keys, case.values))
                weights = (keys @ case.q[row, head].double() * 0.3).softmax(0)
                torch.testing.assert_close(y[row, head].double(), weights @ values, atol=1e-5, rtol=1e-5)


@over_backends("selected_attention")
def test_a_single_row_does_not_read_what_is_not_named(backend: str) -> None:
    case = make_pass(SITUATIONS["decode"])
    chosen = named(case.batch, 4)
    op = operation(backend, "selected_attention")
    expected = op(case.q, case.k_cache, case.v_cache, chosen, case.batch, case.table, scale=0.3)
    assert expected is not None
    for row in range(case.batch.num_tokens):
        kept = set(chosen[row].tolist())
        for position in range(case.batch.kv_lens_host[row]):
            if position not in kept:
                block = int(case.table.block_tables[row, position // case.table.block_size])
                case.k_cache[block, position % case.table.block_size] = torch.nan
    y = op(case.q, case.k_cache, case.v_cache, chosen, case.batch, case.table, scale=0.3)
    assert y is not None
    assert torch.equal(y, expected)


@over_backends("trailing")
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("situation", STATE_SITUATIONS)
def test_rows_stand_behind_the_ones_before_them(backend: str, situation: str, width: int) -> None:
    batch, table = build(STATE_SITUATIONS[situation])
    x = torch.randn(batch.num_tokens, 3, generator=torch.Generator().manual_seed(1))
    window = pool_for(table, width - 1, 3)
    before = window.clone()
    rows = torch.arange(0, batch.num_tokens, 2)
    y = operation(backend, "trailing")(x, rows, window, batch, table)
    assert y is not None
    after = before.clone()
    for sequence, start in enumerate(table.starts_host):
        first, last = batch.cu_seqlens_host[sequence : sequence + 2]
        past = torch.zeros(width - 1, 3) if start == NO_SLOT else before[start]
        history = torch.cat((past, x[first:last]))
        for row in range(first, last):
            if row % 2 == 0:
                assert torch.equal(y[row // 2], history[row - first : row - first + width])
            for written, slot in zip(table.write_rows_host, table.write_slots.tolist(), strict=True):
                if written == row:
                    after[slot] = history[row - first + 1 : row - first + width]
    assert torch.equal(window.nan_to_num(7.0), after.nan_to_num(7.0))


@over_backends("trailing")
def test_whole_numbers_pass_unchanged(backend: str) -> None:
    """Token ids: one number a row, no rows asked for at all in a pass that completes nothing."""
    batch, table = build([Rows(3, start=1, context=4, writes=((1, 0), (2, 1)))])
    window = torch.tensor([[9, 9], [2**40, 5]])
    op = operation(backend, "trailing")
    y = op(torch.tensor([6, 7, 8]), torch.tensor([0, 2]), window, batch, table)
    assert y is not None
    assert y.tolist() == [[2**40, 5, 6], [6, 7, 8]]
    assert window.tolist() == [[6, 7], [7, 8]]
    none = op(torch.tensor([6, 7, 8]), torch.tensor([], dtype=torch.int64), window, batch, table)
    assert none is not None
    assert none.shape == (0, 3)
