"""The order of `check-model`: each section needs what the ones before found, and a failure leaves the rest unchecked.

Owns that order and the turning of errors into findings. Must not print. Called by the command.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from hybridserve.check.content import check_files
from hybridserve.check.devices import check_devices, fit_devices
from hybridserve.check.layout import check_architecture, check_config, check_layers, is_served, lay_out, layer_runs
from hybridserve.check.memory import check_memory, device_weights_nbytes
from hybridserve.check.numerics import check_numerics
from hybridserve.check.operations import check_backends, check_features, choose_backends
from hybridserve.check.report import INTERNAL, Finding, Report, failed, passed, plain, warned
from hybridserve.check.source import Entries, Source, check_dtype, check_shards, check_source, find_source, read_headers
from hybridserve.check.target import Target, check_target, find_target
from hybridserve.check.tensors import check_not_empty, check_tensors, find_match, scan_values
from hybridserve.config import EngineSettings, format_nbytes
from hybridserve.engine.features import features_off
from hybridserve.engine.sizing import free_nbytes, unlimited_plan
from hybridserve.errors import HybridServeError, WeightsError
from hybridserve.models import CausalLM
from hybridserve.models.loader import MatchedWeights
from hybridserve.registry import load_plugin

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Sections that come to nothing when an earlier one fails, in the order of the report.
SECTIONS = ("source", "content", "architecture", "layers", "memory", "numerics", "tensors", "backends", "features", "chat")


@dataclass(frozen=True)
class Options:
    """What is checked beside the engine's own settings."""

    settings: EngineSettings
    device: str  # "cpu", "cuda:h200", ...
    memory_nbytes: int | None = None
    is_deep: bool = False
    is_run: bool = False


