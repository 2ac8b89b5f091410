"""What the tiny models of the tests reach: that every one of them takes the branches of its architecture, and that the folders
they are saved to hold the names that releases use. Other tests rest on both.
"""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hybridserve
from hybridserve.backends.select import select
from hybridserve.kv.spec import PagedSpec
from hybridserve.mixers.base import Mixer
from hybridserve.models import CausalLM, architectures, build_model, resolve
from hybridserve.models.moe import MoE
from tests.checkpoints import TINY, make, rewrite_tensors, save, save_released
from tests.test_models import NUM_TOKENS, open_model

OPS = select(torch.device("cpu"), torch.float32, ["reference"]).ops
#: Tokens of the shortest text that is compared in one-token chunks.
SHORTEST = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CausalLM]:
    """Every tiny model, laid out without weights."""
    found = {}
    for name, maker in TINY.items():
        folder = tmp_path_factory.mktemp(name)
        with torch.device("meta"):
            model = maker()
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        config = resolve(str(folder / "config.json"), load_format="dummy").config
        found[name] = build_model(config, OPS, torch.float32)
    return found


def mixers_of(model: CausalLM) -> list[Mixer]:
    return [module for module in model.modules() if isinstance(module, Mixer)]


def value(mixer: Mixer, key: str) -> object:
    return getattr(mixer.config, key, None)


def test_texts_are_longer_than_every_window_and_budget(models: dict[str, CausalLM]) -> None:
    num_windows = num_indices = 0
    for name, model in models.items():
        for specs in model.cache_specs():
            for spec in specs.values():
                if isinstance(spec, PagedSpec) and spec.window is not None:
                    assert spec.window < SHORTEST < NUM_TOKENS, name
                    num_windows += 1
        for mixer in mixers_of(model):
            index = value(mixer, "index")
            if index is not None:
                budget, group = index.budget, index.group  # type: ignore[attr-defined]
                assert budget + group < SHORTEST, name
                assert group == 1 or NUM_TOKENS % group, f"{name}: a text must end inside a group"
                num_indices += 1
    assert num_windows > 4
    assert num_indices > 4


def test_several_experts_are_chosen_among_more(models: dict[str, CausalLM]) -> None:
    with_experts = set()
    for name, model in models.items():
        for module in model.modules():
            if isinstance(module, MoE):
                assert 1 < module.config.num_chosen < module.config.num_experts, name
                assert module.config.num_groups == 1 or module.config.num_chosen_groups < module.config.num_groups, name
                with_experts.add(name)
    assert {"qwen3_5_moe", "granite_moe", "gpt_oss", "nemotron_h", "deepseek_v3", "glm5_next", "qwen4_exp"} <= with_experts


#: Architectures whose releases have as many key heads as value heads, or query heads as key heads.
EQUAL_VALUE_HEADS = {"olmo_hybrid", "olmo_hybrid_rope"}
EQUAL_KEY_HEADS = {"zamba2", "zamba2_plain"}


def test_heads_are_shared(models: dict[str, CausalLM]) -> None:
    """More value than key heads in the delta rule, more query than key heads in attention, of more than one key head."""
    for name, model in models.items():
        for mixer in mixers_of(model):
            if mixer.kind == "gated_delta" and name not in EQUAL_VALUE_HEADS:
                assert value(mixer, "num_v_heads") > value(mixer, "num_k_heads") > 1, name  # type: ignore[operator]
            if mixer.kind in ("attention", "indexed_attention") and name not in EQUAL_KEY_HEADS:
                assert value(mixer, "num_heads") > value(mixer, "num_kv_heads") > 1, name  # type: ignore[operator]
            if mixer.kind == "mamba2":
                assert value(mixer, "num_heads") > value(mixer, "num_groups"), name  # type: ignore[operator]


def test_caches_have_neighbours(models: dict[str, CausalLM]) -> None:
    """A cache taken for that of another layer would show."""
    for name, model in models.items():
        assert len(model.layer_kinds()) >= 2, name


def test_every_architecture_has_a_tiny_model(models: dict[str, CausalLM]) -> None:
    """So that none is in the table without having been compared. Second names of one builder count as it."""
    builders = {architectures[model.info.architecture] for model in models.values()}
    for name in architectures.names():
        if architectures[name].__module__.startswith("hybridserve.models"):
            assert architectures[name] in builders, name


# --- names on disk ---

