"""All checks of the kit, in the order in which they are run.

Owns the list. Called by the command, the pytest plug-in and tests.
"""

from collections.abc import Callable
from typing import TypeAlias

from hybridserve.conformance import conduct, places, scale, sequences
from hybridserve.conformance.tolerance import Tolerance
from hybridserve.mixers.base import Mixer

Check: TypeAlias = Callable[[Mixer, Tolerance], None]

ALL_CHECKS: tuple[Check, ...] = (
    places.check_specs,
    places.check_storage,
    sequences.check_memory,
    sequences.check_chunking,
    sequences.check_token_ids,
    sequences.check_step,
    sequences.check_batching,
    sequences.check_written_states,
    sequences.check_starts,
    sequences.check_initial_state,
    sequences.check_resume,
    sequences.check_rollback,
    sequences.check_window,
    places.check_slots,
    places.check_entries,
    places.check_padding,
    places.check_crossing_slots,
    places.check_no_writes,
    places.check_offsets,
    conduct.check_meta,
    conduct.check_serialise,
    conduct.check_bfloat16,
    conduct.check_global_state,
    scale.check_many_sequences,
    scale.check_long_text,
    scale.check_far_positions,
    scale.check_twins,
    scale.check_alternating_users,
    scale.check_extreme_gates,
    scale.check_float16,
    scale.check_repeats,
)


def name_of(check: Callable[..., None]) -> str:
    """As it is reported: without `check_`, with spaces."""
    return check.__name__.removeprefix("check_").replace("_", " ")
