"""What is near to an architecture that is not in the table, as far as that is known: for the message that refuses it.

Owns which published classes resemble which of ours, and finding the language model inside of a config that wraps one. Must not
know how a model is laid out. Called by `architectures.py`.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

#: Stems of names (`_stem`) -> the stem of the nearest class here. None: it looks like one of ours, and is something else.
_KIN: Mapping[str, str | None] = {
    **dict.fromkeys(("mistral", "ministral", "ministral3", "phi3", "smollm3", "internlm3", "yi", "arcee"), "llama"),
    **dict.fromkeys(("qwen2", "seedoss"), "qwen3"),
    **dict.fromkeys(("mixtral", "qwen2moe", "glm4moe", "minimaxm2", "olmoe", "qwen3vlmoe"), "qwen3moe"),
    **dict.fromkeys(("qwen3vl", "qwen3vltext"), "qwen3"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3n", "gemma4"), "gemma3"),
    **dict.fromkeys(("deepseek", "deepseekv2", "deepseekv4", "kimik2", "kimik25"), "deepseekv3"),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "graniteswa"), "granitemoehybrid"),
    **dict.fromkeys(("olmo", "olmo2"), "olmo3"),
    **dict.fromkeys(("bailingmoe", "bailingmoev2", "bailingmoev25"), "bailingmoev3"),
    **dict.fromkeys(("kimik3", "kimik3text"), "kimilinear"),
    "zamba": "zamba2",
    **dict.fromkeys(("llama4", "llama4text", "minimaxm3", "nemotron", "falcon", "glm4", "glm", "chatglm"), None),
}
#: Where wrappers keep the config of their language model.
_INNER_KEYS: Final = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config")
#: From this on, names that are not listed count as alike.
_ALIKE = 0.8
_COMMON_LETTERS = 6


def inner_config(config: Mapping[str, object]) -> tuple[str, Mapping[str, object]] | None:
    """The key and the config of the language model that a config wraps; None if it wraps none."""
    for key in _INNER_KEYS:
        inner = config.get(key)
        if isinstance(inner, dict) and inner:
            deeper = inner_config(inner)
            return (key, inner) if deeper is None else (f"{key}.{deeper[0]}", deeper[1])
    return None


def nearest_of(names: Iterable[object], known: Iterable[str]) -> str | None:
    """The class among `known` that resembles one called so, by class name or model type; None if none is known to."""
    known = list(known)
    stems = [stem for name in names if isinstance(name, str) and (stem := _stem(name))]
    for stem in stems:
        if stem in _KIN:
            # Of a class with and without a wrapper, the one without.
            return next((one for one in sorted(known) if _stem(one) == _KIN[stem]), None)
    ranked = sorted(((_likeness(_stem(one), stem), one) for stem in stems for one in known), reverse=True)
    return ranked[0][1] if ranked and ranked[0][0] >= _ALIKE else None


def _likeness(ours: str, theirs: str) -> float:
    """1 for names of one family, which begin alike; else how alike they are."""
    common = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return max(difflib.SequenceMatcher(None, ours, theirs).ratio(), 0.9 if common >= _COMMON_LETTERS else 0.0)


def _stem(name: str) -> str:
    """What is particular in a name: without its task, case, underscores and the `text` of model types."""
    return name.partition("For")[0].removesuffix("_text").replace("_", "").replace(".", "").lower()