_EXPERT = r"experts\.\d+\.(gate|up|down)_proj\.weight"
_MIXTRAL = r"experts\.\d+\.w[123]\.weight"
_FUSED = r"experts\.(gate_up_proj|down_proj)"
_CONVS = r"[qkv]_conv1d\.weight"
#: Of each architecture, names that its releases use, each of which must be in one of the two folders that are compared.
NAMES: dict[str, tuple[str, ...]] = {
    "qwen3_next": (rf"model\.layers\.\d+\.mlp\.{_EXPERT}", r".*linear_attn\.in_proj_(qkvz|ba)\.weight", r"mtp\..*"),
    "qwen3_5": (r"model\.language_model\.layers.*linear_attn\.in_proj_(qkv|z|b|a)\.weight", r"mtp\..*"),
    "qwen3_5_vision": (r"model\.language_model\..*", r"model\.visual\..*"),
    "qwen3_5_moe": (rf".*mlp\.{_FUSED}", rf".*mlp\.{_EXPERT}"),
    "qwen4_exp": (
        r"model\.language_model\.layers\.\d+\.ple\.ple_embedding\.ngram_embedding\.shard_\d+\.weight",
        r".*ple_embedding\.(layer_multipliers|ngram_heads_offsets|ngram_heads_vocab_sizes)",
        r".*indexer\.index_qk_proj\.weight",
        rf".*mlp\.{_FUSED}",
        rf".*mlp\.{_EXPERT}",
    ),
    "glm5_next": (
        r"model\.language_model\.layers\.\d+\.self_attn\.(f_a_proj\.weight|f_b_proj\.weight|dt_bias|A_log)",
        rf".*self_attn\.{_CONVS}",
        r".*\.hc_(attn|ffn)_(fn|base|scale)",
        rf".*mlp\.{_EXPERT}",
        r".*indexer\.(wq_b\.weight|wk\.weight|weights_proj\.weight|k_norm\.weight|index_kpool_compress_(gate|ape))",
    ),
    "kimi_linear": (
        r".*self_attn\.(f_a_proj|f_b_proj|g_a_proj|g_b_proj)\.weight",
        rf".*self_attn\.{_CONVS}",
        rf".*block_sparse_moe\.{_MIXTRAL}",
        r".*block_sparse_moe\.(gate|shared_experts\.up_proj)\.weight",
        r".*layers\.0\.mlp\.gate_proj\.weight",
    ),
    "bailing_moe_v3": (
        r"model\.word_embeddings\.weight",
        r".*\.attention\.(dense|f_proj|g_proj)\.weight",
        r".*\.attention\.(dt_bias|A_log)",
        rf".*attention\.{_CONVS}",
        r".*mlp\.gate\.expert_bias",
        rf".*mlp\.{_EXPERT}",
    ),
    "olmo_hybrid": (r".*\.(attention|feedforward)_layer_norm\.weight", rf".*linear_attn\.{_CONVS}"),
    "lara_mini": (r".*linear_attn\.in_proj\.weight", r".*linear_attn\.out_norm\.weight", rf".*mlp\.{_FUSED}"),
    "nemotron_h": (
        r"backbone\.(embeddings|norm_f)\.weight",
        r"backbone\.layers\.\d+\.mixer\.experts\.\d+\.(up|down)_proj\.weight",
        r".*mixer\.experts\.(up|down)_proj",
    ),
    "granite_moe": (
        r".*block_sparse_moe\.(input|output)_linear\.weight",
        r".*block_sparse_moe\.router\.layer\.weight",
        r".*shared_mlp\.(input|output)_linear\.weight",
    ),
    "jamba": (r".*feed_forward\.experts\.\d+\.(gate|up|down)_proj\.weight", r".*feed_forward\.router\.weight"),
    "minimax": (rf".*block_sparse_moe\.{_MIXTRAL}", r".*\.(slope_rate|query_decay|key_decay|diagonal_decay)"),
    "lfm2_moe": (rf".*feed_forward\.{_MIXTRAL}", r".*feed_forward\.expert_bias"),
    "lfm3": (r".*self_attn\.gate_proj\.weight", r".*self_attn\.g_proj\.weight"),
    "deepseek_v3": (rf".*mlp\.{_EXPERT}", rf".*mlp\.{_FUSED}", r".*mlp\.gate\.e_score_correction_bias"),
    "deepseek_v32": (rf".*mlp\.{_EXPERT}", r".*indexer\.(wq_b|wk|weights_proj)\.weight", r".*indexer\.k_norm\.(weight|bias)"),
    "glm_moe_dsa": (rf".*mlp\.{_EXPERT}", rf".*mlp\.{_FUSED}"),
    "glm4_moe_lite": (rf".*mlp\.{_EXPERT}", rf".*mlp\.{_FUSED}"),
    "gpt_oss": (r".*experts\.(gate_up_proj|down_proj)(_bias)?", r".*self_attn\.sinks", r".*mlp\.router\.(weight|bias)"),
    "bamba": (r".*mamba\.in_proj\.weight", r".*feed_forward\.(gate|up|down)_proj\.weight"),
    "falcon_h1": (r".*mamba\.in_proj\.weight", r".*feed_forward\.(gate|up|down)_proj\.weight"),
    "mamba": (r"backbone\.embeddings\.weight", r"backbone\.layers\.\d+\.mixer\.(A_log|D|x_proj\.weight|dt_proj\.bias)"),
    "mamba2": (r"backbone\.layers\.\d+\.mixer\.(A_log|D|dt_bias|conv1d\.weight|norm\.weight)",),
    "falcon_mamba": (r"backbone\.layers\.\d+\.mixer\.(A_log|D|x_proj\.weight)",),
    "zamba2": (r".*shared_transformer\..*", r".*mamba_decoder\..*"),
    "lfm2": (r".*conv\.(conv|in_proj|out_proj)\.weight", r".*feed_forward\.w[123]\.weight"),
    "gemma3_vision": (r".*vision_tower\..*", r".*multi_modal_projector\..*"),
}


