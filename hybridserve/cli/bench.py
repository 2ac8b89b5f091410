"""`hybridserve bench {throughput,latency,serve}`: measurements whose JSON has the keys of `vllm bench`.

Owns the three subcommands' flags and output. What is measured in this process is here; a running server is `bench_serve.py`'s.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hybridserve.cli import bench_serve
from hybridserve.cli.flags import Sources, add_config, add_settings, at_least, changed
from hybridserve.config import EngineSettings
from hybridserve.errors import UsageError

if TYPE_CHECKING:
    from hybridserve.llm import LLM, TokensPrompt

_PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Three subcommands."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="{throughput,latency,serve}")
    throughput = kinds.add_parser("throughput", help="tokens per second of many prompts at once", allow_abbrev=False)
    throughput.add_argument("--num-prompts", type=at_least(1), default=100, metavar="N", help="prompts (default: 100)")
    latency = kinds.add_parser("latency", help="seconds of one batch", allow_abbrev=False)
    latency.add_argument("--batch-size", type=at_least(1), default=8, metavar="N", help="prompts in the batch (default: 8)")
    latency.add_argument("--num-iters", type=at_least(1), default=10, metavar="N", help="measured batches (default: 10)")
    latency.add_argument("--num-iters-warmup", type=at_least(0), default=2, metavar="N", help="batches before (default: 2)")
    for command in (throughput, latency):
        _add_lengths(command)
        command.add_argument("--output-json", metavar="FILE", help="also write the result there")
        add_settings(command, EngineSettings, positional=None)
        add_config(command)
    bench_serve.add_arguments(kinds.add_parser("serve", help="load a running server", allow_abbrev=False))


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the JSON, and write it where asked."""
    if arguments.kind == "serve":
        return bench_serve.run(arguments)
    engine = Sources(arguments).settings(EngineSettings)
    from hybridserve.llm import LLM

    settings = changed(engine)
    with LLM(str(settings.pop("model")), **settings) as llm:
        room = llm.info.max_model_len
        if arguments.input_len + arguments.output_len > room:
            raise UsageError(
                f"--input-len {arguments.input_len} and --output-len {arguments.output_len} exceed the context, {room} tokens"
            )
        result = _throughput(llm, arguments) if arguments.kind == "throughput" else _latency(llm, arguments)
    write_result(result, arguments.output_json)
    return 0


def write_result(result: dict[str, object], path: str | None) -> None:
    """Print a result as JSON, and write it to a file as well."""
    text = json.dumps(result, indent=2)
    print(text)
    if path is not None:
        Path(path).write_text(text + "\n", encoding="utf-8")


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=at_least(1), default=128, metavar="N", help="tokens per prompt (default: 128)")
    parser.add_argument("--output-len", type=at_least(1), default=128, metavar="N", help="tokens per answer (default: 128)")


def _throughput(llm: "LLM", arguments: argparse.Namespace) -> dict[str, object]:
    prompts = _random_prompts(llm, arguments.num_prompts, arguments.input_len)
    seconds = _generate(llm, prompts, arguments.output_len)
    num_output = arguments.num_prompts * arguments.output_len
    total = num_output + arguments.num_prompts * arguments.input_len
    print(f"{total / seconds:.1f} tokens/s, {num_output / seconds:.1f} of them generated", file=sys.stderr)
    return {
        "elapsed_time": seconds,
        "num_requests": arguments.num_prompts,
        "total_num_tokens": total,
        "requests_per_second": arguments.num_prompts / seconds,
        "tokens_per_second": total / seconds,
        "output_tokens_per_second": num_output / seconds,
    }


def _latency(llm: "LLM", arguments: argparse.Namespace) -> dict[str, object]:
    """Every batch has prompts of its own, or the prefix cache would be what is measured."""
    for _ in range(arguments.num_iters_warmup):
        _generate(llm, _random_prompts(llm, arguments.batch_size, arguments.input_len), arguments.output_len)
    latencies = [
        _generate(llm, _random_prompts(llm, arguments.batch_size, arguments.input_len), arguments.output_len)
        for _ in range(arguments.num_iters)
    ]
    return {
        "avg_latency": statistics.fmean(latencies),
        "latencies": latencies,
        "percentiles": {str(share): bench_serve.percentile(latencies, share) for share in _PERCENTILES},
    }


def _generate(llm: "LLM", prompts: "list[TokensPrompt]", output_len: int) -> float:
    from hybridserve.request import SamplingParams

    sampling = SamplingParams(max_tokens=output_len, ignore_eos=True, temperature=0.0)
    start = time.perf_counter()
    results = llm.generate(prompts, sampling)
    seconds = time.perf_counter() - start
    short = [result for result in results if len(result.outputs[0].token_ids) != output_len]
    if short:
        raise UsageError(f"{len(short)} answers are shorter than --output-len {output_len}; the figure would be wrong")
    return seconds


_random = random.Random(0)  # the same prompts in every process, new ones in every batch


def _random_prompts(llm: "LLM", count: int, length: int) -> "list[TokensPrompt]":
    size = llm.info.vocab_size
    return [{"prompt_token_ids": [_random.randrange(size) for _ in range(length)]} for _ in range(count)]
