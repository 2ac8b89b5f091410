"""Architectures, and how their configs and weights are read. Importing the package fills the table of architectures."""

from hybridserve.models import (
    bailing_moe_v3,
    deepseek_v3,
    falcon_h1,
    gemma3,
    glm4_moe_lite,
    gpt_oss,
    granite_moe_hybrid,
    kimi_linear,
    lfm2,
    llama,
    olmo3,
    qwen3,
    qwen3_5,
    qwen3_moe,
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
    "bailing_moe_v3",
    "build_model",
    "deepseek_v3",
    "falcon_h1",
    "format_layer_plan",
    "gemma3",
    "glm4_moe_lite",
    "gpt_oss",
    "granite_moe_hybrid",
    "kimi_linear",
    "lfm2",
    "llama",
    "load",
    "load_dummy",
    "load_weights",
    "olmo3",
    "plan_weights",
    "qwen3",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
    "resolve",
]
