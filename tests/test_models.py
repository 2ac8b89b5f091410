"""Every architecture against transformers, fp32, on tiny models that take every branch; and the published shapes."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridserve.backends.select import select
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import PagedSpec, StateSpec
from hybridserve.models import CausalLM, build_model, format_layer_plan, load_weights, resolve
from tests.checkpoints import TINY, VOCAB_SIZE, make, save, save_released
from tests.driver import Driver

CPU = torch.device("cpu")
OPS = select(CPU, torch.float32, ["reference"]).ops
NUM_TOKENS = 70  # more than one chunk of 64 of the recurrent kernels, and no multiple of anything
#: fp32 against fp32, in another order of summing, with logits of size 1 to 10.
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def prompt(num_tokens: int, seed: int) -> list[int]:
    return torch.randint(VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def open_model(folder: Path, dtype: str = "auto") -> CausalLM:
    found = resolve(str(folder))
    model = build_model(found.config, OPS, found.dtype(dtype))
    load_weights(model, found, CPU)
    return model


class Pair:
    """A model, and what transformers computes with the same weights."""

    def __init__(self, name: str, folder: Path) -> None:
        self.reference = make(name)
        self.folder = save(self.reference, folder / "saved")
        self.model = open_model(self.folder)
        self.released = open_model(save_released(self.reference, folder / "released"))

    def logits(self, ids: list[int]) -> Tensor:
        """One pass over the whole, without a cache. Returns [len(ids), vocab]."""
        with torch.no_grad():
            return self.reference(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.fixture(scope="module", params=list(TINY))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


def test_logits_equal_transformers(pair: Pair) -> None:
    ids = prompt(NUM_TOKENS, seed=1)
    expected = pair.logits(ids)
    # Tokens must disagree by more than the tolerance, or the comparison would say nothing.
    assert expected.std(0).mean() > 0.1
    torch.testing.assert_close(Driver(pair.model).step([("a", ids)])[0], expected, **CLOSE)


def test_released_spelling_gives_the_same_model(pair: Pair) -> None:
    ours, other = dict(pair.model.named_parameters()), dict(pair.released.named_parameters())
    assert ours.keys() == other.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, other[name]), name
    ids = prompt(20, seed=2)
    torch.testing.assert_close(Driver(pair.released).step([("a", ids)])[0], pair.logits(ids), **CLOSE)


@pytest.mark.parametrize("size", [1, 3, 4, 64])
def test_i6_chunks_equal_transformers_in_one_pass(pair: Pair, size: int) -> None:
    ids = prompt(NUM_TOKENS if size > 1 else 24, seed=3)
    torch.testing.assert_close(Driver(pair.model).run_chunks("a", ids, size), pair.logits(ids), **CLOSE)


def test_i7_mixed_batches_equal_transformers(pair: Pair) -> None:
    """Prompts, chunks and single tokens of three sequences in the same passes, in changing order."""
    a, b, c = prompt(40, seed=4), prompt(23, seed=5), prompt(9, seed=6)
    driver = Driver(pair.model)
    passes = [
        [("a", a[:7])],
        [("b", b[:20]), ("a", a[7:8])],
        [("a", a[8:9]), ("c", c[:1]), ("b", b[20:21])],
        [("c", c[1:8]), ("b", b[21:23]), ("a", a[9:40])],
        [("c", c[8:9])],
    ]
    seen: dict[str, list[Tensor]] = {"a": [], "b": [], "c": []}
    for chunks in passes:
        for (name, _), logits in zip(chunks, driver.step(chunks), strict=True):
            seen[name].append(logits)
    for name, ids in (("a", a), ("b", b), ("c", c)):
        torch.testing.assert_close(torch.cat(seen[name]), pair.logits(ids), **CLOSE)


def test_bfloat16_is_as_close_as_transformers(pair: Pair) -> None:
    """Rounding is in the same places: the error against fp32 is that of transformers in bfloat16."""
    ids = prompt(NUM_TOKENS, seed=8)
    exact = pair.logits(ids)
    rounded = copy.deepcopy(pair.reference).to(torch.bfloat16)
    with torch.no_grad():
        theirs = rounded(torch.tensor([ids]), use_cache=False).logits[0].float()
    model = open_model(pair.folder, "bfloat16")
    ours = Driver(model).run_chunks("a", ids, 64)
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()


def test_greedy_tokens_equal_transformers(pair: Pair) -> None:
    ids = prompt(21, seed=7)
    expected = list(ids)
    for _ in range(8):
        expected.append(int(pair.logits(expected)[-1].argmax()))
    assert Driver(pair.model).generate("a", ids, 8) == expected[21:]


# --- published shapes: rows of a survey of released configs, natural bytes in bf16 with fp32 recurrent states ---

_QWEN_MOE = {
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip


def qwen(
    layers: int, hidden: int, heads: tuple[int, int], v_heads: int, *, moe: bool = False, next_: bool = False, inter: int = 3584
) -> dict[str, object]:
    """A Qwen3.5 (or Qwen3-Next) config with the published key heads and dims."""
    kind = "Qwen3Next" if next_ else "Qwen3_5Moe" if moe else "Qwen3_5"
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "vocab_size": 248320,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        **(_QWEN_MOE if moe or next_ else {}),
    }


def granite(layers: int, attention: set[int], hidden: int, heads: tuple[int, int], mamba: tuple[int, int]) -> dict[str, object]:
    """A dense Granite 4 config with N = 128 and one group."""
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "vocab_size": 100352,
        "hidden_size": hidden,
        "shared_intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "layer_types": ["attention" if i in attention else "mamba" for i in range(layers)],
        "mamba_n_heads": mamba[0],
        "mamba_d_head": mamba[1],
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "position_embedding_type": "nope",
        "normalization_function": "rmsnorm",
        "rope_theta": 10000,
        "rope_scaling": None,
        "attention_multiplier": 0.015625,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "tie_word_embeddings": True,
    }


def falcon(layers: int, hidden: int, heads: tuple[int, int, int], mamba: tuple[int, int, int]) -> dict[str, object]:
    """A Falcon-H1 config; heads: query, key, dim; mamba: heads, head dim, state."""
    return {
        "architectures": ["FalconH1ForCausalLM"],
        "vocab_size": 32784,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "mamba_d_ssm": mamba[0] * mamba[1],
        "mamba_n_heads": mamba[0],
        "mamba_d_head": mamba[1],
        "mamba_d_state": mamba[2],
        "mamba_n_groups": 1,
        "mamba_norm_before_gate": False,
        "mamba_use_mlp": True,
        "rope_theta": 1e11,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
    }


def lfm2(layers: int, attention: set[int], hidden: int, heads: tuple[int, int]) -> dict[str, object]:
    """An LFM2 config with the keys of the releases."""
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "vocab_size": 65536,
        "hidden_size": hidden,
        "block_dim": hidden,
        "conv_dim": hidden,
        "block_ff_dim": 6656,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "block_use_swiglu": True,
        "block_norm_eps": 1e-5,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_heads": heads[0],
        "num_key_value_heads": heads[1],
        "full_attn_idxs": sorted(attention),
        "max_position_embeddings": 128000,
        "rope_theta": 1e6,
        "use_pos_enc": True,
        "tie_embedding": True,
    }


_EVERY_TENTH = {5, 15, 25, 35}
_LFM2_16 = {2, 5, 8, 10, 12, 14}
#: Model, its config, bytes of keys and values per token, bytes of state per sequence.
PUBLISHED = [
    ("Qwen3-Next-80B-A3B", qwen(48, 2048, (16, 2), 32, next_=True), 24_576, 77_266_944),
    ("Qwen3.5-0.8B", qwen(24, 1024, (8, 2), 16), 12_288, 19_537_920),
    ("Qwen3.5-4B", qwen(32, 2560, (16, 4), 32), 32_768, 51_511_296),
    ("Qwen3.5-27B", qwen(64, 5120, (24, 4), 48), 65_536, 153_944_064),
    ("Qwen3.5-35B-A3B", qwen(40, 2048, (16, 2), 32, moe=True), 20_480, 64_389_120),
    ("Qwen3.5-122B-A10B", qwen(48, 3072, (32, 2), 64, moe=True), 24_576, 153_649_152),
    ("Qwen3.5-397B-A17B", qwen(60, 4096, (32, 2), 64, moe=True), 30_720, 192_061_440),
    ("Granite-4.0-h-350m", granite(32, {10, 13, 17, 27}, 768, (12, 4), (48, 32)), 4_096, 22_321_152),
    ("Granite-4.0-h-micro", granite(40, _EVERY_TENTH, 2048, (32, 8), (64, 64)), 8_192, 76_437_504),
    ("Granite-4.0-h-tiny", granite(40, _EVERY_TENTH, 1536, (12, 4), (48, 64)), 8_192, 57_341_952),
    ("Falcon-H1-Tiny-90M", falcon(24, 512, (8, 2, 64), (24, 32, 64)), 12_288, 4_847_616),
    ("Falcon-H1-0.5B", falcon(36, 1024, (8, 2, 64), (24, 64, 128)), 18_432, 28_698_624),
    ("Falcon-H1-7B", falcon(44, 3072, (12, 2, 128), (24, 128, 256)), 45_056, 139_358_208),
    ("LFM2-350M", lfm2(16, _LFM2_16, 1024, (16, 8)), 12_288, 40_960),
    ("LFM2-1.2B", lfm2(16, _LFM2_16, 2048, (32, 8)), 12_288, 81_920),
]


@pytest.mark.parametrize(
    ("config", "kv_nbytes", "state_nbytes"), [row[1:] for row in PUBLISHED], ids=[row[0] for row in PUBLISHED]
)
def test_published_shapes_need_the_published_bytes(config: dict[str, object], kv_nbytes: int, state_nbytes: int) -> None:
    model = build_model(config, OPS, torch.bfloat16)
    specs = [spec for layer in model.cache_specs() for spec in layer.values()]
    assert sum(spec.entry_nbytes for spec in specs if isinstance(spec, PagedSpec)) == kv_nbytes
    assert sum(spec.nbytes for spec in specs if isinstance(spec, StateSpec)) == state_nbytes
    assert all(parameter.is_meta for parameter in model.parameters())


def test_parameter_counts_are_the_published_ones() -> None:
    """0.75 B for the text part of Qwen3.5-0.8B, 354 M for LFM2-350M: gate, conv and head widths are right as well."""
    configs = {name: config for name, config, _, _ in PUBLISHED}
    for name, count in (("Qwen3.5-0.8B", 0.752e9), ("LFM2-350M", 354e6)):
        parameters = build_model(configs[name], OPS, torch.bfloat16).parameters()
        assert math.isclose(sum(parameter.numel() for parameter in parameters), count, rel_tol=0.01), name


def test_granite_without_mamba_layers_needs_no_sense_in_its_mamba_keys() -> None:
    config = {**granite(2, {0, 1}, 64, (4, 2), (7, 3)), "mamba_d_head": "auto"}
    assert build_model(config, OPS, torch.float32).layer_kinds() == ["attention", "attention"]
    refused({**config, "layer_types": ["mamba", "attention"]}, "mamba_d_head", "7 heads", "128")


def test_caches_of_a_layer_with_two_mixers_have_names_of_their_own() -> None:
    model = build_model(falcon(2, 64, (4, 2, 16), (4, 16, 16)), OPS, torch.float32)
    assert set(model.cache_specs()[0]) == {"mamba2.state", "attention.kv"}
    assert model.layer_kinds() == ["mamba2+attention"] * 2


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (["gated_delta"] * 3 + ["attention"] + ["gated_delta"] * 3 + ["attention"], "0-2,4-6: gated_delta  3,7: attention"),
        (["attention"], "0: attention"),
        (["mamba2+attention"] * 2, "0-1: mamba2+attention"),
    ],
)
def test_layer_plan_names_ranges(kinds: list[str], text: str) -> None:
    assert format_layer_plan(kinds) == text


# --- configs that would be mis-served are refused by name ---


def refused(config: dict[str, object], *words: str, ignore_keys: tuple[str, ...] = ()) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        build_model(config, OPS, torch.float32, ignore_keys=ignore_keys)
    for word in words:
        assert word in str(caught.value)


SMALL = qwen(4, 64, (4, 2), 16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_res_block_size": 4}, ["attn_res_block_size=4", "--ignore-config-keys attn_res_block_size"]),
        ({"hidden_act": "situ"}, ["hidden_act", "'situ'", "'silu'"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"attn_output_gate": False}, ["attn_output_gate", "False", "True"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"layer_types": ["linear_attention"] * 3 + ["qwen_sparse_attention"]}, ["layer_types[3]", "'qwen_sparse_attention'"]),
        ({"layer_types": ["linear_attention"]}, ["layer_types", "1 layers", "4"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"hidden_size": None}, ["hidden_size", "needs"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "1000000000"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, ["'spiral'", "yarn"]),
        ({"rope_parameters": {"rope_type": "default"}}, ["rope_theta", "None"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 8.0}}, ["'factor'"]),
        ({"architectures": []}, ["architectures"]),
        ({"architectures": ["A", "B"]}, ["architectures"]),
    ],
)
def test_a_key_that_changes_the_mathematics_is_refused_by_name(changes: dict[str, object], words: list[str]) -> None:
    refused({**SMALL, **changes}, *words)


def test_an_unknown_architecture_is_refused_with_the_nearest_and_what_differs() -> None:
    config = {**SMALL, "architectures": ["Qwen3_55ForCausalLM"], "hc_mult": 4}
    refused(config, "'Qwen3_55ForCausalLM'", "nearest is 'Qwen3_5", "hc_mult=4", "--plugin")


def test_a_known_model_type_does_not_make_an_unknown_architecture_known() -> None:
    """Two published models share the model type of Kimi Linear, with other mathematics."""
    refused({**SMALL, "model_type": "qwen3_5_text", "architectures": ["KimiK3ForCausalLM"]}, "'KimiK3ForCausalLM'")


def test_an_unread_key_is_accepted_when_the_user_says_so() -> None:
    config = {**SMALL, "attn_res_block_size": 4}
    assert build_model(config, OPS, torch.float32, ignore_keys=("attn_res_block_size",)).layer_kinds()[3] == "attention"
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config}
    refused(nested, "text_config.attn_res_block_size=4", ignore_keys=("attn_res_block_size",))
    build_model(nested, OPS, torch.float32, ignore_keys=("text_config.attn_res_block_size",))


def test_configs_are_plain_json() -> None:
    """The rows above are what a config.json can hold."""
    assert all(json.loads(json.dumps(config)) == config for _, config, _, _ in PUBLISHED)
