"""A model's folder and the JSON files in it.

Owns reading those. Must not know architectures or weights, nor where the folder comes from (`hybridserve/origin.py`). Called by
`loader.py` and `check-model`.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from hybridserve.errors import UnsupportedModelError, UsageError
from hybridserve.json_files import read_json_object
from hybridserve.models.foreign import file_refusal, folder_refusal
from hybridserve.models.sidecar import with_sidecar
from hybridserve.origin import find

#: Endings of files that can run code when they are opened.
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelFolder:
    """A model's files. `has_weights` is false when only a config.json was named: its neighbours are no part of the model."""

    source: str
    path: Path
    config: dict[str, object]
    generation_config: dict[str, object]
    has_weights: bool

    def notes(self) -> list[str]:
        """What the folder asks for and does not get, one sentence each, for the log."""
        notes = []
        if self.config.get("auto_map") is not None:
            notes.append("config.json names code of the model's own (auto_map); it is not run")
        if self.has_weights and any("quantization_config" in one for one in (self.config, self._text())):
            notes.append("the weights are stored quantised and decoded on load: they take the memory of a release that is not")
        files = sorted(self.path.iterdir()) if self.has_weights else []
        pickles = [path.name for path in files if path.suffix in PICKLE_SUFFIXES]
        if pickles:
            notes.append(f"pickles are never read: {', '.join(pickles[:3])}{', ...' if len(pickles) > 3 else ''}")
        return notes

    def dtype(self, wanted: str) -> torch.dtype:
        """The dtype to run in: `wanted`, or with "auto" the config's own, else bfloat16. Raises UnsupportedModelError."""
        if wanted != "auto":
            return _DTYPES[wanted]
        for values in (self._text(), self.config):
            for key in ("dtype", "torch_dtype"):
                if values.get(key) is not None:
                    return _known_dtype(key, values[key])
        return torch.bfloat16

    def _text(self) -> dict[str, object]:
        """The language model's part of a config that wraps it; nothing if none does."""
        text = self.config.get("text_config")
        return text if isinstance(text, dict) else {}


def _known_dtype(key: str, value: object) -> torch.dtype:
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedModelError(f"config.json: {key} is {value!r:.80}; known: {', '.join(_DTYPES)}. Choose one with --dtype")
    return _DTYPES[name]


def resolve(source: str, *, load_format: str = "safetensors") -> ModelFolder:
    """Find a model by what the user wrote, and read its config. With `load_format` "dummy" no weights are fetched or needed.

    Raises UsageError when there is no such thing, WeightsError when its JSON is missing or broken.
    """
    path = find(source, with_weights=load_format != "dummy")
    return _read_config_only(source, path, load_format) if path.is_file() else _read_folder(source, path)


def _read_folder(source: str, path: Path) -> ModelFolder:
    config = path / "config.json"
    if not config.is_file():
        raise folder_refusal(source, path)
    generation = path / "generation_config.json"
    values = with_sidecar(_read_json(config), path)
    return ModelFolder(source, path, values, _read_json(generation) if generation.is_file() else {}, True)


def _read_config_only(source: str, path: Path, load_format: str) -> ModelFolder:
    if path.suffix != ".json":
        raise file_refusal(source, path)
    if load_format != "dummy":
        raise UsageError(f"model {source!r} is a config without weights; add --load-format dummy to run it with random ones")
    return ModelFolder(source, path.parent, with_sidecar(_read_json(path), path.parent), {}, False)


def _read_json(path: Path) -> dict[str, object]:
    return read_json_object(path, of_pairs=_with_floats)


def _with_floats(pairs: list[tuple[str, object]]) -> object:
    """Numbers that JSON has no word for, as transformers writes them: ``{"__float__": "Infinity"}``."""
    name = pairs[0][1] if len(pairs) == 1 and pairs[0][0] == "__float__" else None
    return float(name) if name in ("Infinity", "-Infinity", "NaN") and isinstance(name, str) else dict(pairs)
