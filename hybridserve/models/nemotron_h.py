"""Nemotron-H (and Nemotron 3): every layer is one norm and one of Mamba-2, attention, an MLP or experts.

Owns how its config is read and its weights are named. Called through the table of architectures. Attention knows no positions;
MLPs and experts have no gate and square their relu; large releases run the experts in a narrower space. Source: published
`NemotronHForCausalLM`.
"""

import math
from collections.abc import Callable, Mapping

import torch

from hybridserve.backends.ops import Activation, Ops
from hybridserve.errors import UnsupportedModelError
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import mixers
from hybridserve.mixers.mamba2 import Mamba2Config
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.config_keys import FP32_ROUTER, Family
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer
from hybridserve.models.llama import read_info
from hybridserve.models.mlp import PlainMLP
from hybridserve.models.moe import MoE, MoeConfig
from hybridserve.models.reader import MAX_LAYERS, ConfigReader, read_choice, read_groups, read_spelled_layer_types
from hybridserve.models.weights import DEPTHWISE, Rule, Spelling, WeightMap

_EXPERTS = r"\1.experts"
WEIGHTS = WeightMap(
    renames=(
        (r"\.mixers\.\w+\.mixer\.", ".mixer."),
        (r"\.mlp_norm\.", ".norm."),
        (r"\.mlp\.router\.", ".mixer.gate."),
        (r"\.mlp\.choice_bias$", ".mixer.gate.e_score_correction_bias"),
        (r"\.mlp\.shared\.(up|down)\.", r".mixer.shared_experts.\1_proj."),
        (r"\.mlp\.latent_in\.", ".mixer.fc1_latent_proj."),
        (r"\.mlp\.latent_out\.", ".mixer.fc2_latent_proj."),
        (r"\.mlp\.(up|down)\.", r".mixer.\1_proj."),
        (r"\.mlp\.", ".mixer."),
        (r"^norm\.", "norm_f."),
        (r"^embed_tokens\.", "embeddings."),
    ),
    rules=(
        Rule(r"(.*\.conv1d)\.weight", (Spelling((r"\1.weight",), DEPTHWISE),)),
        *(
            Rule(
                rf"(.*\.mixer)\.{ours}",
                (
                    Spelling((rf"{_EXPERTS}.{{expert}}.{theirs}.weight",), per_expert=True),
                    Spelling((f"{_EXPERTS}.{theirs}",)),
                ),
            )
            for ours, theirs in (("gate_up", "up_proj"), ("down", "down_proj"))
        ),
    ),
    prefixes=("backbone.", "model."),
    ignored=(r".*\.rotary_emb\.inv_freq", r"mtp\..*"),
)
#: Initialisation, the draft head, and a rotary embedding that no layer has.
_UNUSED_KEYS = (
    "expand", "time_step_max", "time_step_floor", "time_step_limit", "rescale_prenorm_residual", "chunk_size",
    "moe_shared_expert_overlap", "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
    "rope_theta", "rope_parameters", "partial_rotary_factor", "norm_eps", "mamba_expand", "mamba_dt_max", "mamba_dt_limit",
    "mamba_dt_init_floor",
)  # fmt: skip
#: Of older configs.
_OLD_SPELLINGS = (
    ("n_groups", "mamba_n_groups"), ("conv_kernel", "mamba_d_conv"), ("time_step_min", "mamba_dt_min"),
    ("use_conv_bias", "mamba_conv_bias"),
)  # fmt: skip
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _read_kinds(config: ConfigReader) -> list[str]:
    """The kind of each layer: a list, or a pattern of letters."""
    pattern = config.read("hybrid_override_pattern", str, "")
    unknown = sorted(set(pattern) - set(_LETTERS))
    if unknown or len(pattern) > MAX_LAYERS:
        raise UnsupportedModelError(
            f"config.json: {config.name('hybrid_override_pattern')} is {pattern!r:.80}; it may have at most {MAX_LAYERS} of the "
            f"letters {''.join(_LETTERS)}"
        )
    keys = ("layers_block_type", "layer_types")
    lists = [config.read(key, list[str]) for key in keys if config.has(key)]
    if not lists and not pattern:
        config.read(keys[0], list[str])
    default = [_LETTERS[letter] for letter in pattern]
    num_layers = config.read_size("num_hidden_layers", len(lists[0] if lists else default), most=MAX_LAYERS)
    return read_spelled_layer_types(config, num_layers, tuple(_LETTERS.values()), default, keys)


