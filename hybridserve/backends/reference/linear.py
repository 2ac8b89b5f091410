"""Matrix products with weights in plain torch: `linear`, `head_linear`, and the experts of `moe`.

Owns these operations of the reference backend and the widening to fp32 where a CPU is slow at 16-bit products. Must not
know layers. `offer` picks the form of `linear` once; `moe` is given the same one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridserve.backends.activations import ACTIVATIONS
from hybridserve.backends.ops import Activation, Linear

#: With fewer rows the 16-bit product is memory-bound and the widening costs more than it saves (measured on AVX2).
WIDEN_FROM_ROWS = 4
#: Bytes of the fp32 copy of a part of the weight: it should stay in a core's second-level cache.
WIDENED_NBYTES = 2 * 2**20


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.Linear`. x: [..., in]; weight: [out, in]; bias: [out] or None. Returns [..., out]."""
    return F.linear(x, weight, bias)


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` for CPUs without 16-bit products: weight and x go through fp32, the result is rounded once.

    x: [..., in]; weight: [out, in]; bias: [out] or None. Returns [..., out] in x's dtype.
    """
    num_rows = x.numel() // max(x.shape[-1], 1)
    if x.dtype.itemsize > 2 or num_rows < WIDEN_FROM_ROWS:
        return F.linear(x, weight, bias)
    out_features, in_features = weight.shape
    wide = x.reshape(num_rows, in_features).float()
    y = x.new_empty(num_rows, out_features)
    part = min(out_features, max(16, WIDENED_NBYTES // (4 * in_features)))
    buffer = torch.empty(part, in_features, dtype=torch.float32, device=x.device)
    for first in range(0, out_features, part):
        last = min(first + part, out_features)
        piece = buffer[: last - first].copy_(weight[first:last])
        y[:, first:last] = F.linear(wide, piece, None if bias is None else bias[first:last].float())
    return y.view(*x.shape[:-1], out_features)


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `ops.HeadLinear`. x: [T, H, in]; weight: [H, out, in]. Returns [T, H, out]."""
    return (x.transpose(0, 1) @ weight.mT).transpose(0, 1)


def widened_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`head_linear` for CPUs without 16-bit products: through fp32, rounded once. Shapes as there."""
    return head_linear(x.float(), weight.float()).to(x.dtype)


def slow_at(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this dtype want widening here: a CPU for which oneDNN has no 16-bit kernels."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if not torch._C._has_mkldnn:
        return True
    if dtype is torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def moe(
    product: Linear,
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: Activation,
    limit: float | None = None,
    up_shift: float = 0.0,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See `ops.Moe`; `product` is the `linear` to use.

    x: [T, D]; expert_ids: [T, k]; expert_weights: [T, k]; gate_up: [E, 2I, D] or [E, I, D]; down: [E, D, I]; biases: [E, 2I
    or I] and [E, D]. Returns [T, D].
    """
    top_k = expert_ids.shape[1]
    by_expert = expert_ids.flatten().argsort(stable=True)  # [T * k] of (row, choice) pairs
    counts = torch.bincount(expert_ids.flatten(), minlength=len(gate_up)).tolist()
    each = x.new_empty(len(by_expert), x.shape[-1])  # [T * k, D]: one result per pair, so that rows share no sum
    gated = gate_up.shape[1] != down.shape[2]
    first = 0
    for expert, count in enumerate(counts):
        if count:
            pairs = by_expert[first : first + count]
            bias, down_bias = (None, None) if biases is None else (biases[0][expert], biases[1][expert])
            inner = product(x[pairs // top_k], gate_up[expert], bias)
            inner = gate(inner, activation, limit, up_shift) if gated else ACTIVATIONS[activation](inner)
            each[pairs] = product(inner, down[expert], down_bias)
            first += count
    each = each.view(*expert_ids.shape, x.shape[-1])
    # Choice after choice in fp32: a row's sum has the same order whatever its neighbours are.
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for choice in range(top_k):
        y.addcmul_(each[:, choice].float(), expert_weights[:, choice, None].float())
    return y.to(x.dtype)


def gate(gate_up: Tensor, activation: Activation, limit: float | None, up_shift: float) -> Tensor:
    """act(gate) * (up + up_shift), both bounded as `ops.Moe` says. gate_up: [..., 2I], gate first. Returns [..., I]."""
    left, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        left, up = left.clamp(max=limit), up.clamp(-limit, limit)
    if up_shift:
        up = up + up_shift
    return ACTIVATIONS[activation](left) * up
