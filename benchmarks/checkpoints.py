"""Random checkpoints at the shapes of released models, written by transformers so that every engine loads the same files."""

import json
from pathlib import Path

#: Qwen3.5-0.8B's shape; sources of the numbers are its public configurations.
QWEN35_08B = {
    "vocab_size": 248_320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(24)],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}


def write_config(folder: Path) -> Path:
    """A config.json alone, for `--load-format dummy`. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    content = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "bfloat16", **QWEN35_08B}
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return path


def make_qwen35_08b(folder: Path) -> Path:
    """1.5 GB of bf16 weights, seeded. Returns the folder; one that is complete already is left as it is."""
    import torch
    import transformers

    if (folder / "model.safetensors").is_file():
        return folder
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**QWEN35_08B))
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return folder
