"""A vocabulary as tiktoken stores it: a line for each token, its bytes in base 64 and its rank.

Owns that format and the patterns that text is split by, which the file does not have. Must not know special tokens. Called by
`vocabulary.py`.
"""

import base64
import binascii
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from hybridserve.engine.byte_level import CHAR_OF_BYTE
from hybridserve.errors import ModelError, UnsupportedModelError

#: Kimi's: Chinese characters for themselves, then words by case with what English adds to them, numbers of three digits.
_KIMI = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
#: Pattern by the `tokenizer_class` of a release, whose own code has it; that code is never run.
PATTERNS = {"TikTokenTokenizer": _KIMI}


def read_tiktoken(path: Path, tokenizer_class: str | None) -> tokenizers.Tokenizer:
    """The tokenizer of a file. Raises UnsupportedModelError where the class has no known pattern, ModelError for a bad file."""
    pattern = PATTERNS.get(tokenizer_class or "")
    if pattern is None:
        raise UnsupportedModelError(
            f"{path.name} says no pattern to split text by, and that of the tokenizer class {tokenizer_class!r} is not known "
            f"(known: {', '.join(PATTERNS)}); put a tokenizer.json beside it, as transformers' save_pretrained writes it"
        )
    ranks = _read_ranks(path)
    vocab = {_spelled(token): rank for token, rank in ranks.items()}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=_merges(ranks), fuse_unk=False, ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    return core


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ModelError(f"{path.name}, line {number}: {error}; fetch the file again") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelError(f"{path.name} has {len(ranks)} tokens whose ranks are not 0 to {len(ranks) - 1}; fetch the file again")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ModelError(f"{path.name} has no token for the byte {missing[0]}, so not every text can be written; fetch it again")
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Every pair that makes a token, in the order in which tiktoken would merge it: by the token's rank."""
    spelled = {token: _spelled(token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in pairs if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spelled[left], spelled[right]) for left, right in pairs]
    return merges


def _spelled(token: bytes) -> str:
    return "".join(map(CHAR_OF_BYTE.__getitem__, token))
