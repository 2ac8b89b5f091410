"""Files beside a config.json in which quantisers say how the weights are stored, of the time before `quantization_config`.

Owns their names, and making a `quantization_config` of them, so that one reader (`quantisation.py`) knows all forms. Must not
know what the keys mean. Called by `source.py`.
"""

from collections.abc import Mapping
from pathlib import Path

from hybridserve.errors import UnsupportedModelError, WeightsError
from hybridserve.json_files import read_json_object

#: File -> the method of the tool that writes it, and the key of the object that counts; None for the whole file.
_SIDECARS: Mapping[str, tuple[str, str | None]] = {
    "hf_quant_config.json": ("modelopt", "quantization"),
    "quantize_config.json": ("gptq", None),
    "quant_config.json": ("awq", None),
}


def with_sidecar(config: dict[str, object], folder: Path) -> dict[str, object]:
    """The config with what a quantiser wrote beside it; as it is where there is no such file.

    Raises WeightsError for a broken one, UnsupportedModelError where the two say different things.
    """
    for name, (method, key) in _SIDECARS.items():
        if (folder / name).is_file():
            return _merged(config, read_json_object(folder / name), name, method, key)
    return config


def _merged(config: dict[str, object], content: dict[str, object], name: str, method: str, key: str | None) -> dict[str, object]:
    said = content if key is None else content.get(key)
    if not isinstance(said, dict):
        raise WeightsError(f"{name} has no object {key!r}, which tells how the weights are stored; download the file again")
    stated = _stated(config)
    if stated is None:
        return {**config, "quantization_config": {"quant_method": method, **said}}
    if method == "modelopt" and stated.get("quant_algo", said.get("quant_algo")) != said.get("quant_algo"):
        raise UnsupportedModelError(
            f"{name} says that the weights are stored as {said.get('quant_algo')!r:.60}, and quantization_config in config.json "
            f"{stated.get('quant_algo')!r:.60}; take both files from one release"
        )
    return config


def _stated(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """The quantization_config, at the top or of the text model that a config wraps."""
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        found = values.get("quantization_config")
        if isinstance(found, dict):
            return found
    return None