def _read_mamba(config: ConfigReader) -> Mamba2Config:
    """Mamba-2, whose time step has a lower bound: the published class takes it from what else only initialises."""
    for spellings in _OLD_SPELLINGS:
        config.spell(*spellings)
    config.expect("mamba_hidden_act", "silu")
    config.expect("mamba_proj_bias", False)
    config.expect("mamba_ssm_cache_dtype", "float32", "auto")
    return Mamba2Config(
        hidden_size=config.read_size("hidden_size"),
        num_heads=config.read_size("mamba_num_heads"),
        head_dim=config.read_size("mamba_head_dim"),
        num_groups=config.read_size("n_groups"),
        state_size=config.read_size("ssm_state_size"),
        conv_width=config.read_size("conv_kernel", 4),
        conv_bias=config.read("use_conv_bias", bool, True),
        proj_bias=config.read("use_bias", bool, False),
        eps=config.read("layer_norm_epsilon", float, 1e-5),
        time_step_limit=(config.read("time_step_min", float, 0.001), math.inf),
    )


def _read_attention(config: ConfigReader) -> AttentionConfig:
    config.expect("sliding_window")
    num_heads = config.read_size("num_attention_heads")
    config.expect("attention_bias", False)  # the published class has none, whatever it says
    return AttentionConfig(
        hidden_size=config.read_size("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=config.read_size("num_key_value_heads", num_heads),
        head_dim=config.read_size("head_dim", 128),
    )


def _read_moe(config: ConfigReader) -> MoeConfig:
    config.expect("n_shared_experts", 1)
    bias = config.read("mlp_bias", bool, False)
    config.spell("n_routed_experts", "num_local_experts")
    num_experts, num_chosen = read_choice(config, "n_routed_experts", "num_experts_per_tok", default_experts=8, default_chosen=2)
    num_groups, num_chosen_groups = read_groups(config, "n_routed_experts", num_experts, "n_group", "topk_group")
    return MoeConfig(
        hidden_size=config.read_size("hidden_size"),
        num_experts=num_experts,
        num_chosen=num_chosen,
        width=config.read_size("moe_intermediate_size", 7688),
        routing="sigmoid",
        renormalise=config.read("norm_topk_prob", bool, True),
        renormalise_eps=1e-20,
        weight_scale=config.read("routed_scaling_factor", float, 1.0),
        choice_bias=True,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        router_fp32=True,
        activation="relu2",
        gated=False,
        latent_size=config.read_optional("moe_latent_size", int),
        latent_bias=bias,
        shared_width=config.read_size("moe_shared_expert_intermediate_size", 7688),
        shared_bias=bias,
    )


@architectures.register("NemotronHForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Lay out a Nemotron-H."""
    config.declare(
        Family(
            norms_qk=False,
            rotates=False,
            unused=frozenset({"time_step_rank"}),
            stated=FP32_ROUTER,
            same={"attention_head_dim": ("head_dim", 128), "rms_norm_eps": ("layer_norm_epsilon", 1e-05)},
        )
    )
    config.ignore(*_UNUSED_KEYS)
    config.expect("mlp_hidden_act", "relu2")
    config.expect("residual_in_fp32", False)
    info = read_info(config)
    hidden, eps = info.hidden_size, config.read("layer_norm_epsilon", float, 1e-5)
    mamba, attention, moe = _read_mamba(config), _read_attention(config), _read_moe(config)
    width, bias = config.read_size("intermediate_size", 21504), config.read("mlp_bias", bool, False)
    activation: Activation = "relu2"

    def make_norm() -> RMSNorm:
        return RMSNorm(hidden, eps, ops, dtype)

    makers: Mapping[str, Callable[[], DecoderLayer]] = {
        "linear_attention": lambda: DecoderLayer([Branch(mixers["mamba2"](mamba, ops, dtype))], make_norm(), None, None),
        "full_attention": lambda: DecoderLayer([Branch(mixers["attention"](attention, ops, dtype))], make_norm(), None, None),
        "moe": lambda: DecoderLayer([], None, MoE(moe, ops, dtype), make_norm()),
        "mlp": lambda: DecoderLayer([], None, PlainMLP(hidden, width, ops, dtype, activation=activation, bias=bias), make_norm()),
    }
    layers = [makers[kind]() for kind in _read_kinds(config)]
    config.ignore("tie_word_embeddings")  # the published class has a head of its own, whatever it says
    return CausalLM(info, layers, make_norm(), ops, dtype, tied=False, weight_map=WEIGHTS)
