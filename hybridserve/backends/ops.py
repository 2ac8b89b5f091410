"""The operations that models and mixers are made of: one signature each, for prefill, decode and verification alike.

Owns the signatures, their shapes and what each writes in place; implementations live beside it (`reference.py` defines every
one of them in plain torch; the others override some and are held to it by tests). Must not know pools, the scheduler or models.
`select.py` fills an `Ops` once at load; mixers get it as a constructor argument.

Letters: T rows of the batch, S sequences, H heads (Hq query, Hk key, Hv value), K key dim, V value dim, P head dim and N state
size of Mamba-2, C channels, W conv width, D hidden, E experts, I expert width, B blocks, L slots.

State operations read `table.start_slots` (or zeros) and write the state after row `table.write_rows[i]` to slot
`table.write_slots[i]`, and touch no other slot. Reads come before writes: a slot may be the start of one sequence and the
target of another in the same call. Arithmetic of states is fp32 whatever the activations are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

from hybridserve.batch import Batch, PagedTable, StateTable

Activation: TypeAlias = Literal["silu", "sigmoid", "gelu_tanh", "gelu", "relu2", "quick_gelu", "identity"]


class Linear(Protocol):
    """y = x weight^T + bias. x: [..., in]; weight: [out, in]; bias: [out] or None. Returns [..., out] in x's dtype."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...


class HeadLinear(Protocol):
    """y_h = x_h weight_h^T of each head h. x: [T, H, in]; weight: [H, out, in], of any strides. Returns [T, H, out], x's dtype.

    What latent attention absorbs: views of one up-projection, stored by outputs on one side and by inputs on the other.
    """

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor: ...


class RmsNorm(Protocol):
    """x / rms(x) * weight over the last dimension, computed in fp32, returned in x's dtype.

    x: [..., D]; weight: [D] or None (ones). With `zero_centred` the factor is 1 + weight (Qwen3-Next, Gemma).
    The weight multiplies in fp32 when zero-centred, else after the cast to x's dtype, as transformers does for each.
    """

    def __call__(self, x: Tensor, weight: Tensor | None, eps: float, *, zero_centred: bool = False) -> Tensor: ...


class GatedRmsNorm(Protocol):
    """RMS norm with a gate. x, gate: [..., D]; weight: [D] or None. Returns [..., D] in gate's dtype.

    norm_first: norm(x) * weight * act(gate) (gated delta); else norm(x * act(gate)) * weight (Mamba-2). The norm is over each
    of the `D // group_size` parts of the last dimension. fp32 inside.
    """

    def __call__(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        eps: float,
        *,
        group_size: int,
        norm_first: bool,
        activation: Activation,
    ) -> Tensor: ...


class KvWrite(Protocol):
    """Store the entries of this pass's rows. values[name]: [T, ...]; cache[name]: [B, block_size, ...], written at kv_index.

    Both in the cache's dtype or cast to it. In place.
    """

    def __call__(self, values: Mapping[str, Tensor], cache: Mapping[str, Tensor], table: PagedTable) -> None: ...


class PagedAttention(Protocol):
    """Causal softmax attention of every row over its sequence's cached tokens, its own included (written before the call).

    q: [T, Hq, K]; k_cache: [B, block_size, Hk, K]; v_cache: [B, block_size, Hk, V]; Hq is a multiple of Hk. A row at position p
    sees positions max(0, p - window + 1) to p. `softcap`: scores become softcap * tanh(score / softcap). `sinks`: [Hq], one more
    logit per head with no value. Returns [T, Hq, V] in q's dtype. Any mix of query lengths: prefill, decode, verification.
    """

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        table: PagedTable,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


class IndexSelect(Protocol):
    """The entries of an index that score highest for each row; of equal scores the lower entry is taken.

    q: [T, H, K]; weights: [T, H], or None for ones; k_cache: [B, block_size // n, K], one entry for n tokens. Entry e scores
    sum over h of weights_h relu(q_h . k_e), in fp32. A row at position p sees the entries whose n tokens all are at most p.
    Returns int32 [T, num_selected]: entries in ascending order, -1 after the last where there are fewer. Source: DeepSeek-V3.2
    (arXiv 2512.02556), section 2.1; pooled entries as published in transformers (qwen4_exp, glm5_next).
    """

    def __call__(
        self, q: Tensor, weights: Tensor | None, k_cache: Tensor, batch: Batch, table: PagedTable, *, num_selected: int
    ) -> Tensor: ...


