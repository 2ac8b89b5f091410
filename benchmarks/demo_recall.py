"""The demo's recall over HTTP: 200 held-out prompts, greedily, one at a time and with 16 clients at once.

    python -m benchmarks.demo_recall [--json FILE]

Starts `hybridserve serve demo` on a free port. Printed: accuracy by length of the prompt, whether both passes gave the same
answers (they must: neighbours in a batch and prefix hits change nothing), time and cached tokens. Exits with 1 under 95 % or on
a difference. The prompts are drawn from a stream that training never saw.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from benchmarks.recall_tasks import Prompt, recall_prompts
from benchmarks.server_process import ServerProcess

NUM_PROMPTS = 200
SEED = 0  # the one that the demo's own evaluation prints
NUM_CLIENTS = 16
MIN_ACCURACY = 0.95
BUCKET = 100
MAX_TOKENS = 16


@dataclass(frozen=True)
class Answer:
    """One reply."""

    text: str
    num_prompt: int
    num_cached: int


@dataclass(frozen=True)
class Pass:
    """All answers, in the order of the prompts, and how long they took together."""

    answers: list[Answer]
    seconds: float

    @property
    def num_cached(self) -> int:
        return sum(answer.num_cached for answer in self.answers)

    @property
    def num_prompt(self) -> int:
        return sum(answer.num_prompt for answer in self.answers)


async def ask(client: openai.AsyncOpenAI, prompt: Prompt) -> Answer:
    """One prompt, greedily."""
    reply = await client.chat.completions.create(
        model="demo",
        messages=prompt[0],  # type: ignore[arg-type]
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    assert reply.usage is not None, "the server always counts"
    details = reply.usage.prompt_tokens_details
    cached = details.cached_tokens if details is not None else None
    return Answer(reply.choices[0].message.content or "", reply.usage.prompt_tokens, cached or 0)


async def run(url: str, prompts: list[Prompt], num_clients: int) -> Pass:
    """Ask all prompts with at most `num_clients` under way at once."""
    free = asyncio.Semaphore(num_clients)

    async def wait_and_ask(prompt: Prompt) -> Answer:
        async with free:
            return await ask(client, prompt)

    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", timeout=600) as client:
        await client.models.list()  # the client's own first-use costs are not the server's
        started = time.perf_counter()
        answers = await asyncio.gather(*map(wait_and_ask, prompts))
        return Pass(answers, time.perf_counter() - started)


def by_length(prompts: list[Prompt], answers: list[Answer]) -> dict[str, tuple[int, int]]:
    """Bucket of prompt tokens -> right answers, prompts."""
    counts: dict[int, list[int]] = {}
    for (_, wanted), answer in zip(prompts, answers, strict=True):
        right_and_all = counts.setdefault(answer.num_prompt // BUCKET, [0, 0])
        right_and_all[0] += answer.text.strip() == wanted
        right_and_all[1] += 1
    return {f"{at * BUCKET}-{(at + 1) * BUCKET - 1}": (right, count) for at, (right, count) in sorted(counts.items())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="another folder of the demo's kind")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prompts = recall_prompts(NUM_PROMPTS, SEED)
    flags = ["--served-model-name", "demo"]
    # A server for each pass: what one leaves in the prefix cache would be what the other measures.
    with ServerProcess(arguments.model, *flags) as server:
        alone = asyncio.run(run(server.url, prompts, 1))
    with ServerProcess(arguments.model, *flags) as server:
        together = asyncio.run(run(server.url, prompts, NUM_CLIENTS))
    result = evaluate(prompts, alone, together)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if result["accuracy"] >= MIN_ACCURACY and not result["different"] else 1


def evaluate(prompts: list[Prompt], alone: Pass, together: Pass) -> dict[str, Any]:
    """Everything that is printed."""
    buckets = by_length(prompts, alone.answers)
    pairs = zip(alone.answers, together.answers, strict=True)
    return {
        "accuracy": sum(right for right, _ in buckets.values()) / len(prompts),
        "buckets": buckets,
        "different": [number for number, (one, other) in enumerate(pairs) if one.text != other.text],
        "alone": {"seconds": alone.seconds, "prompt_tokens": alone.num_prompt, "cached_tokens": alone.num_cached},
        "together": {"seconds": together.seconds, "prompt_tokens": together.num_prompt, "cached_tokens": together.num_cached},
    }


def show(result: dict[str, Any]) -> None:
    print(f"{'prompt tokens':>14} {'right':>6} {'of':>4}")
    for bucket, (right, count) in result["buckets"].items():
        print(f"{bucket:>14} {right:>6} {count:>4}  {right / count:7.1%}")
    print(f"{'all':>14} {result['accuracy']:>19.1%}  (at least {MIN_ACCURACY:.0%} wanted)")
    for name, label in (("alone", "one at a time"), ("together", f"{NUM_CLIENTS} at once")):
        one = result[name]
        print(f"{label:>14}: {one['seconds']:.1f} s, {one['cached_tokens']} of {one['prompt_tokens']} prompt tokens cached")
    different = result["different"]
    print("same answers in both passes" if not different else f"DIFFERENT answers to prompts {different}")


if __name__ == "__main__":
    sys.exit(main())
