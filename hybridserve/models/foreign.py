"""What a folder or a file is that somebody took for a model: an adapter, another format, a cache, or nothing.

Owns the wording of those refusals. Nothing in them is opened but an adapter's small JSON. Called by `source.py`.
"""

import json
from pathlib import Path

from hybridserve.errors import HybridServeError, UnsupportedModelError, UsageError, WeightsError

_NEEDED = "give the folder that the model was downloaded to, with all its files"


def folder_refusal(source: str, folder: Path) -> HybridServeError:
    """Why a folder without a config.json is no model, as far as its files tell."""
    names = sorted(path.name for path in folder.iterdir())
    if "adapter_config.json" in names:
        return UnsupportedModelError(
            f"{source!r} holds an adapter, not a model, and adapters are not implemented; merge it into its base model"
            f"{_base_of(folder)} and give that"
        )
    if "model_index.json" in names:
        return UnsupportedModelError(f"{source!r} is a diffusion pipeline; give a language model")
    gguf = next((name for name in names if name.endswith(".gguf")), None)
    if gguf is not None:
        return gguf_refusal(f"{source!r} holds {gguf}")
    cached = [name for name in names if name.startswith("models--")]
    if "snapshots" in names or cached:
        return _cache(source, folder, cached)
    inside = next((name for name in names if (folder / name / "config.json").is_file()), None)
    if inside is not None:
        return UsageError(
            f"{source!r} has no config.json, but its folder {inside!r} has one; give {str(Path(source) / inside)!r}"
        )
    return WeightsError(f"{source!r} {'has no config.json' if names else 'is an empty folder'}; {_NEEDED}")


def file_refusal(source: str, path: Path) -> HybridServeError:
    """Why a single file that is no JSON is no model."""
    if path.suffix == ".gguf":
        return gguf_refusal(f"{source!r} is a GGUF file")
    if path.suffix == ".safetensors":
        return UsageError(f"{source!r} is a file of weights; give the folder that it is in, with the config.json beside it")
    return UsageError(f"model {source!r} is a file; give the folder it is in, or a config.json with --load-format dummy")


def gguf_refusal(what: str) -> UnsupportedModelError:
    """Why llama.cpp's format is not read. `what` says where it was found."""
    return UnsupportedModelError(f"{what}, a format that is not read; take the release in safetensors, which has a config.json")


def _cache(source: str, folder: Path, cached: list[str]) -> UsageError:
    """A folder of Hugging Face's cache, at one of the levels above a snapshot."""
    if cached:
        known = ", ".join(repr(name.removeprefix("models--").replace("--", "/")) for name in cached[:3])
        return UsageError(
            f"{source!r} is Hugging Face's cache of {len(cached)} models; give one of them by its name, such as {known}"
        )
    snapshots = [path.name for path in sorted(folder.glob("snapshots/*")) if (path / "config.json").is_file()]
    where = (
        f"give {str(Path(source) / 'snapshots' / snapshots[-1])!r}"
        if snapshots
        else "fetch it again: no snapshot has a config.json"
    )
    return UsageError(f"{source!r} is a folder of Hugging Face's cache, not a model; {where}")


def _base_of(folder: Path) -> str:
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return f" ({base!r:.100})"
