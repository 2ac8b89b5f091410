"""Fields that clients of other servers send and this one does not offer: refused by name, never ignored.

Owns that table. A field with a neutral value passes, since many clients send defaults. Called by `wire.py`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from hybridserve.errors import RequestError


class _Refusal(NamedTuple):
    neutral: tuple[object, ...]
    remedy: str


_STRUCTURED = "constrained output is not offered yet; ask for the format in the prompt"
_TOOLS = "tool calling is not offered yet; describe the tools in a message"
_GUIDED = "the guided_* fields became `structured_outputs`, which is not offered yet"
_TOKENS = "leave it out, or use logit_bias"
_LENGTH = "shorten the prompt on your side"

UNSUPPORTED: dict[str, _Refusal] = {
    "suffix": _Refusal((None, ""), "no model here fills in the middle; put the text into the prompt"),
    "response_format": _Refusal((None, {"type": "text"}), _STRUCTURED),
    "structured_outputs": _Refusal((None, {}), _STRUCTURED),
    "grammar": _Refusal((None, ""), _STRUCTURED),
    "json_schema": _Refusal((None, {}), _STRUCTURED),
    "regex": _Refusal((None, ""), _STRUCTURED),
    "ebnf": _Refusal((None, ""), _STRUCTURED),
    "tools": _Refusal((None, []), _TOOLS),
    "tool_choice": _Refusal((None, "none", "auto"), _TOOLS),
    "functions": _Refusal((None, []), _TOOLS),
    "function_call": _Refusal((None, "none", "auto"), _TOOLS),
    "chat_template": _Refusal((None,), "templates come with the model; use chat_template_kwargs"),
    "documents": _Refusal((None, []), "put the documents into a message"),
    "prompt_embeds": _Refusal((None, []), "send text or token ids"),
    "input_embeds": _Refusal((None, []), "send text or token ids"),
    "modalities": _Refusal((None, ["text"]), "only text comes out"),
    "audio": _Refusal((None,), "only text comes out"),
    "web_search_options": _Refusal((None,), "the server never reaches out"),
    "use_beam_search": _Refusal((None, False), "use n with a temperature above 0"),
    "length_penalty": _Refusal((None, 1, 0), "it belongs to beam search, which is not offered"),
    "early_stopping": _Refusal((None, False), "it belongs to beam search, which is not offered"),
    "truncate_prompt_tokens": _Refusal((None,), _LENGTH),
    "truncation_side": _Refusal((None,), _LENGTH),
    "allowed_token_ids": _Refusal((None, []), _TOKENS),
    "bad_words": _Refusal((None, []), _TOKENS),
    "logprob_token_ids": _Refusal((None, []), "use logprobs or top_logprobs"),
    "thinking_token_budget": _Refusal((None,), "use max_tokens"),
    "repetition_detection": _Refusal((None,), "use repetition_penalty"),
    "priority": _Refusal((None, 0), "requests are served in the order they come"),
    "vllm_xargs": _Refusal((None, {}), "the field for extensions is hybrid_xargs"),
    "mm_processor_kwargs": _Refusal((None, {}), "only text goes in"),
    "lora_path": _Refusal((None,), "adapters are not offered yet"),
}
_GUIDED_PREFIX = "guided_"


def refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Raise RequestError for the first field that would have an effect elsewhere and has none here."""
    for name in raw.keys() & UNSUPPORTED.keys():
        refusal = UNSUPPORTED[name]
        if raw[name] not in refusal.neutral:
            raise RequestError(f"{name} is not supported: {refusal.remedy}", param=name, code="unsupported_parameter")
    for name in raw:
        if name.startswith(_GUIDED_PREFIX) and raw[name] is not None:
            raise RequestError(f"{name[:64]} is not supported: {_GUIDED}", param=name[:64], code="unsupported_parameter")
    # Where special tokens are left out, as by default, nothing stands between them.
    if raw.get("spaces_between_special_tokens") and raw.get("skip_special_tokens") is False:
        raise RequestError(
            "spaces_between_special_tokens is not supported: text has the spaces that the vocabulary gives; leave it out",
            param="spaces_between_special_tokens",
            code="unsupported_parameter",
        )
    best_of = raw.get("best_of")
    if best_of is not None and best_of != (raw.get("n") or 1):
        raise RequestError(
            "best_of differs from n, and ranking choices is not supported: leave it out or set it to n",
            param="best_of",
            code="unsupported_parameter",
        )
