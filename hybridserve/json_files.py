"""Reading the JSON files of a model folder, each of which is hostile input.

Owns the bounds of such a file and the refusal of text that no program could write back: lone surrogates, which the escapes of
JSON allow and UTF-8 does not. Must not know what any file means, and imports no torch. Called by whoever reads a model's files.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

from hybridserve.errors import WeightsError

MAX_JSON_NBYTES = 64 * 2**20
_AGAIN = "download the file again"
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_Pairs = list[tuple[str, object]]


def parse_json(raw: bytes, name: str, *, of_pairs: Callable[[_Pairs], object] | None = None) -> object:
    """What a file's bytes hold. `of_pairs` makes each object from its names and values. Raises WeightsError naming the file."""
    try:
        content: object = json.loads(raw.decode("utf-8"), object_pairs_hook=of_pairs)
        if _SURROGATE_ESCAPE.search(raw):  # most are halves of whole pairs
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{name} is not valid JSON: {_in_words(error)}; {_AGAIN}") from error
    return content


def read_json_object(path: Path, *, of_pairs: Callable[[_Pairs], object] | None = None) -> dict[str, object]:
    """The object in a JSON file. Raises WeightsError when there is none, or more than `MAX_JSON_NBYTES`."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_NBYTES:
            raise WeightsError(f"{path.name} has {size:,} bytes; files of this kind have at most {MAX_JSON_NBYTES:,}; {_AGAIN}")
        raw = path.read_bytes()
    except OSError as error:
        raise WeightsError(
            f"{path.name} cannot be read: {error.strerror}; see to its permissions, or download it again"
        ) from error
    content = parse_json(raw, path.name, of_pairs=of_pairs)
    if not isinstance(content, dict):
        raise WeightsError(f"{path.name} holds {type(content).__name__}, not an object of keys; {_AGAIN}")
    return content


def _in_words(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"it has half of a surrogate pair, {error.object[error.start]!a}, which is no character"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
