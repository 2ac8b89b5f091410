"""Where a model's files are: a folder, a config.json, a Hugging Face repo id, or the demo that ships with the package.

Owns that look-up and the fetching of a repository. Must not know what the files hold, and imports no torch: a server's own
process asks here for its tokenizer. Called by `models/source.py` and the commands. Only a repo id may touch the network, and
`HF_HUB_OFFLINE` forbids that too.
"""

import re
from pathlib import Path

from hybridserve.errors import UsageError

#: Name of the model that ships with the package.
DEMO = "demo"
#: What is fetched of a repository: never code, never pickles.
_FETCHED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.safetensors")
#: Files that hold a vocabulary, the one that says most first.
VOCABULARY_FILES = ("tokenizer.json", "tiktoken.model", "tokenizer.tiktoken", "tokenizer.model", "spiece.model")
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def vocabulary_file(folder: str | Path) -> Path | None:
    """The file with a folder's vocabulary, or None."""
    return next((path for name in VOCABULARY_FILES if (path := Path(folder) / name).is_file()), None)


def find(source: str, *, with_weights: bool) -> Path:
    """The folder, or the single file, that the user named; a repository is fetched, with its weights or without.

    Raises UsageError when there is no such thing.
    """
    path = Path(source).expanduser()
    if source == DEMO:
        return Path(__file__).parent / "demo"
    if path.exists():
        return path
    if _REPO_ID.fullmatch(source):
        return _fetch(source, with_weights=with_weights)
    raise UsageError(
        f"model {source!r} is no folder or file here, and not a Hugging Face repo id (owner/name); "
        f"give the path of a model folder, a repo id, or {DEMO!r}"
    )


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
