"""Reading the rotary embedding out of a config, in both published spellings.

Owns which keys mean what: `rope_parameters` (transformers 5), or `rope_theta`, `rope_scaling` and `partial_rotary_factor` beside
each other (before). Must not know frequencies (`mixers/rotary.py`). Called by the files of the architectures.
"""

from collections.abc import Mapping

from hybridserve.errors import UnsupportedModelError
from hybridserve.mixers.rotary import RotaryConfig, rope_scaling
from hybridserve.models.reader import ConfigReader

#: Keys that an unscaled rotary embedding may carry. With text alone, mrope's three position components are equal, so its
#: sections pick from three equal rows.
_PLAIN_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_PLAIN_KINDS = ("default", "mrope")


def read_rotary(
    config: ConfigReader,
    head_dim: int,
    max_positions: int,
    *,
    default_theta: float | None = None,
    default_partial: float = 1.0,
    plain_is_whole: bool = False,
    default_parameters: Mapping[str, object] | None = None,
) -> RotaryConfig:
    """The rotary embedding of heads of `head_dim`. Raises UnsupportedModelError for a kind or key that is not implemented.

    With `plain_is_whole` an unscaled embedding turns the whole head whatever `partial_rotary_factor` says, as the published
    classes of many families do. A `rope_scaling` that says something replaces `rope_parameters` as a whole;
    `default_parameters` are those of a config that has neither.
    """
    parameters = _stated(config, default_parameters)
    # Both are read, so that neither spelling of a file that has the two counts as unread.
    beside = {key: config.read_optional(key, float) for key in ("rope_theta", "partial_rotary_factor")}
    for key, value in beside.items():
        if value is not None:
            parameters.setdefault(key, value)
    return _rotary(config, parameters, head_dim, max_positions, default_theta, default_partial, plain_is_whole)


def _stated(config: ConfigReader, default: Mapping[str, object] | None) -> dict[str, object]:
    """The parameters that count, without those that are null."""
    old = config.read("rope_scaling", dict[str, object], {})
    new = config.read("rope_parameters", dict[str, object], {})
    stated = old or (new if config.has("rope_parameters") else default or {})
    return {key: value for key, value in stated.items() if value is not None}


def read_rotary_by_kind(
    config: ConfigReader,
    head_dim: int,
    max_positions: int,
    default_thetas: Mapping[str, float],
    *,
    sliding_theta_key: str | None = None,
    default_parameters: Mapping[str, Mapping[str, object]] | None = None,
) -> dict[str, RotaryConfig]:
    """The rotary embedding of each kind of attention layer: `rope_parameters` by kind, or the older keys beside each other.

    Of those, `rope_scaling` and `rope_theta` are for full attention, `sliding_theta_key` for a window. An unscaled kind turns
    the whole head whatever its partial factor says, as published transformers does for these families. `default_parameters` are
    those of a config that has no `rope_parameters`.
    """
    by_kind: Mapping[str, Mapping[str, object] | None] = config.read("rope_parameters", dict[str, dict[str, object] | None], {})
    if not config.has("rope_parameters"):
        by_kind = default_parameters or {}
    unknown = sorted(set(by_kind) - set(default_thetas))
    if unknown:
        raise UnsupportedModelError(
            f"config.json: {config.name('rope_parameters')} has {unknown[0]!r}; for {config.architecture} hybridserve implements "
            f"{', '.join(default_thetas)}"
        )
    scaling = config.read("rope_scaling", dict[str, object], {})
    thetas = {"full_attention": config.read_optional("rope_theta", float)}
    if sliding_theta_key is not None:
        thetas["sliding_attention"] = config.read_optional(sliding_theta_key, float)
    found = {}
    for kind, default in default_thetas.items():
        merged = {**(by_kind.get(kind) or {}), **(scaling if kind == "full_attention" else {})}
        parameters = {key: value for key, value in merged.items() if value is not None}
        theta = thetas.get(kind)
        found[kind] = _rotary(config, parameters, head_dim, max_positions, default if theta is None else theta, 1.0, True)
    return found


def _rotary(
    config: ConfigReader,
    parameters: dict[str, object],
    head_dim: int,
    max_positions: int,
    default_theta: float | None,
    default_partial: float,
    plain_is_whole: bool,
) -> RotaryConfig:
    theta = _number(config, parameters, "rope_theta", default_theta)
    partial = _number(config, parameters, "partial_rotary_factor", default_partial)
    if not 0 < partial <= 1 or theta <= 1:
        raise UnsupportedModelError(
            f"config.json: rope_theta is {theta:g} and partial_rotary_factor {partial:g}; they must be over 1, and in (0, 1]"
        )
    _settle_original_length(config, parameters, max_positions)
    kind = _kind(parameters)
    # A proportional embedding turns pairs of the whole head, those beyond the factor by nothing.
    is_whole = kind == "proportional" or (plain_is_whole and kind in _PLAIN_KINDS)
    turned = head_dim if is_whole else int(head_dim * partial)
    if turned < 2 or turned % 2:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor {partial:g} of a head of {head_dim} (head_dim, or hidden_size over "
            f"num_attention_heads) turns {turned} numbers; hybridserve turns pairs, so it must be even and at least 2"
        )
    return RotaryConfig(rotary_dim=turned, theta=theta, scaling=rope_scaling(parameters, max_positions))


def _kind(parameters: Mapping[str, object]) -> object:
    return parameters.get("rope_type", parameters.get("type", "default"))


def _settle_original_length(config: ConfigReader, parameters: dict[str, object], max_positions: int) -> None:
    """Give scaled kinds the length they were trained at, where transformers looks for it; refuse what a plain kind can't use."""
    beside = config.read_optional("original_max_position_embeddings", int)
    kind = _kind(parameters)
    if kind in ("llama3", "yarn", "longrope"):
        parameters.setdefault("original_max_position_embeddings", max_positions)
        if beside is not None:
            parameters["original_max_position_embeddings"] = beside
    unknown = sorted(set(parameters) - _PLAIN_KEYS)
    if kind in _PLAIN_KINDS and unknown:
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
