"""The reference backend: every operation in plain torch, on any device and dtype; all other backends are held to it.

Owns the list of its operations. Must not know layers, pools or other backends. Called by `select.py` once at load.
"""

from functools import partial

import torch

from hybridserve.backends.offer import Offer
from hybridserve.backends.reference.attention import kv_write, paged_attention
from hybridserve.backends.reference.conv import short_conv, trailing
from hybridserve.backends.reference.indexed import index_select, selected_attention
from hybridserve.backends.reference.linear import head_linear, linear, moe, slow_at, widened_head_linear, widened_linear
from hybridserve.backends.reference.norms import gated_rms_norm, rms_norm
from hybridserve.backends.reference.recurrence import delta_rule, linear_scan
from hybridserve.backends.reference.selective_scan import selective_scan


def offer(device: torch.device, dtype: torch.dtype) -> Offer:
    """Offer all operations. Where the CPU is slow at 16-bit products, the products with weights widen to fp32, and the
    reason says so.
    """
    widen = slow_at(device, dtype)
    product = widened_linear if widen else linear
    reason = "plain torch"
    if widen:
        name = str(dtype).removeprefix("torch.")
        reason += f"; products are widened to fp32, since this CPU has no {name} instructions that oneDNN can use"
    return Offer(
        ops={
            "linear": product,
            "head_linear": widened_head_linear if widen else head_linear,
            "rms_norm": rms_norm,
            "gated_rms_norm": gated_rms_norm,
            "kv_write": kv_write,
            "paged_attention": paged_attention,
            "index_select": index_select,
            "selected_attention": selected_attention,
            "trailing": trailing,
            "short_conv": short_conv,
            "delta_rule": delta_rule,
            "linear_scan": linear_scan,
            "selective_scan": selective_scan,
            "moe": partial(moe, product),
        },
        refused={},
        reason=reason,
    )
