"""Attention by index, against the published layers of transformers and through the conformance kit.

The index is never as large as the text, so that something is left out, and has 16 heads: with few heads scores are often equal,
and the published layers break ties as it happens.
"""

import functools
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.glm5_next import modeling_glm5_next
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa
from transformers.models.qwen4_exp import modeling_qwen4_exp

from hybridserve.backends.select import select
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import PagedSpec, StateSpec
from hybridserve.mixers import Mixer
from hybridserve.mixers.base import mixers
from hybridserve.mixers.index import IndexConfig
from hybridserve.mixers.indexed_attention import IndexedAttentionConfig
from hybridserve.mixers.indexed_mla import IndexedMLAConfig
from hybridserve.mixers.rotary import RotaryConfig
from tests.conformance import (
    ALL_CHECKS,
    FP32,
    Bench,
    Check,
    Rows,
    blocks_for,
    check_chunking,
    rows_of,
    run_whole,
)
from tests.test_mixers import HIDDEN, NUM_ROWS, Case, Layer, build, reference_ops, rope

LATENT = {
    "hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 9,
    "qk_nope_head_dim": 8, "v_head_dim": 10, "num_hidden_layers": 1, "index_n_heads": 16, "index_head_dim": 10, "index_topk": 12,
}  # fmt: skip


def causal(num_rows: int) -> Tensor:
    return torch.full((num_rows, num_rows), torch.finfo(torch.float32).min).triu(1)[None, None]


def token_layer(module: nn.Module, rotary: nn.Module) -> tuple[nn.Module, Layer]:
    """A published layer with one index key per token, run eagerly."""
    module.config._attn_implementation = "eager"

    def run(x: Tensor) -> Tensor:
        angles = rotary(x[None], torch.arange(len(x))[None])
        return module(x[None], position_embeddings=angles, attention_mask=causal(len(x)))[0][0]

    return module.eval(), run


def deepseek_v32() -> tuple[nn.Module, Layer]:
    config = transformers.DeepseekV32Config(**LATENT, qk_rope_head_dim=6, max_position_embeddings=128, rope_parameters=rope())
    rotary = modeling_deepseek_v32.DeepseekV32RotaryEmbedding(config)
    return token_layer(modeling_deepseek_v32.DeepseekV32Attention(config, 0), rotary)


def glm_moe_dsa() -> tuple[nn.Module, Layer]:
    options = {**LATENT, "qk_rope_head_dim": 6, "max_position_embeddings": 128, "attention_bias": True}
    config = transformers.GlmMoeDsaConfig(**options, rope_parameters=rope())
    rotary = modeling_glm_moe_dsa.GlmMoeDsaRotaryEmbedding(config)
    return token_layer(modeling_glm_moe_dsa.GlmMoeDsaAttention(config, 0), rotary)


def glm5_next() -> tuple[nn.Module, Layer]:
    config = transformers.Glm5NextTextConfig(**LATENT, index_kpool=4, layer_types=["indexed_attention"], rms_norm_eps=1e-5)
    config._attn_implementation = "eager"
    module = modeling_glm5_next.Glm5NextTextAttention(config, 0).eval()
    return module, lambda x: module(x[None], attention_mask=torch.ones(1, len(x), dtype=torch.bool))[0][0]


def qwen4_exp() -> tuple[nn.Module, Layer]:
    index = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 12}
    config = transformers.Qwen4ExpTextConfig(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=1,
        layer_types=["indexed_attention"],
        rope_parameters=rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True),
        **index,
        indexer_budget=12,
        indexer_compress_ratio=4,
    )
    config._attn_implementation = "eager"
    module = modeling_qwen4_exp.Qwen4ExpTextAttention(config, 0).eval()
    rotary = modeling_qwen4_exp.Qwen4ExpTextRotaryEmbedding(config)

    def run(x: Tensor) -> Tensor:
        angles = rotary(x[None], torch.arange(len(x)).expand(3, 1, -1))
        return module(x[None], position_embeddings=angles, attention_mask=causal(len(x)))[0][0]

    return module, run


SHAPE = {"hidden_size": HIDDEN, "num_heads": 4, "kv_rank": 12, "q_rank": 9, "nope_dim": 8, "v_dim": 10}
INDEX = {"hidden_size": HIDDEN, "query_size": 9, "num_heads": 16, "head_dim": 10, "budget": 12}
PAIRS = RotaryConfig(rotary_dim=6, theta=1e4, interleaved=True)
HALVES = RotaryConfig(rotary_dim=6, theta=1e4)
PARTIAL = RotaryConfig(rotary_dim=8, theta=1e4)

