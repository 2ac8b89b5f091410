"""Where a model's text files (tokenizer, template, generation config) are, and what clients call the model.

Owns those two for the commands. Must not import `models/`: that brings in torch, which takes seconds that a server's own process
can do without.
"""

from pathlib import Path

from hybridserve.origin import find


def text_folder(source: str) -> Path:
    """The folder of what `--tokenizer` or the model argument names. Raises UsageError when there is no such thing."""
    path = find(source, with_weights=False)
    return path.parent if path.is_file() else path


def name_of(model: str, served_name: str | None) -> str:
    """The name that clients use: as told, else a repo id or the last part of a path, which may tell no more than that."""
    if served_name is not None:
        return served_name
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model
