"""The chat section: tokenizer, template, the formats of tools and reasoning, and where an answer stops.

Owns these findings. Must not know weights. Called by `checker.py` with what the template rendered.
"""

import hashlib
from pathlib import Path

from hybridserve.check.rendering import ANSWER, SYSTEM, TOOL, USER, Rendering
from hybridserve.check.report import Finding, failed, passed, warned
from hybridserve.check.source import Source
from hybridserve.config import EngineSettings
from hybridserve.engine.features import FEATURES
from hybridserve.engine.generation_config import model_vocab_size, read_json, read_sampling_defaults, token_ids
from hybridserve.engine.text import Tokenizer
from hybridserve.errors import HybridServeError, UnsupportedModelError, WeightsError
from hybridserve.origin import find, vocabulary_file

#: What in a template tells how the model writes a tool call, the most specific first.
TOOL_FORMATS = (
    ("<|tool_call_start|>", "lfm2: a Python-like list of calls in <|tool_call_start|>"),
    ("<function=", "qwen3_coder: <function=NAME> with <parameter=KEY> in <tool_call>"),
    ("<arg_key>", "glm: <arg_key> and <arg_value> pairs in <tool_call>"),
    ("<tool_call>", "hermes: a JSON object in <tool_call>"),
    ("<|tool_calls_section_begin|>", "kimi: sections of <|tool_call_begin|>"),
    ("<|tool▁calls▁begin|>", "deepseek: <|tool▁call▁begin|>"),
    ("[TOOL_CALLS]", "mistral: a JSON list after [TOOL_CALLS]"),
    ("<|tool_call|>", "granite: a JSON list after <|tool_call|>"),
    ("<|python_tag|>", "llama: JSON or code after <|python_tag|>"),
)
REASONING_FORMATS = (("<think>", "text in <think>"), ("<|channel|>", "harmony: channels"), ("[THINK]", "text in [THINK]"))
_FIRST_CHARS = 64


