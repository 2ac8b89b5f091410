"""The report of `check-model`: findings, layers and memory, as data with a versioned JSON form.

Owns these types, the exit code that findings come to, and the JSON (documented in `docs/check-model.md`). Must not know how
anything is found out, nor torch. Filled by `checker.py`, printed by the command.
"""

from typing import Literal, TypeAlias

import msgspec

from hybridserve import __version__
from hybridserve.engine.messages import GroupInfo
from hybridserve.errors import HybridServeError

#: Raised when a field changes its meaning or goes away; new fields leave it as it is.
SCHEMA_VERSION = 1

Status: TypeAlias = Literal["PASS", "WARN", "FAIL"]

OK = 0
WARNINGS_UNDER_STRICT = 1
INTERNAL = 70
#: Which of several failures decides the exit code: what is wrong with the call, then what is dangerous, broken, unknown, absent.
PRECEDENCE = (INTERNAL, 2, 7, 4, 3, 6, 5)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    id: str  # dotted: the section, then what in it
    status: Status
    detail: str
    fix: str | None = None  # what to do, where something is wrong
    exit_code: int = OK  # of a FAIL


class CacheTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that a layer keeps: for each entry of a paged cache, or for each sequence."""

    cache: str
    kind: Literal["paged", "state"]
    name: str
    shape: tuple[int, ...]
    dtype: str
    tokens_per_entry: int | None = None
    window: int | None = None


class LayerRun(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of one kind with the same caches."""

    layers: str  # "0-2,4-6"
    num_layers: int
    kind: str
    caches: list[CacheTensor]
    operations: list[str]  # of the backends, that these layers may call


class DeviceFit(msgspec.Struct, frozen=True, kw_only=True):
    """What one known device holds."""

    device: str  # as `--device` takes it
    memory_nbytes: int
    max_model_len: int  # the longest sequence that fits beside the weights; 0 when they do not
    memory_users: int  # sequences of 8,192 tokens, or of the longest context, that memory alone would hold


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """How memory is divided. `/v1/limits` uses the same names for what is in force."""

    num_parameters: int
    weights_nbytes: int
    host_nbytes: int = 0  # of those, tables that stay in the host's memory whatever the device
    memory_nbytes: int  # for weights and caches together
    kv_nbytes_per_token: int
    state_nbytes_per_sequence: int
    checkpoint_nbytes: int  # a state kept for later hits, as it lies in its pages
    block_size: int
    match_unit: int
    superpage_nbytes: int
    num_superpages: int  # 0 when not one sequence fits
    cache_nbytes: int
    padding_percent: float
    groups: list[GroupInfo]
    max_model_len: int  # 0 when not one sequence fits
    users_at: dict[str, int]  # context length -> sequences of it that run at once
    memory_users_at: dict[str, int]  # the same, did memory alone bind
    tokens_at: dict[str, int]  # context length -> tokens that they hold together
    limit_at: dict[str, str]  # context length -> what keeps it from being one user more


class Report(msgspec.Struct, kw_only=True):
    """All that was found out."""

    model: str
    device: str
    checks: list[Finding] = []
    not_checked: list[str] = []  # sections that an earlier failure made impossible
    architecture: str | None = None
    dtype: str | None = None
    layers: list[LayerRun] = []
    memory: Memory | None = None
    devices: list[DeviceFit] = []  # the known ones, from the smallest
    backends: dict[str, str] = {}  # operation -> backend and reasons, as in `/v1/limits`
    features_off: dict[str, str] = {}  # feature -> reason code, as in `/v1/limits`

    def exit_code(self, *, strict: bool) -> int:
        """0 when all is well, else the code of the gravest failure; with `strict`, 1 for warnings alone."""
        codes = {finding.exit_code for finding in self.checks if finding.status == "FAIL"}
        if codes:
            return next((code for code in PRECEDENCE if code in codes), INTERNAL)
        warned = any(finding.status == "WARN" for finding in self.checks)
        return WARNINGS_UNDER_STRICT if strict and warned else OK

    def to_json(self, *, strict: bool) -> bytes:
        """The JSON form, ending in a line break."""
        head = {"schema_version": SCHEMA_VERSION, "hybridserve": __version__, "exit_code": self.exit_code(strict=strict)}
        fields = msgspec.to_builtins(self)
        return msgspec.json.format(msgspec.json.encode({**head, **fields}), indent=2) + b"\n"


def plain(text: str) -> str:
    """Text that can be encoded: names of files and keys may hold what is no character."""
    return text.encode(errors="backslashreplace").decode()


def passed(id: str, detail: str) -> Finding:
    """A finding that all is well."""
    return Finding(id=id, status="PASS", detail=plain(detail))


def warned(id: str, detail: str, fix: str) -> Finding:
    """A finding that the model runs, but not as one may think."""
    return Finding(id=id, status="WARN", detail=plain(detail), fix=plain(fix))


def failed(id: str, error: HybridServeError) -> Finding:
    """A finding made from what the engine itself would raise. Messages end with the remedy, after a semicolon or full stop."""
    text = plain(str(error))
    cut = max(text.rfind("; "), text.rfind(". "))
    if cut < 0:
        return Finding(id=id, status="FAIL", detail=text, exit_code=error.exit_code)
    return Finding(id=id, status="FAIL", detail=text[:cut], fix=text[cut + 2 :].rstrip("."), exit_code=error.exit_code)
