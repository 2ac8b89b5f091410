"""Every registered mixer, against the published layer of transformers and through the conformance kit.

The oracle's weights are drawn at random and copied over by name; shapes are chosen so that grouped heads, unequal dims and
every option of a config are in use somewhere.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.cohere import modeling_cohere
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.lfm3 import modeling_lfm3
from transformers.models.llama import modeling_llama
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.olmo3 import modeling_olmo3
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen4_exp import modeling_qwen4_exp

from hybridserve.backends.ops import Ops
from hybridserve.backends.select import select
from hybridserve.batch import NO_SLOT, Batch, LayerCaches
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import Spec, StateSpec, TensorSpec
from hybridserve.mixers import Mixer, MixerConfig, RecurrentMixer, States, mixers
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import dtype_name, empty_parameter
from hybridserve.mixers.gated_delta import GatedDelta, GatedDeltaConfig
from hybridserve.mixers.mamba2 import Mamba2Config
from hybridserve.mixers.rotary import (
    LongRopeScaling,
    Rotary,
    RotaryConfig,
    YarnScaling,
    rope_scaling,
)
from hybridserve.mixers.short_conv import ShortConvConfig
from tests.conformance import (
    ALL_CHECKS,
    FP32,
    Check,
    Forward,
    Rows,
    Tolerance,
    build_again,
    build_batch,
    check_batching,
    check_chunking,
    check_slots,
    check_written_states,
    rows_of,
    run_whole,
)

HIDDEN = 32
NUM_ROWS = 70

#: A published layer as a function of one sequence: [T, D] to [T, D].
Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A mixer with the published layer that it must agree with."""

    kind: str
    config: MixerConfig
    oracle: Callable[[], tuple[nn.Module, Layer]]
    names: Mapping[str, str] = field(default_factory=dict)  # the oracle's module name -> ours


def reference_ops(dtype: torch.dtype = torch.float32) -> Ops:
    """Plain torch operations."""
    return select(torch.device("cpu"), dtype, ["reference"]).ops


# --- oracles ---


def attention_layer(
    layer: type[nn.Module],
    rotary: type[nn.Module],
    config: transformers.PretrainedConfig,
    window: int | None = None,
    layer_types: tuple[str, ...] = (),
) -> tuple[nn.Module, Layer]:
    """A published attention layer, run eagerly with a causal mask made here."""
    config._attn_implementation = "eager"
    module, angles = layer(config, 0).eval(), rotary(config)

    def run(x: Tensor) -> Tensor:
        positions = torch.arange(len(x))
        behind = positions[:, None] - positions
        seen = (behind >= 0) & (behind < (window or len(x)))
        mask = torch.zeros(len(x), len(x)).masked_fill(~seen, torch.finfo(torch.float32).min)
        embeddings = angles(x[None], positions[None], *layer_types)
        return module(x[None], position_embeddings=embeddings, attention_mask=mask[None, None])[0][0]

    return module, run


def recurrent_layer(module: nn.Module) -> tuple[nn.Module, Layer]:
    """A published recurrent layer without a cache."""
    module = module.eval()
    return module, lambda x: module(x[None])[0]


def attention_options(**more: object) -> dict[str, object]:
    """What all attention oracles are configured with: 4 query heads over 2, 8 wide."""
    shape = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return {**shape, "num_hidden_layers": 1, "attention_bias": False, **more}


def rope(theta: float = 1e4, **more: object) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": theta, **more}


YARN = {"factor": 4.0, "original_max_position_embeddings": 16}


def llama() -> tuple[nn.Module, Layer]:
    config = transformers.LlamaConfig(**attention_options(attention_bias=True, rope_parameters=rope(rope_type="yarn", **YARN)))
    return attention_layer(modeling_llama.LlamaAttention, modeling_llama.LlamaRotaryEmbedding, config)


