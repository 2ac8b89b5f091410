"""The vocabulary of a model folder, in whichever of the three formats it is: tokenizer.json, SentencePiece or tiktoken.

Owns reading the file and adding the tokens that `tokenizer_config.json` names. Must not know chats. Called by `text.py`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from hybridserve.engine.generation_config import read_json
from hybridserve.engine.sentencepiece_file import Prefix, read_sentencepiece
from hybridserve.engine.tiktoken_file import read_tiktoken
from hybridserve.errors import ModelError
from hybridserve.origin import VOCABULARY_FILES, vocabulary_file

_MAX_NBYTES = 256 * 2**20
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n?")
_RESERVED_TOKENS = {"TikTokenTokenizer": 256}
#: Classes that put a BOS before a text unless their config says otherwise.
_WITH_BOS = ("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizer", "GemmaTokenizerFast")


def read_vocabulary(folder: Path, special_tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    """The tokenizer of a folder.

    Raises ModelError when there is none or it is broken, UnsupportedModelError when its file does not say enough.
    """
    path = vocabulary_file(folder)
    if path is None:
        raise ModelError(
            f"there is no vocabulary ({', '.join(VOCABULARY_FILES)}) beside the model; name a folder that has one with "
            "--tokenizer"
        )
    if path.stat().st_size > _MAX_NBYTES:
        raise ModelError(f"{path.name} has {path.stat().st_size} bytes; a vocabulary has at most {_MAX_NBYTES}")
    if path.name == "tokenizer.json":
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception for any fault in the file
            raise ModelError(f"tokenizer.json is not readable: {error}; fetch or convert it again") from error
    config = read_json(folder / "tokenizer_config.json")
    name = config.get("tokenizer_class")
    name = name if isinstance(name, str) else None
    with path.open("rb") as file:
        is_tiktoken = _TIKTOKEN_LINE.fullmatch(file.readline(4096)) is not None
    core = read_tiktoken(path, name) if is_tiktoken else read_sentencepiece(path, _prefix(config))
    _add_tokens(core, config, _RESERVED_TOKENS.get(name or "", 0))
    if not is_tiktoken:
        _add_ends(core, config, special_tokens, has_bos=name in _WITH_BOS)
    return core


def _prefix(config: Mapping[str, Any]) -> Prefix | None:
    """Where a space goes before text, as `tokenizer_config.json` says; None where it leaves that to the file."""
    if config.get("add_prefix_space") is False:
        return "never"
    return "first" if config.get("legacy") is False else None


def _add_tokens(core: tokenizers.Tokenizer, config: Mapping[str, Any], num_reserved: int) -> None:
    """Add `added_tokens_decoder`, whose ids go on where the vocabulary ends, with reserved tokens between them. In place."""
    entries = config.get("added_tokens_decoder") or {}
    size = core.get_vocab_size(with_added_tokens=True)
    named: dict[int, AddedToken] = {}
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        if not (isinstance(entry, dict) and isinstance(entry.get("content"), str) and str(key).isdecimal()):
            raise ModelError(
                f"added_tokens_decoder in tokenizer_config.json has a broken entry {key!r:.40}; fetch the file again"
            )
        flags = {flag: entry.get(flag) is True for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        named[int(key)] = AddedToken(entry["content"], **flags)
    last = max([size + num_reserved + 1 if num_reserved else size - 1, *named])
    if last > size + 2**16:
        raise ModelError(f"added_tokens_decoder names the id {last} beside {size} tokens; fetch tokenizer_config.json again")
    for token_id in [*(one for one in sorted(named) if one < size), *range(size, last + 1)]:
        token = named.get(token_id) or AddedToken(f"<|reserved_token_{token_id}|>", special=True, normalized=False)
        (core.add_special_tokens if token.special else core.add_tokens)([token])
        if core.token_to_id(token.content) != token_id:
            raise ModelError(
                f"added_tokens_decoder gives {token.content!r:.60} the id {token_id}, but the vocabulary "
                f"{core.token_to_id(token.content)}; take both files from one release"
            )


def _add_ends(core: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str], *, has_bos: bool) -> None:
    """Put BOS and EOS around a text where the config says so. In place."""
    bos, eos = special.get("bos_token"), special.get("eos_token")
    begins = bos if config.get("add_bos_token", has_bos) is True and bos is not None else None
    ends = eos if config.get("add_eos_token") is True and eos is not None else None
    ids = [(text, core.token_to_id(text)) for text in (begins, ends) if text is not None]
    if any(token_id is None for _, token_id in ids) or not ids:
        return
    single = [*([begins] if begins else []), "$A", *([ends] if ends else [])]
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
