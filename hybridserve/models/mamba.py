"""Mamba and Falcon Mamba: a norm and a mixer in every layer, nothing else. Source: published `MambaForCausalLM`,
`FalconMambaForCausalLM`.

Owns how their configs are read and their weights are named. Called through the table of architectures. Falcon Mamba norms the
time step's low rank, B and C, without weights.
"""

from dataclasses import replace
from typing import Literal

import torch

from hybridserve.backends.ops import Ops
from hybridserve.mixers.base import mixers
from hybridserve.mixers.mamba1 import Mamba1Config
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import ON, Family
from hybridserve.models.decoder import CausalLM
from hybridserve.models.mamba2 import UNUSED_KEYS, build_tower
from hybridserve.models.mamba2 import WEIGHTS as MAMBA2_WEIGHTS
from hybridserve.models.reader import MAX_LAYERS, ConfigReader

#: What published configs state that this class has no other way than to do.
_FAMILY = Family(
    stated={"rms_norm": ON, "ssm_cfg": ({},)},
    same={"d_model": ("hidden_size", None), "d_inner": ("intermediate_size", None), "n_layer": ("num_hidden_layers", None)},
)

WEIGHTS = replace(MAMBA2_WEIGHTS, renames=(*MAMBA2_WEIGHTS.renames, (r"\.dt_bias$", ".dt_proj.bias")))


def read_time_step_rank(config: ConfigReader, key: str, hidden: int) -> int:
    """A number, or a sixteenth of the hidden size, rounded up, where it says "auto"."""
    is_auto = config.read(key, object, "auto") == "auto"
    return -(-hidden // 16) if is_auto else config.read_size(key)


def _read_mamba(config: ConfigReader, inner_norms: Literal["none", "plain"]) -> Mamba1Config:
    hidden = config.read_size("hidden_size")
    inner = max(1, int(config.read("expand", float, 2.0) * hidden))
    return Mamba1Config(
        hidden_size=hidden,
        inner=config.read_size("intermediate_size", inner),
        state_size=config.read_size("state_size", 16),
        dt_rank=read_time_step_rank(config, "time_step_rank", hidden),
        conv_width=config.read_size("conv_kernel", 4),
        conv_bias=config.read("use_conv_bias", bool, True),
        proj_bias=config.read("use_bias", bool, False),
        inner_norms=inner_norms,
        eps=config.read("mixer_rms_eps", float, 1e-6),
    )


def _build(config: ConfigReader, inner_norms: Literal["none", "plain"], ops: Ops, dtype: torch.dtype) -> CausalLM:
    # The last four: choices of kernels, and a list in which all layers are the same.
    config.ignore(*UNUSED_KEYS, "use_mambapy", "use_falcon_mambapy", "use_associative_scan", "layer_types")
    config.expect("hidden_act", "silu")
    mamba = _read_mamba(config, inner_norms)
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    blocks = [mixers["mamba1"](mamba, ops, dtype) for _ in range(num_layers)]
    return build_tower(config, blocks, ops, dtype, default_tied=True, weight_map=WEIGHTS)


@architectures.register("MambaForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Mamba."""
    config.declare(_FAMILY)
    return _build(config, "none", ops, dtype)


@architectures.register("FalconMambaForCausalLM")
def build_falcon(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Falcon Mamba."""
    config.declare(_FAMILY)
    return _build(config, "plain", ops, dtype)