def qwen3() -> tuple[nn.Module, Layer]:
    config = transformers.Qwen3Config(**attention_options(rms_norm_eps=1e-5, rope_parameters=rope(1e6)))
    return attention_layer(modeling_qwen3.Qwen3Attention, modeling_qwen3.Qwen3RotaryEmbedding, config)


def qwen3_5() -> tuple[nn.Module, Layer]:
    parameters = rope(1e7, partial_rotary_factor=0.5, mrope_section=[1, 1, 0], mrope_interleaved=True)
    config = transformers.Qwen3_5TextConfig(**attention_options(rope_parameters=parameters))
    return attention_layer(modeling_qwen3_5.Qwen3_5Attention, modeling_qwen3_5.Qwen3_5TextRotaryEmbedding, config)


def olmo3() -> tuple[nn.Module, Layer]:
    parameters = {kind: rope() for kind in ("full_attention", "sliding_attention")}
    options = attention_options(rope_parameters=parameters, layer_types=["sliding_attention"], sliding_window=7)
    config = transformers.Olmo3Config(**options)
    rotary = modeling_olmo3.Olmo3RotaryEmbedding
    return attention_layer(modeling_olmo3.Olmo3Attention, rotary, config, 7, ("sliding_attention",))


def gpt_oss() -> tuple[nn.Module, Layer]:
    options = attention_options(rope_parameters=rope(), layer_types=["sliding_attention"], sliding_window=5, attention_bias=True)
    config = transformers.GptOssConfig(**options)
    return attention_layer(modeling_gpt_oss.GptOssAttention, modeling_gpt_oss.GptOssRotaryEmbedding, config, window=5)


def gemma2() -> tuple[nn.Module, Layer]:
    options = attention_options(rope_parameters=rope(), layer_types=["full_attention"])
    config = transformers.Gemma2Config(**options, attn_logit_softcapping=1.5, query_pre_attn_scalar=5)
    return attention_layer(modeling_gemma2.Gemma2Attention, modeling_gemma2.Gemma2RotaryEmbedding, config)


def falcon_attention() -> tuple[nn.Module, Layer]:
    config = transformers.FalconH1Config(**attention_options(rope_parameters=rope(1e5), key_multiplier=0.4))
    return attention_layer(modeling_falcon_h1.FalconH1Attention, modeling_falcon_h1.FalconH1RotaryEmbedding, config)


def cohere() -> tuple[nn.Module, Layer]:
    config = transformers.CohereConfig(**attention_options(rope_parameters=rope()))
    return attention_layer(modeling_cohere.CohereAttention, modeling_cohere.CohereRotaryEmbedding, config)


def lfm3() -> tuple[nn.Module, Layer]:
    options = attention_options(layer_types=["full_attention"], use_attention_gate=True)
    config = transformers.Lfm3Config(**options, rope_parameters={"full_attention": rope(partial_rotary_factor=0.5)})
    config._attn_implementation = "eager"
    module = modeling_lfm3.Lfm3Attention(config, 0).eval()
    return module, _without_positions(module)


def _without_positions(module: nn.Module) -> Layer:
    """A published attention layer with rotation by nothing."""

    def run(x: Tensor) -> Tensor:
        mask = torch.full((len(x), len(x)), torch.finfo(torch.float32).min).triu(1)
        embeddings = (torch.ones(1, len(x), 8), torch.zeros(1, len(x), 8))
        return module(x[None], position_embeddings=embeddings, attention_mask=mask[None, None])[0][0]

    return run


LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12}


def qwen3_5_delta() -> tuple[nn.Module, Layer]:
    config = transformers.Qwen3_5TextConfig(**attention_options(layer_types=["linear_attention"], **LINEAR))
    return recurrent_layer(modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0))


def qwen4_delta() -> tuple[nn.Module, Layer]:
    options = attention_options(layer_types=["linear_attention"], output_gate_type="sigmoid", linear_conv_kernel_dim=3)
    config = transformers.Qwen4ExpTextConfig(**options, **LINEAR, rms_norm_eps=1e-3)
    return recurrent_layer(modeling_qwen4_exp.Qwen4ExpTextGatedDeltaNet(config, 0))


