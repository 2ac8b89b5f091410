"""Seeded text tasks with checkable answers: recall, copying, sums, short instructions, ten-turn chats.

Owns the wording and the random draws, and nothing else: no tensors, no tokenizer, no HTTP. `train_demo.py`
trains the demo weights on `training_dialogue`. Evaluations, in process or over HTTP, ask the `*_prompts`
functions, which draw from random streams of their own: no seed of an evaluation is a seed of the training.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

__all__ = [
    "Message",
    "Prompt",
    "Stage",
    "arithmetic_prompts",
    "chat_prompts",
    "copy_prompts",
    "corpus",
    "instruction_prompts",
    "recall_prompts",
    "training_dialogue",
]

Message = dict[str, str]
Prompt = tuple[list[Message], str]
# Draws a question and its answer.
Turn = Callable[[random.Random], tuple[str, str]]

# Text between these control characters inside a user message is also trained on (see `_repeat_facts`).
TARGET_OPEN, TARGET_CLOSE = "\x02", "\x03"

MAX_FACTS = 27
MAX_OPERAND = 20

NAMES = (  # noqa: SIM905 (forty-eight quoted words read worse)
    "Ada Amy Anna Ben Bob Carl Clara Dan David Dora Ella Emma Eric Eva Felix Finn Frank Grace Greta Hana "
    "Henry Hugo Ida Ivan Jack Jane John Julia Karl Kate Lara Leo Lisa Lucy Mark Mary Max Mia Nina Noah "
    "Nora Olga Oscar Paul Peter Rosa Sam Tom"
).split()

WORDS = (  # noqa: SIM905 (as above)
    "apple bird boat book bread bridge car cat chair cloud coin door dog fire fish flower glass gold "
    "green hand horse house key lake lamp leaf milk moon mouse paper red ring river road rose salt sand "
    "ship snow star stone sun table tea tree water wind wood"
).split()

FILLERS = (
    "The weather was mild.",
    "It was a long day.",
    "The train was late again.",
    "We had tea by the lake.",
    "The house by the river is green.",
    "There was snow on the road.",
    "The meeting is on Monday.",
    "Please keep this in mind.",
    "The door was open.",
    "She read a book in the sun.",
    "The shop is closed today.",
    "He likes the old bridge.",
    "A bird sat on the chair.",
    "Nobody knows the answer yet.",
    "The list is long.",
    "We will talk about it later.",
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a small demo model.",
    "Answer in one word.",
    "Be short.",
)

ACKNOWLEDGEMENT = "OK."
ACKNOWLEDGED = ("Keep these facts in mind.", "Remember this.", "Please remember these facts.", "Note this.")

INSTRUCTIONS = {
    "Hello!": ("Say hello.", "say hello", "Hello.", "Hi!", "Hello!", "Please say hello."),
    "I am a small demo model.": ("Who are you?", "who are you", "What are you?", "Tell me who you are."),
    "You are welcome.": ("Thank you.", "Thanks!", "thank you"),
    "Goodbye!": ("Say goodbye.", "Goodbye!", "Bye.", "say goodbye"),
}

COPY_TEMPLATES = ("Repeat: {}", 'Repeat "{}".', 'Say "{}".', 'Copy "{}".', 'Repeat after me: "{}"')

SUM_TEMPLATES = ("What is {} plus {}?", "{} plus {}?", "Add {} and {}.", "What is {} + {}?", "{} + {} =")

# In quotes a value is the same token as in an answer, where no space comes before it either.
# Name and value are at most three tokens apart, which the convolution of a gated delta layer spans.
FACT_TEMPLATES = (
    '{name}: "{value}".',
    '{name} has "{value}".',
    'The {noun} of {name} is "{value}".',
    'The {noun} of {name}: "{value}".',
)

QUESTION_TEMPLATES = (
    "What is the {noun} of {name}?",
    "The {noun} of {name}?",
    "What is {name}'s {noun}?",
    "Tell me the {noun} of {name}.",
    "Which {noun} does {name} have?",
)


def _code(rng: random.Random) -> str:
    return str(rng.randint(10, 99))


def _password(rng: random.Random) -> str:
    return rng.choice(WORDS)


VALUE_KINDS: dict[str, Callable[[random.Random], str]] = {"code": _code, "password": _password}


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum: how hard the recall dialogues of a training batch may be."""

    max_facts: int
    max_fillers: int = 0
    num_questions: int = 4
    num_repeats: int = 0
    kinds: tuple[str, ...] = tuple(VALUE_KINDS)
    num_fact_templates: int = len(FACT_TEMPLATES)
    num_names: int = len(NAMES)


