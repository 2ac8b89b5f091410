"""What kernels are told about the states of a batch.

Owns the order of those arguments. Must not know what a state is. Called by the wrappers of state operations.
"""

from hybridserve.batch import Batch, StateTable


def table_arguments(batch: Batch, table: StateTable) -> tuple[int, int, int, int, int, int]:
    """Addresses of cu_seqlens, start slots, rows and slots of writes; numbers of sequences and writes."""
    return (
        batch.cu_seqlens.data_ptr(),
        table.start_slots.data_ptr(),
        table.write_rows.data_ptr(),
        table.write_slots.data_ptr(),
        batch.num_sequences,
        len(table.write_rows_host),
    )
