"""What `check-layer` found out, as data with a versioned JSON form.

Owns the verdict and the exit code. Must not know how anything is found out, nor torch. Filled by `judge.py`, printed by the
command.
"""

from typing import Literal, TypeAlias

import msgspec

from hybridserve import __version__

#: Raised when a field changes its meaning or goes away; new fields leave it as it is.
SCHEMA_VERSION = 1

Verdict: TypeAlias = Literal["verified", "self-consistent, not verified", "failed"]

OK = 0
UNVERIFIED_UNDER_STRICT = 1
FAILED = 8


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One check of one layer."""

    check: str
    status: Literal["PASS", "FAIL"]
    seconds: float
    detail: str = ""  # of a FAIL: the inputs and what came out
    difference: float | None = None  # the largest, where one was measured


class LayerReport(msgspec.Struct, frozen=True, kw_only=True):
    """All checks of one layer with one config."""

    layer: str
    config: dict[str, object]
    has_oracle: bool
    checks: list[Outcome]

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.checks if outcome.status == "FAIL"]

    @property
    def verdict(self) -> Verdict:
        if self.failed:
            return "failed"
        return "verified" if self.has_oracle else "self-consistent, not verified"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All layers that one call named."""

    target: str
    layers: list[LayerReport]

    @property
    def verdict(self) -> Verdict:
        """That of the worst."""
        verdicts = {layer.verdict for layer in self.layers}
        order: tuple[Verdict, ...] = ("failed", "self-consistent, not verified", "verified")
        return next(verdict for verdict in order if verdict in verdicts)

    def exit_code(self, *, strict: bool) -> int:
        """0; 8 when a check failed; with `strict`, 1 when there was nothing to verify a layer against."""
        if self.verdict == "failed":
            return FAILED
        return UNVERIFIED_UNDER_STRICT if strict and self.verdict != "verified" else OK

    def to_json(self, *, strict: bool) -> bytes:
        """The JSON form, ending in a line break."""
        layers = [{**msgspec.to_builtins(layer), "verdict": layer.verdict} for layer in self.layers]
        fields = {
            "schema_version": SCHEMA_VERSION,
            "hybridserve": __version__,
            "exit_code": self.exit_code(strict=strict),
            "target": self.target,
            "verdict": self.verdict,
            "layers": layers,
        }
        return msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n"