class SelectedAttention(Protocol):
    """Softmax attention of every row over the tokens that are named for it, otherwise as `PagedAttention`.

    selected: int32 [T, N], positions of the row's sequence up to its own, each once and at least one, in any order; -1 names
    none. q: [T, Hq, K]; k_cache: [B, block_size, Hk, K]; v_cache: [B, block_size, Hk, V]. Returns [T, Hq, V] in q's dtype.
    """

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, selected: Tensor, batch: Batch, table: PagedTable, *, scale: float
    ) -> Tensor: ...


class Trailing(Protocol):
    """Some rows, each behind the W - 1 rows before it in its sequence, continued from a window of past rows.

    x: [T, ...]; rows: int64 [R]; window: [L, W - 1, ...], the last W - 1 rows, oldest first, in place, of x's dtype. Returns
    [R, W, ...], oldest first, with zeros before a sequence's first row.
    """

    def __call__(self, x: Tensor, rows: Tensor, window: Tensor, batch: Batch, table: StateTable) -> Tensor: ...


class ShortConv(Protocol):
    """Causal depthwise convolution over each sequence, continued from a window of raw inputs.

    x: [T, C]; weight: [C, W]; bias: [C] or None; window: [L, W - 1, C], the last W - 1 inputs, oldest first, in place.
    Returns act(conv(x) + bias): [T, C] in x's dtype.
    """

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        window: Tensor,
        batch: Batch,
        table: StateTable,
        *,
        activation: Activation,
    ) -> Tensor: ...


class DeltaRule(Protocol):
    """Gated delta rule: S <- S exp(g); S <- S + beta (v - S k) k^T; y = scale S q, with S: [V, K] of each value head.

    q, k: [T, Hk, K]; v: [T, Hv, V]; log_decay g <= 0: [T, Hv] (per head) or [T, Hv, K] (per channel); beta: [T, Hv];
    state: [L, Hv, V, K] fp32, in place. Value head h uses key head h // (Hv // Hk). With `qk_l2norm` q and k are first divided
    by sqrt(sum of squares + 1e-6). Returns [T, Hv, V] in v's dtype. Source: Yang et al. 2024 (arXiv 2412.06464), section 3;
    per-channel decay: Kimi Linear (arXiv 2510.26692).
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        state: Tensor,
        batch: Batch,
        table: StateTable,
        *,
        scale: float,
        qk_l2norm: bool,
    ) -> Tensor: ...


class LinearScan(Protocol):
    """Linear attention with one decay per head: S <- S exp(g) + v k^T; y = S q, with S: [P, N] of each head.

    q, k: [T, G, N]; v: [T, H, P]; log_decay g <= 0: [T, H]; state: [L, H, P, N] fp32, in place. Head h uses group
    h // (H // G). Mamba-2 is q = C, k = B, v = dt x, g = dt A. Returns [T, H, P] fp32. Source: Dao and Gu 2024
    (arXiv 2405.21060), section 6.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, batch: Batch, table: StateTable
    ) -> Tensor: ...


class SelectiveScan(Protocol):
    """Mamba's scan, with a decay for every channel and state element: h <- h exp(dt A) + dt x B; y = h . C, h: [C, N].

    x, dt: [T, C]; A < 0: [C, N]; b, c: [T, N]; state: [L, C, N] fp32, in place. Returns [T, C] fp32. Source: Gu and Dao 2023
    (arXiv 2312.00752), section 3.2 and algorithm 2; the step D x and the gate are the mixer's.
    """

    def __call__(
        self, x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, state: Tensor, batch: Batch, table: StateTable
    ) -> Tensor: ...


class Moe(Protocol):
    """Experts: sum over each row's experts e of w_e * down_e(inner), where inner = act(gate_e x) * up_e x.

    x: [T, D]; expert_ids: int64 [T, k]; expert_weights: [T, k]; gate_up: [E, 2I, D], gate rows first; down: [E, D, I].
    With gate_up [E, I, D] there is no gate: inner = act(up_e x) (Nemotron-H). `limit` bounds the gate above and up on both
    sides; `up_shift` is added to up after that; biases: [E, 2I or I] and [E, D] of the two products (gpt-oss).
    Returns [T, D] in x's dtype. Rows never share a reduction, so neighbours do not change a row's result.
    """

    def __call__(
        self,
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
    ) -> Tensor: ...


@dataclass(frozen=True)
class Ops:
    """The implementation chosen for each operation."""

    linear: Linear
    rms_norm: RmsNorm
    gated_rms_norm: GatedRmsNorm
    head_linear: HeadLinear
    kv_write: KvWrite
    paged_attention: PagedAttention
    index_select: IndexSelect
    selected_attention: SelectedAttention
    trailing: Trailing
    short_conv: ShortConv
    delta_rule: DeltaRule
    linear_scan: LinearScan
    selective_scan: SelectiveScan
    moe: Moe
