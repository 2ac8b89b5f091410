"""DeepSeek-V3.2: DeepSeek-V3 whose attention reads only the tokens that an index chooses. Source: published
`DeepseekV32ForCausalLM`.

Owns how its config is read. Called through the table of architectures; `glm_moe_dsa.py` differs in the index's rotation and in
that layers may share a choice.
"""

import msgspec
import torch

from hybridserve.backends.ops import Ops
from hybridserve.mixers.base import mixers
from hybridserve.mixers.index import IndexConfig
from hybridserve.mixers.indexed_mla import IndexedMLAConfig
from hybridserve.mixers.mla import MLAConfig
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import FP32_ROUTER, Family
from hybridserve.models.decoder import CausalLM
from hybridserve.models.deepseek_v3 import ROUTING, assemble, read_attention, read_info, read_sigmoid_moe, read_sparse_layers
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_layer_types


def read_index(config: ConfigReader, attention: MLAConfig, *, interleaved: bool) -> IndexConfig:
    """One key per token, turned as far as the attention's own rotary part. Queries come from the attention's low-rank row."""
    config.expect("indexer_rope_interleave", interleaved)
    rotary = attention.rotary
    return IndexConfig(
        hidden_size=attention.hidden_size,
        query_size=config.read_size("q_lora_rank"),
        num_heads=config.read_size("index_n_heads"),
        head_dim=config.read_size("index_head_dim"),
        budget=config.read_size("index_topk"),
        rotary=None if rotary is None else msgspec.structs.replace(rotary, interleaved=interleaved),
    )


def with_index(attention: MLAConfig, index: IndexConfig | None) -> IndexedMLAConfig:
    """The same attention with an index of one key per token; None where the layer takes another's choice."""
    return IndexedMLAConfig(**msgspec.structs.asdict(attention), index=index)


def expect_indexed(config: ConfigReader, num_layers: int) -> None:
    """Refuse a config some of whose layers are not indexed. Raises UnsupportedModelError."""
    read_layer_types(config, num_layers, ("indexed_attention",), ["indexed_attention"] * num_layers)


@architectures.register("DeepseekV32ForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a DeepSeek-V3.2."""
    config.declare(Family(rotates=True, stated=FP32_ROUTER))
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    expect_indexed(config, num_layers)
    config.expect("rope_interleave", True)  # the published class has no other way
    attention = read_attention(config, read_info(config).max_positions)
    indexed = with_index(attention, read_index(config, attention, interleaved=False))
    token_mixers = [mixers["indexed_mla"](indexed, ops, dtype) for _ in range(num_layers)]
    return assemble(config, token_mixers, read_sigmoid_moe(config, ROUTING), read_sparse_layers(config, 3), ops, dtype)
