"""Latent attention and Kimi delta attention, against the published layers of transformers and through the conformance kit."""

import functools
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.bailing_hybrid import modeling_bailing_hybrid
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm5_next import modeling_glm5_next
from transformers.models.kimi_linear import modeling_kimi_linear

from hybridserve.backends.select import select
from hybridserve.errors import UnsupportedModelError
from hybridserve.mixers import Mixer
from hybridserve.mixers.base import mixers
from hybridserve.mixers.kda import KDAConfig
from hybridserve.mixers.mla import MLAConfig
from hybridserve.mixers.rotary import RotaryConfig, YarnScaling
from tests.conformance import ALL_CHECKS, FP32, Check, Tolerance, build_again, check_chunking, rows_of, run_whole
from tests.test_mixers import HIDDEN, NUM_ROWS, Case, Layer, build, recurrent_layer, reference_ops, rope

LATENT = {
    "hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6, "v_head_dim": 10, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
SHAPE = {"hidden_size": HIDDEN, "num_heads": 4, "kv_rank": 12, "nope_dim": 8, "rope_dim": 6, "v_dim": 10}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.7}


class Renamed(nn.Module):
    """A published layer whose parameters go by our names; parts of one parameter are joined in the order given."""

    def __init__(self, layer: nn.Module, names: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__()
        self.layer = layer
        self._names = names

    def named_parameters(self, *args: object, **kwargs: object) -> Iterator[tuple[str, Tensor]]:
        own = dict(self.layer.named_parameters())
        for ours, theirs in self._names.items():
            yield ours, torch.cat([own.pop(name) for name in theirs])
        yield from own.items()


def latent_layer(module: nn.Module, rotary: nn.Module | None) -> tuple[nn.Module, Layer]:
    """A published latent attention layer, run eagerly with a causal mask made here."""
    module.config._attn_implementation = "eager"
    module = module.eval()

    def run(x: Tensor) -> Tensor:
        mask = torch.full((len(x), len(x)), torch.finfo(torch.float32).min).triu(1)[None, None]
        if rotary is None:
            return module(x[None], attention_mask=mask)[0][0]
        angles = rotary(x[None], torch.arange(len(x))[None])
        return module(x[None], position_embeddings=angles, attention_mask=mask)[0][0]

    return module, run


def deepseek(**more: object) -> tuple[nn.Module, Layer]:
    options = {key: value for key, value in LATENT.items() if key != "layer_types"}
    config = transformers.DeepseekV3Config(**options, max_position_embeddings=64, **more)
    rotary = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(config)
    return latent_layer(modeling_deepseek_v3.DeepseekV3Attention(config, 0), rotary)


def deepseek_yarn() -> tuple[nn.Module, Layer]:
    return deepseek(q_lora_rank=9, attention_bias=True, rope_parameters=rope(rope_type="yarn", **YARN))


def deepseek_plain() -> tuple[nn.Module, Layer]:
    return deepseek(q_lora_rank=None, rope_interleave=False, rope_parameters=rope())


def kimi_latent() -> tuple[nn.Module, Layer]:
    config = transformers.KimiLinearConfig(**LATENT, q_lora_rank=None)
    return latent_layer(modeling_kimi_linear.KimiLinearAttention(config, 1), None)


def ling_latent() -> tuple[nn.Module, Layer]:
    config = transformers.BailingHybridConfig(**LATENT, q_lora_rank=9, rope_theta=1e4)
    rotary = modeling_bailing_hybrid.BailingHybridRotaryEmbedding(config)
    return latent_layer(modeling_bailing_hybrid.BailingHybridAttention(config, 1), rotary)


JOINED = {"in_proj_qkv.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight")}
LINEAR = {"linear_head_dim": 8, "linear_num_heads": 3, "linear_conv_kernel_dim": 3}


def delta_layer(module: nn.Module) -> tuple[nn.Module, Layer]:
    """A published delta layer without a cache; the forget gate's parameters stand beside the others."""
    _, run = recurrent_layer(module)
    names = {name: (f"forget_gate.{name}",) for name in ("A_log", "dt_bias")}
    gates = {"f_a_proj": "f_proj.a", "f_b_proj": "f_proj.b", "f_proj": "f_proj"}
    found = {name.removesuffix(".weight") for name, _ in module.forget_gate.named_parameters()}
    names |= {f"{ours}.weight": (f"forget_gate.{theirs}.weight",) for theirs, ours in gates.items() if theirs in found}
    return Renamed(module, {**JOINED, **names}), run


def kimi_delta() -> tuple[nn.Module, Layer]:
    config = transformers.KimiLinearConfig(**LATENT, **LINEAR)
    return delta_layer(modeling_kimi_linear.KimiLinearDeltaAttention(config, 0))


def ling_delta(**more: object) -> tuple[nn.Module, Layer]:
    config = transformers.BailingHybridConfig(
        **{**LATENT, "num_attention_heads": 3, "num_key_value_heads": 3}, head_dim=8, **more
    )
    return delta_layer(modeling_bailing_hybrid.BailingHybridDeltaAttention(config, 0))


def glm_delta() -> tuple[nn.Module, Layer]:
    config = transformers.Glm5NextTextConfig(**{**LATENT, "qk_rope_head_dim": 0}, **LINEAR, linear_lower_bound=-2.0)
    return delta_layer(modeling_glm5_next.Glm5NextTextLinearAttention(config, 0))


