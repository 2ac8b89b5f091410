"""Train the demo weights that ship in `hybridserve/demo`, tokenizer included, on two CPU cores.

    python benchmarks/train_demo.py

Owns the tokenizer, the architecture and the training loop; the tasks are those of `recall_tasks.py`. The model is a
transformers `Qwen3_5ForCausalLM` with gated-delta and gated full-attention layers, trained with a differentiable chunked
delta rule in place of the slow fallback of transformers. What was exported is evaluated with unmodified transformers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import recall_tasks as tasks
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [PAD, IM_START, IM_END]

# Digits in pairs, so that a two-digit number is one token; a word takes the space before it along.
PRETOKEN_PATTERN = r"'s| ?\p{N}{1,2}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s"

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

IGNORED = -100
CHUNK = 32

CURRICULUM = (
    tasks.Stage(max_facts=4, num_repeats=14, num_questions=2, num_fact_templates=1),
    tasks.Stage(max_facts=8, num_repeats=12, num_questions=4, num_fact_templates=2),
    tasks.Stage(max_facts=12, num_repeats=8, num_questions=6, max_fillers=2, kinds=tuple(tasks.VALUE_KINDS)),
    tasks.Stage(max_facts=18, num_questions=8, max_fillers=4, kinds=tuple(tasks.VALUE_KINDS)),
    tasks.Stage(max_facts=tasks.MAX_FACTS, num_questions=10, max_fillers=24, kinds=tuple(tasks.VALUE_KINDS)),
)
# Running accuracy of recall at which the next stage starts.
PROMOTION_ACCURACY = 0.9


@dataclass(frozen=True)
class Settings:
    """What a run depends on; the defaults made the weights that ship."""

    out: Path
    steps: int
    layers: str
    learning_rate: float = 2e-3
    tokens_per_batch: int = 5000
    warmup_steps: int = 50
    decay_fraction: float = 0.3
    evaluate_every: int = 250
    vocab_size: int = 1024
    seed: int = 0


def train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the texts of the tasks; all 256 bytes are in, so any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    roles = ["system\n", "user\n", "assistant\n"] * 1000
    tokenizer.train_from_iterator(tasks.corpus(1000) + roles, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def build_model(layers: str, vocab_size: int, eos_id: int, pad_id: int) -> Qwen3_5ForCausalLM:
    """A model with one layer per letter of `layers`: L is gated delta, F is gated full attention."""
    kinds = {"L": "linear_attention", "F": "full_attention"}
    config = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(layers),
        layer_types=[kinds[letter] for letter in layers],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=2048,
        # Tied embeddings, or the default initializer range of 0.02, keep a model this small from learning to recall.
        tie_word_embeddings=False,
        initializer_range=0.05,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
        dtype="float32",
        architectures=["Qwen3_5ForCausalLM"],
    )
    return Qwen3_5ForCausalLM(config)


def chunked_gated_delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_unused: object
) -> tuple[Tensor, None]:
    """Gated delta rule from a zero state, in chunks whose inner part is one triangular solve.

    query, key [B, T, H, K], value [B, T, H, V], g (log decay) and beta [B, T, H], all fp32; returns [B, T, H, V].
    Same arithmetic as `torch_chunk_gated_delta_rule` of transformers, which loops over the rows of a chunk instead.
    """
    batch, length, heads, key_dim = key.shape
    pad = -length % CHUNK

    def chunked(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, pad))
        return padded.unflatten(1, (-1, CHUNK)).transpose(2, 3)

    query = chunked(modeling_qwen3_5.l2norm(query) * key_dim**-0.5)
    key, value, beta = chunked(modeling_qwen3_5.l2norm(key)), chunked(value), chunked(beta).unsqueeze(-1)
    decay = chunked(g).cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    pair_decay = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~causal, float("-inf")).exp()
    from_start, to_end = decay.exp().unsqueeze(-1), (decay[..., -1:] - decay).exp().unsqueeze(-1)

    system = ((key @ key.mT) * pair_decay * beta).tril(-1) + torch.eye(CHUNK)
    right = torch.cat([value * beta, key * beta * from_start], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new_value, new_key = solved.split([value.shape[-1], key_dim], dim=-1)

    inner, query, key = (query @ key.mT) * pair_decay, query * from_start, (key * to_end).mT
    chunk_decay = from_start[..., -1:, :]
    state = value.new_zeros(batch, heads, key_dim, value.shape[-1])
    outputs = []
    for i in range(decay.shape[1]):
        corrected = new_value[:, i] - new_key[:, i] @ state
        outputs.append(query[:, i] @ state + inner[:, i] @ corrected)
        state = state * chunk_decay[:, i] + key[:, i] @ corrected
    return torch.stack(outputs, dim=1).transpose(2, 3).flatten(1, 2)[:, :length], None


@contextmanager
def fast_delta_rule() -> Iterator[None]:
    """Within the context, models of transformers use `chunked_gated_delta`; without, they are as published."""
    published = modeling_qwen3_5.torch_chunk_gated_delta_rule
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunked_gated_delta
    try:
        yield
    finally:
        modeling_qwen3_5.torch_chunk_gated_delta_rule = published


def segments(messages: list[tasks.Message]) -> Iterator[tuple[str, bool]]:
    """The dialogue as its chat template renders it, in pieces that are to be learned (True) or only read (False)."""
    for message in messages:
        yield f"{IM_START}{message['role']}\n", False
        if message["role"] == "assistant":
            yield message["content"] + IM_END, True
            yield "\n", False
            continue
        for piece in message["content"].split(tasks.TARGET_OPEN):
            target, closed, rest = piece.rpartition(tasks.TARGET_CLOSE)
            if closed:
                yield target, True
            yield rest, False
        yield f"{IM_END}\n", False


class DialogueEncoder:
    """Token ids and labels of dialogues; remembers the ids of pieces, most of which recur."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._pad_id = tokenizer.pad_token_id

    def encode(self, messages: list[tasks.Message]) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        labels: list[int] = []
        pieces = list(segments(messages))
        encodings = self._backend.encode_batch([text for text, _ in pieces])
        for encoding, (_, is_target) in zip(encodings, pieces, strict=True):
            ids += encoding.ids
            labels += encoding.ids if is_target else [IGNORED] * len(encoding.ids)
        return ids, labels

    def collate(self, dialogues: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
        """Ids and labels [B, T], padded at the right, where a causal model needs no mask."""
        length = max(len(ids) for ids, _ in dialogues)
        ids = [row + [self._pad_id] * (length - len(row)) for row, _ in dialogues]
        labels = [row + [IGNORED] * (length - len(row)) for _, row in dialogues]
        return torch.tensor(ids), torch.tensor(labels)


def target_logits(model: Qwen3_5ForCausalLM, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [N, vocabulary] before each of the N labelled tokens of [B, T], and those tokens [N]."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    is_target = labels[:, 1:] != IGNORED
    return model.lm_head(hidden[:, :-1][is_target]), labels[:, 1:][is_target]


def training_batch(encoder: DialogueEncoder, step: int, stage_index: int, settings: Settings) -> tuple[str, Tensor, Tensor]:
    """Task, ids and labels [B, T] of a step: dialogues of one task and about one length."""
    rng = random.Random(f"{settings.seed}/{step}")
    task = rng.choices(("recall", "short", "chat"), weights=(8, 2, 1 if stage_index > 1 else 0))[0]
    stage = CURRICULUM[stage_index]
    # The square root prefers many facts, which are harder.
    num_facts = max(2, round(stage.max_facts * rng.random() ** 0.5))
    dialogues: list[tuple[list[int], list[int]]] = []
    longest = 0
    for index in itertools.count():
        stream = f"{settings.seed}/{step}/{index}"
        dialogues.append(encoder.encode(tasks.training_dialogue(stream, task, stage, num_facts)))
        longest = max(longest, len(dialogues[-1][0]))
        if longest * len(dialogues) >= settings.tokens_per_batch:
            break
    return task, *encoder.collate(dialogues)


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up, plateau, and linear decay to nearly zero."""
    decay_steps = settings.steps * settings.decay_fraction
    return settings.learning_rate * min(
        1.0, (step + 1) / settings.warmup_steps, (settings.steps - step) / decay_steps
    )


@torch.no_grad()
def quick_accuracy(model: Qwen3_5ForCausalLM, encoder: DialogueEncoder, prompts: list[tasks.Prompt]) -> float:
    """Share of prompts whose greedy answer is exact.

    One pass over prompt and answer decides it: greedy decoding gives the answer if and only if each of its tokens is
    the most likely one after those before it.
    """
    exact = 0
    for messages, answer in prompts:
        ids, labels = encoder.encode([*messages, {"role": "assistant", "content": answer}])
        answer_start = len(ids) - next(i for i, label in enumerate(reversed(labels[:-1])) if label == IGNORED) - 1
        only_answer = [IGNORED] * answer_start + labels[answer_start:]
        logits, targets = target_logits(model, torch.tensor([ids]), torch.tensor([only_answer]))
        exact += bool((logits.argmax(-1) == targets).all())
    return exact / len(prompts)


def held_out_prompts(n: int, seed: int) -> dict[str, list[tasks.Prompt]]:
    """`n` prompts of each task."""
    return {
        "recall": tasks.recall_prompts(n, seed),
        "chat": tasks.chat_prompts(n, seed),
        "copy": tasks.copy_prompts(n, seed),
        "arithmetic": tasks.arithmetic_prompts(n, seed),
        "instruction": tasks.instruction_prompts(n, seed),
    }


def export(model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the folder; each file appears whole, because others may be reading an earlier export."""
    fresh = out.with_name(out.name + ".tmp")
    fresh.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(fresh)
    save_file(dict(model.state_dict()), fresh / "model.safetensors", metadata={"format": "pt"})
    for path in fresh.iterdir():
        os.replace(path, out / path.name)
    fresh.rmdir()


def train(settings: Settings) -> None:
    """Train, and export whenever the held-out accuracy improves."""
    torch.manual_seed(settings.seed)
    tokenizer = train_tokenizer(settings.vocab_size)
    encoder = DialogueEncoder(tokenizer)
    model = build_model(settings.layers, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    start, stage_index, running, best = time.monotonic(), 0, 0.0, -1.0
    for step in range(settings.steps):
        task, ids, labels = training_batch(encoder, step, stage_index, settings)
        logits, targets = target_logits(model, ids, labels)
        loss = F.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        optimizer.step()
        if task == "recall":
            is_value = targets != tokenizer.eos_token_id
            accuracy = (logits.argmax(-1) == targets)[is_value].float().mean().item()
            running = 0.95 * running + 0.05 * accuracy
            if running > PROMOTION_ACCURACY and stage_index < len(CURRICULUM) - 1:
                stage_index, running = stage_index + 1, 0.5
        if step % 25 == 0:
            shape = "x".join(str(n) for n in ids.shape)
            print(
                f"{time.monotonic() - start:5.0f} s  step {step}  stage {stage_index}  {task} {shape}  "
                f"loss {loss.item():.3f}  recall {running:.3f}",
                flush=True,
            )
        if (step + 1) % settings.evaluate_every == 0 or step + 1 == settings.steps:
            scores = {
                name: quick_accuracy(model, encoder, prompts) for name, prompts in held_out_prompts(60, 1000).items()
            }
            print("      ", json.dumps(scores), flush=True)
            score = sum(scores.values())
            if score > best:
                best = score
                export(model, tokenizer, settings.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "hybridserve" / "demo")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--layers", default="LF", help="one letter per layer: L gated delta, F full attention")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(out=arguments.out, steps=arguments.steps, layers=arguments.layers)
    with fast_delta_rule():
        train(settings)


if __name__ == "__main__":
    main()
