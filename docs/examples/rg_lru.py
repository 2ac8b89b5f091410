"""RG-LRU, the recurrence of Griffin, and a small model around it. Source: De et al. 2024 (arXiv 2402.19427), section 2.4.

Letters: T rows, S sequences, D hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridserve.backends.ops import Ops
from hybridserve.batch import Batch, LayerCaches
from hybridserve.kv.spec import Spec, StateSpec, TensorSpec
from hybridserve.mixers.attention import AttentionConfig
from hybridserve.mixers.base import MixerConfig, RecurrentMixer, States, empty_parameter, mixers
from hybridserve.mixers.conv import DepthwiseConv
from hybridserve.mixers.linear import Linear
from hybridserve.mixers.norm import RMSNorm
from hybridserve.models.architectures import architectures
from hybridserve.models.decoder import Branch, CausalLM, DecoderLayer
from hybridserve.models.llama import read_info
from hybridserve.models.mlp import SwiGLU
from hybridserve.models.reader import ConfigReader
from hybridserve.models.rope import read_rotary
from hybridserve.models.weights import WeightMap

PLUGIN_API = 1


class RgLruConfig(MixerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    num_heads: int  # the two gates are block-diagonal, one block per head


@mixers.register("rg_lru")
class RgLru(RecurrentMixer):
    """h <- a h + sqrt(1 - a^2) i u; y = out(h gelu(gate x)), with u = conv(in x), a = exp(-8 r softplus(p)), gates r, i of u."""

    Config = RgLruConfig
    config: RgLruConfig
    kind = "rg_lru"

    def __init__(self, config: RgLruConfig, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(config, ops, dtype)
        hidden, heads = config.hidden_size, config.num_heads
        self.linear_x, self.linear_y, self.linear_out = (Linear(hidden, hidden, ops, dtype, bias=True) for _ in range(3))
        self.conv_1d = DepthwiseConv(hidden, 4, ops, dtype, bias=True, silu=False)
        self.gate_weight = empty_parameter(2, heads, hidden // heads, hidden // heads, dtype=dtype)  # of r, then of i
        self.gate_bias = empty_parameter(2, hidden, dtype=dtype)
        self.recurrent_param = empty_parameter(hidden, dtype=torch.float32)

    def specs(self) -> dict[str, Spec]:
        """The last three inputs of the convolution, and h: [D, 1, 1] in fp32."""
        return {"state": StateSpec((self.conv_1d.spec("conv"), TensorSpec("h", (self.config.hidden_size, 1, 1), "float32")))}

    def step(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        """One token of each sequence. x: [S, D]. Returns [S, D] and the states afterwards."""
        u, window = self.conv_1d.step(self.linear_x(x), states["state"]["conv"])
        log_a, v = self._gates(u)
        h = log_a.exp() * states["state"]["h"].flatten(1) + v
        return self._output(h, x), {"state": {"conv": window, "h": h[..., None, None]}}

    def _gates(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """log a and sqrt(1 - a^2) i u, in fp32. u: [T, D]. Returns two of [T, D]."""
        by_head = torch.unflatten(u, -1, (self.config.num_heads, -1))
        r, i = (torch.einsum("thd,ghde->gthe", by_head, self.gate_weight).flatten(-2) + self.gate_bias[:, None]).float().sigmoid()
        log_a = -8 * r * F.softplus(self.recurrent_param)
        return log_a, (-torch.expm1(2 * log_a)).sqrt() * i * u.float()

    def _output(self, h: Tensor, x: Tensor) -> Tensor:
        """h: [T, D] fp32; x: [T, D]. Returns [T, D]."""
        return self.linear_out(h.to(x.dtype) * F.gelu(self.linear_y(x), approximate="tanh"))

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """Mix rows. x: [T, D]. Returns [T, D]. Every channel is a head of its own, of size 1, for the chunked scan."""
        cache = caches["state"]
        table, one = batch.states[cache.group], x.new_ones(len(x), 1, 1)
        log_a, v = self._gates(self.conv_1d(self.linear_x(x), cache.tensors["conv"], batch, table))
        h = self.ops.linear_scan(one, one, v[..., None], log_a, cache.tensors["h"], batch, table)
        return self._output(h.flatten(1), x)


@architectures.register("GriffinForCausalLM")
def build(config: ConfigReader, ops: Ops, dtype: torch.dtype) -> CausalLM:
    """Two RG-LRU layers, one of attention within a window, and so on."""
    info, num_heads, width = read_info(config), config.read_size("num_attention_heads"), config.read_size("intermediate_size")
    head_dim, window = info.hidden_size // num_heads, config.read_size("sliding_window")
    rotary = read_rotary(config, head_dim, info.max_positions, default_theta=10_000.0)
    sizes = {"hidden_size": info.hidden_size, "num_heads": num_heads}
    rg_lru = RgLruConfig(**sizes)
    attention = AttentionConfig(**sizes, num_kv_heads=1, head_dim=head_dim, window=window, rotary=rotary)

    def make_norm() -> RMSNorm:
        return RMSNorm(info.hidden_size, 1e-6, ops, dtype)

    layers = []
    for i in range(config.read_size("num_hidden_layers")):
        mixer = mixers["attention"](attention, ops, dtype) if i % 3 == 2 else mixers["rg_lru"](rg_lru, ops, dtype)
        layers.append(DecoderLayer([Branch(mixer)], make_norm(), SwiGLU(info.hidden_size, width, ops, dtype), make_norm()))
    return CausalLM(info, layers, make_norm(), ops, dtype, tied=True, weight_map=WeightMap())
