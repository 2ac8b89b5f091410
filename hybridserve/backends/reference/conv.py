"""Short causal convolution, and rows with the ones before them, in plain torch.

Owns `short_conv` and `trailing` of the reference backend. Must not know layers. All sequences go in one pass, whatever
their lengths.
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
    history, place = _history(x, window, batch, table)
    wide = history.float()
    ends = len(history) - past  # taps run over all of the history; outputs across a border are not picked
    y = torch.zeros(ends, x.shape[1], dtype=torch.float32, device=x.device)
    for tap in range(width):
        y.addcmul_(wide[tap : tap + ends], weight[:, tap].float())
    y = y[place - past]
    if bias is not None:
        y += bias.float()

    _keep_window(history, place, window, table)
    return ACTIVATIONS[activation](y).to(x.dtype)


def trailing(x: Tensor, rows: Tensor, window: Tensor, batch: Batch, table: StateTable) -> Tensor:
    """See `ops.Trailing`. x: [T, ...]; rows: [R]; window: [L, W - 1, ...], in place. Returns [R, W, ...]."""
    past = window.shape[1]
    history, place = _history(x, window, batch, table)
    out = history[place[rows][:, None] + torch.arange(-past, 1, device=x.device)]
    _keep_window(history, place, window, table)
    return out


def _history(x: Tensor, window: Tensor, batch: Batch, table: StateTable) -> tuple[Tensor, Tensor]:
    """Rows with the window before each sequence's first: [T + S (W - 1), ...], and where in it each row lies: [T].

    x: [T, ...]; window: [L, W - 1, ...].
    """
    past = window.shape[1]
    starts = batch.cu_seqlens.long()  # [S + 1]
    rows = torch.arange(len(x), device=x.device)
    place = rows + (torch.bucketize(rows, starts[1:], right=True) + 1) * past
    history = x.new_empty(len(x) + batch.num_sequences * past, *x.shape[1:])
    history[place] = x
    before = starts[:-1] + torch.arange(batch.num_sequences, device=x.device) * past  # [S]
    history[before[:, None] + torch.arange(past, device=x.device)] = start_states(window, table).to(x.dtype)
    return history, place


def _keep_window(history: Tensor, place: Tensor, window: Tensor, table: StateTable) -> None:
    """Store the last W - 1 rows up to each kept one. history, place: see `_history`; window: [L, W - 1, ...], in place."""
    last = place[table.write_rows][:, None] + torch.arange(1 - window.shape[1], 1, device=place.device)
    write_states(window, table, history[last])