def latent(rotary: RotaryConfig | None, **more: object) -> MLAConfig:
    return MLAConfig(**SHAPE, rotary=rotary, **more)


DELTA = {"hidden_size": HIDDEN, "num_heads": 3, "head_dim": 8}
LOW_RANK = {"g_a_proj": "g_proj.a", "g_b_proj": "g_proj.b"}
PAIRS = RotaryConfig(rotary_dim=6, theta=1e4, interleaved=True)

CASES: dict[str, Case] = {
    "mla-deepseek-yarn-rank-bias": Case(
        "mla",
        latent(
            RotaryConfig(rotary_dim=6, theta=1e4, interleaved=True, scaling=YarnScaling(**YARN)),
            q_rank=9,
            bias=True,
            scale=14**-0.5 * (0.1 * 0.7 * 1.3862943611198906 + 1.0) ** 2,
        ),
        deepseek_yarn,
    ),
    "mla-deepseek-halves": Case("mla", latent(RotaryConfig(rotary_dim=6, theta=1e4)), deepseek_plain),
    "mla-kimi-nope": Case("mla", latent(None), kimi_latent),
    "mla-ling-head-gate": Case("mla", latent(PAIRS, q_rank=9, output_gate="head"), ling_latent),
    "kda-kimi-low-rank": Case("kda", KDAConfig(**DELTA, conv_width=3, eps=1e-5, gate_rank=8), kimi_delta, LOW_RANK),
    "kda-ling-full-rank-bounded": Case(
        "kda", KDAConfig(**DELTA, lower_bound=-5.0, conv_fp32=True), lambda: ling_delta(kda_lower_bound=-5.0)
    ),
    "kda-ling-full-rank-plain": Case("kda", KDAConfig(**DELTA), lambda: ling_delta(kda_safe_gate=False)),
    "kda-glm-low-rank-bounded": Case(
        "kda", KDAConfig(**DELTA, conv_width=3, eps=1e-5, gate_rank=8, lower_bound=-2.0, conv_fp32=True), glm_delta, LOW_RANK
    ),
}  # fmt: skip


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
@pytest.mark.parametrize(
    "name", ["mla-deepseek-yarn-rank-bias", "mla-kimi-nope", "kda-kimi-low-rank", "kda-ling-full-rank-bounded"]
)
def test_a_mixer_conforms(name: str, check: Check) -> None:
    check(built(name)[0], FP32)


@pytest.mark.parametrize("name", ["mla-ling-head-gate", "mla-kimi-nope", "kda-kimi-low-rank", "kda-glm-low-rank-bounded"])
def test_the_operations_chosen_by_default_serve_the_published_layer(name: str) -> None:
    mixer, oracle = build(CASES[name], ops=select(torch.device("cpu"), torch.float32, []).ops)
    x = rows_of(mixer, NUM_ROWS)
    with torch.no_grad():
        FP32.check(run_whole(mixer, x)[0], oracle(x), name)
    check_chunking(mixer, FP32)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_costs_little(name: str) -> None:
    """Against fp32 with the same weights, rounded: what is left is the rounding of activations and caches."""
    mixer, _ = build(CASES[name], torch.bfloat16)
    exact = build_again(built(name)[0])
    exact.load_state_dict({key: value.float() for key, value in mixer.state_dict().items()})
    x = rows_of(mixer, NUM_ROWS)
    actual, expected = run_whole(mixer, x)[0], run_whole(exact, x.float())[0]
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).norm() < 0.02 * expected.norm()
    check_chunking(mixer, Tolerance(atol=0.05, rtol=0.05))


@pytest.mark.parametrize("name", CASES)
def test_specs_follow_the_dtype(name: str) -> None:
    """Caches are in the model's dtype, memories of recurrences in fp32; so are the weights that must stay so."""
    case = CASES[name]
    mixer = mixers[case.kind](case.config, reference_ops(), torch.bfloat16)
    dtypes = {tensor.name: tensor.dtype for spec in mixer.specs().values() for tensor in spec.tensors}
    expected = {"latent": "bfloat16", "conv": "bfloat16", "recurrent": "float32"}
    assert dtypes == {name: expected[name] for name in dtypes}
    kept = {name for name, parameter in mixer.named_parameters() if parameter.dtype == torch.float32}
    conv = {"conv1d.weight"} if getattr(case.config, "conv_fp32", False) else set()
    assert kept == ({"A_log", "dt_bias", *conv} if case.kind == "kda" else set())


def test_a_latent_entry_is_all_that_a_token_keeps() -> None:
    """576 numbers for the released shape, whatever the number of heads."""
    config = MLAConfig(hidden_size=64, num_heads=128, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    with torch.device("meta"):
        specs = mixers["mla"](config, reference_ops(), torch.bfloat16).specs()
    assert [tensor.nbytes for spec in specs.values() for tensor in spec.tensors] == [2 * 576]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: latent(RotaryConfig(rotary_dim=8, theta=1e4)), "rotary_dim is 8"),
        (lambda: KDAConfig(**DELTA, conv_width=1), "conv_width is 1"),
        (lambda: KDAConfig(**DELTA, lower_bound=0.5), "lower_bound is 0.5"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(make: Callable[[], object], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        make()
