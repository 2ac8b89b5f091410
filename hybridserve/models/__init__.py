"""Architectures, and how their configs and weights are read. Importing the package fills the table of architectures."""

from hybridserve.models import (
    deepseek_v3,
    falcon_h1,
    glm4_moe_lite,
    granite_moe_hybrid,
    lfm2,
    llama,
    qwen3,
    qwen3_5,
    qwen3_next,
)
from hybridserve.models.architectures import Builder, architectures, build_model
from hybridserve.models.decoder import CausalLM, ModelInfo, format_layer_plan
from hybridserve.models.loader import LoadedModel, LoadReport, load, load_dummy, load_weights, plan_weights
from hybridserve.models.source import ModelFolder, resolve

__all__ = [
    "Builder",
    "CausalLM",
    "LoadReport",
    "LoadedModel",
    "ModelFolder",
    "ModelInfo",
    "architectures",
    "build_model",
    "deepseek_v3",
    "falcon_h1",
    "format_layer_plan",
    "glm4_moe_lite",
    "granite_moe_hybrid",
    "lfm2",
    "llama",
    "load",
    "load_dummy",
    "load_weights",
    "plan_weights",
    "qwen3",
    "qwen3_5",
    "qwen3_next",
    "resolve",
]
