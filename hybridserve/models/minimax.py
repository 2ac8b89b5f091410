"""MiniMax-Text-01 and M1: lightning attention and attention, 7 to 1, all with experts. Source: published `MiniMaxForCausalLM`.

Owns how its config is read, its layers, and how its weights are named. Called through the table of architectures. A half's norm
feeds the residual as well, and both are weighted.

Letters: T rows, D hidden.
"""

from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor, nn

from hybridserve.backends.ops import Ops
from hybridserve.batch import Batch, LayerCaches
from hybridserve.errors import UnsupportedModelError
from hybridserve.kv.spec import Spec
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import Mixer, States, mixers
from hybridserve.mixers.lightning import LightningConfig
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import Family
from hybridserve.models.decoder import CausalLM, Layer, named_states
from hybridserve.models.llama import read_info
from hybridserve.models.moe import MoE, MoeConfig
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_choice, read_layer_types
from hybridserve.models.rope import read_rotary
from hybridserve.models.weights import Rule, Spelling, WeightMap

_MOE = r"\1.block_sparse_moe"
_EXPERTS = f"{_MOE}.experts.{{expert}}"
WEIGHTS = WeightMap(
    renames=(
        (r"\.mixer\.", ".self_attn."),
        (r"(layers\.\d+)\.norm\.", r"\1.input_layernorm."),
        (r"\.mlp_norm\.", ".post_attention_layernorm."),
    ),
    rules=(
        Rule(r"(.*)\.mlp\.router\.weight", (Spelling((f"{_MOE}.gate.weight",)), Spelling((r"\1.mlp.gate.weight",)))),
        Rule(
            r"(.*)\.mlp\.gate_up",
            (
                Spelling((f"{_EXPERTS}.w1.weight", f"{_EXPERTS}.w3.weight"), per_expert=True),
                Spelling((r"\1.mlp.experts.gate_up_proj",)),
            ),
        ),
        Rule(
            r"(.*)\.mlp\.down",
            (Spelling((f"{_EXPERTS}.w2.weight",), per_expert=True), Spelling((r"\1.mlp.experts.down_proj",))),
        ),
    ),
    # Tables that follow from the slopes and the published block size.
    ignored=(r".*\.rotary_emb\.inv_freq", r".*\.self_attn\.(query_decay|key_decay|diagonal_decay)"),
)


