"""Mamba and lightning attention: the selective scan of every backend against its definition in fp64, both mixers against the
published layers, and the conformance kit.
"""

import sys
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from hybridserve.backends.select import select
from hybridserve.batch import NO_SLOT, Batch, StateTable
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import StateSpec
from hybridserve.mixers.base import Mixer
from hybridserve.mixers.lightning import Lightning, LightningConfig
from hybridserve.mixers.mamba1 import Mamba1, Mamba1Config
from tests.conformance import ALL_CHECKS, FP32, Check, Rows, rows_of, run_whole
from tests.operations import SITUATIONS, build, operation, over_backends, pool_for, random_situation, strided

HIDDEN, INNER, SIZE, RANK = 32, 24, 6, 5
OPS = select(torch.device("cpu"), torch.float32, ["reference"]).ops


# --- the operation ---


def scan_oracle(inputs: tuple[Tensor, ...], state: Tensor, batch: Batch, table: StateTable) -> tuple[Tensor, Tensor]:
    """Row by row in fp64. inputs: x, dt, A, b, c. Returns y: [T, C] and the pool afterwards."""
    x, dt, A, b, c = (tensor.double() for tensor in inputs)
    after, y = state.double().clone(), torch.zeros(x.shape, dtype=torch.float64)
    writes = list(zip(table.write_rows_host, table.write_slots.tolist(), strict=True))
    for sequence, start in enumerate(table.starts_host):
        h = torch.zeros(A.shape, dtype=torch.float64) if start == NO_SLOT else state[start].double()
        for row in range(*batch.cu_seqlens_host[sequence : sequence + 2]):
            h = h * torch.exp(dt[row, :, None] * A) + (dt[row] * x[row])[:, None] * b[row]
            y[row] = h @ c[row]
            for written, slot in writes:
                if written == row:
                    after[slot] = h
    return y, after


def check_scan(backend: str, sequences: list[Rows], seed: int = 0) -> None:
    batch, table = build(sequences)
    generator = torch.Generator().manual_seed(seed)
    x, b, c = (strided(batch.num_tokens, n, generator=generator) for n in (INNER, SIZE, SIZE))
    # From steps that change almost nothing to some that forget everything.
    dt = torch.rand(batch.num_tokens, INNER, generator=generator) ** 4 * 30
    A = -torch.rand(INNER, SIZE, generator=generator) * 16
    state = pool_for(table, INNER, SIZE, seed=seed)
    inputs = (x, dt, A, b, c)
    expected, after = scan_oracle(inputs, state, batch, table)
    y = operation(backend, "selective_scan")(*inputs, state, batch, table)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-5 * expected.abs().max().item())
    torch.testing.assert_close(state.double(), after, rtol=0, atol=2e-5 * expected.abs().max().item(), equal_nan=True)


@over_backends("selective_scan")
@pytest.mark.parametrize("situation", SITUATIONS)
def test_selective_scan_is_its_definition(backend: str, situation: str) -> None:
    check_scan(backend, SITUATIONS[situation])


@over_backends("selective_scan")
@pytest.mark.parametrize(("passes", "rows"), [(19, 1), (1, 95)], ids=["decode", "chunks"])
def test_a_state_that_fades_becomes_zero_and_no_denormal_number(backend: str, passes: int, rows: int) -> None:
    batch, table = build([Rows(rows, context=64, start=7, writes=((rows - 1, 7),))])
    x, dt = torch.zeros(rows, INNER), torch.full((rows, INNER), 95.0 / (passes * rows))
    b = c = torch.ones(rows, SIZE)
    state = pool_for(table, INNER, SIZE)
    for _ in range(passes):
        operation(backend, "selective_scan")(x, dt, -torch.ones(INNER, SIZE), b, c, state, batch, table)
    assert not ((state[7] != 0) & (state[7].abs() < torch.finfo(torch.float32).tiny)).any()
    assert (state[7].abs() < 1e-30).all()


@over_backends("selective_scan")
@pytest.mark.parametrize("seed", range(12))
def test_selective_scan_in_random_situations(backend: str, seed: int) -> None:
    check_scan(backend, random_situation(seed), seed)


@over_backends("selective_scan")
def test_selective_scan_of_more_sequences_than_fit_at_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["hybridserve.backends.reference.selective_scan"]
    monkeypatch.setattr(module, "TEMPORARY_NBYTES", 2 * 4 * 16 * INNER * SIZE)
    check_scan(backend, SITUATIONS["mixed"])


# --- the mixers against the published layers ---


def mamba1(inner_norms: str, **more: object) -> Mamba1:
    sizes = {"hidden_size": HIDDEN, "inner": 2 * HIDDEN, "state_size": SIZE, "dt_rank": RANK, "proj_bias": True, "eps": 1e-3}
    return Mamba1(Mamba1Config(**sizes, inner_norms=inner_norms, **more), OPS, torch.float32)


