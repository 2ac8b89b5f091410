"""Slices of the two headline models at their released widths, in bf16 on the CPU, over HTTP with the openai client.

    python -m benchmarks.headline_slices [--model flash-next|glm-flash] [--long 2200] [--json FILE]

Four layers each, with all widths, heads, streams and indices as released; what is cut so that it fits 8 GiB is printed: experts,
rows of the embedding, rows of the n-gram table. Weights are random, so what is said means nothing; what is
measured is that every part runs together. Four requests at once, one of them longer than the index's budget, then the same
again, then a second turn. Exits with 1 when a resend is not a hit. Answers of a resend may differ: in bf16 a result
depends on how many rows were computed together, and tokens of random weights are often as good as each other.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import openai
import torch

from benchmarks.server_process import ServerProcess
from tests.flash_shapes import FLASH_NEXT, GLM_FLASH, flash_next_slice, glm_flash_slice

VOCAB = 4096
LAYERS = 4
#: Slices by name: the config, and what of the release is cut.
SLICES: Mapping[str, tuple[dict[str, object], str]] = {
    "flash-next": (
        flash_next_slice(layers=LAYERS, experts=128, vocab=VOCAB, ngram_rows=100_000),
        f"{LAYERS} of {FLASH_NEXT['num_hidden_layers']} layers, 128 of {FLASH_NEXT['num_experts']} experts, {VOCAB:,} of "
        f"{FLASH_NEXT['vocab_size']:,} rows, n-gram heads of 100,000 instead of 20,000,000 rows",
    ),
    "glm-flash": (
        glm_flash_slice(layers=LAYERS, experts=64, vocab=VOCAB),
        f"{LAYERS} of {GLM_FLASH['num_hidden_layers']} layers, 64 of {GLM_FLASH['n_routed_experts']} experts, {VOCAB:,} of "
        f"{GLM_FLASH['vocab_size']:,} rows",
    ),
}
FLAGS = (
    "--load-format", "dummy", "--tokenizer", "demo", "--device", "cpu", "--dtype", "bfloat16", "--served-model-name", "slice",
    "--max-model-len", "4096", "--max-num-batched-tokens", "512", "--max-num-seqs", "8", "--kv-cache-memory", "1GiB",
)  # fmt: skip
MAX_TOKENS = 12
QUESTION = "The code of the red door is 4711. What is the code of the red door?"


@dataclass(frozen=True)
class Asked:
    """A request: a chat, or tokens to go on from."""

    name: str
    messages: list[dict[str, str]] | None = None
    tokens: list[int] | None = None


@dataclass(frozen=True)
class Answer:
    """What came back, and when."""

    name: str
    text: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float


async def ask(client: openai.AsyncOpenAI, asked: Asked, max_tokens: int = MAX_TOKENS) -> Answer:
    """One request, greedily."""
    started = time.perf_counter()
    more = {"ignore_eos": True}
    if asked.messages is not None:
        chat = await client.chat.completions.create(
            model="slice",
            messages=asked.messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=max_tokens,
            extra_body=more,
        )
        text, usage = chat.choices[0].message.content or "", chat.usage
    else:
        completion = await client.completions.create(
            model="slice", prompt=asked.tokens or [0], temperature=0, max_tokens=max_tokens, extra_body=more
        )
        text, usage = completion.choices[0].text, completion.usage
    assert usage is not None, "the server always counts"
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else None
    elapsed = time.perf_counter() - started
    return Answer(asked.name, text, usage.prompt_tokens, cached or 0, usage.completion_tokens, elapsed)


def requests(num_long: int) -> list[Asked]:
    """Two chats and two completions, of which one has `num_long` tokens."""
    generator = torch.Generator().manual_seed(0)
    system = {"role": "system", "content": "You are a careful clerk. " * 6}
    return [
        Asked("chat", [{"role": "user", "content": QUESTION}]),
        Asked("chat with system", [system, {"role": "user", "content": QUESTION}]),
        Asked("completion", tokens=torch.randint(0, VOCAB, (90,), generator=generator).tolist()),
        Asked("long completion", tokens=torch.randint(0, VOCAB, (num_long,), generator=generator).tolist()),
    ]


def second_turn(asked: Asked, answer: Answer) -> Asked:
    """The chat goes on after its answer."""
    assert asked.messages is not None, "only chats have turns"
    more = [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And of the blue one?"}]
    return Asked("second turn", [*asked.messages, *more])


async def talk(url: str, asked: Sequence[Asked]) -> dict[str, list[Answer]]:
    """All at once, all again, and a second turn."""
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", timeout=3600, max_retries=0) as client:
        first = await asyncio.gather(*(ask(client, one) for one in asked))
        again = await asyncio.gather(*(ask(client, one) for one in asked))
        turn = await ask(client, second_turn(asked[1], first[1]))
    return {"at once": list(first), "again": list(again), "next": [turn]}


def run_slice(config: Mapping[str, object], asked: Sequence[Asked], *flags: str) -> dict[str, object]:
    """Serve a config with random weights and ask. Returns what `--json` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        with ServerProcess(str(path), *FLAGS, *flags) as server:
            rounds = asyncio.run(talk(server.url, asked))
            limits = httpx.get(server.url + "/v1/limits").json()["memory"]
    kept = ("weights_nbytes", "num_parameters", "kv_nbytes_per_token", "state_nbytes_per_sequence", "cache_nbytes")
    return {
        "ready_s": server.ready_s,
        "memory": {name: limits[name] for name in kept},
        "answers": {name: [asdict(one) for one in answers] for name, answers in rounds.items()},
        "same": [one.text for one in rounds["at once"]] == [one.text for one in rounds["again"]],
        "num_same": sum(one.text == other.text for one, other in zip(rounds["at once"], rounds["again"], strict=True)),
        "all_hit": all(one.cached_tokens == one.prompt_tokens - 1 for one in rounds["again"]),
    }


def show(name: str, cut: str, result: dict[str, object]) -> None:
    memory, answers = result["memory"], result["answers"]
    assert isinstance(memory, dict)
    assert isinstance(answers, dict)
    print(f"{name}: {cut}")
    per_token, per_sequence = memory["kv_nbytes_per_token"], memory["state_nbytes_per_sequence"]
    weights_gib = memory["weights_nbytes"] / 2**30
    print(f"  {memory['num_parameters']:,} parameters, {weights_gib:.2f} GiB, ready in {result['ready_s']:.1f} s")
    print(f"  {per_token:,} bytes a token, {per_sequence:,} of state a sequence")
    print(f"  {'':>8} {'request':>18} {'prompt':>7} {'cached':>7} {'output':>7} {'seconds':>8}")
    for when, all_of_them in answers.items():
        for one in all_of_them:
            counts = f"{one['prompt_tokens']:>7,} {one['cached_tokens']:>7,} {one['output_tokens']:>7}"
            print(f"  {when:>8} {one['name']:>18} {counts} {one['seconds']:>8.2f}")
    print(
        f"  every resend a hit to the last token but one: {result['all_hit']}; same answers: {result['num_same']} of 4",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SLICES), help="one of the two; default: both")
    parser.add_argument("--long", type=int, default=2200, help="tokens of the long prompt; the indices choose 2,048")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    for name, (config, cut) in SLICES.items():
        if arguments.model in (None, name):
            results[name] = run_slice(config, requests(arguments.long))
            show(name, cut, results[name])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if all(one["all_hit"] for one in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
