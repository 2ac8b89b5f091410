"""What a model's `generation_config.json` says about sampling, for requests that leave it out.

Owns that file's reading. Must not know requests or tokenizers. Called by `text.py`, `server/` and the commands.
"""

from pathlib import Path
from typing import Any

import msgspec

from hybridserve.errors import ModelError
from hybridserve.json_files import read_json_object

_MAX_TOKEN_ID = 2**31


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """A model author's sampling settings; None where the file says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def items(self) -> dict[str, float | int]:
        """The settings that are there, named as in `SamplingParams`."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


def read_sampling_defaults(folder: str | Path) -> SamplingDefaults:
    """Read a model folder's `generation_config.json`; `do_sample: false` there means greedy. Raises ModelError."""
    found = read_json(Path(folder) / "generation_config.json")
    names = {name: name for name in SamplingDefaults.__struct_fields__ if name != "max_tokens"}
    names["max_new_tokens"] = "max_tokens"
    values = {names[key]: value for key, value in found.items() if key in names}
    if found.get("do_sample") is False:
        values["temperature"] = 0.0
    try:
        return msgspec.convert(values, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ModelError(f"generation_config.json: {error}; correct the file") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder, or an empty one when there is no such file. Raises WeightsError."""
    return read_json_object(path) if path.is_file() else {}


def token_ids(value: Any) -> list[int]:
    """Token ids from a config's entry, which is one id, a list of them, or null; what can be no id is left out."""
    entries = value if isinstance(value, list) else [value]
    return [entry for entry in entries if isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry < _MAX_TOKEN_ID]