@pytest.mark.parametrize("name", NAMES)
def test_i31_released_names_are_loaded_and_a_tensor_more_is_not(name: str, tmp_path: Path) -> None:
    """Both folders are loaded elsewhere with the same result; here: that they hold these names, and that nothing may be left."""
    model, found = make(name), set[str]()
    for spelling, write in (("saved", save), ("released", save_released)):
        folder = write(model, tmp_path / spelling)
        tensors = load_file(folder / "model.safetensors")
        found |= tensors.keys()
        # Beside a layer's own tensors, where a release would have it.
        stray = next(one for one in tensors if "layers.1." in one or "layers.0." in one).rpartition(".")[0] + ".stray_proj.weight"
        rewrite_tensors(folder, {**tensors, stray: torch.ones(2, 2)})
        with pytest.raises(Exception, match=re.escape(stray)) as caught:
            open_model(folder)
        assert type(caught.value).__name__ == "WeightsError"
    for pattern in NAMES[name]:
        assert any(re.fullmatch(pattern, one) for one in found), pattern


def test_kimis_decay_has_the_shape_of_the_release(tmp_path: Path) -> None:
    tensors = load_file(save_released(make("kimi_linear"), tmp_path) / "model.safetensors")
    shapes = {tuple(tensor.shape) for one, tensor in tensors.items() if one.endswith("A_log")}
    assert shapes == {(1, 1, 6, 1)}


def test_no_architecture_is_known_outside_its_file() -> None:
    """Neither its class nor a model type: the engine, the caches and the server ask what a model's layers declare."""
    package = Path(hybridserve.__file__).parent
    classes = [name for name in architectures.names() if architectures[name].__module__.startswith("hybridserve.models")]
    named: dict[str, set[str]] = {name: set() for name in classes}
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        place = str(path.relative_to(package))
        if not place.startswith(("models/", "mixers/")):
            assert "model_type" not in text, place
        for name in classes:
            # As a string: docstrings may say where mathematics come from.
            if f'"{name}"' in text or f"'{name}'" in text:
                named[name].add(place)
    for name, places in named.items():
        assert places == {"models/" + architectures[name].__module__.rpartition(".")[2] + ".py"}, name


#: What transformers keeps in fp32 whatever a model's dtype, and the endings of our names for it.
KEPT = {
    "e_score_correction_bias": "choice_bias", "gate.weight": "router.weight", "dt_bias": "dt_bias", "A_log": "A_log",
    "conv1d": "conv1d.weight", "attn_hc.base": "mixer_connection.base", "attn_hc.scale": "mixer_connection.scale",
    "ffn_hc.base": "mlp_connection.base", "ffn_hc.scale": "mlp_connection.scale",
}  # fmt: skip


def test_what_transformers_keeps_in_fp32_is_kept(models: dict[str, CausalLM], tmp_path: Path) -> None:
    kept_somewhere = set()
    for name in models:
        with torch.device("meta"):
            theirs = TINY[name]()
        theirs.config.architectures = [type(theirs).__name__]
        theirs.config.save_pretrained(tmp_path)
        config = resolve(str(tmp_path / "config.json"), load_format="dummy").config
        dtypes = {path: p.dtype for path, p in build_model(config, OPS, torch.bfloat16).named_parameters()}
        for pattern in theirs._keep_in_fp32_modules_strict or ():
            mine = {path: dtype for path, dtype in dtypes.items() if path.endswith(KEPT[pattern])}
            assert mine, f"{name}: {pattern}"
            assert set(mine.values()) == {torch.float32}, f"{name}: {pattern}"
            kept_somewhere.add(pattern)
    assert kept_somewhere == KEPT.keys()
