"""Vocabularies in the formats of SentencePiece and tiktoken, held to both algorithms as they are defined."""

import base64
import itertools
import json
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridserve.engine.sentencepiece_file import read_sentencepiece
from hybridserve.engine.text import Detokenizer, Tokenizer
from hybridserve.engine.tiktoken_file import read_tiktoken
from hybridserve.errors import ModelError, UnsupportedModelError

WORDS = ["the", " the", "in", "ing", " th", "  ", "北", "京", "北京", "é", "\n\n", "12", "aa", "ab", "ba", "aba", "'ll"]


def ranks_of(words: list[str]) -> dict[bytes, int]:
    """All bytes, then every beginning of every word, shorter ones first."""
    tokens = [bytes([byte]) for byte in range(256)]
    beginnings = {word.encode()[:size] for word in words for size in range(2, len(word.encode()) + 1)}
    return {token: rank for rank, token in enumerate([*tokens, *sorted(beginnings, key=lambda one: (len(one), one))])}


RANKS = ranks_of(WORDS)


def tiktoken_folder(path: Path, **config: object) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items()]
    (path / "tiktoken.model").write_text("\n".join(lines))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TikTokenTokenizer", **config}))
    return path


def merged(piece: bytes) -> list[int]:
    """tiktoken's loop: while any two neighbours make a token, join the two that make the one of lowest rank, leftmost first."""
    if piece in RANKS:
        return [RANKS[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        pairs = [(RANKS[left + right], at) for at, (left, right) in enumerate(itertools.pairwise(parts)) if left + right in RANKS]
        if not pairs:
            return [RANKS[part] for part in parts]
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


#: The same pattern for text of these characters alone, in the syntax of Python's own expressions.
SPLIT = re.compile(
    r"[北京]+"
    r"|[^\r\n\w]?[A-ZÉ]*[a-zé]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\w]?[A-ZÉ]+[a-zé]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[0-9]{1,3}| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LETTERS = st.text(alphabet="theingabTHE É é 北京 12345 \n\r\t.,!<'", max_size=40) | st.lists(st.sampled_from(WORDS)).map("".join)


@settings(max_examples=150, deadline=None)
@given(text=LETTERS)
def test_a_tiktoken_vocabulary_encodes_as_tiktoken_does(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    assert "".join(SPLIT.findall(text)) == text
    expected = [token_id for piece in SPLIT.findall(text) for token_id in merged(piece.encode())]
    assert TIKTOKEN.encode(text) == expected
    assert TIKTOKEN.decode(expected) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_a_tiktoken_vocabulary_writes_any_text(text: str) -> None:
    ids = TIKTOKEN.encode(text)
    detokenizer = Detokenizer(TIKTOKEN)
    assert "".join(detokenizer.push([one]) for one in ids) + detokenizer.finish() == text


def make_tiktoken() -> Tokenizer:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        size = len(RANKS)
        added = {
            str(size): {"content": "[BOS]", "special": True},
            str(size + 3): {"content": "<|im_end|>", "special": True},
            str(size + 5): {"content": "<think>", "special": False},
        }
        path = tiktoken_folder(Path(folder), bos_token="[BOS]", eos_token="<|im_end|>", added_tokens_decoder=added)
        return Tokenizer.from_folder(path)


TIKTOKEN = make_tiktoken()


def test_tokens_that_the_config_adds_have_their_ids() -> None:
    size = len(RANKS)
    assert TIKTOKEN.vocab_size == size + 258
    assert TIKTOKEN.encode("[BOS]the<|im_end|><think>") == [size, RANKS[b"the"], size + 3, size + 5]
    assert TIKTOKEN.decode([size, RANKS[b"the"], size + 5]) == "the<think>"
    assert TIKTOKEN.bos_token_id == size
    assert TIKTOKEN.eos_token_ids == (size + 3,)
    assert TIKTOKEN.added_tokens["<|reserved_token_" + str(size + 1) + "|>"]


def test_what_a_tiktoken_file_lacks_is_named(tmp_path: Path) -> None:
    folder = tiktoken_folder(tmp_path, tokenizer_class="OtherTokenizer")
    with pytest.raises(UnsupportedModelError, match=r"no pattern.*OtherTokenizer.*tokenizer\.json"):
        Tokenizer.from_folder(folder)
    path = tmp_path / "tiktoken.model"
    good = path.read_text()
    for wrong, words in (
        (good + "\nnot base64 300", "line"),
        (good.replace(" 7\n", " 8\n"), "ranks"),
        ("\n".join(good.splitlines()[:200]), "byte 200"),
        (good + "\nzz", "line"),
    ):
        path.write_text(wrong)
        with pytest.raises(ModelError, match=words):
            read_tiktoken(path, "TikTokenTokenizer")
    path.write_text(good)
    for entry in ({"3": {"content": "x"}}, {"9999999": {"content": "x"}}, {"x": {"content": "x"}}, {"400": 1}):
        tiktoken_folder(tmp_path, added_tokens_decoder=entry)
        with pytest.raises(ModelError, match="added_tokens_decoder"):
            Tokenizer.from_folder(tmp_path)


# --- SentencePiece ---

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def field(number: int, value: object) -> bytes:
    """One field of a protocol buffer."""
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def pieces_of(is_unigram: bool) -> list[tuple[str, float, int]]:
    words = ["▁", "t", "h", "e", "i", "n", "g", "a", "b", "▁t", "▁the", "th", "he", "in", "ing", "ab", "ba", "aba", "▁▁", "东"]
    scores = [-2.0 - 0.37 * at if is_unigram else -float(at) for at in range(len(words))]
    special = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    byte_pieces = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    return [*special, *byte_pieces, ("<tool>", 0.0, USER_DEFINED), *((w, s, NORMAL) for w, s in zip(words, scores, strict=True))]


def model_of(
    is_unigram: bool, *, prefix: bool = True, removes: bool = False, charsmap: bytes = b"", kind: int | None = None
) -> bytes:
    data = b"".join(field(1, field(1, w) + field(2, s) + field(3, k)) for w, s, k in pieces_of(is_unigram))
    trainer = field(3, kind or (1 if is_unigram else 2)) + field(35, 1)
    return data + field(2, trainer) + field(3, field(2, charsmap) + field(3, int(prefix)) + field(4, int(removes)))


def expected_pieces(text: str, is_unigram: bool) -> list[str]:
    """What either algorithm makes of a text with spaces written as they are stored."""
    scores = {word: score for word, score, kind in pieces_of(is_unigram) if kind == NORMAL}
    if is_unigram:
        best: list[tuple[float, list[str]]] = [(0.0, [])]
        for end in range(1, len(text) + 1):
            known = [(best[s][0] + scores[text[s:end]], [*best[s][1], text[s:end]]) for s in range(end) if text[s:end] in scores]
            last = text[end - 1]
            known += [] if last in scores else [(best[end - 1][0] - 100.0, [*best[end - 1][1], last])]
            best.append(max(known))
        return best[-1][1]
    parts = list(text)
    while True:
        pairs = [(-scores[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def spelled(parts: list[str], is_unigram: bool) -> list[str]:
    known = {word for word, _, _ in pieces_of(is_unigram)}
    return [one for part in parts for one in ([part] if part in known else [f"<0x{byte:02X}>" for byte in part.encode()])]


@pytest.mark.parametrize("is_unigram", [True, False], ids=["unigram", "bpe"])
@pytest.mark.parametrize("prefix", [True, False])
@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="theing ab东é\n", max_size=30))
def test_a_sentencepiece_vocabulary_encodes_as_sentencepiece_does(
    tmp_path_factory: pytest.TempPathFactory, is_unigram: bool, prefix: bool, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"{is_unigram}{prefix}.model"
    if not path.exists():
        path.write_bytes(model_of(is_unigram, prefix=prefix))
        CORES[is_unigram, prefix] = read_sentencepiece(path, None)
    core = CORES[is_unigram, prefix]
    stored = ("▁" if prefix and text else "") + text.replace(" ", "▁")
    encoded = core.encode(text, add_special_tokens=False)
    assert encoded.tokens == spelled(expected_pieces(stored, is_unigram), is_unigram)
    assert core.decode(encoded.ids) == text


CORES: dict[tuple[bool, bool], object] = {}


def test_a_folder_with_a_sentencepiece_file_has_its_ends_and_added_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_of(False))
    size = len(pieces_of(False))
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "added_tokens_decoder": {"1": {"content": "<s>", "special": True}, str(size): {"content": "<|im_end|>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    the = 3 + 256 + 1 + 10
    assert tokenizer.encode("the") == [1, the]
    assert tokenizer.encode("the", add_special_tokens=False) == [the]
    assert tokenizer.encode("<tool><|im_end|></s>", add_special_tokens=False) == [259, size, 2]
    assert tokenizer.encode("<s>the", control=())[1:] != tokenizer.encode("<s>the", add_special_tokens=False)
    assert 1 not in tokenizer.encode("<s>the", control=())[1:]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": False, "add_eos_token": True}))
    assert Tokenizer.from_folder(tmp_path).encode("the") == [the, 2]
    (tmp_path / "tokenizer.model").write_bytes(model_of(False, removes=True))
    assert Tokenizer.from_folder(tmp_path).encode("  the  the ", add_special_tokens=False) == [the, the]


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (model_of(True, charsmap=b"x"), UnsupportedModelError, "changes characters"),
        (model_of(True, kind=3), UnsupportedModelError, "type 3"),
        (b"", ModelError, "no unknown piece"),
        (b"\xff" * 40, ModelError, "no SentencePiece model"),
        (model_of(True)[:-3], ModelError, "no SentencePiece model"),
        (field(1, field(1, b"\xff")), ModelError, "no SentencePiece model"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, data: bytes, error: type[ModelError], words: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(error, match=words) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "tokenizer.model" in str(caught.value)
