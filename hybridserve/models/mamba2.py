"""Mamba-2 alone (Codestral Mamba): a norm and a mixer in every layer, nothing else. Source: published `Mamba2ForCausalLM`.

Owns how its config is read and its weights are named, and what `mamba.py` shares: the pass from layer to layer in fp32 whatever
the model's dtype. Called through the table of architectures.
"""

import torch
from torch import Tensor

from hybridserve.backends.ops import Ops
from hybridserve.errors import UnsupportedModelError
from hybridserve.mixers.base import Mixer, mixers
from hybridserve.mixers.mamba2 import Mamba2Config
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import ON, Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer, ModelInfo, Streams
from hybridserve.models.granite_moe_hybrid import read_time_step_limit
from hybridserve.models.reader import MAX_LAYERS, ConfigReader
from hybridserve.models.weights import DEPTHWISE, Rule, Spelling, WeightMap

WEIGHTS = WeightMap(
    renames=(
        (r"\.mixers\.\w+\.mixer\.", ".mixer."),
        (r"^norm\.", "norm_f."),
        (r"^embed_tokens\.", "embeddings."),
    ),
    rules=(
        Rule(r"(.*\.conv1d)\.weight", (Spelling((r"\1.weight",), DEPTHWISE),)),
        Rule(r"embeddings\.weight", (Spelling(("embeddings.weight",)), Spelling(("embedding.weight",)))),
    ),
    prefixes=("backbone.",),
)
#: Nothing in the model bounds a text; this bounds what a request may ask for.
MAX_POSITIONS = 2**20
#: Initialisation, and a rank that nothing uses.
UNUSED_KEYS = (
    "time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme", "time_step_scale",
    "rescale_prenorm_residual", "chunk_size",
)  # fmt: skip


class WideResidual(Streams):
    """The sum over the layers, in fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def open(self, x: Tensor) -> Tensor:
        """x: [T, D]. Returns [T, D] fp32."""
        return x.float()

    def close(self, x: Tensor) -> Tensor:
        """x: [T, D] fp32. Returns [T, D] in the model's dtype."""
        return x.to(self._dtype)


class RoundingNorm(RMSNorm):
    """An RMS norm of what is first rounded to the model's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D]. Returns [..., D] in the weight's dtype."""
        return super().forward(x.to(self.weight.dtype))


def read_info(config: ConfigReader) -> ModelInfo:
    """What the engine needs to know of a model without positions."""
    return ModelInfo(
        architecture=config.architecture,
        vocab_size=config.read_size("vocab_size"),
        hidden_size=config.read_size("hidden_size"),
        max_positions=config.read_size("max_position_embeddings", MAX_POSITIONS, most=2**40),
    )


def build_tower(
    config: ConfigReader, blocks: list[Mixer], ops: Ops, dtype: torch.dtype, *, default_tied: bool, weight_map: WeightMap
) -> CausalLM:
    """Lay out a model of norms and mixers."""
    info = read_info(config)
    eps = config.read("layer_norm_epsilon", float, 1e-5)
    layers = [DecoderLayer([Branch(mixer)], RoundingNorm(info.hidden_size, eps, ops, dtype), None, None) for mixer in blocks]
    return CausalLM(
        info,
        layers,
        RMSNorm(info.hidden_size, eps, ops, dtype),
        ops,
        dtype,
        tied=config.read("tie_word_embeddings", bool, default_tied),
        weight_map=weight_map,
        streams=WideResidual(dtype) if config.read("residual_in_fp32", bool, True) else None,
    )


def _read_mamba(config: ConfigReader) -> Mamba2Config:
    hidden, num_heads, head_dim = config.read_size("hidden_size"), config.read_size("num_heads"), config.read_size("head_dim")
    inner = int(config.read("expand", float, 2.0) * hidden)
    if num_heads * head_dim != inner:
        raise UnsupportedModelError(
            f"config.json: num_heads {num_heads} times head_dim {head_dim} must be expand times hidden_size, {inner}"
        )
    config.expect("intermediate_size", inner)
    return Mamba2Config(
        hidden_size=hidden,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=config.read_size("n_groups", 8),
        state_size=config.read_size("state_size", 128),
        conv_width=config.read_size("conv_kernel", 4),
        conv_bias=config.read("use_conv_bias", bool, True),
        proj_bias=config.read("use_bias", bool, False),
        eps=config.read("layer_norm_epsilon", float, 1e-5),
        time_step_limit=read_time_step_limit(config),
    )


@architectures.register("Mamba2ForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Mamba-2."""
    config.declare(
        Family(
            stated={"rms_norm": ON, "ssm_cfg": ({},)},
            same={
                "d_model": ("hidden_size", None),
                "d_inner": ("intermediate_size", None),
                "n_layer": ("num_hidden_layers", None),
            },
        )
    )
    # The last two: the published class always norms, and always after the gate.
    config.ignore(*UNUSED_KEYS, "time_step_rank", "layer_types", "rms_norm", "norm_before_gate")
    config.expect("hidden_act", "silu")
    mamba = _read_mamba(config)
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    blocks = [mixers["mamba2"](mamba, ops, dtype) for _ in range(num_layers)]
    return build_tower(config, blocks, ops, dtype, default_tied=False, weight_map=WEIGHTS)