class OlmoDelta(nn.Module):
    """Olmo-Hybrid's layer, its separate projections under the names of the joint one."""

    def __init__(self) -> None:
        super().__init__()
        options = attention_options(layer_types=["linear_attention", "full_attention"], linear_allow_neg_eigval=True)
        config = transformers.OlmoHybridConfig(**{**options, "num_hidden_layers": 2}, **LINEAR)
        self.layer = modeling_olmo_hybrid.OlmoHybridGatedDeltaNet(config, 0)

    def named_parameters(self, *args: object, **kwargs: object) -> Iterator[tuple[str, Tensor]]:
        own = dict(self.layer.named_parameters())
        joint = [own.pop(f"{name}_proj.weight") for name in ("q", "k", "v")]
        yield "in_proj_qkv.weight", torch.cat(joint)
        yield from own.items()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def olmo_delta() -> tuple[nn.Module, Layer]:
    return recurrent_layer(OlmoDelta())


MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 5, "mamba_chunk_size": 16}


def granite() -> tuple[nn.Module, Layer]:
    options = {"hidden_size": HIDDEN, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": True, **MAMBA}
    config = transformers.GraniteMoeHybridConfig(**options, num_hidden_layers=1, layer_types=["mamba"], rms_norm_eps=1e-3)
    return recurrent_layer(modeling_granitemoehybrid.GraniteMoeHybridMambaLayer(config, 0))


def falcon_mamba(**more: object) -> tuple[nn.Module, Layer]:
    options = attention_options(mamba_d_ssm=64, ssm_multipliers=[0.5, 1.5, 0.7, 1.3, 0.9], ssm_in_multiplier=1.25, **MAMBA)
    config = transformers.FalconH1Config(**options, **more)
    module = modeling_falcon_h1.FalconH1Mixer(config, 0)
    module.register_buffer("mup_vector", modeling_falcon_h1.compute_mup_vector(config), persistent=False)
    return recurrent_layer(module)


def falcon_normed() -> tuple[nn.Module, Layer]:
    return falcon_mamba(mamba_rms_norm=True, mamba_norm_before_gate=True, projectors_bias=True, rms_norm_eps=1e-2)


def nemotron() -> tuple[nn.Module, Layer]:
    shape = {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 4, "ssm_state_size": 16, "conv_kernel": 2}
    options = {"hidden_size": HIDDEN, "use_conv_bias": False, "use_bias": False, "chunk_size": 16, "time_step_min": 0.3, **shape}
    config = transformers.NemotronHConfig(**options, layers_block_type=["mamba"], layer_norm_epsilon=1e-4)
    return recurrent_layer(modeling_nemotron_h.NemotronHMamba2Mixer(config, 0))


def lfm2_conv(**more: object) -> tuple[nn.Module, Layer]:
    config = transformers.Lfm2Config(hidden_size=HIDDEN, num_hidden_layers=1, layer_types=["conv"], **more)
    return recurrent_layer(modeling_lfm2.Lfm2ShortConv(config, 0))


# --- cases ---


def attention(rotary: RotaryConfig | None, **more: object) -> AttentionConfig:
    return AttentionConfig(hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, head_dim=8, rotary=rotary, **more)


PLAIN = RotaryConfig(rotary_dim=8, theta=1e4)
DELTA = {"hidden_size": HIDDEN, "num_k_heads": 2, "num_v_heads": 6, "k_dim": 8, "v_dim": 12}
SSM = {"hidden_size": HIDDEN, "num_heads": 8, "head_dim": 8, "num_groups": 2, "state_size": 5}
MUP = {"ssm_multipliers": (0.5, 1.5, 0.7, 1.3, 0.9), "in_multiplier": 1.25}
OLMO_NAMES = {"a_proj": "in_proj_a", "b_proj": "in_proj_b", "g_proj": "in_proj_z", "o_norm": "norm", "o_proj": "out_proj"}

CASES: dict[str, Case] = {
    "attention-llama-yarn-bias": Case(
        "attention",
        attention(RotaryConfig(rotary_dim=8, theta=1e4, scaling=YarnScaling(**YARN)), qkv_bias=True, out_bias=True),
        llama,
    ),
    "attention-qwen3-head-norm": Case(
        "attention", attention(RotaryConfig(rotary_dim=8, theta=1e6), qk_norm="head", qk_norm_eps=1e-5), qwen3
    ),
    "attention-qwen3.5-gated-partial": Case(
        "attention",
        attention(RotaryConfig(rotary_dim=4, theta=1e7), qk_norm="head", zero_centred_norm=True, output_gate="element"),
        qwen3_5,
    ),
    "attention-olmo3-full-norm-window": Case("attention", attention(PLAIN, qk_norm="full", qk_norm_eps=1e-5, window=7), olmo3),
    "attention-gpt-oss-sinks-window": Case(
        "attention", attention(PLAIN, sinks=True, window=5, qkv_bias=True, out_bias=True), gpt_oss
    ),
    "attention-gemma2-softcap": Case("attention", attention(PLAIN, softcap=1.5, scale=5**-0.5), gemma2),
    "attention-falcon-key-multiplier": Case(
        "attention", attention(RotaryConfig(rotary_dim=8, theta=1e5), key_multiplier=0.4), falcon_attention
    ),
    "attention-cohere-interleaved": Case("attention", attention(RotaryConfig(rotary_dim=8, theta=1e4, interleaved=True)), cohere),
    "attention-lfm3-head-gate-nope": Case(
        "attention", attention(None, qk_norm="head", qk_norm_eps=1e-5, output_gate="head"), lfm3
    ),
    "gated_delta-qwen3.5": Case("gated_delta", GatedDeltaConfig(**DELTA), qwen3_5_delta),
    "gated_delta-qwen4-sigmoid": Case(
        "gated_delta", GatedDeltaConfig(**DELTA, conv_width=3, eps=1e-3, gate_activation="sigmoid"), qwen4_delta
    ),
    "gated_delta-olmo-negative": Case(
        "gated_delta", GatedDeltaConfig(**DELTA, eps=1e-5, allow_neg_eigval=True), olmo_delta, OLMO_NAMES
    ),
    "mamba2-granite": Case("mamba2", Mamba2Config(**SSM, proj_bias=True, eps=1e-3), granite),
    "mamba2-falcon-gate-only": Case("mamba2", Mamba2Config(**SSM, **MUP, gated_norm=False), falcon_mamba),
    "mamba2-falcon-norm-first": Case(
        "mamba2", Mamba2Config(**SSM, **MUP, norm_first=True, out_bias=True, eps=1e-2), falcon_normed
    ),
    "mamba2-nemotron": Case(
        "mamba2",
        Mamba2Config(
            hidden_size=HIDDEN,
            num_heads=4,
            head_dim=8,
            num_groups=4,
            state_size=16,
            conv_width=2,
            conv_bias=False,
            eps=1e-4,
            time_step_limit=(0.3, float("inf")),
        ),
        nemotron,
    ),
    "short_conv-lfm2": Case("short_conv", ShortConvConfig(hidden_size=HIDDEN, width=3), lambda: lfm2_conv(conv_L_cache=3)),
    "short_conv-lfm2-wide-bias": Case(
        "short_conv",
        ShortConvConfig(hidden_size=HIDDEN, width=7, bias=True),
        lambda: lfm2_conv(conv_L_cache=7, conv_bias=True),
    ),
}


def build(case: Case, dtype: torch.dtype = torch.float32, ops: Ops | None = None) -> tuple[Mixer, Layer]:
    """The mixer and its oracle, with the same random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        module, oracle = case.oracle()
        for name, parameter in nn.Module.named_parameters(module):
            scale, shift = (0.2, 1.0) if "norm" in name else (0.25, 0.0)
            parameter.data.normal_(shift, scale)
    mixer = mixers[case.kind](case.config, ops or reference_ops(dtype), dtype)
    ours = dict(mixer.named_parameters())
    for name, parameter in module.named_parameters():
        head, _, tail = name.rpartition(".")
        target = ours.pop(f"{case.names.get(head, head)}.{tail}".lstrip("."))
        target.data.copy_(parameter.data.reshape(target.shape))
    assert not ours, f"not in the published layer: {sorted(ours)}"
    return mixer, oracle


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


@pytest.mark.parametrize("name", ["attention-qwen3.5-gated-partial", "gated_delta-qwen3.5", "mamba2-granite", "short_conv-lfm2"])
def test_the_operations_chosen_by_default_serve_the_published_layer(name: str) -> None:
    mixer, oracle = build(CASES[name], ops=select(torch.device("cpu"), torch.float32, []).ops)
    x = rows_of(mixer, NUM_ROWS)
    with torch.no_grad():
        FP32.check(run_whole(mixer, x)[0], oracle(x), name)
    for check in (check_chunking, check_batching, check_slots):
        check(mixer, FP32)


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
    """Caches are in the model's dtype, memories of recurrences in fp32 whatever it is."""
    case = CASES[name]
    specs = mixers[case.kind](case.config, reference_ops(), torch.bfloat16).specs()
    dtypes = {tensor.name: tensor.dtype for spec in specs.values() for tensor in spec.tensors}
    expected = {"k": "bfloat16", "v": "bfloat16", "conv": "bfloat16", "recurrent": "float32", "ssm": "float32"}
    assert dtypes == {name: expected[name] for name in dtypes}


# --- a layer of a researcher: specs and step, nothing else ---


class CountingConfig(MixerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """No options of its own."""


class Counting(RecurrentMixer):
    """y = w (x + mean of all x so far) + x of two tokens ago: two specs, one of them with two tensors."""

    Config = CountingConfig
    kind = "counting"
    config: CountingConfig

    def __init__(self, config: CountingConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        self.weight = empty_parameter(config.hidden_size, dtype=dtype)

    def specs(self) -> dict[str, Spec]:
        hidden = self.config.hidden_size
        mean = StateSpec((TensorSpec("sum", (hidden,), "float32"), TensorSpec("count", (1,), "float32")))
        return {"mean": mean, "past": StateSpec((TensorSpec("x", (2, hidden), dtype_name(self.dtype)),))}

    def step(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        total, count = states["mean"]["sum"] + x, states["mean"]["count"] + 1
        past = states["past"]["x"]
        y = self.weight * (x + total / count) + past[:, 0]
        return y.to(x.dtype), {"mean": {"sum": total, "count": count}, "past": {"x": torch.stack((past[:, 1], x), dim=1)}}


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_specs_and_step_are_a_complete_layer(check: Check) -> None:
    mixer = Counting(CountingConfig(hidden_size=HIDDEN), reference_ops(), torch.float32)
    mixer.weight.data.fill_(0.5)
    check(mixer, FP32)


def test_a_step_layer_computes_what_it_says() -> None:
    mixer = Counting(CountingConfig(hidden_size=HIDDEN), reference_ops(), torch.float32)
    mixer.weight.data.fill_(0.5)
    x = rows_of(mixer, 20)
    mean = x.cumsum(0) / torch.arange(1, 21)[:, None]
    past = torch.cat((torch.zeros(2, HIDDEN), x[:-2]))
    FP32.check(run_whole(mixer, x)[0], 0.5 * (x + mean) + past, "closed form")


# --- the kit finds faults ---


def ignores_starts(mixer: Mixer, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
    states = {
        group: replace(table, start_slots=torch.full_like(table.start_slots, NO_SLOT), starts_host=(NO_SLOT,))
        for group, table in batch.states.items()
    }
    return GatedDelta.forward(mixer, x, replace(batch, states=states), caches)


def writes_last_row_only(mixer: Mixer, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
    states = {group: replace(table, write_rows=batch.cu_seqlens[1:][-1:].long() - 1) for group, table in batch.states.items()}
    states = {g: replace(t, write_rows=t.write_rows.repeat(len(t.write_slots))) for g, t in states.items()}
    return GatedDelta.forward(mixer, x, replace(batch, states=states), caches)


def writes_its_start(mixer: Mixer, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
    y = GatedDelta.forward(mixer, x, batch, caches)
    for group, table in batch.states.items():
        for cache in (cache for cache in caches.values() if cache.group == group):
            for pool in cache.tensors.values():
                pool[table.start_slots[table.start_slots != NO_SLOT]] = 0
    return y


def reads_fresh_slots(mixer: Mixer, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
    states = {
        group: replace(table, start_slots=table.start_slots.clamp(min=0), starts_host=tuple(max(0, s) for s in table.starts_host))
        for group, table in batch.states.items()
    }
    return GatedDelta.forward(mixer, x, replace(batch, states=states), caches)


def joins_sequences(mixer: Mixer, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
    y = GatedDelta.forward(mixer, x, batch, caches)
    return y + 1e-3 * (batch.num_sequences - 1)


FAULTS: dict[Forward, Check] = {
    ignores_starts: check_chunking,
    writes_last_row_only: check_written_states,
    writes_its_start: check_slots,
    reads_fresh_slots: check_chunking,
    joins_sequences: check_batching,
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_kit_finds_a_faulty_layer(fault: Forward) -> None:
    class Faulty(GatedDelta):
        forward = fault

    mixer = Faulty(GatedDeltaConfig(**DELTA), reference_ops(), torch.float32)
    mixer.load_state_dict(built("gated_delta-qwen3.5")[0].state_dict())
    with pytest.raises(AssertionError):
        FAULTS[fault](mixer, FP32)


# --- rotary ---

ROPES: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-betas": {
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
    },
    "yarn-factor-of-length": {"original_max_position_embeddings": 512},
    "yarn-attention-factor": {"factor": 2.0, "original_max_position_embeddings": 512, "attention_factor": 0.8},
    "longrope": {
        "short_factor": [1.0 + 0.05 * i for i in range(16)],
        "long_factor": [2.0 + 0.5 * i for i in range(16)],
        "original_max_position_embeddings": 512,
    },
}
MAX_POSITIONS = 2048


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("name", ROPES)
def test_rotation_is_the_published_one(name: str, partial: float) -> None:
    """Frequencies, amplitude and the rotated part of the head, at positions near and far."""
    kind, options = name.partition("-")[0], dict(ROPES[name])
    if kind == "longrope":
        options = {k: v[: int(16 * partial)] if isinstance(v, list) else v for k, v in options.items()}
    parameters = {"rope_type": kind, "rope_theta": 1e4, "partial_rotary_factor": partial, **options}
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=MAX_POSITIONS)
    # The config class completes and checks what it is given; the oracle is to see what is on disk.
    config.rope_parameters = {"factor": None, **parameters} if kind in ("yarn", "longrope") else parameters
    if kind == "default":
        inv_freq, amplitude = 1.0 / 1e4 ** (torch.arange(0, 32 * partial, 2) / (32 * partial)), 1.0
    else:
        inv_freq, amplitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=MAX_POSITIONS)
    rotary = Rotary(RotaryConfig(rotary_dim=int(32 * partial), theta=1e4, scaling=rope_scaling(parameters, MAX_POSITIONS)))
    torch.testing.assert_close(rotary.inv_freq, inv_freq, rtol=2e-6, atol=0)

    q, k = torch.randn(2, 9, 2, 32, generator=torch.Generator().manual_seed(3))
    batch = build_batch([Rows(9, 2039, blocks=tuple(range(512)))], [])
    angle = batch.positions[:, None].float() * rotary.inv_freq
    embeddings = [torch.cat((part, part), -1) * amplitude for part in (angle.cos(), angle.sin())]
    turned = (x[..., : int(32 * partial)].transpose(0, 1)[None] for x in (q, k))
    expected = modeling_llama.apply_rotary_pos_emb(*turned, *(part[None] for part in embeddings))
    kept = q.clone()
    rotary(q, k, batch)
    for x, wanted in zip((q, k), expected, strict=True):
        torch.testing.assert_close(x[..., : int(32 * partial)], wanted[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    assert torch.equal(q[..., int(32 * partial) :], kept[..., int(32 * partial) :]), "what is not rotated passes through"


def test_angles_are_shared_by_the_layers_of_a_batch_only() -> None:
    configs = [RotaryConfig(rotary_dim=8, theta=theta) for theta in (1e4, 1e4, 1e6)]
    batch, other = (build_batch([Rows(3, context, blocks=(0, 1, 2))], []) for context in (0, 5))
    rotated = []
    for config, seen in ((configs[0], batch), (configs[1], batch), (configs[2], batch), (configs[0], other)):
        q = torch.ones(3, 1, 8)
        Rotary(config)(q, torch.ones(3, 1, 8), seen)
        rotated.append(q)
    assert torch.equal(rotated[0], rotated[1])
    assert not torch.equal(rotated[0], rotated[2]), "another theta took the angles of the first"
    assert not torch.equal(rotated[0], rotated[3]), "another batch took the angles of the first"
    assert len(batch.derived) == 2


def test_longrope_is_chosen_when_the_model_is_built() -> None:
    """Not by the length of the moment: a token's key would depend on how its prompt was chunked (I6)."""
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, **ROPES["longrope"]}
    short, long = (rope_scaling(parameters, length) for length in (512, 513))
    assert not short.use_long
    assert long.use_long
    plain = Rotary(RotaryConfig(rotary_dim=32, theta=1e4)).inv_freq
    for scaling, factors in ((short, ROPES["longrope"]["short_factor"]), (long, ROPES["longrope"]["long_factor"])):
        inv_freq = Rotary(RotaryConfig(rotary_dim=32, theta=1e4, scaling=scaling)).inv_freq
        torch.testing.assert_close(inv_freq, plain / torch.tensor(factors))


# --- refusals ---


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: rope_scaling({"rope_type": "dynamic", "factor": 2.0}, 100), "dynamic"),
        (lambda: rope_scaling({"rope_type": "yarn", "factor": 2.0}, 100), "original_max_position_embeddings"),
        (lambda: rope_scaling({"rope_type": "linear", "factor": 2.0, "surprise": 1}, 100), "surprise"),
        (lambda: rope_scaling({"rope_type": "linear", "factor": "two"}, 100), "factor"),
        (lambda: RotaryConfig(rotary_dim=7, theta=1e4), "7"),
        (lambda: Rotary(RotaryConfig(rotary_dim=8, theta=1e4, scaling=LONG)), "16 factors for 4"),
        (lambda: attention(RotaryConfig(rotary_dim=16, theta=1e4)), "rotary_dim is 16"),
        (lambda: AttentionConfig(hidden_size=8, num_heads=3, num_kv_heads=2, head_dim=4), "num_heads is 3"),
        (lambda: GatedDeltaConfig(**{**DELTA, "num_v_heads": 3}), "num_v_heads is 3"),
        (lambda: GatedDeltaConfig(**DELTA, conv_width=1), "conv_width is 1"),
        (lambda: Mamba2Config(**{**SSM, "num_groups": 3}), "num_heads is 8"),
        (lambda: Mamba2Config(**SSM, norm_group_size=5), "norm_group_size is 5"),
        (lambda: Mamba2Config(**SSM, ssm_multipliers=(1.0, 2.0)), "2 values"),
        (lambda: ShortConvConfig(hidden_size=8, width=1), "width is 1"),
        (lambda: mixers["gated_dleta"], "gated_delta"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(make: Callable[[], object], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        make()


LONG = LongRopeScaling(
    short_factor=(1.0,) * 16,
    long_factor=(2.0,) * 16,
    original_max_position_embeddings=512,
    factor=4.0,
    use_long=True,
)
