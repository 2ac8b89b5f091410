"""What is to be checked: a folder, a config.json alone or a repository, and the headers of its weights.

Owns listing files and reading headers, without a byte of the weights themselves. Must not know architectures. Only a repo id
touches the network. Called by `checker.py`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from hybridserve.check.report import Finding, passed, warned
from hybridserve.config import EngineSettings, format_nbytes
from hybridserve.errors import UsageError
from hybridserve.models import ModelFolder, resolve
from hybridserve.models.shards import INDEX_NAME, TensorEntry, read_entries
from hybridserve.origin import DEMO

Kind: TypeAlias = Literal["config", "folder", "repository"]
Entries: TypeAlias = Mapping[str, TensorEntry]

#: torch's dtypes as safetensors headers spell them.
HEADER_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
#: Of numbers that stand for others.
QUANTISED_DTYPES = ("F8_E4M3", "F8_E5M2", "U8")
_KIND_TEXTS = {"config": "a config.json alone", "folder": "a folder", "repository": "a repository"}


@dataclass(frozen=True)
class Source:
    """A model's files as far as they are known."""

    folder: ModelFolder
    kind: Kind
    files: Mapping[str, int]  # name -> bytes

    @property
    def has_weights(self) -> bool:
        return self.kind != "config"

    @property
    def weights_are_here(self) -> bool:
        """Whether tensors can be read, not only their headers."""
        return self.has_weights and any(self.folder.path.glob("*.safetensors"))


def find_source(settings: EngineSettings) -> Source:
    """Find a model and list its files. Raises UsageError or WeightsError."""
    path = Path(settings.model).expanduser()
    if settings.model != DEMO and not path.exists():
        folder = resolve(settings.model, load_format="dummy")
        here = any(folder.path.glob("*.safetensors"))
        return Source(folder, "repository", _list_folder(folder.path) if here else _list_repository(settings.model))
    folder = resolve(settings.model, load_format="dummy" if path.is_file() else "safetensors")
    if not folder.has_weights:
        return Source(folder, "config", {path.name: path.stat().st_size})
    return Source(folder, "folder", _list_folder(folder.path))


def read_headers(source: Source) -> Entries:
    """Headers of all weights. Raises WeightsError or UnsafeContentError naming file and tensor."""
    if source.kind == "repository" and not source.weights_are_here:
        return _fetch_headers(source.folder.source)
    return read_entries(source.folder.path)


def check_source(source: Source) -> Finding:
    """What it is."""
    count, size = len(source.files), format_nbytes(sum(source.files.values()))
    plural = "file" if count == 1 else "files"
    return passed("source", f"{_KIND_TEXTS[source.kind]}: {count} {plural}, {size}")


def check_shards(source: Source, entries: Entries) -> list[Finding]:
    """What the weights files hold, and which of them are not read."""
    used = {entry.file.name for entry in entries.values()}
    dtypes = ", ".join(f"{count} x {dtype}" for dtype, count in Counter(e.dtype for e in entries.values()).most_common())
    size = format_nbytes(sum(entry.nbytes for entry in entries.values()))
    findings = [passed("source.shards", f"{len(used)} safetensors, {len(entries)} tensors, {size}: {dtypes}")]
    extra = sorted(name for name in source.files if name.endswith(".safetensors") and name not in used)
    if extra:
        findings.append(
            warned(
                "source.extra",
                f"{extra[0]}{' and others' if len(extra) > 1 else ''} is beside the weights, but {INDEX_NAME} does not name it; "
                "it is not read",
                "delete it, or download the index again if it belongs to the model",
            )
        )
    return findings


def check_dtype(entries: Entries, dtype: str) -> Finding:
    """Whether the weights lie on disk in the dtype that they run in. dtype: torch's name."""
    weighed: Counter[str] = Counter()
    for entry in entries.values():
        weighed[entry.dtype] += entry.nbytes
    most = weighed.most_common(1)[0][0] if weighed else HEADER_DTYPES[dtype]
    if most == HEADER_DTYPES[dtype]:
        return passed("source.dtype", f"stored as {most}, which is what they run in")
    if most in QUANTISED_DTYPES:
        return passed("source.dtype", f"stored mostly as {most}, quantised; run in {dtype}, which takes more memory than on disk")
    return warned(
        "source.dtype",
        f"stored mostly as {most}, but run in {dtype}: every weight is converted, and none can be used as it lies in the file",
        "choose the stored one with --dtype, unless the conversion is wanted",
    )


def _list_folder(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(path.iterdir()) if file.is_file()}


def _list_repository(repo_id: str) -> dict[str, int]:
    """Files of a repository and their sizes, from its listing. Raises UsageError."""
    import huggingface_hub  # half a second, and only for repo ids

    try:
        siblings = huggingface_hub.HfApi().model_info(repo_id, files_metadata=True).siblings or []
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise _unreachable(repo_id, error) from error
    return {file.rfilename: file.size or 0 for file in siblings}


def _fetch_headers(repo_id: str) -> dict[str, TensorEntry]:
    """Headers of a repository's weights: a few kilobytes of each file. Raises UsageError."""
    import huggingface_hub

    try:
        found = huggingface_hub.HfApi().get_safetensors_metadata(repo_id)
    except huggingface_hub.errors.NotASafetensorsRepoError as error:
        raise UsageError(f"repository {repo_id!r} has no safetensors weights; choose a release that has them") from error
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise _unreachable(repo_id, error) from error
    return {
        name: TensorEntry(Path(file), tensor.dtype, tuple(tensor.shape), *tensor.data_offsets)
        for file, content in found.files_metadata.items()
        for name, tensor in content.tensors.items()
    }


def _unreachable(repo_id: str, error: Exception) -> UsageError:
    return UsageError(
        f"repository {repo_id!r} cannot be read: {type(error).__name__}: {str(error)[:200]}; check the name and the network"
    )
