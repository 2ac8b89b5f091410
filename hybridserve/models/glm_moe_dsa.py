"""GLM-5 (and 5.2): DeepSeek-V3.2's layers, some of which take the choice of the index before them. Source: published
`GlmMoeDsaForCausalLM`.

Owns how its config is read. Called through the table of architectures; `glm5_next.py` uses how it says which layer has an index.
"""

import torch

from hybridserve.backends.ops import Ops
from hybridserve.errors import UnsupportedModelError
from hybridserve.mixers.base import mixers
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import FP32_ROUTER, Family
from hybridserve.models.decoder import CausalLM
from hybridserve.models.deepseek_v3 import (
    RoutingDefaults,
    assemble,
    read_attention,
    read_info,
    read_sigmoid_moe,
    read_sparse_layers,
)
from hybridserve.models.deepseek_v32 import expect_indexed, read_index, with_index
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_layer_types

_LETTERS = {"F": "full", "S": "shared"}


def read_indexer_types(config: ConfigReader, num_layers: int) -> list[str]:
    """Which layers have an index ("full") and which take the last one's choice ("shared").

    A list, a pattern of letters such as FSSF, or every n-th layer from an offset on.
    """
    pattern = config.read("index_topk_pattern", str, "")
    every = max(config.read("index_topk_freq", int, 1), 1)
    offset = config.read("index_skip_topk_offset", int, 2)
    default = [_LETTERS.get(one, one) for one in pattern] or [
        "shared" if max(i - offset + 1, 0) % every else "full" for i in range(num_layers)
    ]
    return read_layer_types(config, num_layers, ("full", "shared"), default, "indexer_types")


@architectures.register("GlmMoeDsaForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a GLM-5."""
    config.declare(Family(rotates=True, stated=FP32_ROUTER))
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    expect_indexed(config, num_layers)
    config.expect("rope_interleave", True)  # the published class has no other way
    attention = read_attention(config, read_info(config).max_positions)
    index = read_index(config, attention, interleaved=True)
    types = read_indexer_types(config, num_layers)
    if types[0] == "shared":
        raise UnsupportedModelError(
            f"config.json: {config.name('indexer_types')}[0] is 'shared', but no layer before it has an index; correct the file"
        )
    configs = [with_index(attention, index if one == "full" else None) for one in types]
    token_mixers = [mixers["indexed_mla"](one, ops, dtype) for one in configs]
    moe = read_sigmoid_moe(config, RoutingDefaults(2.5))
    return assemble(config, token_mixers, moe, read_sparse_layers(config, 3), ops, dtype)
