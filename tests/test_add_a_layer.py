"""The layer of docs/add-a-layer.md: the page shows the file, the file is the published layer, and the engine serves it."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

from hybridserve import LLM, SamplingParams
from hybridserve.backends.select import select
from hybridserve.mixers import Mixer, mixers
from hybridserve.models import build_model
from hybridserve.registry import load_plugin
from tests.conformance import ALL_CHECKS, FP32, Check, run_whole
from tests.registries import forgetting

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/add-a-layer.md"
PLUGIN = ROOT / "docs/examples/rg_lru.py"
CONFIG = ROOT / "docs/examples/griffin.json"
HIDDEN, HEADS = 32, 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Iterator[None]:
    """The plug-in, registered while this file's tests run."""
    with forgetting():
        load_plugin(str(PLUGIN))
        yield


def blocks(info: str) -> list[str]:
    """Contents of the page's code blocks whose opening line ends with `info`."""
    return re.findall(rf"^```{re.escape(info)}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def code_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_the_page_shows_the_file_whole() -> None:
    source = PLUGIN.read_text()
    assert code_lines("".join(blocks("python rg_lru.py"))) == code_lines(source)
    assert len(source.splitlines()) < 100
    (config,) = blocks("json griffin.json")
    assert json.loads(config) == json.loads(CONFIG.read_text())


def filled(mixer: Mixer) -> Mixer:
    """Parameters of a size that makes every part of the layer matter; decays from fast to slow."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in mixer.named_parameters():
        parameter.data.normal_(std=0.3, generator=generator)
        if name == "recurrent_param":
            parameter.data.copy_(torch.linspace(-6.0, 0.0, len(parameter)))
    return mixer


def make(**sizes: int) -> Mixer:
    kind = mixers["rg_lru"]
    ops = select(torch.device("cpu"), torch.float32, ["reference"]).ops
    return filled(kind(kind.Config(**sizes), ops, torch.float32))


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_the_layer_conforms(check: Check) -> None:
    check(make(hidden_size=HIDDEN, num_heads=HEADS), FP32)


def published(mixer: Mixer) -> RecurrentGemmaRecurrentBlock:
    """The published layer with the same weights."""
    config = transformers.RecurrentGemmaConfig(
        hidden_size=HIDDEN, lru_width=HIDDEN, num_attention_heads=HEADS, conv1d_width=4, hidden_activation="gelu_pytorch_tanh"
    )
    ours = mixer.state_dict()
    names = {f"{part}.{kind}" for part in ("linear_x", "linear_y", "linear_out") for kind in ("weight", "bias")}
    theirs = {name: ours[name] for name in names} | {"conv_1d.bias": ours["conv_1d.bias"]}
    theirs["conv_1d.weight"] = ours["conv_1d.weight"].unsqueeze(1)
    theirs["rg_lru.recurrent_param"] = ours["recurrent_param"]
    for index, gate in enumerate(("recurrent_gate", "input_gate")):
        theirs[f"rg_lru.{gate}_weight"] = ours["gate_weight"][index]
        theirs[f"rg_lru.{gate}_bias"] = ours["gate_bias"][index].view(HEADS, -1)
    block = RecurrentGemmaRecurrentBlock(config, 0)
    block.load_state_dict(theirs)
    return block.eval()


def test_the_layer_is_the_published_one() -> None:
    mixer = make(hidden_size=HIDDEN, num_heads=HEADS)
    x = torch.randn(90, HIDDEN, generator=torch.Generator().manual_seed(4))
    # Positions from 1 on: at position 0 the published code leaves out the factor sqrt(1 - a^2), which the paper does not.
    positions = torch.arange(1, 91)[None]
    with torch.no_grad():
        expected, _ = published(mixer)(x[None], positions, attention_mask=None, use_cache=False)
    assert expected.std() > 0.1
    FP32.check(run_whole(mixer, x)[0], expected[0], "RecurrentGemmaRecurrentBlock")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's model with weights that make its answers vary."""
    folder = tmp_path_factory.mktemp("griffin")
    config = json.loads(CONFIG.read_text())
    ops = select(torch.device("cpu"), torch.float32, ["reference"]).ops
    model = build_model(config, ops, torch.float32).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        spread = torch.linspace(-6.0, 0.0, parameter.numel()) if name.endswith("recurrent_param") else 1.0
        neutral = parameter.dim() == 1 and not name.endswith("bias")
        drawn = torch.randn(parameter.shape, generator=generator) * 0.12
        tensors[f"model.{name}"] = drawn + spread if neutral else drawn
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_chunks_batches_and_hits_give_the_tokens_of_one_pass(folder: Path) -> None:
    generator = torch.Generator().manual_seed(6)
    prompts = [{"prompt_token_ids": torch.randint(0, 970, (n,), generator=generator).tolist()} for n in (100, 1, 37)]
    settings = {"plugin": (str(PLUGIN),), "max_num_seqs": 4, "kv_cache_memory": 2**24}
    with LLM(str(folder), max_num_batched_tokens=2048, **settings) as llm:
        assert llm.info.layer_plan == "0-1,3-4: rg_lru  2,5: attention"
        expected = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]
        again = llm.generate(prompts[0], GREEDY)[0]
    assert len({token for tokens in expected for token in tokens}) > 5
    assert (again.outputs[0].token_ids, again.num_cached_tokens) == (expected[0], 99)
    for budget in (4, 13):
        with LLM(str(folder), max_num_batched_tokens=budget, **settings) as llm:
            assert [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)] == expected


def test_it_runs_from_the_config_alone() -> None:
    with LLM(str(CONFIG), load_format="dummy", plugin=(str(PLUGIN),), max_num_seqs=2, kv_cache_memory=2**23) as llm:
        (result,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)
    assert len(result.outputs[0].token_ids) == 10


def test_a_stranger_who_follows_the_page_ends_with_a_served_layer(tmp_path: Path) -> None:
    """Nothing is there but what the page says to write; its commands are run as they stand, on a port that is free."""
    (tmp_path / "docs/examples").mkdir(parents=True)
    (tmp_path / "docs/examples/rg_lru.py").write_text("\n".join(blocks("python rg_lru.py")))
    (config,) = blocks("json griffin.json")
    (tmp_path / "docs/examples/griffin.json").write_text(config)
    command = tmp_path / "bin/hybridserve"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nimport sys\nfrom hybridserve.cli import main\nsys.exit(main())\n")
    command.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    environment = {
        **os.environ,
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HYBRIDSERVE_PORT": port,
        "HYBRIDSERVE_KV_CACHE_MEMORY": "16MiB",
    }

    def run(text: str, shell: str = "bash") -> str:
        arguments = ["bash", "-c", text] if shell == "bash" else [sys.executable, "-c", text]
        done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    check, serve, curl = blocks("bash")
    assert "self-consistent, not verified" in run(check)
    child = subprocess.Popen(["bash", "-c", f"exec {serve}"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stderr is not None
        log = []
        for line in child.stderr:
            log.append(line)
            if "ready: " in line:
                break
        said = "".join(log)
        assert "0-1,3-4: rg_lru  2,5: attention" in said
        reply = json.loads(run(curl.replace("curl", "curl -s").replace(":8000", f":{port}")))
        assert reply["usage"]["completion_tokens"] > 0
    finally:
        child.kill()
        child.communicate()
    (python,) = blocks("python")
    tokens = json.loads(run(python, "python"))
    assert tokens
    assert all(0 <= token < 1024 for token in tokens)
