"""GLM-4.7-Flash: DeepSeek-V3's layers in other sizes. Source: published `Glm4MoeLiteForCausalLM`.

Owns how its config is read. Called through the table of architectures; everything else is `deepseek_v3.py`.
"""

import torch

from hybridserve.backends.ops import Ops
from hybridserve.models.architectures import architectures
from hybridserve.models.decoder import CausalLM
from hybridserve.models.deepseek_v3 import build_latent
from hybridserve.models.reader import ConfigReader


@architectures.register("Glm4MoeLiteForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a GLM-4 MoE Lite; only its first layer is dense unless the config says otherwise."""
    return build_latent(config, ops, dtype, default_dense=1)