FINAL_STAGE = Stage(max_facts=MAX_FACTS, max_fillers=34)


@dataclass(frozen=True)
class _Facts:
    """Values of one kind, by name; `noun` is what the kind is called in a sentence."""

    noun: str
    values: dict[str, str]

    @classmethod
    def draw(cls, rng: random.Random, num_facts: int, stage: Stage) -> _Facts:
        noun = rng.choice(stage.kinds)
        names = rng.sample(NAMES[: stage.num_names], num_facts)
        return cls(noun, {name: VALUE_KINDS[noun](rng) for name in names})

    def sentence(self, rng: random.Random, name: str, value: str, stage: Stage) -> str:
        template = rng.choice(FACT_TEMPLATES[: stage.num_fact_templates])
        return template.format(name=name, noun=self.noun, value=value)

    def question(self, rng: random.Random, name: str) -> str:
        return rng.choice(QUESTION_TEMPLATES).format(name=name, noun=self.noun)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _maybe_system(rng: random.Random) -> list[Message]:
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.3 else []


def _facts_text(rng: random.Random, facts: _Facts, stage: Stage) -> str:
    sentences = [facts.sentence(rng, name, value, stage) for name, value in facts.values.items()]
    for _ in range(rng.randint(0, stage.max_fillers)):
        sentences.insert(rng.randint(0, len(sentences)), rng.choice(FILLERS))
    # Names then always follow a space, so that a name is the same token wherever it stands.
    return "Facts: " + " ".join(sentences)


def _repeat_facts(rng: random.Random, facts: _Facts, stage: Stage) -> str:
    """Facts told a second time, their values marked as targets: the cheapest recall questions there are."""
    names = rng.choices(list(facts.values), k=stage.num_repeats)
    marked = [f"{TARGET_OPEN}{facts.values[name]}{TARGET_CLOSE}" for name in names]
    sentences = [facts.sentence(rng, name, value, stage) for name, value in zip(names, marked, strict=True)]
    return "".join(" " + sentence for sentence in sentences)


def _recall_dialogue(rng: random.Random, stage: Stage, num_facts: int) -> list[Message]:
    """Facts in the system message, in the first user message, or in a turn of their own, then questions."""
    facts = _Facts.draw(rng, num_facts, stage)
    text = _facts_text(rng, facts, stage) + _repeat_facts(rng, facts, stage)
    names = rng.sample(list(facts.values), min(stage.num_questions, num_facts))
    first, *others = [(facts.question(rng, name), facts.values[name]) for name in names]
    place = rng.random()
    if place < 0.7:
        messages = [*_maybe_system(rng), _user(f"{text} {first[0]}")]
    elif place < 0.85:
        messages = [{"role": "system", "content": text}, _user(first[0])]
    else:
        told = _user(f"{text} {rng.choice(ACKNOWLEDGED)}")
        messages = [*_maybe_system(rng), told, _assistant(ACKNOWLEDGEMENT), _user(first[0])]
    messages.append(_assistant(first[1]))
    for question, value in others:
        messages += [_user(question), _assistant(value)]
    return messages


def _copy_turn(rng: random.Random) -> tuple[str, str]:
    phrase = " ".join(rng.sample(WORDS, rng.randint(1, 6)))
    return rng.choice(COPY_TEMPLATES).format(phrase), phrase


