"""Qwen3.5 (and 3.6, 3.8 27B): Qwen3-Next's layers with separate projections, dense or with experts; text part only.

Owns how its config is read and its weights are named. Called through the table of architectures. Releases wrap the text model:
its config is `text_config`, its weights are under `model.language_model.`. Source: published `Qwen3_5ForConditionalGeneration`,
`Qwen3_5MoeForConditionalGeneration`.
"""

import torch

from hybridserve.backends.ops import Ops
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import CausalLM
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.moe import MoE
from hybridserve.models.qwen3_next import IGNORED, RENAMES, RULES, final_norm, make_layers, read_info, read_kinds, read_moe
from hybridserve.models.reader import ConfigReader
from hybridserve.models.weights import WeightMap

#: What published configs state that this class has no other way than to do.
_FAMILY = Family(
    norms_qk=True,
    rotates=True,
    unused=frozenset({"max_window_layers", "sliding_window"}),
    stated={"output_gate_type": ("swish", "silu")},
)

_PREFIXES = ("model.language_model.", "model.")
#: Of the wrapper: tokens that stand for images, and the vision tower.
_VISION_KEYS = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
#: Of the draft head, which plain decoding does not use.
_DRAFT_KEYS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mtp_layer_types")


@architectures.register("Qwen3_5ForConditionalGeneration")
@architectures.register("Qwen3_5ForCausalLM")
def build_dense(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Qwen3.5 with dense MLPs."""
    config.declare(_FAMILY)
    text = _text(config)
    hidden, width = text.read_size("hidden_size"), text.read_size("intermediate_size")
    # Of the sizes with experts; some dense releases carry them as 0 or unused.
    text.ignore("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    text.expect("num_experts", 0)
    return _assemble(config, text, [SwiGLU(hidden, width, ops, dtype) for _ in read_kinds(text)], ops, dtype)


@architectures.register("Qwen3_5MoeForConditionalGeneration")
@architectures.register("Qwen3_5MoeForCausalLM")
def build_moe(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Qwen3.5 with experts in every layer."""
    config.declare(_FAMILY)
    text = _text(config)
    text.expect("mlp_only_layers", [])
    text.expect("decoder_sparse_step", 1)
    text.ignore("intermediate_size")
    text.expect("norm_topk_prob", True)  # the published class has no other way
    moe = read_moe(text)
    return _assemble(config, text, [MoE(moe, ops, dtype) for _ in read_kinds(text)], ops, dtype)


def _text(config: ConfigReader) -> ConfigReader:
    """The reader of the text model: `text_config`, or the whole."""
    config.ignore(*_VISION_KEYS)
    text = config.nested("text_config") if config.has("text_config") else config
    text.ignore(*_DRAFT_KEYS)
    return text


def _assemble(config: ConfigReader, text: ConfigReader, mlps: list[SwiGLU] | list[MoE], ops: Ops, dtype: torch.dtype) -> CausalLM:
    info = read_info(text)
    inner = text.read("tie_word_embeddings", bool, False)
    return CausalLM(
        info,
        make_layers(text, info, mlps, ops, dtype),
        final_norm(text, ops, dtype),
        ops,
        dtype,
        tied=config.read("tie_word_embeddings", bool, inner),  # the wrapper's word counts, as for transformers
        weight_map=WeightMap(RENAMES, RULES, prefixes=_PREFIXES, ignored=IGNORED),
    )
