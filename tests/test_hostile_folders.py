"""A model folder that is broken or hostile ends every command in the exit code of its fault, never in a traceback (R2, I21)."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hybridserve
from hybridserve.cli import main

DEMO = Path(hybridserve.__file__).parent / "demo"
WEIGHTS, UNSAFE, UNSUPPORTED = 4, 7, 3


def edit_header(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def edit_json(name: str, **values: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        path = folder / name
        known = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**known, **values}))

    return edit


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def index_of(file: str) -> Callable[[Path], object]:
    return write("model.safetensors.index.json", json.dumps({"weight_map": {"model.norm.weight": file}}).encode())


def only_gguf(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model-q4_k_m.gguf").write_bytes(b"GGUF")


DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
#: name -> how the folder is broken, the exit code of its fault, and a word of the message.
FAULTS: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "metadata of numbers": (lambda f: edit_header(f, lambda h: h.update(__metadata__={"a": 1})), WEIGHTS, "__metadata__"),
    "metadata of a list": (lambda f: edit_header(f, lambda h: h.update(__metadata__=["a"])), WEIGHTS, "__metadata__"),
    "surrogate in a tensor's name": (lambda f: edit_header(f, lambda h: h.update({"\ud800": {}})), WEIGHTS, "surrogate"),
    "surrogate in config.json": (edit_json("config.json", license="\ud800"), WEIGHTS, "surrogate"),
    "surrogate as a key": (edit_json("config.json", **{"\udfff": 1}), WEIGHTS, "surrogate"),
    "surrogate in the index": (index_of("\ud800.safetensors"), WEIGHTS, "surrogate"),
    "shard name of 300 characters": (index_of("a" * 300 + ".safetensors"), UNSAFE, "index.json"),
    "shard name of 200 wide characters": (index_of("\u00e4" * 200 + ".safetensors"), UNSAFE, "index.json"),
    "shard name with a zero byte": (index_of("a\0.safetensors"), UNSAFE, "index.json"),
    "index nested too deeply": (write("model.safetensors.index.json", DEEP), WEIGHTS, "nested"),
    "config nested too deeply": (write("config.json", DEEP), WEIGHTS, "nested"),
    "config in Latin-1": (write("config.json", b'{"license": "\xe4"}'), WEIGHTS, "config.json"),
    "number of 5,000 digits": (write("config.json", b'{"hidden_size": ' + b"1" * 5000 + b"}"), WEIGHTS, "config.json"),
    "generation config nested too deeply": (write("generation_config.json", DEEP), WEIGHTS, "generation_config.json"),
    "generation config that is a list": (write("generation_config.json", b"[]"), WEIGHTS, "generation_config.json"),
    "generation config with a surrogate": (edit_json("generation_config.json", a="\udc00"), WEIGHTS, "surrogate"),
    "tokenizer config nested too deeply": (write("tokenizer_config.json", DEEP), WEIGHTS, "tokenizer_config.json"),
    "tokenizer of no JSON": (write("tokenizer.json", b"{"), WEIGHTS, "tokenizer.json"),
    "template in bad UTF-8": (write("chat_template.jinja", b"\xff\xfe{{ x }}"), WEIGHTS, "chat_template"),
    "templates without names": (edit_json("tokenizer_config.json", chat_template=[{"x": 1}]), WEIGHTS, "chat_template"),
    "templates that are numbers": (edit_json("tokenizer_config.json", chat_template=[1]), WEIGHTS, "chat_template"),
    "template that is no template": (write("chat_template.jinja", b"{% if %}"), WEIGHTS, "template"),
    "a template that is a number": (edit_json("tokenizer_config.json", chat_template=1), WEIGHTS, "chat_template"),
    "architectures of numbers": (edit_json("config.json", architectures=[1]), UNSUPPORTED, "architectures"),
    "GGUF beside a config": (only_gguf, UNSUPPORTED, "gguf"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(DEMO, tmp_path / "model")
    jinja = tmp_path / "model" / "chat_template.jinja"
    jinja.unlink(missing_ok=True)
    return tmp_path / "model"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("command", ["check-model", "generate"])
def test_r2_a_hostile_folder_ends_in_the_exit_code_of_its_fault(
    folder: Path, command: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    harm, code, word = FAULTS[fault]
    harm(folder)
    more = ["--prompt", "a", "--kv-cache-memory", "8MiB"] if command == "generate" else ["--device", "cpu"]
    if command == "generate" and "template" in fault:
        more.append("--chat")
    assert main([command, str(folder), *more, "--backend", "reference"]) == code
    out, err = capsys.readouterr()
    assert word in out + err
    assert "Traceback" not in out + err
    assert "the check itself failed" not in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["metadata of numbers", "template in bad UTF-8", "generation config nested too deeply", "GGUF beside a config"]
)
def test_r2_a_server_ends_in_the_exit_code_of_its_folders_fault(folder: Path, fault: str) -> None:
    harm, code, word = FAULTS[fault]
    harm(folder)
    command = [sys.executable, "-m", "hybridserve", "serve", str(folder), "--backend", "reference", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code
    assert word in done.stderr
    assert "Traceback" not in done.stderr
