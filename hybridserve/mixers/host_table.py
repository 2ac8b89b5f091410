"""An embedding table too large for any device: it stays in host memory, in parts that can be views of mapped files.

Owns the parts and the gathering of rows from them. Must not know what the rows mean. Called by `ngram.py`; the loader leaves its
parameters on the host, in the dtype of the file, so that a part costs only the pages that are read: floats of 8 bits are scaled
after they are gathered.

Letters: R rows gathered, D row size.
"""

import torch
from torch import Tensor, nn

from hybridserve.mixers.base import empty_parameter


class HostTable(nn.Module):
    """Rows [num_rows, D] in `num_parts` parts, cut as `torch.chunk` cuts."""

    def __init__(self, num_rows: int, dim: int, num_parts: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dim = dim
        self.dtype = dtype
        self.rows_per_part = -(-num_rows // num_parts)
        starts = range(0, num_rows, self.rows_per_part)
        self.parts = nn.ParameterList(
            [empty_parameter(min(self.rows_per_part, num_rows - start), dim, dtype=dtype) for start in starts]
        )
        self._scales = [1.0] * len(self.parts)

    def set_scale(self, part: int, scale: float) -> None:
        """What the numbers of a part are multiplied by, for a table that is stored quantised."""
        self._scales[part] = scale

    def forward(self, ids: Tensor) -> Tensor:
        """Gather rows. ids: int64 [R]. Returns [R, D] on their device, in the model's dtype."""
        on_host = ids.cpu()
        stored = self.parts[0].dtype
        is_scaled = any(scale != 1.0 for scale in self._scales)
        out = torch.empty(len(on_host), self.dim, dtype=torch.float32 if is_scaled or stored.itemsize == 1 else stored)
        part = on_host // self.rows_per_part
        order = part.argsort(stable=True)
        first = 0
        for index, count in enumerate(torch.bincount(part, minlength=len(self.parts)).tolist()):
            if count:
                here = order[first : first + count]
                rows = self.parts[index][on_host[here] - index * self.rows_per_part].to(out.dtype)
                out[here] = rows * self._scales[index] if is_scaled else rows
                first += count
        return out.to(ids.device, self.dtype)
