"""What a model's `generation_config.json` says about sampling, for requests that leave it out.

Owns that file's reading. Must not know requests or tokenizers. Called by `text.py`, `server/` and the commands.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hybridserve.errors import HybridServeError, WeightsError
from hybridserve.json_files import read_json_object
from hybridserve.request import MAX_LOGIT_BIAS, SamplingParams

log = logging.getLogger(__name__)

FILE_NAME = "generation_config.json"
_MAX_TOKEN_ID = 2**31
#: As low as a bias may be: what `suppress_tokens` come to.
_SUPPRESSED = -100.0
_READ = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
#: Keys that change what is generated and are not implemented, with the values that change nothing; null never does.
_NOT_IMPLEMENTED: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "typical_p", "guidance_scale", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(
        (
            *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "penalty_alpha", "epsilon_cutoff", "eta_cutoff"),
            *("diversity_penalty", "min_length", "renormalize_logits", "top_h"),
        ),
        (0, False),
    ),
    **dict.fromkeys(("begin_suppress_tokens", "sequence_bias", "constraints", "force_words_ids", "forced_decoder_ids"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "max_time"), ()),
    **dict.fromkeys(("dola_layers", "watermarking_config", "custom_generate"), ()),
}


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """A model author's sampling settings, named as in `SamplingParams`; None where the file says nothing.

    `unsupported` are settings that the file asks for and no request gets, as `key=value`; the reason code is not_implemented.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    logit_bias: dict[int, float] | None = None
    unsupported: tuple[str, ...] = ()

    def items(self) -> dict[str, Any]:
        """The settings that are there."""
        found = {name: getattr(self, name) for name in self.__struct_fields__ if name != "unsupported"}
        return {name: value for name, value in found.items() if value is not None}


def read_sampling_defaults(folder: str | Path) -> SamplingDefaults:
    """Read a model folder's `generation_config.json`; `do_sample: false` there means greedy.

    Raises WeightsError for a value that no request could have. What is not implemented is logged with its reason code.
    """
    found = read_json(Path(folder) / FILE_NAME)
    values = {name: found[key] for key, name in _READ.items() if found.get(key) is not None}
    if found.get("do_sample") is False:
        values["temperature"] = 0.0
    if values.get("top_k") == -1:  # other servers' word for no limit
        values["top_k"] = 0
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    suppressed, unsupported = _suppressed(found, model_vocab_size(Path(folder)))
    if suppressed:
        values["logit_bias"] = dict.fromkeys(suppressed, _SUPPRESSED)
    unsupported += [
        f"{key}={found[key]!r:.60}" for key, neutral in _NOT_IMPLEMENTED.items() if not _is_neutral(found.get(key), neutral)
    ]
    if unsupported:
        log.warning("%s asks for %s, which is off: not_implemented", FILE_NAME, ", ".join(unsupported))
    return _checked(values, tuple(unsupported))


def _checked(values: dict[str, Any], unsupported: tuple[str, ...]) -> SamplingDefaults:
    try:
        defaults = msgspec.convert({**values, "unsupported": unsupported}, SamplingDefaults)
        # A bound that follows from a request's own limit is the request's matter.
        SamplingParams(**{**defaults.items(), "max_tokens": defaults.max_tokens})
    except (msgspec.ValidationError, HybridServeError, OverflowError) as error:
        raise WeightsError(f"{FILE_NAME}: {error}; correct the file, or delete it to sample as each request says") from error
    return defaults


def _suppressed(found: Mapping[str, Any], vocab_size: int) -> tuple[list[int], list[str]]:
    """Tokens that are never to be chosen, and what of the wish can't be met. Ids that the model hasn't can't be chosen anyway."""
    words = found.get("bad_words_ids")
    entries = [entry for entry in words if isinstance(entry, list)] if isinstance(words, list) else []
    single = [entry[0] for entry in entries if len(entry) == 1]
    ids = [one for one in dict.fromkeys([*token_ids(found.get("suppress_tokens")), *token_ids(single)]) if one < vocab_size]
    unmet = [f"bad_words_ids={entry!r:.60}" for entry in entries if len(entry) > 1][:1]
    if len(ids) > MAX_LOGIT_BIAS:
        return [], [f"suppress_tokens of {len(ids)} tokens (at most {MAX_LOGIT_BIAS})", *unmet]
    return ids, unmet


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    return value is None or value in neutral


def model_vocab_size(folder: Path) -> int:
    """Ids from this on the model in a folder never gives; a bound of all ids where its config does not say."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    for values in (text if isinstance(text, dict) else {}, config):
        size = values.get("vocab_size")
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return min(size, _MAX_TOKEN_ID)
    return _MAX_TOKEN_ID


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder, or an empty one when there is no such file. Raises WeightsError."""
    return read_json_object(path) if path.is_file() else {}


def token_ids(value: Any) -> list[int]:
    """Token ids from a config's entry, which is one id, a list of them, or null; what can be no id is left out."""
    entries = value if isinstance(value, list) else [value]
    return [entry for entry in entries if isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry < _MAX_TOKEN_ID]
