"""Where a model's text files (tokenizer, template, generation config) are, and what clients call the model.

Owns those two for the commands. Must not import `models/`: that brings in torch, which takes seconds that a server's own process
can do without.
"""

from collections.abc import Sequence
from pathlib import Path

from hybridserve.origin import find


def text_folder(source: str) -> Path:
    """The folder of what `--tokenizer` or the model argument names. Raises UsageError when there is no such thing."""
    path = find(source, with_weights=False)
    return path.parent if path.is_file() else path


def names_of(model: str, served_names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The name that answers carry, and others that requests may give for it.

    Names as told, and then only those; else a repo id or the last part of a path. The path itself, as given and in full, is taken
    from clients that know it, and told to none.
    """
    if served_names:
        return served_names[0], tuple(served_names[1:])
    path = Path(model).expanduser()
    if not path.exists():
        return model, ()
    full = path.resolve()
    return full.name, tuple(sorted({model, str(path), str(full)} - {full.name}))