@dataclass(frozen=True, slots=True)
class Weights:
    """What the residual and what a half adds are multiplied by."""

    residual: float
    added: float

    def sum(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [T, D]. Returns [T, D]."""
        return x * self.residual + y * self.added


class MiniMaxLayer(Layer):
    """x = norm(x); x = a x + b mixer(x); x = mlp_norm(x); x = c x + d mlp(x)."""

    def __init__(
        self, mixer: Mixer, norm: RMSNorm, mlp: nn.Module, mlp_norm: RMSNorm, weights: Weights, mlp_weights: Weights
    ) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = norm
        self.mlp = mlp
        self.mlp_norm = mlp_norm
        self.weights = weights
        self.mlp_weights = mlp_weights
        self.kind = mixer.kind

    def cache_specs(self) -> dict[str, Spec]:
        """The mixer's."""
        return {f"{self.kind}.{name}": spec for name, spec in self.mixer.specs().items()}

    def initial_states(self) -> States:
        """The mixer's."""
        return named_states(self.mixer)

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """x: [T, D]. Returns [T, D]."""
        own = {name.removeprefix(f"{self.kind}."): cache for name, cache in caches.items()}
        x = self.norm(x)
        x = self.mlp_norm(self.weights.sum(x, self.mixer(x, batch, own)))
        return self.mlp_weights.sum(x, self.mlp(x))


def _slopes(num_heads: int, layer: int, num_layers: int) -> tuple[float, ...]:
    """What heads forget: a geometric series over the heads, less and less towards the last layer."""
    factor = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return tuple(2 ** (-8 / num_heads * (head + 1)) * factor for head in range(num_heads))


def _read_kinds(config: ConfigReader) -> list[str]:
    """The kind of each layer: names, numbers (1 for attention over all tokens), or in turn."""
    num_layers = config.read_size("num_hidden_layers", most=MAX_LAYERS)
    default = ["linear_attention" if i % 2 else "full_attention" for i in range(num_layers)]
    numbers = config.read_optional("attn_type_list", list[int])
    if numbers is not None:
        unknown = sorted(set(numbers) - {0, 1})
        if unknown:
            raise UnsupportedModelError(f"config.json: {config.name('attn_type_list')} has {unknown[0]}; it may have 0 and 1")
        default = ["full_attention" if one else "linear_attention" for one in numbers]
    return read_layer_types(config, num_layers, ("linear_attention", "full_attention"), default)


def _read_attention(config: ConfigReader, max_positions: int, head_dim: int) -> AttentionConfig:
    """Attention; `rotary_dim`, where it is stated, is the turned part of a head."""
    config.expect("sliding_window")
    num_heads = config.read_size("num_attention_heads")
    rotary = read_rotary(config, head_dim, max_positions, default_theta=1_000_000.0, plain_is_whole=True)
    turned = config.read_optional("rotary_dim", int)
    return AttentionConfig(
        hidden_size=config.read_size("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=config.read_size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rotary=rotary if turned is None else msgspec.structs.replace(rotary, rotary_dim=turned),
    )


def _read_moe(config: ConfigReader) -> MoeConfig:
    config.expect("shared_intermediate_size", 0)
    config.spell("num_local_experts", "num_experts")
    num_experts, num_chosen = read_choice(config, "num_local_experts", "num_experts_per_tok", default_experts=8, default_chosen=2)
    return MoeConfig(
        hidden_size=config.read_size("hidden_size"),
        num_experts=num_experts,
        num_chosen=num_chosen,
        width=config.read_size("intermediate_size"),
        routing="softmax_topk",
    )


def _read_weights(config: ConfigReader, what: str) -> Weights:
    """Under today's keys, or those of the releases before transformers had the class."""
    once = f"layernorm_{what.replace('_attn', '_attention')}"
    for one in ("alpha", "beta"):
        config.spell(f"{what}_{one}_factor", f"{once}_{one}")
    return Weights(*(config.read(f"{what}_{one}_factor", float, 1.0) for one in ("alpha", "beta")))


def _ignore_weights(config: ConfigReader, kind: str) -> None:
    """Those of a kind that no layer has."""
    for one in ("alpha", "beta"):
        config.ignore(f"{kind.removesuffix('_attention')}_attn_{one}_factor", f"layernorm_{kind}_{one}")


@architectures.register("MiniMaxM1ForCausalLM")
@architectures.register("MiniMaxText01ForCausalLM")
@architectures.register("MiniMaxForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a MiniMax."""
    config.declare(Family(norms_qk=False, rotates=True, unused=frozenset({"shared_moe_mode"})))
    config.ignore("block_size")  # rows that the published code computes together
    config.expect("hidden_act", "silu")
    config.expect("postnorm", True)
    info = read_info(config)
    hidden, eps, num_heads = info.hidden_size, config.read("rms_norm_eps", float), config.read_size("num_attention_heads")
    head_dim = config.read_size("head_dim", max(1, hidden // num_heads))
    attention, moe, kinds = _read_attention(config, info.max_positions, head_dim), _read_moe(config), _read_kinds(config)
    weights = {kind: _read_weights(config, f"{kind.removesuffix('_attention')}_attn") for kind in set(kinds)}
    for unused in {"linear_attention", "full_attention"} - set(kinds):
        _ignore_weights(config, unused)

    def make_mixer(layer: int, kind: str) -> Mixer:
        if kind == "full_attention":
            return mixers["attention"](attention, ops, dtype)
        slopes = _slopes(num_heads, layer, len(kinds))
        lightning = LightningConfig(hidden_size=hidden, num_heads=num_heads, head_dim=head_dim, slopes=slopes)
        return mixers["lightning"](lightning, ops, dtype)

    def make_norm() -> RMSNorm:
        return RMSNorm(hidden, eps, ops, dtype)

    mlp_weights = _read_weights(config, "mlp")
    layers = [
        MiniMaxLayer(make_mixer(i, kind), make_norm(), MoE(moe, ops, dtype), make_norm(), weights[kind], mlp_weights)
        for i, kind in enumerate(kinds)
    ]
    tied = config.read("tie_word_embeddings", bool, False)
    slopes = {
        f"layers.{i}.self_attn.slope_rate": _slopes(num_heads, i, len(kinds))
        for i, kind in enumerate(kinds)
        if kind == "linear_attention"
    }
    weight_map = replace(WEIGHTS, stated=slopes)
    return CausalLM(info, layers, make_norm(), ops, dtype, tied=tied, weight_map=weight_map)
