"""A tiny recurrence between layers of attention, as an architecture, and the same as a plain loop without caches.

Owns the model, its weights and how an engine is put through chunks, hits and preemption with it. Used by `test_recurrences.py`.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hybridserve.backends.select import select
from hybridserve.config import EngineSettings
from hybridserve.conformance import oracles
from hybridserve.engine.core import EngineCore
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import Mixer, MixerConfig, mixers
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models import CausalLM, build_model
from hybridserve.models.architectures import architectures
from hybridserve.models.decoder import Branch, DecoderLayer
from hybridserve.models.llama import read_info
from hybridserve.models.weights import WeightMap
from hybridserve.request import EngineRequest, SamplingParams

HIDDEN, VOCAB_SIZE, MAX_LEN = 32, 97, 96
#: One sequence computed without caches: a mixer, for its parameters, and rows [T, D]. Returns [T, D].
Loop = Callable[[Mixer, Tensor], Tensor]


def register(kind: str) -> None:
    """The architecture `TinyForCausalLM`: the layer `kind`, attention, and the layer again."""

    @architectures.register("TinyForCausalLM")
    def build(config, ops, dtype):
        info = read_info(config)
        attention = AttentionConfig(hidden_size=HIDDEN, num_heads=4, num_kv_heads=4, head_dim=8)
        layers = []
        for name, settings in ((kind, MixerConfig(hidden_size=HIDDEN)), ("attention", attention)) * 2:
            branch = Branch(mixers[name](settings, ops, dtype))
            layers.append(DecoderLayer([branch], RMSNorm(HIDDEN, 1e-6, ops, dtype), None, None))
        return CausalLM(info, layers, RMSNorm(HIDDEN, 1e-6, ops, dtype), ops, dtype, tied=True, weight_map=WeightMap())


def reference_ops():
    return select(torch.device("cpu"), torch.float32, ["reference"]).ops


def save(folder: Path) -> CausalLM:
    """Writes the model with random weights; returns it."""
    config = {
        "architectures": ["TinyForCausalLM"],
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "max_position_embeddings": 512,
    }
    model = build_model(config, reference_ops(), torch.float32).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        gain = 4.0 if parameter.dim() == 1 else 3 / parameter.shape[-1] ** 0.5
        parameter.data.copy_(1 + drawn / 4 if "norm" in name else drawn * gain)
    save_file({f"model.{name}": tensor for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return model


@torch.no_grad()
def greedy(model: CausalLM, loop: Loop, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by computing the whole text for each."""
    tokens = list(prompt)
    for _ in range(count):
        x = model.embed_tokens(torch.tensor(tokens))
        for layer in model.layers:
            (branch,) = layer.mixers.values()
            run = oracles.attention if branch.mixer.kind == "attention" else loop
            x = x + run(branch.mixer, layer.norm(x)).to(x.dtype)
        tokens.append(int(model.logits(model.norm(x[-1:]))[0].argmax()))
    return tokens[len(prompt) :]


def engine(folder: Path, **settings: object) -> EngineCore:
    sizes = {"max_num_seqs": 8, "kv_cache_memory": 2**24, "max_model_len": MAX_LEN, "backend": ("reference",)}
    return EngineCore(EngineSettings(model=str(folder), **{**sizes, **settings}))


def run(core: EngineCore, prompts: dict[str, list[int]], count: int) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Greedy tokens of several requests at once, and how much of each was cached."""
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    for name, prompt in prompts.items():
        assert core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)) is None
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    cached: dict[str, int] = {}
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.new_token_ids
            if output.num_cached_tokens is not None:
                cached[output.request_id] = output.num_cached_tokens
        core.check()
    return tokens, cached


def prompts(lengths: tuple[int, ...]) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(6)
    for n in lengths:
        yield torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist()


def check_served(folder: Path, model: CausalLM, loop: Loop) -> None:
    """In chunks, side by side, after a hit inside the text and after preemption the engine's tokens are the loop's."""
    texts = {str(i): prompt for i, prompt in enumerate(prompts((1, 23, 40)))}
    expected = {name: greedy(model, loop, prompt, 24) for name, prompt in texts.items()}
    assert len({token for tokens in expected.values() for token in tokens}) > 5
    for budget in (2048, 9):
        assert run(engine(folder, max_num_batched_tokens=budget), texts, 24)[0] == expected

    core = engine(folder, max_num_batched_tokens=16)
    run(core, {"left": texts["2"][:21]}, 1)
    longer = [*texts["2"][:21], *texts["1"]]
    for round_ in ("first", "after clear_cache"):
        tokens, cached = run(core, {round_: longer}, 8)
        assert tokens[round_] == greedy(model, loop, longer, 8)
        assert cached[round_] == (21 if round_ == "first" else 0)
        core.clear_cache()

    # One sequence at full length fits: several outgrow that, and come again.
    info = core.info
    pages = sum(-(-(MAX_LEN // 16 if g.kind == "paged" else 2) // g.pages_per_superpage) for g in info.groups)
    core = engine(folder, kv_cache_memory=pages * info.superpage_nbytes, max_num_batched_tokens=32)
    many = {f"{copy}.{name}": prompt for copy in range(2) for name, prompt in texts.items()}
    tokens, _ = run(core, many, 24)
    assert core.stats().num_preemptions > 0
    assert tokens == {f"{copy}.{name}": expected[name] for copy in range(2) for name in texts}
