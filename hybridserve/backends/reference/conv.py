"""Short causal convolution in plain torch.

Owns `short_conv` of the reference backend. Must not know layers. All sequences go in one pass, whatever their lengths.
"""

import torch
from torch import Tensor

from hybridserve.backends.activations import ACTIVATIONS
from hybridserve.backends.ops import Activation
from hybridserve.backends.reference.slots import start_states, write_states
from hybridserve.batch import Batch, StateTable


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    batch: Batch,
    table: StateTable,
    *,
    activation: Activation,
) -> Tensor:
    """See `ops.ShortConv`. x: [T, C]; weight: [C, W]; bias: [C] or None; window: [L, W - 1, C], in place.

    Returns [T, C]. The history puts before each sequence's rows the W - 1 inputs it starts from, so that the input of
    tap j is the row W - 1 - j further up, in whichever part it lies.
    """
    width = weight.shape[1]
    past = width - 1
    starts = batch.cu_seqlens.long()  # [S + 1]
    rows = torch.arange(len(x), device=x.device)
    place = _place(rows, starts, past)  # [T]
    history = x.new_empty(len(x) + batch.num_sequences * past, x.shape[1])  # [T + S (W - 1), C]
    history[place] = x
    before = starts[:-1] + torch.arange(batch.num_sequences, device=x.device) * past  # [S]
    history[before[:, None] + torch.arange(past, device=x.device)] = start_states(window, table).to(x.dtype)

    wide = history.float()
    ends = len(history) - past  # taps run over all of the history; outputs across a border are not picked
    y = torch.zeros(ends, x.shape[1], dtype=torch.float32, device=x.device)
    for tap in range(width):
        y.addcmul_(wide[tap : tap + ends], weight[:, tap].float())
    y = y[place - past]
    if bias is not None:
        y += bias.float()

    last_inputs = _place(table.write_rows, starts, past)[:, None] + torch.arange(1 - past, 1, device=x.device)
    write_states(window, table, history[last_inputs])
    return ACTIVATIONS[activation](y).to(x.dtype)


def _place(rows: Tensor, starts: Tensor, past: int) -> Tensor:
    """Where rows of the batch lie in the history. rows: [R]; starts: [S + 1]. Returns int64 [R]."""
    sequences = torch.bucketize(rows, starts[1:], right=True)
    return rows + (sequences + 1) * past
