"""Where a model comes from: a folder, a config.json, a Hugging Face repo id, or the demo that ships with the package.

Owns finding and reading the JSON files. Must not know architectures or weights. Called by `loader.py`, the tokenizer and
`check-model`. Only a repo id may touch the network, and `HF_HUB_OFFLINE` forbids that too.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridserve.errors import UnsupportedModelError, UsageError, WeightsError

#: Name of the model that ships with the package.
DEMO = "demo"
#: Endings of files that can run code when they are opened.
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
#: What is fetched of a repository: never code, never pickles.
_FETCHED = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
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
        files = sorted(self.path.iterdir()) if self.has_weights else []
        pickles = [path.name for path in files if path.suffix in PICKLE_SUFFIXES]
        if pickles:
            notes.append(f"pickles are never read: {', '.join(pickles[:3])}{', ...' if len(pickles) > 3 else ''}")
        return notes

    def dtype(self, wanted: str) -> torch.dtype:
        """The dtype to run in: `wanted`, or with "auto" the config's own, else bfloat16. Raises UnsupportedModelError."""
        if wanted != "auto":
            return _DTYPES[wanted]
        text = self.config.get("text_config")
        for values in (text if isinstance(text, dict) else {}, self.config):
            for key in ("dtype", "torch_dtype"):
                if values.get(key) is not None:
                    return _known_dtype(key, values[key])
        return torch.bfloat16


def _known_dtype(key: str, value: object) -> torch.dtype:
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedModelError(f"config.json: {key} is {value!r:.80}; known: {', '.join(_DTYPES)}. Choose one with --dtype")
    return _DTYPES[name]


def resolve(source: str, *, load_format: str = "safetensors") -> ModelFolder:
    """Find a model by what the user wrote, and read its config. With `load_format` "dummy" no weights are fetched or needed.

    Raises UsageError when there is no such thing, WeightsError when its JSON is missing or broken.
    """
    path = Path(source).expanduser()
    if source == DEMO:
        return _read_folder(source, Path(__file__).parent.parent / "demo")
    if path.is_dir():
        return _read_folder(source, path)
    if path.is_file():
        return _read_config_only(source, path, load_format)
    if _REPO_ID.fullmatch(source):
        return _read_folder(source, _fetch(source, with_weights=load_format != "dummy"))
    raise UsageError(
        f"model {source!r} is no folder or file here, and not a Hugging Face repo id (owner/name); "
        f"give the path of a model folder, a repo id, or {DEMO!r}"
    )


def _read_folder(source: str, path: Path) -> ModelFolder:
    config = path / "config.json"
    if not config.is_file():
        raise WeightsError(f"{source!r} has no config.json; give the folder that the model was downloaded to, with all its files")
    generation = path / "generation_config.json"
    return ModelFolder(source, path, _read_json(config), _read_json(generation) if generation.is_file() else {}, True)


def _read_config_only(source: str, path: Path, load_format: str) -> ModelFolder:
    if path.suffix != ".json":
        raise UsageError(f"model {source!r} is a file; give the folder it is in, or a config.json with --load-format dummy")
    if load_format != "dummy":
        raise UsageError(f"model {source!r} is a config without weights; add --load-format dummy to run it with random ones")
    return ModelFolder(source, path.parent, _read_json(path), {}, False)


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=_with_floats)
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path.name} is not valid JSON: {str(error)[:200]}; download the file again") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path.name} holds {type(content).__name__}, not an object of keys; download the file again")
    return content


def _with_floats(values: dict[str, object]) -> object:
    """Numbers that JSON has no word for, as transformers writes them: ``{"__float__": "Infinity"}``."""
    name = values.get("__float__")
    return float(name) if len(values) == 1 and name in ("Infinity", "-Infinity", "NaN") else values


def _fetch(repo_id: str, *, with_weights: bool) -> Path:
    """Download a repository's data files, or find them in the local cache. Raises UsageError."""
    import huggingface_hub  # half a second, and only for repo ids

    patterns = [pattern for pattern in _FETCHED if with_weights or pattern != "*.safetensors"]
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=patterns))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise UsageError(
            f"model {repo_id!r} is not a folder here, and fetching it failed: {type(error).__name__}: {str(error)[:300]}. "
            "Check the name and the network (HF_HUB_OFFLINE=1 allows only what is in the cache), or give a local folder"
        ) from error
