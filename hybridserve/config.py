"""Settings: one frozen, typed model that feeds the command line, the environment, the YAML file and the docs.

Owns every setting's name, type, bounds and help text, and the order in which sources win: flag > `HYBRIDSERVE_*` > `--config`
file > the default here. Must not know what the settings do. Only this module reads the environment. Resolved once into a new
object; unknown keys fail.
"""

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from hybridserve.errors import MissingDependencyError, UsageError

ENV_PREFIX = "HYBRIDSERVE_"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

#: A number of bytes; written as 24GiB, 512MB or a plain number.
Nbytes = Annotated[int, Meta(ge=1, extra={"unit": "bytes"})]
Positive = Annotated[int, Meta(ge=1)]


def about(text: str) -> Meta:
    """Help text of a setting."""
    return Meta(description=text)


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides how a model is loaded and run."""

    model: Annotated[str, about("a folder, a Hugging Face repo id, a config.json (with --load-format dummy), or `demo`")]
    tokenizer: Annotated[str | None, about("folder or repo id of the tokenizer, if not the model's")] = None
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], about("dtype of weights and activations")] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], about("where to run")] = "auto"
    load_format: Annotated[Literal["safetensors", "dummy"], about("`dummy`: random weights at the real shapes")] = "safetensors"
    max_model_len: Annotated[Annotated[int, Meta(ge=2)] | None, about("longest prompt plus output; default: the model's")] = None
    max_num_batched_tokens: Annotated[Positive, about("token budget of one step")] = 2048
    short_prompt_share: Annotated[
        Annotated[float, Meta(ge=0, lt=1)], about("share of a step's prompt tokens for the prompts with least left; 0: in order")
    ] = 0.5
    max_num_seqs: Annotated[Positive, about("requests that run at once")] = 64
    block_size: Annotated[Positive, about("tokens per block of the paged caches")] = 16
    kv_cache_memory: Annotated[Nbytes | None, about("bytes for caches, such as 4GiB; default: a share of what is free")] = None
    kv_cache_share: Annotated[
        Annotated[float, Meta(gt=0, le=1)], about("share of free memory for caches, if not given in bytes")
    ] = 0.5
    enable_prefix_caching: Annotated[bool, about("reuse what earlier requests computed")] = True
    cache_policy: Annotated[Literal["cost", "lru"], about("what goes first when cache memory runs out")] = "cost"
    max_num_queued_reqs: Annotated[Positive, about("sequences that may wait; more are answered 503")] = 2048
    threads: Annotated[Positive | None, about("CPU threads of the engine; default: all cores")] = None
    seed: Annotated[int, about("seed of dummy weights and of requests without their own")] = 0
    backend: Annotated[tuple[str, ...], about("force a backend for an operation, such as delta_rule=reference; repeatable")] = ()
    plugin: Annotated[tuple[str, ...], about("a Python file that registers mixers or architectures; repeatable")] = ()
    ignore_config_keys: Annotated[tuple[str, ...], about("config keys to accept unread, at your own risk; repeatable")] = ()


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides how the model is offered over HTTP."""

    host: Annotated[str, about("address to listen on")] = "127.0.0.1"
    port: Annotated[Annotated[int, Meta(ge=0, le=65535)], about("port to listen on; 0 takes a free one")] = 8000
    served_model_name: Annotated[
        tuple[str, ...], about("name that clients use, instead of the model's own; the first is answered with; repeatable")
    ] = ()
    api_key: Annotated[
        tuple[str, ...], Meta(description="a key that clients must send; repeatable", extra={"commas": "kept"})
    ] = ()
    share_cache_between_keys: Annotated[bool, about("let requests of all keys find each other's prefixes")] = False
    allow_open_bind: Annotated[bool, about("listen beyond loopback without a key")] = False
    allowed_origins: Annotated[tuple[str, ...], about("origins that browsers may call from; repeatable; default: none")] = ()
    allowed_hosts: Annotated[
        tuple[str, ...], about("more names that a server without keys answers to, such as a proxy's; repeatable; `*` for all")
    ] = ()
    request_timeout_s: Annotated[Annotated[float, Meta(gt=0)], about("deadline of one request, in seconds")] = 3600.0
    drain_timeout_s: Annotated[Annotated[float, Meta(ge=0)], about("how long SIGTERM lets running requests finish")] = 30.0
    max_connections: Annotated[Positive, about("connections that may be open; more are answered 503")] = 4096
    client_share: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        about(
            "share of connections, places for sequences and bytes of bodies that one client may hold: one key, else one address"
        ),
    ] = 0.5
    header_timeout_s: Annotated[Annotated[float, Meta(gt=0)], about("how long a client may take to send headers")] = 20.0
    body_timeout_s: Annotated[Annotated[float, Meta(gt=0)], about("how long a client may take to send a body")] = 120.0
    write_timeout_s: Annotated[
        Annotated[float, Meta(gt=0)], about("a connection whose client takes nothing of its reply for so long is closed")
    ] = 60.0
    max_unread_nbytes: Annotated[
        Nbytes, about("output that may wait for the reader of one stream; beyond it the stream ends")
    ] = 16 * 2**20
    step_timeout_s: Annotated[
        Annotated[float, Meta(gt=0)],
        about("an engine that has work and completes no step for so many seconds is killed and started again"),
    ] = 300.0
    spare_engine: Annotated[
        bool, about("hold a second engine process without a model, so that a restart takes a second and not several")
    ] = True
    max_body_nbytes: Annotated[Nbytes, about("largest request body")] = 16 * 2**20
    max_bodies_nbytes: Annotated[Nbytes, about("bytes of bodies that all open requests may have together")] = 128 * 2**20
    ui: Annotated[bool, about("the chat page at /")] = True
    ssl_keyfile: Annotated[str | None, about("TLS key file")] = None
    ssl_certfile: Annotated[str | None, about("TLS certificate file")] = None

    def __post_init__(self) -> None:
        """Raise UsageError for a key that no client could send, and for one that is none."""
        for key in self.api_key:
            if not key.strip():
                raise UsageError("an --api-key is empty, which would be no key at all; give one, or leave the setting out")
            if key != key.strip() or not (key.isascii() and key.isprintable()):
                raise UsageError(
                    "an --api-key has spaces around it, or characters other than printable ASCII, which a header does not carry "
                    "unchanged; choose another key"
                )