def text_folder(source: Source, settings: EngineSettings) -> Path:
    """Where tokenizer and template are: the model's folder, or what `--tokenizer` names. Raises UsageError."""
    if settings.tokenizer is None:
        return source.folder.path
    path = find(settings.tokenizer, with_weights=False)
    return path.parent if path.is_file() else path


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer, or None where there is no file of it.

    Raises UnsupportedModelError when its format is not read, WeightsError when the file is broken.
    """
    if vocabulary_file(folder) is None:
        return None
    try:
        return Tokenizer.from_folder(folder)
    except UnsupportedModelError:
        raise
    except HybridServeError as error:
        raise WeightsError(str(error)) from error


def check_tokenizer(tokenizer: Tokenizer | None, vocab_size: int) -> Finding:
    """That there is one, and that the model has a row for each of its tokens."""
    if tokenizer is None:
        return warned(
            "chat.tokenizer",
            "no vocabulary, such as a tokenizer.json: only token ids can be given, and `serve` refuses it",
            "name one with --tokenizer",
        )
    if tokenizer.vocab_size > vocab_size:
        return warned(
            "chat.tokenizer",
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, the model's embedding {vocab_size:,} rows: requests with one of "
            "the others are refused",
            "take the tokenizer that was published with the weights",
        )
    return passed("chat.tokenizer", f"{tokenizer.vocab_size:,} tokens in {vocab_size:,} rows of the embedding")


def check_template(rendering: Rendering) -> list[Finding]:
    """What the template can do, as seen from what it rendered."""
    if not rendering.cases:
        return [warned("chat.template", "the model has no chat template; chat requests are refused", "use completions")]
    plain = next(case for case in rendering.cases if case.name == "user")
    if plain.outcome != "rendered":
        return [
            warned(
                "chat.template", f"it does not render a single user's message: {plain.text:.300}", "take a newer release of it"
            )
        ]
    if USER not in plain.text:
        return [
            failed(
                "chat.template",
                WeightsError(
                    "the chat template leaves out what the user says, and the model would answer without the question; take it "
                    "from the model's publisher"
                ),
            )
        ]
    digest = hashlib.sha256(rendering.source.encode()).hexdigest()[:12]
    can = {
        "several turns": rendering.text_of("turns") is not None,
        "a system message": SYSTEM in (rendering.text_of("system") or ""),
        "tools": TOOL in (rendering.text_of("tools") or ""),
        "a switch for thinking": "enable_thinking" in rendering.source,
    }
    able, unable = ", ".join(k for k, v in can.items() if v), ", ".join(k for k, v in can.items() if not v)
    text = f"sha256 {digest}; takes {able or 'single messages only'}" + (f"; without {unable}" if unable else "")
    return [
        passed("chat.template", text),
        passed(
            "chat.tools", _format(rendering.source, TOOL_FORMATS, "tool_calling", "the template shows no format of tool calls")
        ),
        passed("chat.reasoning", _format(rendering.source, REASONING_FORMATS, "reasoning", "the template shows no reasoning")),
    ]


def check_stop_tokens(source: Source, tokenizer: Tokenizer, rendering: Rendering) -> Finding:
    """That the token with which the template ends an answer is one that ends generation."""
    stops = tokenizer.eos_token_ids
    said = token_ids(read_json(source.folder.path / "generation_config.json").get("eos_token_id"))
    listed = ", ".join(f"{tokenizer.token_text(one)!r} ({one})" for one in stops) or "none"
    size = model_vocab_size(source.folder.path)
    beyond = [one for one in _stated_ends(source) if one >= size]
    if beyond:
        return warned(
            "chat.stop",
            f"eos_token_id {beyond[0]} is beyond the model's vocabulary of {size} tokens, so it never ends an answer; "
            f"what does: {listed}",
            "correct eos_token_id in generation_config.json and config.json, or take both from the release of the weights",
        )
    if not stops:
        return warned(
            "chat.stop", "no token ends an answer: each runs to its max_tokens", "set eos_token_id in generation_config.json"
        )
    ending = _token_after_answer(tokenizer, rendering)
    if ending is not None and ending not in stops:
        name = f"{tokenizer.token_text(ending)!r} ({ending})"
        return warned(
            "chat.stop",
            f"the template ends an answer with {name}, which does not end generation; what does: {listed}",
            f"add {ending} to eos_token_id in generation_config.json",
        )
    origin = "generation_config.json and the tokenizer" if said else "config.json and the tokenizer"
    return passed("chat.stop", f"{listed}, from {origin}")


def _stated_ends(source: Source) -> list[int]:
    """Ids that end a text, as any file of the model states them."""
    config, generation = source.folder.config, read_json(source.folder.path / "generation_config.json")
    text = config.get("text_config")
    places = (generation, config, text if isinstance(text, dict) else {})
    return [one for place in places for one in token_ids(place.get("eos_token_id"))]


def check_defaults(source: Source) -> Finding:
    """Sampling settings of the model's author."""
    defaults = read_sampling_defaults(source.folder.path)
    listed = ", ".join(f"{name}={_shown(value)}" for name, value in defaults.items().items())
    if defaults.unsupported:
        return warned(
            "chat.defaults",
            f"generation_config.json asks for {', '.join(defaults.unsupported)}, which is off: not_implemented; "
            f"what counts: {listed or 'nothing'}",
            "expect answers unlike those that the model's author had, or set other sampling in requests",
        )
    return passed("chat.defaults", listed or "generation_config.json says nothing about sampling")


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return f"{len(value)} tokens suppressed"
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _token_after_answer(tokenizer: Tokenizer, rendering: Rendering) -> int | None:
    """The special token that follows an answer in a chat, if the template puts one there."""
    text = rendering.text_of("answer")
    if text is None or ANSWER not in text:
        return None
    ids = tokenizer.encode(text.rpartition(ANSWER)[2][:_FIRST_CHARS], add_special_tokens=False)
    return next((one for one in ids if tokenizer.is_special(one)), None)


def _format(source: str, formats: tuple[tuple[str, str], ...], feature: str, otherwise: str) -> str:
    """The format that a template shows, and what becomes of it where the server does not read it."""
    found = next((text for mark, text in formats if mark in source), None)
    if found is None:
        return otherwise
    return found if FEATURES[feature] is None else f"{found}; it stays in the answer's text, since {feature} is off"