def _sum_turn(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(0, MAX_OPERAND), rng.randint(0, MAX_OPERAND)
    return rng.choice(SUM_TEMPLATES).format(a, b), str(a + b)


def _instruction_turn(rng: random.Random) -> tuple[str, str]:
    answer = rng.choice(list(INSTRUCTIONS))
    return rng.choice(INSTRUCTIONS[answer]), answer


def _short_dialogue(rng: random.Random, num_turns: int) -> list[Message]:
    """Turns that need nothing from earlier turns."""
    messages = _maybe_system(rng)
    for _ in range(num_turns):
        turn = rng.choices((_copy_turn, _sum_turn, _instruction_turn), weights=(3, 5, 1))[0]
        question, answer = turn(rng)
        messages += [_user(question), _assistant(answer)]
    return messages


def _chat_dialogue(rng: random.Random, num_turns: int) -> list[Message]:
    """Turns that tell one to three facts, ask for an earlier fact, or are short tasks; the last one asks."""
    facts = _Facts.draw(rng, 3 * num_turns, FINAL_STAGE)
    untold = list(facts.values)
    told: list[str] = []
    messages = _maybe_system(rng)
    for turn in range(num_turns):
        choice = rng.random()
        if turn == 0 or (choice < 0.35 and turn < num_turns - 1):
            names = [untold.pop() for _ in range(rng.randint(1, 3))]
            told += names
            text = " ".join(facts.sentence(rng, name, facts.values[name], FINAL_STAGE) for name in names)
            question, answer = f"Facts: {text} {rng.choice(ACKNOWLEDGED)}", ACKNOWLEDGEMENT
        elif choice < 0.8 or turn == num_turns - 1:
            name = rng.choice(told)
            question, answer = facts.question(rng, name), facts.values[name]
        else:
            question, answer = rng.choice((_copy_turn, _sum_turn, _instruction_turn))(rng)
        messages += [_user(question), _assistant(answer)]
    return messages


def training_dialogue(stream: str, task: str, stage: Stage, num_facts: int) -> list[Message]:
    """A dialogue whose assistant messages and marked spans are to be learned; `stream` names the draw."""
    rng = random.Random(f"train/{stream}")
    if task == "drill":
        return _recall_dialogue(rng, stage, num_facts)
    if task == "recall":
        return _recall_dialogue(rng, replace(stage, num_repeats=0), num_facts)
    if task == "chat":
        return _chat_dialogue(rng, rng.randint(3, 10))
    return _short_dialogue(rng, rng.randint(2, 8))


def corpus(num_dialogues: int) -> list[str]:
    """Message texts of all tasks, each name and word equally often, for training a tokenizer."""
    texts = [f" {name} {name}" for name in NAMES * 200] + [f"{word} {word}" for word in WORDS * 200]
    texts += [f"{number} {number}" for number in list(range(100)) * 200]
    for index in range(num_dialogues):
        for task in ("recall", "chat", "short"):
            dialogue = training_dialogue(f"corpus/{index}/{task}", task, FINAL_STAGE, 1 + index % MAX_FACTS)
            texts += [message["content"] for message in dialogue]
    return texts


def _held_out(task: str, seed: int) -> random.Random:
    return random.Random(f"held-out/{task}/{seed}")


def _as_prompts(dialogues: list[list[Message]]) -> list[Prompt]:
    return [(dialogue[:-1], dialogue[-1]["content"]) for dialogue in dialogues]


def recall_prompts(n: int, seed: int) -> list[Prompt]:
    """Prompts that tell 1 to 27 facts amid fillers and ask for one of them."""
    rng = _held_out("recall", seed)
    stage = replace(FINAL_STAGE, num_questions=1)
    return _as_prompts([_recall_dialogue(rng, stage, rng.randint(1, MAX_FACTS)) for _ in range(n)])


def chat_prompts(n: int, seed: int, num_turns: int = 10) -> list[Prompt]:
    """Chats whose last turn asks for a fact of an earlier turn."""
    rng = _held_out("chat", seed)
    return _as_prompts([_chat_dialogue(rng, num_turns) for _ in range(n)])


def _single_turns(n: int, rng: random.Random, turn: Turn) -> list[Prompt]:
    pairs = [turn(rng) for _ in range(n)]
    return [([_user(question)], answer) for question, answer in pairs]


def copy_prompts(n: int, seed: int) -> list[Prompt]:
    """Requests to repeat one to six words."""
    return _single_turns(n, _held_out("copy", seed), _copy_turn)


def arithmetic_prompts(n: int, seed: int) -> list[Prompt]:
    """Sums of two numbers up to `MAX_OPERAND`."""
    return _single_turns(n, _held_out("arithmetic", seed), _sum_turn)


def instruction_prompts(n: int, seed: int) -> list[Prompt]:
    """Greetings and questions about the model, with fixed answers."""
    return _single_turns(n, _held_out("instruction", seed), _instruction_turn)
