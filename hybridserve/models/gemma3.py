"""Gemma 3 (text part): five layers with a window to one without, norms on both sides of each half.

Owns how its config is read and its weights are named. Called through the table of architectures. Norms are zero-centred, the
embedding is scaled, and the two kinds of layers turn by different bases. Source: published `Gemma3ForCausalLM`,
`Gemma3ForConditionalGeneration`.
"""

import torch

from hybridserve.backends.ops import Activation, Ops
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import mixers
from hybridserve.mixers.norm import RMSNorm
from hybridserve.mixers.rotary import RotaryConfig
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer, ModelInfo
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_layer_types
from hybridserve.models.rope import read_rotary_by_kind
from hybridserve.models.weights import Rule, Spelling, WeightMap

WEIGHTS = WeightMap(
    renames=(
        (r"\.mixers\.attention\.mixer\.", ".self_attn."),
        (r"(layers\.\d+)\.norm\.", r"\1.input_layernorm."),
        (r"\.after_norm\.", ".post_attention_layernorm."),
        (r"\.mlp_norm\.", ".pre_feedforward_layernorm."),
        (r"\.after_mlp_norm\.", ".post_feedforward_layernorm."),
        (r"\.mlp\.down\.", ".mlp.down_proj."),
    ),
    rules=(Rule(r"(.*)\.gate_up\.weight", (Spelling((r"\1.gate_proj.weight", r"\1.up_proj.weight")),)),),
    # The wrapper around a vision tower has been saved under both names.
    prefixes=("model.language_model.", "language_model.model.", "model."),
    ignored=(
        r".*\.rotary_emb\.inv_freq",
        r"(model\.)?(vision_tower|multi_modal_projector)\..*",
    ),
)
_THETAS = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
#: Of the wrapper: tokens that stand for images, and the vision tower.
_VISION_KEYS = (
    "vision_config", "image_token_index", "image_token_id", "boi_token_index", "eoi_token_index", "mm_tokens_per_image",
)  # fmt: skip


def _read_kinds(config: ConfigReader) -> list[str]:
    """The kind of each layer: `layer_types`, or every n-th sees all tokens."""
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    every = config.read_size("sliding_window_pattern", config.read_size("_sliding_window_pattern", 6))
    default = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    return read_layer_types(config, num_layers, tuple(_THETAS), default)


def _read_attention(config: ConfigReader, rotary: RotaryConfig, window: int | None) -> AttentionConfig:
    bias = config.read("attention_bias", bool, False)
    return AttentionConfig(
        hidden_size=config.read_size("hidden_size"),
        num_heads=config.read_size("num_attention_heads", 8),
        num_kv_heads=config.read_size("num_key_value_heads", 4),
        head_dim=config.read_size("head_dim", 256),
        scale=config.read("query_pre_attn_scalar", float, 256.0) ** -0.5,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        qk_norm_eps=config.read("rms_norm_eps", float, 1e-6),
        zero_centred_norm=True,
        rotary=rotary,
        window=window,
    )


def _text(config: ConfigReader) -> ConfigReader:
    """The reader of the text model: `text_config`, or the whole."""
    if not config.has("text_config"):
        return config
    config.ignore(*_VISION_KEYS)
    config.expect("tie_word_embeddings", True)
    return config.nested("text_config")


def _read_info(text: ConfigReader) -> ModelInfo:
    """What the engine needs to know; releases that wrap the text model leave out what its class defaults to."""
    return ModelInfo(
        architecture=text.architecture,
        vocab_size=text.read_size("vocab_size", 262208),
        hidden_size=text.read_size("hidden_size", 2304),
        max_positions=text.read_size("max_position_embeddings", 131072, most=2**40),
    )


@architectures.register("Gemma3ForConditionalGeneration")
@architectures.register("Gemma3ForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Gemma 3."""
    config.declare(Family(norms_qk=True, rotates=True))
    text = _text(config)
    text.expect("hidden_activation", "gelu_pytorch_tanh")
    text.expect("use_bidirectional_attention", False)
    text.expect("tie_word_embeddings", True)
    text.expect("attn_logit_softcapping")  # null in every release; the published class never applies it
    info = _read_info(text)
    if text is not config:
        text.expect("final_logit_softcapping")  # the wrapper never applies it
    eps, width = text.read("rms_norm_eps", float, 1e-6), text.read_size("intermediate_size")
    activation: Activation = "gelu_tanh"
    rotary = read_rotary_by_kind(
        text, text.read_size("head_dim", 256), info.max_positions, _THETAS, sliding_theta_key="rope_local_base_freq"
    )
    windows = {"sliding_attention": text.read_size("sliding_window", 4096), "full_attention": None}
    attention = {kind: _read_attention(text, rotary[kind], window) for kind, window in windows.items()}

    def make_norm() -> RMSNorm:
        return RMSNorm(info.hidden_size, eps, ops, dtype, zero_centred=True)

    layers = [
        DecoderLayer(
            [Branch(mixers["attention"](attention[kind], ops, dtype))],
            make_norm(),
            SwiGLU(info.hidden_size, width, ops, dtype, activation=activation),
            make_norm(),
            after_norm=make_norm(),
            after_mlp_norm=make_norm(),
        )
        for kind in _read_kinds(text)
    ]
    return CausalLM(
        info,
        layers,
        make_norm(),
        ops,
        dtype,
        tied=True,
        weight_map=WEIGHTS,
        # Rounded as the published layer does: it changes the result in 16 bits.
        embedding_multiplier=float(torch.tensor(info.hidden_size**0.5, dtype=dtype, device="cpu")),
        logits_softcap=text.read_optional("final_logit_softcapping", float),
    )
