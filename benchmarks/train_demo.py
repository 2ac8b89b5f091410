"""Train the demo weights that ship in `hybridserve/demo`, tokenizer included, on two CPU cores.

    python -m benchmarks.train_demo

Owns the tokenizer, the architecture and the training loop; the tasks are those of `recall_tasks.py`. The
model is a `Qwen3_5ForCausalLM` of transformers with gated delta and gated full-attention layers, trained with
a chunked delta rule in place of the slow fallback of transformers. What was exported is then evaluated with
transformers as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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

from benchmarks import recall_tasks as tasks

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
VALIDATION_SEED, TEST_SEED = 1000, 0
LENGTH_BUCKET = 100

CURRICULUM = (
    # Few names first: the circuit that matches a name to its value then forms in a hundred steps.
    tasks.Stage(4, num_repeats=14, num_questions=2, num_fact_templates=1, num_names=8, kinds=("code",)),
    # Only questions: carrying the name from the question to the answer is learned apart from matching it.
    tasks.Stage(4, num_questions=4, num_fact_templates=2, num_names=8),
    tasks.Stage(8, num_repeats=8, num_questions=6, num_names=24),
    tasks.Stage(16, num_repeats=12, num_questions=6, max_fillers=3),
    tasks.Stage(tasks.MAX_FACTS, num_repeats=12, num_questions=10, max_fillers=34),
)
# Running accuracy of recall at which the next stage starts.
PROMOTION_ACCURACY = 0.75
# How often a batch is of which task; dialogues without drill wait until all names are in use.
EARLY_MIX = {"drill": 8, "short": 2}
FULL_MIX = {"drill": 4, "recall": 5, "short": 3, "chat": 1}


@dataclass(frozen=True)
class Settings:
    """What a run depends on; the defaults made the weights that ship."""

    out: Path
    steps: int
    layers: str
    learning_rate: float = 2e-3
    tokens_per_batch: int = 2000
    warmup_steps: int = 50
    decay_fraction: float = 0.5
    report_every: int = 25
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
        # With tied embeddings, or the default range of 0.02, a model this small doesn't learn to recall.
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
    model = Qwen3_5ForCausalLM(config)
    initialise(model)
    return model


@torch.no_grad()
def initialise(model: Qwen3_5ForCausalLM) -> None:
    """Start from memories of one to a thousand tokens, as in Mamba, and from attention that can be sharp.

    By default a gated delta head forgets within one or two tokens, and normalized queries and keys of 32
    dimensions leave attention too flat to pick one fact of 27.
    """
    for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
        if kind == "linear_attention":
            mixer = layer.linear_attn
            step_size = torch.logspace(-3, -1, len(mixer.dt_bias))
            # The inverse of the softplus that is applied to it.
            mixer.dt_bias.copy_(step_size + torch.log(-torch.expm1(-step_size)))
            mixer.A_log.copy_(torch.linspace(1, 8, len(mixer.A_log)).log())
        else:
            # One is added to these weights, so logits reach about twice the default.
            layer.self_attn.q_norm.weight.fill_(0.4)
            layer.self_attn.k_norm.weight.fill_(0.4)


def chunked_gated_delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_unused: object
) -> tuple[Tensor, None]:
    """Gated delta rule from a zero state, in chunks whose inner part is one triangular solve.

    query, key [B, T, H, K], value [B, T, H, V], log decay g and beta [B, T, H], fp32; returns [B, T, H, V].
    Computes what `torch_chunk_gated_delta_rule` of transformers does, whose loop over rows is slow to train.
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
    """Within the context, models of transformers use `chunked_gated_delta`."""
    published = modeling_qwen3_5.torch_chunk_gated_delta_rule
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunked_gated_delta
    try:
        yield
    finally:
        modeling_qwen3_5.torch_chunk_gated_delta_rule = published


def segments(messages: list[tasks.Message]) -> Iterator[tuple[str, bool]]:
    """The dialogue as the chat template renders it, in pieces to be learned (True) or only read (False)."""
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
    """Token ids and labels of dialogues; a label is the id of a token to be learned, or `IGNORED`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._pad_id = tokenizer.pad_token_id

    def encode(self, messages: list[tasks.Message]) -> tuple[list[int], list[int]]:
        """Ids and labels. Pieces are encoded one by one, so the ids of a shorter dialogue are a prefix."""
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


def training_batch(
    encoder: DialogueEncoder,
    step: int,
    stage: tasks.Stage,
    settings: Settings,
) -> tuple[str, Tensor, Tensor]:
    """Task, ids and labels [B, T] of a step: dialogues of one task and about one length."""
    rng = random.Random(f"{settings.seed}/{step}")
    mix = FULL_MIX if stage.num_names == len(tasks.NAMES) else EARLY_MIX
    task = rng.choices(list(mix), weights=list(mix.values()))[0]
    # The square root prefers many facts, which are harder.
    num_facts = max(2, round(stage.max_facts * rng.random() ** 0.5))
    dialogues: list[tuple[list[int], list[int]]] = []
    longest = 0
    while longest * len(dialogues) < settings.tokens_per_batch:
        stream = f"{settings.seed}/{step}/{len(dialogues)}"
        dialogues.append(encoder.encode(tasks.training_dialogue(stream, task, stage, num_facts)))
        longest = max(longest, len(dialogues[-1][0]))
    return task, *encoder.collate(dialogues)


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up, plateau, and linear decay to nearly zero."""
    warm_up = (step + 1) / settings.warmup_steps
    decay = (settings.steps - step) / (settings.steps * settings.decay_fraction)
    return settings.learning_rate * min(1.0, warm_up, decay)


