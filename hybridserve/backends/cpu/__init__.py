"""The native CPU backend: C++ kernels compiled at first use, called through ctypes.

Owns the decision what to offer for a dtype on this machine and says why. Must not know models or pools. `select.py` calls
`offer` once at load, `check-model` asks `foresee`.
"""

from collections.abc import Callable

import torch

from hybridserve.backends.cpu.attention import NativeAttention
from hybridserve.backends.cpu.build import COMPILER, built_library, library_path
from hybridserve.backends.cpu.conv import NativeShortConv
from hybridserve.backends.cpu.experts import NativeMoe
from hybridserve.backends.cpu.heads import NativeHeadLinear
from hybridserve.backends.cpu.index import NativeIndexSelect
from hybridserve.backends.cpu.library import Library, Unbuilt
from hybridserve.backends.cpu.linear import MAX_ROWS_BESIDE_BF16_HARDWARE, NativeLinear
from hybridserve.backends.cpu.norms import NativeNorms
from hybridserve.backends.cpu.recurrence import NativeRecurrence
from hybridserve.backends.cpu.scan import NativeSelectiveScan
from hybridserve.backends.offer import Offer, Operation
from hybridserve.config import user_cache_folder
from hybridserve.errors import MissingDependencyError

__all__ = ["foresee", "offer"]

_DTYPES = (torch.float32, torch.bfloat16)


def offer(device: torch.device, dtype: torch.dtype, compiler: str = COMPILER) -> Offer:
    """What the kernels do for this device and dtype of activations; compiles them if this machine has not yet."""
    return _offer(device, dtype, compiler, lambda: Library(library_path(user_cache_folder(), compiler)))


def foresee(device: torch.device, dtype: torch.dtype, compiler: str = COMPILER) -> Offer:
    """What `offer` will say, without compiling: for a plan. Where nothing is compiled yet, its operations cannot be called."""

    def find() -> Library:
        path = built_library(user_cache_folder(), compiler)
        return Unbuilt() if path is None else Library(path)

    return _offer(device, dtype, compiler, find)


def _offer(device: torch.device, dtype: torch.dtype, compiler: str, find: Callable[[], Library]) -> Offer:
    if device.type != "cpu":
        return Offer({}, {}, f"the native kernels run on the CPU, not on {device.type}")
    if dtype not in _DTYPES:
        return Offer({}, {}, f"the native kernels compute fp32 and bf16, not {dtype}")
    try:
        library = find()
    except MissingDependencyError as error:
        return Offer({}, {}, str(error))
    bf16_hardware = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    is_built = not isinstance(library, Unbuilt)
    reason = f"{'' if is_built else 'will be '}compiled by {compiler} for this processor"
    if not is_built:
        reason += ", once, when a model is first loaded"
    if bf16_hardware:
        reason += f"; it has bf16 instructions, so bf16 products of more than {MAX_ROWS_BESIDE_BF16_HARDWARE} rows are torch's"
    return Offer(_operations(library, bf16_hardware), {}, reason)


def _operations(library: Library, bf16_hardware: bool) -> dict[str, Operation]:
    """Every operation on the kernels of `library`."""
    attention, norms, recurrence = NativeAttention(library), NativeNorms(library), NativeRecurrence(library)
    return {
        "linear": NativeLinear(library, bf16_hardware),
        "head_linear": NativeHeadLinear(library, bf16_hardware),
        "rms_norm": norms.rms_norm,
        "gated_rms_norm": norms.gated_rms_norm,
        "kv_write": attention.kv_write,
        "paged_attention": attention.paged_attention,
        "index_select": NativeIndexSelect(library),
        "selected_attention": attention.selected_attention,
        "short_conv": NativeShortConv(library),
        "delta_rule": recurrence.delta_rule,
        "linear_scan": recurrence.linear_scan,
        "selective_scan": NativeSelectiveScan(library),
        "moe": NativeMoe(library, bf16_hardware),
    }
