"""The safetensors files of a model folder: what they hold, checked against their true size before anything is read.

Owns headers, the shard index and the opening of files. Must not know models or parameter names. Called by `loader.py`.
Everything in these files is hostile input: each offset, shape and dtype is held against the file.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridserve.errors import UnsafeContentError, WeightsError
from hybridserve.json_files import parse_json, read_json_object
from hybridserve.models.foreign import gguf_refusal
from hybridserve.models.source import PICKLE_SUFFIXES

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_NBYTES = 100 * 10**6
#: Of a file's name, on any file system.
_MAX_NAME_NBYTES = 255
_AGAIN = "download the file again"
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]

#: Bytes of one element, by the dtype names of the format.
DTYPE_NBYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
    "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file, as its header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes, from the end of the header
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def read_entries(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of a model folder, by name. Raises WeightsError naming file and tensor, UnsafeContentError for pickles."""
    index = folder / INDEX_NAME
    single = folder / SINGLE_NAME
    if index.is_file():
        names = _read_index(index)
        # Where both are there and have nothing to do with each other, transformers takes the one file.
        if SINGLE_NAME in names.values() or not single.is_file():
            return _read_sharded(folder, names)
        return read_header(single)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return read_header(files[0])
    if files:
        raise WeightsError(
            f"{len(files)} safetensors files ({files[0].name}, ...) but no {INDEX_NAME} that says which tensor is where; "
            "download the index too"
        )
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    gguf = sorted(path.name for path in folder.glob("*.gguf"))
    if gguf:
        raise gguf_refusal(f"the folder has no *.safetensors file but {gguf[0]}")
    if pickles:
        raise UnsafeContentError(
            f"the weights are only there as a pickle ({pickles[0]}), which can run code when it is opened and is never read; "
            "convert them to safetensors, or take a release that has them"
        )
    raise WeightsError("the folder has no *.safetensors file; download the weights, or run random ones with --load-format dummy")


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    content = read_json_object(path, of_pairs=_unique)
    names = content.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise WeightsError(f"{path.name} has no weight_map of tensor names to file names; {_AGAIN}")
    for file in names.values():
        if Path(file).name != file or not file.endswith(".safetensors") or "\0" in file or len(file.encode()) > _MAX_NAME_NBYTES:
            raise UnsafeContentError(
                f"{path.name} names {file!r:.200}, which is not a safetensors file of its own folder; {_AGAIN}"
            )
    return names


def _read_sharded(folder: Path, names: Mapping[str, str]) -> dict[str, TensorEntry]:
    files = sorted(set(names.values()))
    for file in files:
        if not (folder / file).is_file():
            orphan = next(name for name, where in names.items() if where == file)
            raise WeightsError(
                f"shard {file} is missing; {INDEX_NAME} puts {orphan!r} and others there. Download all {len(files)} shards"
            )
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(folder / file).items():
            if names.get(name) != file:
                where = f"in {names[name]}" if name in names else "nowhere"
                raise WeightsError(
                    f"shard {file} holds {name!r}, which {INDEX_NAME} puts {where}; take all files from one release"
                )
            entries[name] = entry
    for name, file in names.items():
        if name not in entries:
            raise WeightsError(f"{INDEX_NAME} puts {name!r} in {file}, which does not hold it; take all files from one release")
    return entries


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file, by name. Raises WeightsError when header and file do not agree."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise WeightsError(
            f"{path.name} cannot be read: {error.strerror}; see to its permissions, and if it is a link to where it leads"
        ) from error
    with file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        length = int.from_bytes(first, "little") if len(first) == 8 else 0
        if first.startswith(b"version "):
            raise WeightsError(f"{path.name} is a Git LFS pointer, not the weights; fetch it with `git lfs pull`")
        if not 2 <= length <= min(MAX_HEADER_NBYTES, size - 8):
            raise WeightsError(f"{path.name} ({size} bytes) is not a safetensors file, or truncated within its header; {_AGAIN}")
        header = parse_json(file.read(length), path.name, of_pairs=_unique)
    if not isinstance(header, dict):
        raise WeightsError(f"the header of {path.name} is not a table of tensors; {_AGAIN}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WeightsError(f"{path.name}: __metadata__ in its header is {metadata!r:.100}, not texts by name; {_AGAIN}")
    entries = {name: _entry(path, name, value) for name, value in header.items()}
    _check_spans(path, entries, size - 8 - length)
    return entries


class _HeaderEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[_Count]
    data_offsets: tuple[_Count, _Count]


def _entry(path: Path, name: str, value: object) -> TensorEntry:
    try:
        fields = msgspec.convert(value, _HeaderEntry)
        width = DTYPE_NBYTES[fields.dtype]
    except (msgspec.ValidationError, KeyError) as error:
        raise WeightsError(f"{path.name}: the header entry of {name!r} is {value!r:.200} ({error}); {_AGAIN}") from error
    start, end = fields.data_offsets
    if end - start != math.prod(fields.shape) * width:
        raise WeightsError(f"{path.name}: {name!r} is {fields.dtype} {fields.shape} but takes {end - start} bytes; {_AGAIN}")
    return TensorEntry(path, fields.dtype, tuple(fields.shape), start, end)


def _check_spans(path: Path, entries: Mapping[str, TensorEntry], nbytes: int) -> None:
    """Tensors lie one after the other, without gap or overlap, and end where the file ends."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            raise WeightsError(f"{path.name}: {name!r} starts at byte {entry.start}, expected {at} (overlap or gap); {_AGAIN}")
        if entry.end > nbytes:
            raise WeightsError(
                f"{path.name} is truncated: {name!r} ends at byte {entry.end} of the data, the file has {nbytes}; {_AGAIN}"
            )
        at = entry.end
    if at != nbytes:
        raise WeightsError(f"{path.name} has {nbytes - at} bytes after its last tensor; {_AGAIN}")


def read_tensors(entries: Mapping[str, TensorEntry]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these entries, file by file, each a view of the mapped file: pages come when they are touched."""
    by_file: dict[Path, list[str]] = {}
    for name, entry in entries.items():
        by_file.setdefault(entry.file, []).append(name)
    for path, names in by_file.items():
        with _opened(path) as file:
            for name in sorted(names, key=lambda name: entries[name].start):
                yield name, file.get_tensor(name)


def _opened(path: Path) -> safe_open:
    """The file, for reading tensors. Raises WeightsError for what the library holds against it and `read_header` did not."""
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path.name} cannot be read: {str(error)[:200]}; {_AGAIN}") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out