@torch.no_grad()
def quick_accuracy(model: Qwen3_5ForCausalLM, encoder: DialogueEncoder, prompts: list[tasks.Prompt]) -> float:
    """Share of prompts whose greedy answer is exact.

    One pass over prompt and answer decides it: greedy decoding gives the answer if and only if each of its
    tokens is the most likely one after those before it.
    """
    exact = 0
    for messages, answer in prompts:
        num_read = len(encoder.encode(messages)[0])
        ids, labels = encoder.encode([*messages, {"role": "assistant", "content": answer}])
        labels[:num_read] = [IGNORED] * num_read
        logits, targets = target_logits(model, torch.tensor([ids]), torch.tensor([labels]))
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
    eos_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    GenerationConfig(do_sample=False, eos_token_id=eos_id, pad_token_id=pad_id).save_pretrained(fresh)
    save_file(dict(model.state_dict()), fresh / "model.safetensors", metadata={"format": "pt"})
    (fresh / "model.safetensors").chmod(0o644)
    for path in fresh.iterdir():
        os.replace(path, out / path.name)
    fresh.rmdir()


@dataclass
class Curriculum:
    """Where the run stands in `CURRICULUM`: a stage is left once its questions are answered well."""

    index: int = 0
    accuracy: float = 0.0

    @property
    def stage(self) -> tasks.Stage:
        return CURRICULUM[self.index]

    def observe(self, accuracy: float) -> None:
        self.accuracy = 0.9 * self.accuracy + 0.1 * accuracy
        if self.accuracy > PROMOTION_ACCURACY and self.index < len(CURRICULUM) - 1:
            self.index, self.accuracy = self.index + 1, 0.5


def build_optimizer(model: Qwen3_5ForCausalLM, settings: Settings) -> torch.optim.AdamW:
    """AdamW that decays matrices, but not the norms, decay rates and biases."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98))


def optimize(
    model: Qwen3_5ForCausalLM,
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    labels: Tensor,
) -> tuple[float, float]:
    """One update from ids and labels [B, T]; returns loss and accuracy, the latter without `IM_END`."""
    logits, targets = target_logits(model, ids, labels)
    loss = F.cross_entropy(logits, targets)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    is_content = targets != model.config.eos_token_id
    return loss.item(), (logits.argmax(-1) == targets)[is_content].float().mean().item()


def train(settings: Settings) -> None:
    """Train, and export whenever the accuracy on held-out prompts improves."""
    torch.manual_seed(settings.seed)
    tokenizer = train_tokenizer(settings.vocab_size)
    encoder = DialogueEncoder(tokenizer)
    model = build_model(settings.layers, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    optimizer = build_optimizer(model, settings)
    validation = held_out_prompts(60, VALIDATION_SEED)
    curriculum, best, start = Curriculum(), -1.0, time.monotonic()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        task, ids, labels = training_batch(encoder, step, curriculum.stage, settings)
        loss, accuracy = optimize(model, optimizer, ids, labels)
        if task in {"drill", "recall"}:
            curriculum.observe(accuracy)
        if step % settings.report_every == 0:
            print(
                f"{time.monotonic() - start:5.0f} s  step {step}  stage {curriculum.index}  "
                f"{task} {tuple(ids.shape)}  loss {loss:.3f}  recall {curriculum.accuracy:.3f}",
                flush=True,
            )
        if (step + 1) % settings.evaluate_every == 0 or step + 1 == settings.steps:
            scores = {name: quick_accuracy(model, encoder, prompts) for name, prompts in validation.items()}
            print("       validation", scores, flush=True)
            if sum(scores.values()) >= best:
                best = sum(scores.values())
                export(model, tokenizer, settings.out)


@torch.no_grad()
def evaluate_export(folder: Path, num_prompts: int = 200) -> dict[str, dict[str, int]]:
    """Print and return how often transformers, loading the exported folder, generates exactly the expected answer."""
    exact_of: dict[str, dict[str, int]] = {}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, prompts in held_out_prompts(num_prompts, TEST_SEED).items():
        outcomes: dict[int, list[bool]] = defaultdict(list)
        for messages, answer in prompts:
            inputs = tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
            num_read = inputs["input_ids"].shape[1]
            output = model.generate(**inputs, max_new_tokens=32)[0, num_read:]
            is_exact = tokenizer.decode(output, skip_special_tokens=True) == answer
            outcomes[num_read // LENGTH_BUCKET].append(is_exact)
        total = [exact for bucket in outcomes.values() for exact in bucket]
        print(f"{name}: {sum(total)} of {len(total)} exact")
        exact_of[name] = {"exact": sum(total), "prompts": len(total)}
        for bucket, exact in sorted(outcomes.items()):
            first = bucket * LENGTH_BUCKET
            print(f"    {first} to {first + LENGTH_BUCKET - 1} tokens: {sum(exact)} of {len(exact)}")
    return exact_of


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo weights and evaluate them.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "hybridserve" / "demo")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--layers", default="LF", help="a letter each: L gated delta, F full attention")
    parser.add_argument("--evaluate-only", action="store_true", help="evaluate what --out holds")
    parser.add_argument("--json", type=Path, help="write how many answers were exact to this file")
    arguments = parser.parse_args()
    # A second thread makes tensors this small slower, and leaves no core for anything else.
    torch.set_num_threads(1)
    if not arguments.evaluate_only:
        with fast_delta_rule():
            train(Settings(out=arguments.out, steps=arguments.steps, layers=arguments.layers))
    found = evaluate_export(arguments.out)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