CASES: dict[str, Case] = {
    "indexed_mla-deepseek-token": Case(
        "indexed_mla",
        IndexedMLAConfig(**SHAPE, rope_dim=6, rotary=PAIRS, index=IndexConfig(**INDEX, rotary=HALVES)),
        deepseek_v32,
    ),
    "indexed_mla-glm-token-bias": Case(
        "indexed_mla",
        IndexedMLAConfig(**SHAPE, rope_dim=6, rotary=PAIRS, bias=True, index=IndexConfig(**INDEX, rotary=PAIRS)),
        glm_moe_dsa,
    ),
    "indexed_mla-glm-learned-pool": Case(
        "indexed_mla",
        IndexedMLAConfig(**SHAPE, rope_dim=0, eps=1e-5, index=IndexConfig(**INDEX, group=4), pooling="learned"),
        glm5_next,
    ),
    "indexed_attention-qwen-mean-pool": Case(
        "indexed_attention",
        IndexedAttentionConfig(
            hidden_size=HIDDEN,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            qk_norm="head",
            zero_centred_norm=True,
            output_gate="element",
            rotary=PARTIAL,
            index=IndexConfig(
                hidden_size=HIDDEN, query_size=HIDDEN, num_heads=16, head_dim=12, budget=12, group=4, rotary=PARTIAL
            ),
        ),
        qwen4_exp,
    ),
}


@functools.cache
def built(name: str) -> tuple[Mixer, Layer]:
    """A case in fp32 with reference operations; checks leave it as it is."""
    return build(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_a_mixer_is_the_published_layer(name: str) -> None:
    mixer, oracle = built(name)
    x = rows_of(mixer, NUM_ROWS)
    with torch.no_grad():
        expected = oracle(x)
    assert expected.abs().mean() > 0.02, "the oracle's output is too small to tell anything"
    FP32.check(run_whole(mixer, x)[0], expected, name)


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", CASES)
def test_a_mixer_conforms(name: str, check: Check) -> None:
    check(built(name)[0], FP32)


@pytest.mark.parametrize("name", CASES)
def test_the_operations_chosen_by_default_serve_the_published_layer(name: str) -> None:
    mixer, oracle = build(CASES[name], ops=select(torch.device("cpu"), torch.float32, []).ops)
    x = rows_of(mixer, NUM_ROWS)
    with torch.no_grad():
        FP32.check(run_whole(mixer, x)[0], oracle(x), name)
    check_chunking(mixer, FP32)


@pytest.mark.parametrize("name", CASES)
def test_something_is_left_out(name: str) -> None:
    """A token that no group of the last row's choice holds may be anything, and its entry is not read."""
    mixer, _ = built(name)
    x = rows_of(mixer, 40)
    bench = Bench(mixer)
    blocks = blocks_for(40)
    bench.run_chunks(x[:39], [39], 0, blocks)
    expected = bench.run(x[39:], [Rows(1, 39, 0, (), blocks)])
    unread = 0
    for block in blocks[:9]:
        kept = {name: pool[block].clone() for name, pool in bench.caches["kv"].tensors.items()}
        for pool in bench.caches["kv"].tensors.values():
            pool[block] = 1e3
        unread += torch.equal(bench.run(x[39:], [Rows(1, 39, 0, (), blocks)]), expected)
        for name_, pool in bench.caches["kv"].tensors.items():
            pool[block] = kept[name_]
    assert 0 < unread < 9, f"{unread} of 9 blocks were not read by a row with a budget of 12 tokens"


@pytest.mark.parametrize("name", CASES)
def test_the_caches_of_an_index(name: str) -> None:
    """A key per token or per group; the open group is a state."""
    mixer, _ = built(name)
    specs, index = mixer.specs(), CASES[name].config.index
    assert specs["index"].tokens_per_entry == index.group
    assert isinstance(specs["kv"], PagedSpec)
    assert ("open" in specs) == (index.group > 1)
    if index.group > 1:
        assert isinstance(specs["open"], StateSpec)
        assert specs["open"].tensors[0].shape[0] == index.group - 1


def test_a_layer_without_an_index_takes_the_last_choice() -> None:
    """Two layers with the same weights but for the index: the second gives what the first does, in the same pass only."""
    first, _ = built("indexed_mla-deepseek-token")
    config = IndexedMLAConfig(**SHAPE, rope_dim=6, rotary=PAIRS, index=None)
    second = mixers["indexed_mla"](config, reference_ops(), torch.float32)
    second.load_state_dict({key: value for key, value in first.state_dict().items() if "indexer" not in key})
    assert set(second.specs()) == {"kv"}
    both = Bench(first, lambda mixer, x, batch, caches: (mixer(x, batch, caches), second(x, batch, caches))[1])
    x = rows_of(first, 30)
    FP32.check(both.run_chunks(x, [30]), run_whole(first, x)[0], "shared choice")
    with pytest.raises(KeyError):
        Bench(second).run_chunks(x, [30])


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: IndexConfig(**{**INDEX, "budget": 10}, group=4), "10 tokens in groups of 4"),
        (lambda: IndexConfig(**INDEX, rotary=RotaryConfig(rotary_dim=12, theta=1e4)), "rotary_dim is 12"),
        (lambda: IndexedMLAConfig(**SHAPE, rope_dim=0, index=IndexConfig(**INDEX, group=4)), "pooling 'none'"),
        (
            lambda: IndexedAttentionConfig(
                hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, window=3, index=IndexConfig(**INDEX, group=4)
            ),
            "window",
        ),
        (
            lambda: IndexedAttentionConfig(hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, index=IndexConfig(**INDEX)),
            "groups of 1",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(make: Callable[[], object], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        make()
