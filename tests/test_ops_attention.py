"""Paged attention and the write of its entries, of every backend, against a token-serial oracle and transformers.

Blocks nobody wrote, the tails of last blocks and blocks that fell out of a window hold NaN: reading one shows.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from hybridserve.backends.reference import attention
from hybridserve.batch import Batch, PagedTable
from hybridserve.kv.spec import PagedSpec, TensorSpec
from tests.conformance import Rows, build_batch
from tests.operations import operation, over_backends, strided

over_attention = over_backends("paged_attention")

#: (rows here, tokens before) of each sequence of a pass.
SITUATIONS = {
    "decode": [(1, 0), (1, 15), (1, 16), (1, 200), (1, 3)],
    "prefill": [(1, 0), (16, 0), (33, 0), (5, 0)],
    "mixed": [(1, 40), (17, 0), (3, 61), (1, 7), (40, 25), (2, 31)],
}


@dataclass(frozen=True)
class Pass:
    """One call: caches filled with what the rows may see, and NaN elsewhere."""

    q: Tensor  # [T, Hq, K]
    k_cache: Tensor  # [B, block_size, Hk, K]
    v_cache: Tensor  # [B, block_size, Hk, V]
    keys: list[Tensor]  # of each sequence, [L, Hk, K]
    values: list[Tensor]  # of each sequence, [L, Hk, V]
    batch: Batch
    table: PagedTable

    def run(self, backend: str, **scores: object) -> Tensor:
        op = operation(backend, "paged_attention", self.q.dtype)
        y = op(self.q, self.k_cache, self.v_cache, self.batch, self.table, **scores)
        assert y is not None
        return y


def strided_cache(num_blocks: int, *shape: int) -> Tensor:
    """[num_blocks, *shape] of NaN, each block followed by a gap, as in an arena."""
    size = torch.Size(shape).numel()
    return torch.full((num_blocks, size + 6), torch.nan)[:, :size].unflatten(1, shape)


def make_pass(
    situation: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    block_size: int = 16,
    window: int | None = None,
    seed: int = 0,
) -> Pass:
    """`heads` is (Hq, Hk), `dims` (K, V). Blocks lie in random order; with a window older ids in the table are stale."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = sum(-(-(rows + context) // block_size) for rows, context in situation) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    stale = free.pop()  # a block of NaN
    k_cache, v_cache = (strided_cache(num_blocks, block_size, heads[1], dim) for dim in dims)
    sequences, keys, values = [], [], []
    for rows, context in situation:
        length = rows + context
        key, value = (torch.randn(length, heads[1], dim, generator=generator) for dim in dims)
        first = 0 if window is None else max(0, context + 1 - window)
        blocks = tuple(stale if (b + 1) * block_size <= first else free.pop() for b in range(-(-length // block_size)))
        for position in range(first, length):
            k_cache[blocks[position // block_size], position % block_size] = key[position]
            v_cache[blocks[position // block_size], position % block_size] = value[position]
        sequences.append(Rows(rows, context=context, blocks=blocks))
        keys.append(key)
        values.append(value)
    spec = PagedSpec((TensorSpec("k", (heads[1], dims[0]), "float32"),))
    batch = build_batch(sequences, [spec], block_size)
    q = strided(batch.num_tokens, heads[0], dims[0], generator=generator)
    return Pass(q, k_cache, v_cache, keys, values, batch, batch.paged[0])


def oracle(
    p: Pass, *, scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Row by row and head by head in fp64, from the definition. Returns [T, Hq, V]."""
    num_heads, num_key_heads = p.q.shape[1], p.k_cache.shape[2]
    y = torch.zeros(*p.q.shape[:2], p.v_cache.shape[-1], dtype=torch.float64)
    for s, (key, value) in enumerate(zip(p.keys, p.values, strict=True)):
        row, row_end = p.batch.cu_seqlens_host[s : s + 2]
        for r in range(row, row_end):
            last = len(key) - (row_end - r) + 1
            first = 0 if window is None else max(0, last - window)
            for h in range(num_heads):
                kh = h // (num_heads // num_key_heads)
                logits = key[first:last, kh].double() @ p.q[r, h].double() * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                if sinks is not None:
                    logits = torch.cat((logits, sinks[h].double()[None]))
                y[r, h] = logits.softmax(0)[: last - first] @ value[first:last, kh].double()
    return y


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 5e-6) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance)


@over_attention
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
def test_attention_equals_the_oracle(backend: str, situation: str, heads: tuple[int, int]) -> None:
    p = make_pass(SITUATIONS[situation], heads=heads)
    assert_near(p.run(backend, scale=0.25), oracle(p, scale=0.25))


@over_attention
@pytest.mark.parametrize("dims", [(24, 8), (8, 40), (64, 64), (256, 256)])
@pytest.mark.parametrize("block_size", [1, 16, 20])
def test_attention_of_any_shape(backend: str, dims: tuple[int, int], block_size: int) -> None:
    p = make_pass([(1, 20), (7, 0), (9, 21), (1, 0)], dims=dims, block_size=block_size)
    assert_near(p.run(backend, scale=0.1), oracle(p, scale=0.1))


@over_attention
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("window", [1, 5, 16, 17, 41, 1000])
def test_window_reads_nothing_older(backend: str, situation: str, window: int) -> None:
    p = make_pass(SITUATIONS[situation], window=window)
    assert_near(p.run(backend, scale=0.25, window=window), oracle(p, scale=0.25, window=window))


@over_attention
@pytest.mark.parametrize("window", [8])
@pytest.mark.parametrize("length", [7, 8, 9, 24, 25])
def test_window_edge(backend: str, window: int, length: int) -> None:
    p = make_pass([(1, length - 1), (length, 0), (2, length - 1)], window=window, block_size=8)
    assert_near(p.run(backend, scale=0.25, window=window), oracle(p, scale=0.25, window=window))


@over_attention
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("with_softcap", [True, False])
@pytest.mark.parametrize("with_sinks", [True, False])
def test_softcap_and_sinks(backend: str, situation: str, window: int | None, with_softcap: bool, with_sinks: bool) -> None:
    p = make_pass(SITUATIONS[situation], window=window)
    sinks = torch.tensor([0.5, -1.0, 2.0, 4.0]) if with_sinks else None
    scores = {"scale": 0.5, "window": window, "softcap": 1.5 if with_softcap else None, "sinks": sinks}
    assert_near(p.run(backend, **scores), oracle(p, **scores))


@over_attention
def test_chunked_prefill_equals_one_pass(backend: str) -> None:
    p = make_pass([(50, 0)])
    whole = p.run(backend, scale=0.25)
    blocks = tuple(p.table.block_tables[0].tolist())
    parts = []
    for first, last in ((0, 1), (1, 17), (17, 48), (48, 49), (49, 50)):
        spec = PagedSpec((TensorSpec("k", (2, 16), "float32"),))
        batch = build_batch([Rows(last - first, context=first, blocks=blocks)], [spec], 16)
        parts.append(replace(p, q=p.q[first:last], batch=batch, table=batch.paged[0]).run(backend, scale=0.25))
    assert_near(torch.cat(parts), whole, 1e-6)


@over_attention
def test_temporaries_are_bounded_by_cutting_rows(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small enough that every form of cutting happens: rows of a prompt, and groups of decode rows.
    monkeypatch.setattr(attention, "TEMPORARY_NBYTES", 4096)
    monkeypatch.setattr(attention, "MIN_WINDOW_ROWS", 4)
    for window, softcap in ((None, None), (9, None), (None, 2.0)):
        p = make_pass(SITUATIONS["mixed"] + SITUATIONS["decode"], window=window)
        scores = {"scale": 0.25, "window": window, "softcap": softcap}
        assert_near(p.run(backend, **scores), oracle(p, **scores))


@over_attention
def test_I21_nan_rows_stay_in_their_sequence(backend: str) -> None:
    p = make_pass([(5, 0), (1, 9), (1, 12), (7, 3)])
    clean = p.run(backend, scale=0.25)
    p.q[0] = p.q[5] = torch.nan
    y = p.run(backend, scale=0.25)
    assert y[5].isnan().all()
    assert_near(y[6:], clean[6:], 1e-6)


@over_attention
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("window", [None, 9])
def test_attention_in_bfloat16(backend: str, situation: str, window: int | None) -> None:
    p = make_pass(SITUATIONS[situation], window=window)
    half = replace(
        p,
        q=p.q.bfloat16(),
        k_cache=p.k_cache.bfloat16(),
        v_cache=p.v_cache.bfloat16(),
        keys=[key.bfloat16() for key in p.keys],
        values=[value.bfloat16() for value in p.values],
    )
    y = half.run(backend, scale=0.25, window=window)
    assert y.dtype == torch.bfloat16
    assert_near(y, oracle(half, scale=0.25, window=window), 2e-2)


@over_attention
@pytest.mark.parametrize(("rows", "context"), [(12, 0), (1, 30), (6, 11)])
@pytest.mark.parametrize("published", ["gemma2", "gpt_oss"])
def test_attention_equals_transformers(backend: str, published: str, rows: int, context: int) -> None:
    p = make_pass([(rows, context)])
    q, k, v = (x.transpose(0, 1)[None] for x in (p.q, p.keys[0], p.values[0]))
    mask = torch.full((rows, rows + context), -torch.inf).triu(context + 1)
    sinks = torch.tensor([0.5, -1.0, 2.0, 4.0])
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks, head_dim=16)
    if published == "gemma2":
        expected, _ = gemma2_attention(module, q, k, v, mask, scaling=0.5, softcap=1.5)
        y = p.run(backend, scale=0.5, softcap=1.5)
    else:
        expected, _ = gpt_oss_attention(module, q, k, v, mask, scaling=0.5)
        y = p.run(backend, scale=0.5, sinks=sinks)
    assert_near(y, expected[0])


@over_attention
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_write_touches_its_entries_only(backend: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = {"k": strided_cache(6, 4, 2, 8).to(dtype), "v": strided_cache(6, 4, 2, 6).to(dtype)}
    blocks = torch.tensor([[3, 1, 5]], dtype=torch.int32)
    kv_index = torch.tensor([3 * 4 + 3, 1 * 4 + 0, 5 * 4 + 2])
    values = {"k": strided(3, 2, 8, generator=generator), "v": strided(3, 2, 6, generator=generator)}
    operation(backend, "kv_write", dtype)(values, cache, PagedTable(blocks, kv_index, 4))
    for name, entries in values.items():
        expected = torch.full_like(cache[name], torch.nan)
        for entry, (block, offset) in zip(entries, ((3, 3), (1, 0), (5, 2)), strict=True):
            expected[block, offset] = entry.to(dtype)
        torch.testing.assert_close(cache[name], expected, rtol=0, atol=0, equal_nan=True)
