"""What a replay needs to know of a model: its cache plan and its sizes, from the config alone.

Owns the counting of parameters on the meta device. Called by `cli/replay.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hybridserve.backends.select import select
from hybridserve.kv.arena import CachePlan, plan_cache
from hybridserve.models import CausalLM, build_model, resolve
from hybridserve.replay.roofline import Device, Roofline


@dataclass(frozen=True)
class ReplayModel:
    """Cache plan and parameter counts of one model."""

    plan: CachePlan
    max_positions: int
    dense: int
    experts: int
    expert_share: float
    itemsize: int
    attention_width: int  # heads x head size of all layers that attend to all text

    def roofline(self, device: Device) -> Roofline:
        """Cost of its passes on a device."""
        return Roofline.of(
            self.plan,
            device,
            dense=self.dense,
            experts=self.experts,
            expert_share=self.expert_share,
            itemsize=self.itemsize,
            attention_width=self.attention_width,
        )


def plan_of(source: str, nbytes: int, *, max_chunk: int) -> ReplayModel:
    """Lay a model out without weights. Raises ModelError as loading would."""
    folder = resolve(source, load_format="dummy")
    dtype = folder.dtype("auto")
    ops = select(torch.device("cpu"), torch.float32, ("reference",)).ops
    model = build_model(folder.config, ops, dtype)
    dense, experts = _count(model)
    plan = plan_cache(model.cache_specs(), nbytes, max_chunk=max_chunk)
    return ReplayModel(
        plan=plan,
        max_positions=model.info.max_positions,
        dense=dense,
        experts=experts,
        expert_share=_expert_share(folder.config),
        itemsize=dtype.itemsize,
        attention_width=_attention_width(folder.config, plan),
    )


def _count(model: CausalLM) -> tuple[int, int]:
    """Parameters that every token uses, and those of experts, which are the three-dimensional ones."""
    experts = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 3)
    total = sum(parameter.numel() for name, parameter in model.named_parameters() if "embed_tokens" not in name)
    return total - experts, experts


def _text_of(config: Mapping[str, object]) -> Mapping[str, object]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _attention_width(config: Mapping[str, object], plan: CachePlan) -> int:
    """Heads x head size over the layers whose caches grow with the text; 0 where the config has no such names."""
    values = _text_of(config)
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    size = values.get("v_head_dim") or values.get("head_dim")
    if not isinstance(heads, int) or not isinstance(hidden, int) or not heads:
        return 0
    width = heads * (size if isinstance(size, int) else hidden // heads)
    return width * len({layer for group in plan.paged if group.window is None for layer in group.layers})


def _expert_share(config: Mapping[str, object]) -> float:
    """Share of the experts that one token uses, by the names that configs have for it."""
    values = _text_of(config)
    count = next((values[n] for n in ("num_experts", "num_local_experts", "n_routed_experts") if values.get(n)), 1)
    used = next((values[n] for n in ("num_experts_per_tok", "moe_topk") if values.get(n)), 1)
    return float(used) / float(count) if isinstance(used, int) and isinstance(count, int) else 1.0