S = TypeVar("S", bound=msgspec.Struct)


def parse_nbytes(text: str) -> int:
    """Bytes from `24GiB`, `512MB`, `1e9` or a plain number. Raises UsageError."""
    match = re.fullmatch(r"\s*((?:\d+\.?\d*|\.\d+)(?:e\d\d?)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"{text!r} is not a size; write it like 24GiB, 512MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_nbytes(count: int) -> str:
    """A number of bytes for people: `1.50 GiB`."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def read_environment(known: set[str], environ: Mapping[str, str] = os.environ) -> tuple[dict[str, str], list[str]]:
    """Settings from `HYBRIDSERVE_*`, and the names among those variables that are no setting's."""
    found = {name[len(ENV_PREFIX) :].lower(): value for name, value in environ.items() if name.startswith(ENV_PREFIX)}
    values = {name: value for name, value in found.items() if name in known}
    return values, sorted(ENV_PREFIX + name.upper() for name in found if name not in known)


def user_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's files that can be made again belong: `$XDG_CACHE_HOME/hybridserve`, else `~/.cache/hybridserve`.

    Raises MissingDependencyError where there is neither.
    """
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a path that is not absolute is to be ignored.
    if os.path.isabs(base):
        return Path(base) / "hybridserve"
    try:
        return Path.home() / ".cache" / "hybridserve"
    except RuntimeError as error:
        raise MissingDependencyError(f"no cache folder: {error}; set XDG_CACHE_HOME or HOME to an absolute path") from error


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a child process for foreign code gets of the environment: the time zone, and no keys."""
    return {name: environ[name] for name in ("TZ",) if name in environ}


def let_idle_threads_sleep(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Have OpenMP's threads sleep while they wait, unless the user has decided: those that spin slow everything else down.

    Returns whether that has an effect: the runtime reads its policy when torch is first imported.
    """
    is_decided = "OMP_WAIT_POLICY" in environ
    environ.setdefault("OMP_WAIT_POLICY", "passive")
    return is_decided or "torch" not in sys.modules


def read_file(path: str) -> dict[str, Any]:
    """Settings from a YAML file whose keys are long flags, with - or _. Raises UsageError."""
    import yaml  # only when a file is given

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path!r}: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"--config {path!r} holds {type(content).__name__}; it must be a mapping of settings")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def resolve(kind: type[S], *sources: Mapping[str, Any]) -> S:
    """Build settings from sources, the strongest first. Raises UsageError naming the key, its value and what is allowed."""
    merged: dict[str, Any] = {}
    for source in reversed(sources):
        merged.update(source)
    fields = {field.name for field in msgspec.structs.fields(kind)}
    unknown = sorted(set(merged) - fields)
    if unknown:
        raise UsageError(f"unknown setting {unknown[0]!r}; known: {', '.join(sorted(fields))}")
    try:
        return msgspec.convert({name: _plain(kind, name, value) for name, value in merged.items()}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{_which(str(error), merged)}; --help tells what each may be") from error


def _which(error: str, values: Mapping[str, object]) -> str:
    """msgspec's error with the setting's name and value in front, if it says where it is."""
    reason, found, place = error.partition(" - at `$.")
    name = place.partition("[")[0].rstrip("`")
    return f"setting {name} is {_shown(name, values.get(name))}: {reason}" if found else f"settings: {error}"


def _shown(name: str, value: object) -> str:
    return "not shown here" if name == "api_key" else f"{value!r:.100}"


def unit_of(kind: type[msgspec.Struct], name: str) -> str | None:
    """The unit of a setting as its type declares it (`bytes`), or None."""
    field = next(field for field in msgspec.structs.fields(kind) if field.name == name)
    return "bytes" if "'unit': 'bytes'" in repr(field.type) else None


def _plain(kind: type[msgspec.Struct], name: str, value: Any) -> Any:
    """Text from a flag or the environment, in the form that msgspec converts."""
    if isinstance(value, str) and unit_of(kind, name) == "bytes":
        return parse_nbytes(value)
    field = next(field for field in msgspec.structs.fields(kind) if field.name == name)
    if isinstance(value, str) and "'commas': 'kept'" in repr(field.type):
        return [value]  # half a secret must not be taken for a whole one
    if isinstance(value, str) and "tuple[" in repr(field.type):
        return [part for part in value.split(",") if part]
    if value == "" and not field.required and field.default is None:
        return None
    return value
