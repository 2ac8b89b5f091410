"""Reading the rotary embedding out of a config, in both published spellings.

Owns which keys mean what: `rope_parameters` (transformers 5), or `rope_theta`, `rope_scaling` and `partial_rotary_factor` beside
each other (before). Must not know frequencies (`mixers/rotary.py`). Called by the files of the architectures.
"""

from hybridserve.errors import UnsupportedModelError
from hybridserve.mixers.rotary import RotaryConfig, rope_scaling
from hybridserve.models.reader import ConfigReader

#: Keys that an unscaled rotary embedding may carry. With text alone, mrope's three position components are equal, so its
#: sections pick from three equal rows.
_PLAIN_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}


def read_rotary(
    config: ConfigReader, head_dim: int, max_positions: int, *, default_theta: float | None = None, default_partial: float = 1.0
) -> RotaryConfig:
    """The rotary embedding of heads of `head_dim`. Raises UnsupportedModelError for a kind or key that is not implemented."""
    old = config.read("rope_scaling", dict[str, object], {})
    parameters = {
        key: value for key, value in {**old, **config.read("rope_parameters", dict[str, object], {})}.items() if value is not None
    }
    # Both are read, so that neither spelling of a file that has the two counts as unread.
    beside = {key: config.read_optional(key, float) for key in ("rope_theta", "partial_rotary_factor")}
    for key, value in beside.items():
        if value is not None:
            parameters.setdefault(key, value)
    theta = _number(config, parameters, "rope_theta", default_theta)
    partial = _number(config, parameters, "partial_rotary_factor", default_partial)
    if not 0 < partial <= 1 or theta <= 1:
        raise UnsupportedModelError(
            f"config.json: rope_theta is {theta:g} and partial_rotary_factor {partial:g}; they must be over 1, and in (0, 1]"
        )
    _settle_original_length(config, parameters, max_positions)
    return RotaryConfig(rotary_dim=int(head_dim * partial), theta=theta, scaling=rope_scaling(parameters, max_positions))


def _settle_original_length(config: ConfigReader, parameters: dict[str, object], max_positions: int) -> None:
    """Give scaled kinds the length they were trained at, where transformers looks for it; refuse what a plain kind can't use."""
    beside = config.read_optional("original_max_position_embeddings", int)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("llama3", "yarn", "longrope"):
        parameters.setdefault("original_max_position_embeddings", max_positions)
        if beside is not None:
            parameters["original_max_position_embeddings"] = beside
    unknown = sorted(set(parameters) - _PLAIN_KEYS)
    if kind in ("default", "mrope") and unknown:
        raise UnsupportedModelError(
            f"config.json: rope_parameters has {unknown[0]!r} with rope_type {kind!r}, which reads only "
            f"{', '.join(sorted(_PLAIN_KEYS))}; one rotary embedding for all layers is implemented"
        )


def _number(config: ConfigReader, parameters: dict[str, object], key: str, default: float | None) -> float:
    value = parameters.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedModelError(
            f"config.json: {key} of the rotary embedding is {value!r}; {config.architecture} needs a number, "
            f"in {config.name('rope_parameters')} or beside it"
        )
    return float(value)