def lightning() -> Lightning:
    slopes = (0.7, 0.2, 0.05, 0.0)
    return Lightning(LightningConfig(hidden_size=HIDDEN, num_heads=4, head_dim=12, slopes=slopes), OPS, torch.float32)


MAKERS: dict[str, Callable[[], Mixer]] = {
    "mamba1-plain": lambda: mamba1("none"),
    "mamba1-falcon": lambda: mamba1("plain"),
    "mamba1-jamba": lambda: mamba1("weighted", conv_width=3),
    "lightning": lightning,
}


def filled(name: str) -> Mixer:
    """A mixer with weights that matter."""
    mixer = MAKERS[name]()
    generator = torch.Generator().manual_seed(4)
    for path, parameter in mixer.named_parameters():
        parameter.data.normal_(std=0.3, generator=generator)
        if path.endswith("norm_weight") or path == "norm.weight":
            parameter.data.add_(1.0)
    return mixer


def published_mamba(name: str) -> nn.Module:
    sizes = {"hidden_size": HIDDEN, "hidden_act": "silu"}
    if name == "mamba1-jamba":
        mamba = {"mamba_d_state": SIZE, "mamba_dt_rank": RANK, "mamba_d_conv": 3, "mamba_proj_bias": True, "rms_norm_eps": 1e-3}
        return JambaMambaMixer(transformers.JambaConfig(**sizes, **mamba), 0)
    mamba = {"state_size": SIZE, "time_step_rank": RANK, "use_bias": True}
    if name == "mamba1-falcon":
        return FalconMambaMixer(transformers.FalconMambaConfig(**sizes, **mamba, mixer_rms_eps=1e-3), 0, False)
    return MambaMixer(transformers.MambaConfig(**sizes, **mamba), 0)


@pytest.mark.parametrize("name", ["mamba1-plain", "mamba1-falcon", "mamba1-jamba"])
def test_mamba_is_the_published_layer(name: str) -> None:
    mixer, published = filled(name), published_mamba(name).eval()
    ours = dict(mixer.named_parameters())
    with torch.no_grad():
        for path, parameter in published.named_parameters():
            known = path.replace("_layernorm.weight", "_norm_weight").replace("dt_proj.bias", "dt_bias")
            parameter.copy_(ours.pop(known).view(parameter.shape))
        x = rows_of(mixer, 70)
        expected = published(x[None])[0]
    assert not ours
    FP32.check(run_whole(mixer, x)[0], expected, name)


def test_lightning_is_the_published_layer() -> None:
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 4, "head_dim": 12, "num_hidden_layers": 3, "block_size": 16}
    config = transformers.MiniMaxConfig(**sizes, layer_types=["linear_attention"] * 3)
    published = MiniMaxLightningAttention(config, 1).eval()
    slopes = tuple(published.slope_rate.flatten().tolist())
    mixer = Lightning(LightningConfig(hidden_size=HIDDEN, num_heads=4, head_dim=12, slopes=slopes), OPS, torch.float32)
    weights = dict(filled("lightning").named_parameters())
    mixer.load_state_dict(weights, assign=True)
    with torch.no_grad():
        for path, parameter in published.named_parameters():
            parameter.copy_(weights[path])
        x = rows_of(mixer, 70)
        expected = published(x[None], None, None)[0][0]
    FP32.check(run_whole(mixer, x)[0], expected, "lightning")


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", MAKERS)
def test_a_mixer_conforms(name: str, check: Check) -> None:
    check(filled(name), FP32)


def test_states_are_those_of_the_releases() -> None:
    """Falcon Mamba 7B and MiniMax-Text-01, a layer: bytes with convolutions in bf16, states in fp32."""
    with torch.device("meta"):
        falcon = Mamba1(Mamba1Config(hidden_size=4096, inner=8192, state_size=16, dt_rank=256), OPS, torch.bfloat16)
        minimax = Lightning(
            LightningConfig(hidden_size=6144, num_heads=64, head_dim=128, slopes=(0.1,) * 64), OPS, torch.bfloat16
        )
    for mixer, nbytes in ((falcon, 49_152 + 524_288), (minimax, 4_194_304)):
        (spec,) = mixer.specs().values()
        assert isinstance(spec, StateSpec)
        assert spec.nbytes == nbytes


def test_sizes_that_make_no_layer_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="conv_width is 1"):
        mamba1("none", conv_width=1)
    for slopes in ((0.1,) * 3, (0.1, 0.1, 0.1, -0.1), (0.1, 0.1, 0.1, float("nan"))):
        with pytest.raises(UnsupportedModelError, match="slopes"):
            LightningConfig(hidden_size=HIDDEN, num_heads=4, head_dim=12, slopes=slopes)
