"""What a config.json says of the form that weights are stored in: every way that is read, and the refusal of all others.

Owns the keys of `quantization_config`. Must not know architectures or tensors; the forms are `quantised.py`'s. Called by
`architectures.py` with the config that a model is laid out from.
"""

from collections.abc import Callable, Collection, Mapping

from hybridserve.errors import UnsupportedModelError
from hybridserve.models.quantised import Mxfp4, Quantisation, ScaledFloat
from hybridserve.models.reader import ConfigReader

_COMPRESSED_FORMATS = ("float-quantized", "naive-quantized")
#: What other forms are, for their refusal.
_OTHERS: Mapping[str, str] = {
    "nvfp4": "floats of 4 bits in two levels of scales",
    "nvfp4-pack-quantized": "floats of 4 bits in two levels of scales",
    "pack-quantized": "integers of 4 or 8 bits, packed",
    "int-quantized": "integers of 8 bits",
    "marlin-24": "integers of 4 bits, every second one dropped",
    "gptq": "integers in groups, by GPTQ",
    "awq": "integers of 4 bits in groups, by AWQ",
    "bitsandbytes": "bitsandbytes' 4 or 8 bits",
    "mxfp8": "floats of 8 bits in groups of 32",
    "mixed_precision": "layers in several forms",
    "int8_sq": "integers of 8 bits, by SmoothQuant",
}


def read_quantisation(
    config: Mapping[str, object], *, architecture: str, ignore_keys: Collection[str] = ()
) -> Quantisation | None:
    """How a config.json says that weights are quantised; None if they aren't. Raises UnsupportedModelError by name.

    A form that is not read can't be ignored: `ignore_keys` count for keys that nobody knows.
    """
    top = ConfigReader(config, architecture=architecture, accepted=ignore_keys)
    readers = [top, *([top.nested("text_config")] if isinstance(config.get("text_config"), Mapping) else [])]
    for one in readers:
        if one.has("quantization"):
            raise _refusal(one.name("quantization"), "mlx", "the groups of MLX")
    holder = next((one for one in readers if one.has("quantization_config")), None)
    if holder is None:
        return None
    reader = holder.nested("quantization_config")
    method = reader.read("quant_method", str, "unnamed").lower()
    if method not in _METHODS:
        raise _refusal(reader.name("quant_method"), method)
    quantisation = _METHODS[method](reader)
    # Which modules were left alone shows in the dtypes of their tensors.
    reader.ignore("modules_to_not_convert", "modules_to_convert", "ignored_layers", "ignore", "exclude_modules")
    reader.finish()
    return quantisation


def _refusal(key: str, value: object, meaning: str | None = None) -> UnsupportedModelError:
    """The error for a form that isn't read, with what to take instead."""
    known = meaning or _OTHERS.get(str(value).lower())
    return UnsupportedModelError(
        f"config.json: {key} is {value!r:.60}{f' ({known})' if known else ''}, a form of weights that isn't implemented, nor can "
        "be ignored. Take the release of this model that is not quantised, or one in 'fp8' (DeepSeek's and Qwen's blocks), "
        "'fbgemm_fp8', 'compressed-tensors' with 'float-quantized', 'modelopt' with 'FP8', or 'mxfp4' (gpt-oss): those are read, "
        "and turned into the model's dtype on load"
    )


def _must_be(config: ConfigReader, key: str, *allowed: object) -> None:
    """Refuse any other value, ignored or not: tensors would be taken for other numbers. Absent is allowed."""
    value = config.read(key, object, None)
    if value is not None and value not in allowed:
        raise _refusal(config.name(key), value)


def _read_fp8(config: ConfigReader) -> Quantisation:
    """DeepSeek's and Qwen's keys, and what transformers saves."""
    # Activations stay as they are; the dtypes of weights and scales are in the headers.
    config.ignore("activation_scheme", "dequantize", "fmt", "scale_fmt", "is_checkpoint_fp8_serialized")
    _must_be(config, "expert_dtype", "fp8")
    return ScaledFloat(_read_block(config, "weight_block_size"))


def _read_rowwise_fp8(config: ConfigReader) -> Quantisation:
    config.ignore("activation_scale_ub")
    return ScaledFloat(None)


def _read_modelopt(config: ConfigReader) -> Quantisation:
    """NVIDIA's: of its algorithms the one with a scale for each tensor."""
    config.ignore("producer", "kv_cache_scheme", "kv_cache_quant_algo", "config_groups", "group_size", "has_zero_point")
    config.ignore("pre_quant_scale")
    if not config.has("quant_algo"):
        raise UnsupportedModelError(f"config.json has no {config.name('quant_algo')}, which tells how the weights are stored")
    _must_be(config, "quant_algo", "FP8")
    return ScaledFloat(None)


def _read_compressed(config: ConfigReader) -> Quantisation:
    """compressed-tensors: floats of 8 bits, in groups of layers that must all be stored alike."""
    _must_be(config, "format", *_COMPRESSED_FORMATS)
    _must_be(config, "transform_config", {})
    sparse = config.nested("sparsity_config")
    _must_be(sparse, "format", "dense")
    sparse.ignore("ignore", "targets", "registry_requires_subclass", "sparsity_structure", "global_sparsity")
    config.ignore("quantization_status", "global_compression_ratio", "kv_cache_scheme", "version", "quantization_version")
    groups = config.nested("config_groups")
    blocks = {_read_group(groups.nested(name)) for name in config.read("config_groups", dict[str, object], {})}
    if len(blocks) != 1:
        raise UnsupportedModelError(
            f"config.json: {groups.name('')[:-1]} has {len(blocks)} ways of storing weights; one for all layers is implemented"
        )
    return ScaledFloat(blocks.pop())


def _read_group(group: ConfigReader) -> tuple[int, int] | None:
    group.ignore("targets", "input_activations", "output_activations")
    _must_be(group, "format", *_COMPRESSED_FORMATS)
    weights = group.nested("weights")
    weights.ignore("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype", "group_size")
    for key, value in (("num_bits", 8), ("type", "float"), ("symmetric", True), ("dynamic", False)):
        _must_be(weights, key, value)
    _must_be(weights, "strategy", "tensor", "channel", "block")
    block = _read_block(weights, "block_structure")
    return block if weights.read("strategy", str, "tensor") == "block" else None


def _read_block(config: ConfigReader, key: str) -> tuple[int, int] | None:
    block = config.read_optional(key, tuple[int, int])
    if block is not None and min(block) < 1:
        raise UnsupportedModelError(f"config.json: {config.name(key)} is {list(block)}; both must be 1 or more")
    return block


def _read_mxfp4(config: ConfigReader) -> Quantisation:
    config.ignore("dequantize")
    return Mxfp4()


_METHODS: Mapping[str, Callable[[ConfigReader], Quantisation]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_rowwise_fp8,
    "compressed-tensors": _read_compressed,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
}
