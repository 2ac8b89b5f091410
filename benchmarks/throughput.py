"""Output tokens a second on a Qwen3.5-0.8B-shaped checkpoint: hybridserve against transformers' `generate`.

    python -m benchmarks.throughput [--repeats 5] [--json FILE]

Two comparisons in one run, arms alternating, on the same bf16 weights (widened for transformers
where the CPU has no bf16 instructions), prompts and threads: eight requests of 256 tokens in and
64 out (all at once here, one after another there, as `generate` is used), and one stream alone. Printed beside: the floor,
weights and states over the measured read bandwidth, plus prompt arithmetic over the measured matrix rate.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

from benchmarks.checkpoints import make_qwen35_08b
from benchmarks.floors import Rates, measure
from hybridserve import LLM, SamplingParams

NUM_REQUESTS, PROMPT, OUTPUT = 8, 256, 64
#: Prompt of the single stream, whose time is taken out of what is measured.
SHORT = 16


class Transformers:
    """The arm that runs transformers' own generation."""

    name = "transformers"

    def __init__(self, folder: Path, dtype: str) -> None:
        self._model = transformers.Qwen3_5ForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def one(self, prompt: list[int], num_tokens: int) -> list[int]:
        out = self._model.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()

    def decode_s(self, prompt: list[int]) -> float:
        """Seconds a token of a single stream, the prompt's time taken out."""
        return _difference(lambda count: self.one(prompt, count))

    def many_s(self, prompts: list[list[int]]) -> float:
        started = time.perf_counter()
        for prompt in prompts:
            self.one(prompt, OUTPUT)
        return (time.perf_counter() - started) / len(prompts)


class Hybridserve:
    """The arm that runs this engine, without its prefix cache so that repeats compute everything."""

    name = "hybridserve"

    def __init__(self, folder: Path) -> None:
        settings = {"enable_prefix_caching": False, "kv_cache_memory": "1GiB", "max_num_seqs": NUM_REQUESTS}
        self._llm = LLM(str(folder), dtype="bfloat16", **settings)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return [r.outputs[0].token_ids for r in self._llm.generate([{"prompt_token_ids": p} for p in prompts], params)]

    def decode_s(self, prompt: list[int]) -> float:
        return _difference(lambda count: self.generate([prompt], count))

    def many_s(self, prompts: list[list[int]]) -> float:
        started = time.perf_counter()
        self.generate(prompts, OUTPUT)
        return (time.perf_counter() - started) / len(prompts)


def _difference(run: object, short: int = 2, long: int = 18) -> float:
    """Seconds a token from two runs of different length."""
    assert callable(run)
    started = time.perf_counter()
    run(short)
    middle = time.perf_counter()
    run(long)
    return (time.perf_counter() - middle - (middle - started)) / (long - short)


def floors(rates: Rates, weights_nbytes: int, num_parameters: int, embedding: int) -> tuple[float, float]:
    """Seconds a token of one stream, and seconds a request of eight at once, that no implementation could beat."""
    state_nbytes = 2 * 19_537_920
    one = (weights_nbytes + state_nbytes) / rates.read_nbytes_per_s
    rate = max(rates.fp32_flop_per_s, rates.bf16_flop_per_s)
    prefill = 2 * (num_parameters - embedding) * PROMPT / rate
    step = max((weights_nbytes + NUM_REQUESTS * state_nbytes) / rates.read_nbytes_per_s, 2 * num_parameters * NUM_REQUESTS / rate)
    return one, prefill + step * OUTPUT / NUM_REQUESTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sequential", type=int, default=NUM_REQUESTS, help="requests of transformers' one-after-another arm")
    parser.add_argument(
        "--peer-dtype",
        choices=("bfloat16", "float32"),
        default="float32" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "bfloat16",
        help="transformers' dtype; default: the faster one here (on AVX2, bf16 convolutions take seconds a token)",
    )
    parser.add_argument("--folder", type=Path, help="keep the checkpoint here")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = make_qwen35_08b(arguments.folder or Path(tempfile.mkdtemp()))
    ours, theirs = Hybridserve(folder), Transformers(folder, arguments.peer_dtype)
    info = ours._llm.info
    rates = measure()
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 200_000, (NUM_REQUESTS, PROMPT), generator=generator).tolist()
    same = ours.generate([prompts[0][:SHORT]], 4)[0][0] == theirs.one(prompts[0][:SHORT], 4)[0]
    many: dict[str, list[float]] = {ours.name: [], theirs.name: []}
    decode: dict[str, list[float]] = {ours.name: [], theirs.name: []}
    for repeat in range(arguments.repeats):
        many[ours.name].append(ours.many_s(prompts))
        many[theirs.name].append(theirs.many_s(prompts[: arguments.sequential]))
        decode[ours.name].append(ours.decode_s(prompts[0][:SHORT]))
        decode[theirs.name].append(theirs.decode_s(prompts[0][:SHORT]))
        print(f"repeat {repeat + 1}: seconds a request {many[ours.name][-1]:.2f} / {many[theirs.name][-1]:.2f}", flush=True)
    floor_one, floor_many = floors(rates, info.weights_nbytes, info.num_parameters, info.vocab_size * 1024)
    rows = {
        "eight at once, output tokens/s": {n: sorted(OUTPUT / s for s in found) for n, found in many.items()},
        "one stream, decode tokens/s": {n: sorted(1 / s for s in found) for n, found in decode.items()},
    }
    print(f"\n{rates}; torch {torch.__version__}; first tokens equal: {same}")
    print(f"transformers {transformers.__version__} in {arguments.peer_dtype}, hybridserve in bfloat16")
    for (title, row), floor in zip(rows.items(), (OUTPUT / floor_many, 1 / floor_one), strict=True):
        median = {name: statistics.median(found) for name, found in row.items()}
        for name, found in row.items():
            print(f"{title:>32} {name:>13} {median[name]:8.2f}  ({found[0]:.2f} to {found[-1]:.2f}; floor {floor:.1f})")
        print(f"{'ratio':>32} {median[ours.name] / median[theirs.name]:22.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rates": str(rates), "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