class _Checker:
    """Fills one report."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.report = Report(model=plain(options.settings.model), device=plain(options.device))

    def add(self, findings: Iterable[Finding]) -> None:
        self.report.checks.extend(findings)

    def attempt(self, name: str, work: Callable[[], T]) -> T | None:
        """The result of `work`, or None after noting its failure as the finding `name`."""
        try:
            return work()
        except HybridServeError as error:
            self.add([failed(name, error)])
        except OSError as error:
            self.add([failed(name, _unreadable(error))])
        except Exception as error:  # a fault of ours must not hide what else was found out
            log.debug("check %s failed", name, exc_info=True)
            text = plain(f"the check itself failed: {type(error).__name__}: {str(error)[:300]}")
            self.add([Finding(id=name, status="FAIL", detail=text, fix="report this with the config.json", exit_code=INTERNAL)])
        return None

    def attempt_all(self, name: str, work: Callable[[], Iterable[Finding]]) -> None:
        """Add what `work` finds."""
        self.add(self.attempt(name, work) or ())

    def run(self) -> None:
        options = self.options
        target = self.attempt("target", lambda: find_target(options.device, options.memory_nbytes))
        for path in options.settings.plugin:
            self.attempt("plugin", partial(load_plugin, path))
        source = self.attempt("source", lambda: find_source(options.settings))
        if target is None or source is None:
            self.report.not_checked = [name for name in SECTIONS if name not in self._sections()]
            return
        self.report.device = target.name
        self.add(check_target(target))
        self.add([check_source(source)])
        self.attempt_all("content", lambda: check_files(source))
        entries = self.attempt("source.shards", lambda: read_headers(source)) if self._reads_headers(source) else None
        if entries is not None:
            self.add(check_shards(source, entries))
        model = self._lay_out(source)
        if model is not None:
            self._check_model(model, source, target, entries)
        self._check_chat(source, model)
        if model is not None and options.is_run:
            self._run(model, source, target)
        self.report.not_checked = [name for name in SECTIONS if name not in self._sections() and self._applies(name, source)]

    def _lay_out(self, source: Source) -> CausalLM | None:
        settings = self.options.settings
        served = self.attempt("architecture", lambda: is_served(source))
        found = self.attempt("architecture", lambda: check_architecture(source)) if served else None
        if served is None or (served and found is None):
            return None
        self.add([found] if found is not None else ())
        model = self.attempt("config" if served else "architecture", lambda: lay_out(source, settings))
        if model is not None:
            self.add(check_config(source, settings))
            self.report.architecture = model.info.architecture
            self.report.dtype = str(model.dtype).removeprefix("torch.")
        return model

    def _check_model(self, model: CausalLM, source: Source, target: Target, entries: Entries | None) -> None:
        settings, report = self.options.settings, self.report
        runs = self.attempt("layers", lambda: layer_runs(model, unlimited_plan(settings, model.cache_specs())))
        if runs is None:
            return
        report.layers = runs
        self.add(check_layers(runs))
        matched = None if entries is None else find_match(model, entries)
        memory = self.attempt("memory", lambda: check_memory(model, settings, target, matched))
        if memory is not None:
            findings, report.memory = memory
            self.add(findings)
            self.attempt_all("memory.devices", lambda: self._compare_devices(model, matched))
            self.attempt_all("numerics", lambda: check_numerics(model, runs, memory[1], settings))
        if entries is not None:
            self.add([check_dtype(entries, str(model.dtype).removeprefix("torch."))])
            self.attempt_all("tensors", lambda: check_tensors(model, entries))
        if self.options.is_deep:
            self._scan(source, entries)
        elif entries is not None and source.weights_are_here:
            self.attempt("tensors.values", lambda: check_not_empty(entries))
        chosen = self.attempt("backends", lambda: choose_backends(model, settings, target))
        if chosen is not None:
            report.backends = chosen
            self.add(check_backends(runs, chosen))
        report.features_off = features_off(settings)
        self.add(check_features(settings))

    def _compare_devices(self, model: CausalLM, matched: MatchedWeights | None) -> list[Finding]:
        settings, longest = self.options.settings, self.options.settings.max_model_len or model.info.max_positions
        weights_nbytes = device_weights_nbytes(model, matched)
        fits = fit_devices(unlimited_plan(settings, model.cache_specs()), weights_nbytes, settings, longest)
        self.report.devices = fits
        return [check_devices(fits, weights_nbytes, settings, longest)]

    def _scan(self, source: Source, entries: Entries | None) -> None:
        if entries is not None and source.weights_are_here:
            self.attempt_all("tensors.values", lambda: [scan_values(entries)])
        elif entries is not None or not source.has_weights:
            self.add([warned("tensors.values", "not scanned: the weights are not on this machine", "download them first")])

    def _check_chat(self, source: Source, model: CausalLM | None) -> None:
        if not self._has_text(source):
            return
        # Tokenizers and templates take a good part of a second to import, which a config alone needs not wait for.
        from hybridserve.check.chat import (
            check_defaults,
            check_stop_tokens,
            check_template,
            check_tokenizer,
            read_tokenizer,
            text_folder,
        )
        from hybridserve.check.rendering import render

        folder = self.attempt("chat.tokenizer", lambda: text_folder(source, self.options.settings))
        found = self.attempt("chat.tokenizer", lambda: [read_tokenizer(folder)]) if folder is not None else None
        if folder is None or found is None:
            return
        tokenizer = found[0]
        texts = (tokenizer.special_tokens, tokenizer.added_tokens) if tokenizer else ({}, {})
        rendering = self.attempt("content.template", lambda: render(folder, *texts))
        if rendering is None:
            return
        if rendering.cases:
            self.add([passed("content.template", f"{len(rendering.cases)} chats rendered in the sandbox, within bounds")])
        if model is not None:
            self.add([check_tokenizer(tokenizer, model.info.vocab_size)])
        self.add(check_template(rendering))
        if tokenizer is not None:
            self.attempt_all("chat.stop", lambda: [check_stop_tokens(source, tokenizer, rendering)])
        self.attempt_all("chat.defaults", lambda: [check_defaults(source)])

    def _run(self, model: CausalLM, source: Source, target: Target) -> None:
        settings = self.options.settings
        if not target.is_here:
            self.add([warned("run", f"not run: {target.name} is not here", "leave out --device, or run it there")])
        elif any(finding.status == "FAIL" for finding in self.report.checks):
            self.add([warned("run", "not run, because something else failed", "repair that first")])
        elif (shortage := self._shortage(target)) is not None:
            self.add([warned("run", f"not run: {shortage}", "run it where it fits, or try a smaller model of the family")])
        else:
            from hybridserve.check.trial import run_trial  # the whole engine

            with_weights = source.weights_are_here and settings.load_format != "dummy"
            self.attempt_all("run", lambda: run_trial(model, settings, with_weights=with_weights))

    def _shortage(self, target: Target) -> str | None:
        """That what is free now does not hold the weights, whatever `--memory` says; None if it does."""
        memory, free = self.report.memory, free_nbytes(target.device)
        if memory is None or memory.weights_nbytes - memory.host_nbytes < free:
            return None
        return f"the weights take {format_nbytes(memory.weights_nbytes)}, but {format_nbytes(free)} are free here now"

    def _reads_headers(self, source: Source) -> bool:
        refused = any(finding.status == "FAIL" and finding.id == "content.pickles" for finding in self.report.checks)
        return source.has_weights and self.options.settings.load_format != "dummy" and not refused

    def _sections(self) -> set[str]:
        return {finding.id.partition(".")[0] for finding in self.report.checks}

    def _applies(self, name: str, source: Source) -> bool:
        if name == "tensors":
            return source.has_weights and self.options.settings.load_format != "dummy"
        return name != "chat" or self._has_text(source)

    def _has_text(self, source: Source) -> bool:
        return source.has_weights or self.options.settings.tokenizer is not None


def _unreadable(error: OSError) -> WeightsError:
    what = Path(error.filename).name if error.filename else "a file of the model"
    return WeightsError(f"{what} cannot be read: {error.strerror or error}; see that it is there and to its permissions")


def check_model(options: Options) -> Report:
    """Find out all that can be found out. Never raises: what goes wrong is in the report."""
    checker = _Checker(options)
    checker.attempt("check", checker.run)
    return checker.report
