"""Where a model's text files (tokenizer, template, generation config) are.

Owns that look-up for the commands. The two common cases are decided here, because asking `models/` imports torch, which takes
seconds that a server's own process can do without.
"""

from importlib.resources import files
from pathlib import Path


def text_folder(source: str) -> Path:
    """The folder of what `--tokenizer` or the model argument names. Raises UsageError when there is no such thing."""
    if source == "demo":
        return Path(str(files("hybridserve"))) / "demo"
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    from hybridserve.models import resolve  # for repo ids and bare configs

    return resolve(source, load_format="dummy").path


def name_of(model: str, served_name: str | None) -> str:
    """The name that clients use: as told, else a repo id or the last part of a path, which may tell no more than that."""
    if served_name is not None:
        return served_name
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model
