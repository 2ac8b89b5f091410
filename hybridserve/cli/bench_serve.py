"""`hybridserve bench serve`: load an OpenAI-compatible server and measure what its clients feel.

Owns the arrival of requests, the clock of each and the figures. Key names are those of `vllm bench serve`. TTFT is the time to
the first token, TPOT the mean time per later token of a request, ITL each gap between events, E2EL the whole.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hybridserve.cli.flags import at_least
from hybridserve.cli.http_client import Endpoint
from hybridserve.errors import HybridServeError, UsageError


@dataclass
class Sample:
    """What one request felt, in seconds from its start."""

    input_len: int
    output_len: int = 0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    cached: int = 0
    error: str = ""

    @property
    def tpot(self) -> float:
        return (self.latency - self.ttft) / (self.output_len - 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags, named as in `vllm bench serve`."""
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="the server (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", help="default: what the server says")
    parser.add_argument("--api-key", metavar="KEY", help="the server's key")
    parser.add_argument("--num-prompts", type=at_least(1), default=100, metavar="N", help="requests (default: 100)")
    parser.add_argument("--input-len", type=at_least(1), default=128, metavar="N", help="tokens per prompt (default: 128)")
    parser.add_argument("--output-len", type=at_least(1), default=128, metavar="N", help="tokens per answer (default: 128)")
    parser.add_argument("--prefix-len", type=at_least(0), default=0, metavar="N", help="tokens shared by all (default: 0)")
    parser.add_argument("--request-rate", type=float, default=math.inf, metavar="R", help="requests per second (default: inf)")
    parser.add_argument("--max-concurrency", type=at_least(1), metavar="N", help="requests open at once at most")
    parser.add_argument("--vocab-size", type=at_least(1), metavar="N", help="ids are below this; default: the server's limits")
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="answers of full length")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default: 0)")
    parser.add_argument("--output-json", metavar="FILE", help="also write the result there")
    parser.add_argument("--save-detailed", action="store_true", help="keep every request's figures in the result")


def run(arguments: argparse.Namespace) -> int:
    """Measure; returns 1 when a request failed."""
    if arguments.num_prompts < 1 or arguments.request_rate <= 0:
        raise UsageError("--num-prompts and --request-rate must be above 0")
    result = asyncio.run(_measure(arguments))
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output_json is not None:
        Path(arguments.output_json).write_text(text + "\n", encoding="utf-8")
    return 1 if result["failed"] else 0


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    endpoint = Endpoint(arguments.base_url, api_key=arguments.api_key)
    model = arguments.model or (await endpoint.get("/v1/models"))["data"][0]["id"]
    size = arguments.vocab_size or (await endpoint.get("/v1/limits"))["vocab_size"]
    source = random.Random(arguments.seed)
    shared = [source.randrange(size) for _ in range(arguments.prefix_len)]
    own = arguments.input_len - arguments.prefix_len
    if own < 1:
        raise UsageError(f"--prefix-len {arguments.prefix_len} leaves nothing of --input-len {arguments.input_len}")
    bodies = [
        {
            "model": model,
            "prompt": shared + [source.randrange(size) for _ in range(own)],
            "max_tokens": arguments.output_len,
            "temperature": 0.0,
            "ignore_eos": arguments.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(arguments.num_prompts)
    ]
    start = time.perf_counter()
    samples = await _send_all(endpoint, bodies, arguments, source)
    duration = time.perf_counter() - start
    return _figures(samples, duration, arguments, model)


async def _send_all(
    endpoint: Endpoint, bodies: Sequence[dict[str, Any]], arguments: argparse.Namespace, source: random.Random
) -> list[Sample]:
    gate = asyncio.Semaphore(arguments.max_concurrency or len(bodies))

    async def one(body: dict[str, Any]) -> Sample:
        async with gate:
            return await _send(endpoint, body)

    tasks = []
    for body in bodies:
        tasks.append(asyncio.create_task(one(body)))
        if arguments.request_rate != math.inf:
            await asyncio.sleep(source.expovariate(arguments.request_rate))
    return await asyncio.gather(*tasks)


async def _send(endpoint: Endpoint, body: dict[str, Any]) -> Sample:
    sample = Sample(len(body["prompt"]))
    start = last = time.perf_counter()
    try:
        async with aclosing(endpoint.events("/v1/completions", body)) as events:
            async for event in events:
                now = time.perf_counter()
                if usage := event.get("usage"):
                    sample.output_len = usage["completion_tokens"]
                    sample.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                if not event.get("choices"):
                    continue
                if sample.ttft:
                    sample.itl.append(now - last)
                else:
                    sample.ttft = now - start
                last = now
    except HybridServeError as error:
        sample.error = str(error)
    sample.latency = last - start
    return sample


def _figures(samples: Sequence[Sample], duration: float, arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    good = [sample for sample in samples if not sample.error]
    num_input = sum(sample.input_len for sample in good)
    num_output = sum(sample.output_len for sample in good)
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": "openai",
        "model_id": model,
        "num_prompts": len(samples),
        "request_rate": "inf" if arguments.request_rate == math.inf else arguments.request_rate,
        "burstiness": 1.0,
        "max_concurrency": arguments.max_concurrency,
        "duration": duration,
        "completed": len(good),
        "failed": len(samples) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_cached_tokens": sum(sample.cached for sample in good),
        "request_throughput": len(good) / duration,
        "request_goodput": None,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
    }
    result |= _spread("ttft", [sample.ttft for sample in good])
    result |= _spread("tpot", [sample.tpot for sample in good if sample.output_len > 1])
    result |= _spread("itl", [gap for sample in good for gap in sample.itl])
    result |= _spread("e2el", [sample.latency for sample in good])
    if arguments.save_detailed:
        result |= {
            "input_lens": [sample.input_len for sample in samples],
            "output_lens": [sample.output_len for sample in samples],
            "ttfts": [sample.ttft for sample in samples],
            "itls": [sample.itl for sample in samples],
            "errors": [sample.error for sample in samples],
        }
    for message in sorted({sample.error for sample in samples if sample.error})[:3]:
        print(f"a request failed: {message}", file=sys.stderr)
    return result


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and 99th percentile, in milliseconds."""
    values = [1000 * value for value in seconds] or [0.0]
    return {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": statistics.median(values),
        f"std_{name}_ms": statistics.pstdev(values),
        f"p99_{name}_ms": percentile(values, 99),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` percent lie, interpolated as numpy does."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * share / 100
    low = math.floor(position)
    high = math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
