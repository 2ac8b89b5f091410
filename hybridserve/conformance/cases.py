"""What each built-in kind of layer is checked as: small configs that use every option somewhere, each with its oracle.

Owns the table. A registered kind without a case fails a test, so that no layer of the package goes unchecked. Called by
`subjects.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridserve.conformance import oracles
from hybridserve.conformance.conduct import Oracle
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import MixerConfig
from hybridserve.mixers.gated_delta import GatedDeltaConfig
from hybridserve.mixers.index import IndexConfig
from hybridserve.mixers.indexed_attention import IndexedAttentionConfig
from hybridserve.mixers.indexed_mla import IndexedMLAConfig
from hybridserve.mixers.kda import KDAConfig
from hybridserve.mixers.lightning import LightningConfig
from hybridserve.mixers.mamba1 import Mamba1Config
from hybridserve.mixers.mamba2 import Mamba2Config
from hybridserve.mixers.mla import MLAConfig
from hybridserve.mixers.ngram import NgramConfig
from hybridserve.mixers.rotary import RotaryConfig
from hybridserve.mixers.short_conv import ShortConvConfig

HIDDEN = 32


@dataclass(frozen=True)
class Case:
    """A config and what it must compute; `name` tells it from the others of its kind."""

    name: str
    config: MixerConfig
    oracle: Oracle | None = None


_HALVES, _PAIRS = (RotaryConfig(rotary_dim=6, theta=1e4, interleaved=pairs) for pairs in (False, True))

_ATTENTION = (
    Case(
        "head norm, element gate, partial rotation",
        AttentionConfig(
            hidden_size=HIDDEN,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            rotary=_HALVES,
            qk_norm="head",
            zero_centred_norm=True,
            output_gate="element",
        ),
        oracles.attention,
    ),
    Case(
        "window, sinks, biases, softcap",
        AttentionConfig(
            hidden_size=HIDDEN,
            num_heads=6,
            num_kv_heads=2,
            head_dim=8,
            rotary=_PAIRS,
            window=7,
            sinks=True,
            softcap=1.5,
            qkv_bias=True,
            out_bias=True,
        ),
        oracles.attention,
    ),
    Case(
        "full norm, head gate, no positions",
        AttentionConfig(
            hidden_size=HIDDEN, num_heads=4, num_kv_heads=4, head_dim=8, qk_norm="full", output_gate="head", key_multiplier=0.4
        ),
        oracles.attention,
    ),
)
_MLA = (
    Case(
        "low-rank query, biases, head gate",
        MLAConfig(
            hidden_size=HIDDEN,
            num_heads=4,
            kv_rank=12,
            nope_dim=8,
            rope_dim=6,
            v_dim=10,
            q_rank=9,
            rotary=_PAIRS,
            bias=True,
            output_gate="head",
        ),
        oracles.mla,
    ),
    Case("no positions", MLAConfig(hidden_size=HIDDEN, num_heads=4, kv_rank=12, nope_dim=8, rope_dim=6, v_dim=10), oracles.mla),
)
_GATED_DELTA = (
    Case(
        "three value heads to a key head",
        GatedDeltaConfig(hidden_size=HIDDEN, num_k_heads=2, num_v_heads=6, k_dim=8, v_dim=12),
        oracles.gated_delta,
    ),
    Case(
        "negative eigenvalues, sigmoid gate",
        GatedDeltaConfig(
            hidden_size=HIDDEN,
            num_k_heads=2,
            num_v_heads=2,
            k_dim=8,
            v_dim=8,
            conv_width=3,
            gate_activation="sigmoid",
            allow_neg_eigval=True,
        ),
        oracles.gated_delta,
    ),
)
_KDA = (
    Case(
        "low-rank gates",
        KDAConfig(hidden_size=HIDDEN, num_heads=3, head_dim=8, conv_width=3, gate_rank=8),
        oracles.kda,
    ),
    Case(
        "bounded decay, fp32 convolution",
        KDAConfig(hidden_size=HIDDEN, num_heads=3, head_dim=8, lower_bound=-5.0, conv_fp32=True),
        oracles.kda,
    ),
)
_LIGHTNING = (
    Case(
        "slopes from none to steep",
        LightningConfig(hidden_size=HIDDEN, num_heads=4, head_dim=12, slopes=(0.0, 0.05, 0.3, 1.0)),
        oracles.lightning,
    ),
)
_MAMBA1 = (
    Case(
        "weighted inner norms",
        Mamba1Config(hidden_size=HIDDEN, inner=24, state_size=5, dt_rank=6, inner_norms="weighted"),
        oracles.mamba1,
    ),
    Case(
        "plain inner norms, biases",
        Mamba1Config(hidden_size=HIDDEN, inner=24, state_size=5, dt_rank=6, inner_norms="plain", conv_width=3, proj_bias=True),
        oracles.mamba1,
    ),
    Case(
        "no inner norms",
        Mamba1Config(hidden_size=HIDDEN, inner=24, state_size=5, dt_rank=6, conv_bias=False),
        oracles.mamba1,
    ),
)
_MAMBA2 = (
    Case(
        "norm after gate",
        Mamba2Config(hidden_size=HIDDEN, num_heads=8, head_dim=8, num_groups=2, state_size=5, proj_bias=True),
        oracles.mamba2,
    ),
    Case(
        "norm before gate, multipliers, limited steps",
        Mamba2Config(
            hidden_size=HIDDEN,
            num_heads=4,
            head_dim=8,
            num_groups=4,
            state_size=16,
            conv_width=2,
            conv_bias=False,
            norm_first=True,
            out_bias=True,
            time_step_limit=(0.3, float("inf")),
            ssm_multipliers=(0.5, 1.5, 0.7, 1.3, 0.9),
            in_multiplier=1.25,
        ),
        oracles.mamba2,
    ),
    Case(
        "gate alone",
        Mamba2Config(hidden_size=HIDDEN, num_heads=4, head_dim=8, num_groups=1, state_size=5, gated_norm=False),
        oracles.mamba2,
    ),
)
_SHORT_CONV = (
    Case("width 3", ShortConvConfig(hidden_size=HIDDEN, width=3), oracles.short_conv),
    Case("width 7, biases", ShortConvConfig(hidden_size=HIDDEN, width=7, bias=True), oracles.short_conv),
)

# Sixteen heads, so that scores are rarely equal; a budget smaller than the text, so that something is left out.
_INDEXED_ATTENTION = (
    Case(
        "mean of four keys",
        IndexedAttentionConfig(
            hidden_size=HIDDEN,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            qk_norm="head",
            rotary=_HALVES,
            index=IndexConfig(
                hidden_size=HIDDEN, query_size=HIDDEN, num_heads=16, head_dim=10, budget=12, group=4, rotary=_HALVES
            ),
        ),
        oracles.indexed_attention,
    ),
)
_INDEXED_MLA = (
    Case(
        "a key per token",
        IndexedMLAConfig(
            hidden_size=HIDDEN,
            num_heads=4,
            kv_rank=12,
            q_rank=9,
            nope_dim=8,
            rope_dim=6,
            v_dim=10,
            rotary=_PAIRS,
            index=IndexConfig(hidden_size=HIDDEN, query_size=9, num_heads=16, head_dim=10, budget=12, rotary=_HALVES),
        ),
        oracles.indexed_mla,
    ),
    Case(
        "learned pool of four keys",
        IndexedMLAConfig(
            hidden_size=HIDDEN,
            num_heads=4,
            kv_rank=12,
            q_rank=9,
            nope_dim=8,
            rope_dim=0,
            v_dim=10,
            index=IndexConfig(hidden_size=HIDDEN, query_size=9, num_heads=16, head_dim=10, budget=12, group=4),
            pooling="learned",
        ),
        oracles.indexed_mla,
    ),
)
_NGRAM = (
    Case(
        "two streams, up to 4 tokens",
        NgramConfig(
            hidden_size=HIDDEN,
            num_streams=2,
            embed_dim=24,
            multipliers=(3, 1009, 9176, 52711),
            head_sizes=(31, 37, 41, 43, 47, 53),
            num_rows=256,
            num_parts=3,
            end_token=5,
            conv_width=3,
        ),
        oracles.ngram,
    ),
)

#: By the name under which the kind is registered.
CASES: Mapping[str, tuple[Case, ...]] = {
    "attention": _ATTENTION,
    "gated_delta": _GATED_DELTA,
    "indexed_attention": _INDEXED_ATTENTION,
    "indexed_mla": _INDEXED_MLA,
    "kda": _KDA,
    "lightning": _LIGHTNING,
    "mamba1": _MAMBA1,
    "mamba2": _MAMBA2,
    "mla": _MLA,
    "ngram": _NGRAM,
    "short_conv": _SHORT_CONV,
}
