"""GLM-4.7-Flash: DeepSeek-V3's layers in other sizes. Source: published `Glm4MoeLiteForCausalLM`.

Owns how its config is read. Called through the table of architectures; everything else is `deepseek_v3.py`.
"""

import torch

from hybridserve.backends.ops import Ops
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import FP32_ROUTER, Family
from hybridserve.models.decoder import CausalLM
from hybridserve.models.deepseek_v3 import RoutingDefaults, build_latent, read_sigmoid_moe, read_sparse_layers
from hybridserve.models.reader import ConfigReader


@architectures.register("Glm4MoeLiteForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a GLM-4 MoE Lite; only its first layer is dense unless the config says otherwise."""
    config.declare(Family(rotates=True, stated=FP32_ROUTER))
    config.spell("qk_rope_head_dim", "head_dim")
    moe = read_sigmoid_moe(config, RoutingDefaults(1.8))
    return build_latent(config, moe, read_sparse_layers(config, 1, is_counted=False), ops, dtype)
