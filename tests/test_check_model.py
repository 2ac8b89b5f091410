"""`check-model`: released shapes get the figures of the literature and of the engine, broken inputs the right refusal."""

import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

import hybridserve
from hybridserve.backends.select import BACKENDS, FORESEEN, select
from hybridserve.check.report import PRECEDENCE, CacheTensor, Finding, LayerRun, Memory, Report
from hybridserve.check.target import CUDA_DEVICES
from hybridserve.cli import main
from hybridserve.config import EngineSettings, ServerSettings
from hybridserve.engine.core import EngineCore
from hybridserve.engine.messages import GroupInfo
from hybridserve.engine.text import Tokenizer
from hybridserve.models import architectures
from hybridserve.server.app import create_app
from tests import checkpoints
from tests.fake_engine import FakeEngine, Script, make_info
from tests.releases import RELEASES, SERVED

DEMO = Path(hybridserve.__file__).parent / "demo"
#: The reference backend needs no compiler; memory is given, so that the machine of the tests does not matter.
QUICK = ("--backend", "reference", "--device", "cpu")
Found = dict[str, Any]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Found]]:
    """Run the command with --json. Returns its exit code and the report."""

    def run(model: Path | str, *arguments: str) -> tuple[int, Found]:
        capsys.readouterr()
        memory = () if any(one.startswith("--memory") for one in arguments) else ("--memory", "4TiB")
        code = main(["check-model", str(model), *QUICK, *memory, *arguments, "--json"])
        report = json.loads(capsys.readouterr().out)
        assert report["exit_code"] == code
        assert report["schema_version"] == 1
        return code, report

    return run


def found(report: Found, prefix: str) -> list[Mapping[str, Any]]:
    return [one for one in report["checks"] if one["id"] == prefix or one["id"].startswith(prefix + ".")]


def only(report: Found, status: str) -> Mapping[str, Any]:
    (one,) = (one for one in report["checks"] if one["status"] == status)
    return one


# --- released shapes ---


def write_config(name: str, folder: Path, **more: object) -> Path:
    release = RELEASES[name]
    kind = getattr(tf, release.config)
    config = kind(text_config=dict(release.text)) if release.is_wrapped else kind(**release.text)
    config.save_pretrained(folder)
    content = checkpoints.read_config(folder)
    checkpoints.rewrite_config(folder, {**content, "architectures": [release.architecture], "dtype": "bfloat16", **more})
    return folder / "config.json"


@pytest.mark.parametrize("name", RELEASES)
def test_released_shapes_cost_what_the_literature_says(name: str, tmp_path: Path, check) -> None:
    code, report = check(write_config(name, tmp_path))
    release = RELEASES[name]
    if code == 3:
        refusal = only(report, "FAIL")
        assert name not in SERVED, refusal
        assert release.architecture in refusal["detail"]
        assert refusal["fix"]
        assert refusal["id"] == ("config" if release.architecture in architectures else "architecture")
        assert {"layers", "memory"} <= set(report["not_checked"])
        return
    assert code == 0, [one for one in report["checks"] if one["status"] == "FAIL"]
    memory = report["memory"]
    assert release.kv_nbytes == memory["kv_nbytes_per_token"]
    assert release.state_nbytes == memory["state_nbytes_per_sequence"]
    for group in memory["groups"]:
        assert group["page_nbytes"] * group["pages_per_superpage"] == memory["superpage_nbytes"]
    assert sum(run["num_layers"] for run in report["layers"]) >= 16
    assert report["dtype"] == "bfloat16"


def test_a_config_alone_is_laid_out_in_words(tmp_path: Path, check) -> None:
    _, report = check(write_config("Qwen3.5-4B", tmp_path, tie_word_embeddings=True))
    gated_delta, attention = report["layers"]
    assert gated_delta["layers"].startswith("0-2,4-6,")
    assert (gated_delta["num_layers"], attention["num_layers"], attention["kind"]) == (24, 8, "attention")
    recurrent = next(cache for cache in gated_delta["caches"] if cache["name"] == "recurrent")
    assert (sorted(recurrent["shape"]), recurrent["dtype"], recurrent["kind"]) == ([32, 128, 128], "float32", "state")
    line = found(report, "layers")[0]["detail"]
    assert "gated_delta" in line
    assert "32x128x128 fp32" in line
    assert report["memory"]["num_parameters"] == pytest.approx(4.2e9, rel=0.05)
    assert found(report, "source")[0]["detail"].startswith("a config.json alone")
    assert not found(report, "chat")
    assert report["not_checked"] == []


# --- the plan is the engine's ---


@pytest.mark.parametrize("name", ["qwen3_5", "granite_moe", "falcon_h1", "lfm2", "llama"])
def test_the_plan_is_what_the_engine_allocates(name: str, tmp_path: Path, check) -> None:
    folder = checkpoints.save(checkpoints.make(name), tmp_path)
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "block_size": 8, "max_model_len": 200}
    arguments = [word for key, value in sizes.items() for word in ("--" + key.replace("_", "-"), str(value))]
    _, report = check(folder, "--kv-cache-memory", "900KiB", *arguments)
    info = EngineCore(EngineSettings(model=str(folder), device="cpu", kv_cache_memory=900 * 1024, **sizes)).info
    memory = report["memory"]
    assert memory["cache_nbytes"] == info.superpage_nbytes * info.num_superpages <= 900 * 1024
    for field in (
        *("num_parameters", "weights_nbytes", "kv_nbytes_per_token", "state_nbytes_per_sequence", "block_size", "match_unit"),
        *("superpage_nbytes", "num_superpages", "padding_percent", "max_model_len", "users_at", "limit_at"),
    ):
        assert memory[field] == getattr(info, field), field
    assert memory["groups"] == [{field: getattr(group, field) for field in group.__struct_fields__} for group in info.groups]


def test_limits_of_a_server_use_the_names_of_the_report(check) -> None:
    tokenizer = Tokenizer.from_folder(DEMO)
    app = create_app(
        FakeEngine(make_info(tokenizer.vocab_size), lambda request: Script([1])), tokenizer, ServerSettings(), "fake"
    )

    async def ask() -> dict[str, Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return (await client.get("/v1/limits")).json()

    limits = asyncio.run(ask())
    _, report = check("demo")
    assert set(limits["memory"]) <= set(report["memory"])
    assert set(report["memory"]) - set(limits["memory"]) == {"memory_nbytes", "host_nbytes", "memory_users_at"}
    assert limits["memory"]["cache_nbytes"] == 32 * 2**16
    assert limits["backends"] == {"attention": "reference: a fake"}


@pytest.mark.parametrize(
    ("memory", "length", "limit"),
    [("141GB", "1024", "max_num_seqs"), ("30GiB", "262144", "paged_cache"), ("18GiB", "1024", "states")],
)
def test_the_limit_that_binds_is_named(memory: str, length: str, limit: str, tmp_path: Path, check) -> None:
    config = write_config("Qwen3.5-9B", tmp_path)
    code, report = check(config, "--memory", memory)
    assert code == 0
    figures = report["memory"]
    length = length if length in figures["limit_at"] else str(figures["max_model_len"])
    assert figures["limit_at"][length] == limit
    assert figures["tokens_at"][length] == figures["users_at"][length] * int(length)
    # One user more would not fit: by hand, from the natural sizes of one sequence.
    if limit != "max_num_seqs":
        one = int(length) * figures["kv_nbytes_per_token"] + figures["state_nbytes_per_sequence"]
        assert (figures["users_at"][length] + 1) * one * 1.03 > figures["cache_nbytes"] - figures["superpage_nbytes"]
        assert figures["users_at"][length] * one <= figures["cache_nbytes"]


@pytest.mark.parametrize(("device", "code"), [("cuda:h200", 0), ("cuda:A100-40GB", 5), ("cuda:rtx4090", 5)])
def test_a_device_that_is_not_here_is_planned_for(device: str, code: int, tmp_path: Path, capsys, check) -> None:
    config = write_config("Qwen3.5-27B", tmp_path)
    assert main(["check-model", str(config), "--device", device, "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["device"] == device
    assert {one["id"] for one in found(report, "backends")} == {"backends.gated_delta", "backends.attention", "backends.head"}
    for line in found(report, "backends"):
        assert line["detail"].endswith("by reference: the only one there is for cuda; not cpu: runs on cpu, not on cuda")
    if code:
        assert "weights" in only(report, "FAIL")["detail"]
        assert report["memory"]["num_superpages"] == 0


def test_P12_nothing_is_promised_for_a_kind_of_device_that_nothing_has_run_on(tmp_path: Path, capsys) -> None:
    config = write_config("Qwen3.5-4B", tmp_path)
    assert main(["check-model", str(config), "--device", "cuda:h200"]) == 0
    text = capsys.readouterr().out
    assert "WARN target.unproven: no release of hybridserve has been run on cuda yet" in text
    assert "it should run, but nothing has been run on such a device yet (exit 0)" in text
    assert main(["check-model", str(config), "--device", "cuda:h200", "--strict"]) == 1
    assert main(["check-model", str(config), "--device", "cpu", "--memory", "64GiB", "--strict"]) == 0


def on_device(name: str, config: Path, capsys: pytest.CaptureFixture[str]) -> Found:
    """The report of a config for a named device, with the memory that it has."""
    main(["check-model", str(config), "--device", name, "--json"])
    return json.loads(capsys.readouterr().out)


def test_several_devices_are_told_to_be_served_from_one(tmp_path: Path, capsys) -> None:
    config = write_config("Qwen3.5-27B", tmp_path)
    several, one = (on_device(name, config, capsys) for name in ("cuda:4xh100", "cuda:h100"))
    assert several["memory"] == one["memory"]
    assert "4 devices have 318.59 GiB together" in found(several, "target.several")[0]["detail"]
    assert not found(one, "target.several")


def test_the_smallest_device_is_named(tmp_path: Path, capsys) -> None:
    config = write_config("Qwen3.5-27B", tmp_path)
    report = on_device("cuda:t4", config, capsys)
    devices = {one["device"]: one for one in report["devices"]}
    assert [one["memory_nbytes"] for one in report["devices"]] == sorted(one["memory_nbytes"] for one in report["devices"])
    for name in ("cuda:l40s", "cuda:h100", "cuda:h200"):
        figures = on_device(name, config, capsys)["memory"]
        assert devices[name]["max_model_len"] == figures["max_model_len"]
        assert devices[name]["memory_users"] == figures["memory_users_at"].get("8192", 0)
    holding = next(one for one in report["devices"] if one["max_model_len"] == 262_144)
    assert f"{holding['device']} is the smallest known device for 262,144 tokens" in found(report, "memory.devices")[0]["detail"]


# --- windows, and memory without a bound on seats ---


#: As OpenAI published it, but for how the experts are stored.
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "attention_bias": True,
    "head_dim": 64,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rope_theta": 150000,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "initial_context_length": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


def test_users_of_a_model_with_windows_share_one_budget_of_rows(tmp_path: Path, check) -> None:
    """Beside its window a sequence holds what it computes in this step; all of them together compute one budget."""
    config, at = tmp_path / "config.json", {}
    config.write_text(json.dumps(GPT_OSS_20B))
    for seats in ("512", "4096"):
        code, report = check(config, "--memory", "80GiB", "--max-num-seqs", seats)
        assert code == 0
        at[seats] = report["memory"]
    window, whole = (next(g for g in at["512"]["groups"] if (g["window"] is None) is is_whole) for is_whole in (False, True))
    block, budget = at["512"]["block_size"], 2048
    users = at["512"]["memory_users_at"]["1024"]
    least = users * 1024 // block * whole["natural_nbytes"] + users * window["window"] // block * window["natural_nbytes"]
    blocks = users * (window["window"] // block + 2) + budget // block
    most = users * 1024 // block * whole["page_nbytes"] + blocks * window["page_nbytes"]
    granted = (80 * 2**30 - at["512"]["weights_nbytes"]) // 2
    one = 1024 // block * whole["page_nbytes"] + (window["window"] // block + 2) * window["page_nbytes"]
    assert least <= granted
    assert granted - one - 2 * at["512"]["superpage_nbytes"] <= most <= granted + 2 * at["512"]["superpage_nbytes"]
    # Seats give no memory and take little: only a step that is as long as there are seats.
    assert at["4096"]["users_at"]["1024"] >= 0.99 * users


def test_what_memory_alone_would_hold_is_told_where_seats_bind(tmp_path: Path, check) -> None:
    config = write_config("Qwen3.5-9B", tmp_path)
    _, few = check(config, "--memory", "141GB", "--max-num-seqs", "8")
    _, many = check(config, "--memory", "141GB", "--max-num-seqs", "100000")
    assert few["memory"]["users_at"]["1024"] == 8
    assert few["memory"]["memory_users_at"]["1024"] == many["memory"]["users_at"]["1024"] > 100
    line = next(one["detail"] for one in found(few, "memory.users") if one["detail"].startswith("1,024"))
    assert f"memory alone would hold {few['memory']['memory_users_at']['1024']:,}" in line


# --- broken inputs ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(checkpoints.make("granite_moe"), tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A good model with the demo's tokenizer and template, to be broken."""
    target = tmp_path / "model"
    shutil.copytree(saved, target)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, target / name)
    checkpoints.rewrite_config(target, {**checkpoints.read_config(target), "eos_token_id": None})
    return target


def set_config(**values: object) -> Callable[[Path], None]:
    return lambda folder: checkpoints.rewrite_config(folder, {**checkpoints.read_config(folder), **values})


def set_tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    return lambda folder: checkpoints.rewrite_tensors(folder, change(load_file(folder / "model.safetensors")))


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def lose_shard(folder: Path) -> None:
    names = sorted(load_file(folder / "model.safetensors"))
    write("model.safetensors.index.json", json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}))(
        folder
    )
    (folder / "model.safetensors").unlink()


def point_elsewhere(folder: Path) -> None:
    names = sorted(load_file(folder / "model.safetensors"))
    write("model.safetensors.index.json", json.dumps({"weight_map": dict.fromkeys(names, "../model.safetensors")}))(folder)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def rewrite_header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return work


def overlap(header: dict[str, Any]) -> None:
    first, second = sorted((name for name in header if name != "__metadata__"), key=lambda n: header[n]["data_offsets"])[:2]
    start, end = header[second]["data_offsets"]
    assert header[first]["data_offsets"][1] == start
    header[second]["data_offsets"] = [start - 4, end - 4]


def huge_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.write((200 * 10**6).to_bytes(8, "little") + b"{")
        file.truncate(300 * 10**6)


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_nan(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = "model.norm.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][3] = float("nan")
    return tensors


def reshape(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "model.norm.weight": torch.ones(63)}


def without(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def as_float8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "model.norm.weight": tensors["model.norm.weight"].to(torch.float8_e4m3fn)}


def nothing(folder: Path) -> None:
    pass


def become(name: str | None, text: str) -> Callable[[Path], None]:
    """A folder with one file in it, or none."""

    def work(folder: Path) -> None:
        shutil.rmtree(folder)
        path = folder / (name or ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        if name is not None:
            path.write_text(text)

    return work


def dangle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("nowhere/model.safetensors")


def unopenable(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def write_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"x": 1}]}))


def with_tiktoken(folder: Path) -> None:
    """A vocabulary that does not say how text is split, and whose class nobody knows."""
    (folder / "tokenizer.json").unlink()
    lines = (f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256))
    (folder / "tiktoken.model").write_text("\n".join(lines))


LOOP = "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
DOUBLE = "{% set ns = namespace(x='xxxxxxxx') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
ESCAPE = "{{ messages.__class__.__mro__[-1].__subclasses__() }}"

#: What is wrong -> how it is made wrong, further flags, the exit code, the check that says so, and words of its message.
BROKEN: Mapping[str, tuple[Callable[[Path], Any], tuple[str, ...], int, str, tuple[str, ...]]] = {
    "no config": (remove("config.json"), (), 4, "source", ("no config.json", "downloaded")),
    "config is no JSON": (write("config.json", "{"), (), 4, "source", ("config.json", "download the file again")),
    "config is a list": (write("config.json", "[1]"), (), 4, "source", ("config.json", "list")),
    "no architecture": (set_config(architectures=None), (), 3, "architecture", ("architectures is None",)),
    "unknown architecture": (
        set_config(architectures=["GraniteSwaForCausalLM"]), (), 3, "architecture",
        ("'GraniteSwaForCausalLM'", "'GraniteMoeHybridForCausalLM'", "plug-in"),
    ),
    "code of its own": (
        set_config(architectures=["MyForCausalLM"], auto_map={"AutoModelForCausalLM": "my.MyForCausalLM"}), (), 3, "architecture",
        ("MyForCausalLM", "auto_map", "plug-in"),
    ),
    "a key that changes the mathematics": (
        set_config(normalization_function="layernorm"), (), 3, "config",
        ("normalization_function", "layernorm", "--ignore-config-keys"),
    ),
    "a key that nobody knows": (
        set_config(attn_res_block_size=12), (), 3, "config", ("attn_res_block_size=12", "--ignore-config-keys"),
    ),
    "several keys": (
        set_config(normalization_function="layernorm", hidden_act="gelu", attn_res_block_size=12), (), 3, "config",
        ("normalization_function is 'layernorm'", "hidden_act is 'gelu'", "attn_res_block_size=12",
         "--ignore-config-keys normalization_function", "--ignore-config-keys hidden_act"),
    ),
    "no characters": (
        set_config(**{"\ud800": "\udfff"}), (), 4, "source", ("\\ud800", "download the file again"),
    ),
    "a number for no text": (set_config(rms_norm_eps="\ud800"), (), 4, "source", ("\\ud800", "download the file again")),
    "a size beyond counting": (set_config(num_attention_heads=2**63), (), 3, "config", ("num_attention_heads", "correct")),
    "a divisor of zero": (set_config(logits_scaling=0), (), 3, "config", ("logits_scaling is 0.0", "correct the file")),
    "config of a gigabyte": (
        lambda folder: os.truncate(folder / "config.json", 2**30), (), 4, "source", ("1,073,741,824", "download"),
    ),
    "quantised in a way that is not read": (
        set_config(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"}), (), 3, "config",
        ("'NVFP4'", "'FP8'"),
    ),
    "an adapter alone": (
        become("adapter_config.json", '{"base_model_name_or_path": "o/n"}'), (), 3, "source", ("adapter", "'o/n'", "merge"),
    ),
    "a GGUF file": (become("model-Q4.gguf", "GGUF"), (), 3, "source", ("model-Q4.gguf", "safetensors")),
    "a diffusion pipeline": (become("model_index.json", "{}"), (), 3, "source", ("diffusion", "language model")),
    "an empty folder": (become(None, ""), (), 4, "source", ("empty folder", "downloaded")),
    "a folder above the model": (become("inner/config.json", "{}"), (), 2, "source", ("'inner'", "give")),
    "a folder of the cache": (become("snapshots/abc/config.json", "{}"), (), 2, "source", ("cache", "snapshots/abc")),
    "the cache itself": (become("models--o--n/refs/main", ""), (), 2, "source", ("cache", "'o/n'")),
    "a link that leads nowhere": (dangle, (), 4, "source.shards", ("model.safetensors", "No such file", "link")),
    "weights that cannot be opened": (unopenable, (), 4, "source.shards", ("model.safetensors", "cannot be read", "permissions")),
    "absurd size": (set_config(hidden_size=10**12), (), 3, "config", ("hidden_size", "1000000000000")),
    "dtype unknown": (set_config(dtype="int4"), (), 3, "config", ("int4", "--dtype")),
    "missing shard": (lose_shard, (), 4, "source.shards", ("model-00001-of-00002.safetensors", "missing", "Download all")),
    "index points elsewhere": (point_elsewhere, (), 7, "source.shards", ("../model.safetensors",)),
    "truncated": (truncate, (), 4, "source.shards", ("model.safetensors", "truncated", "download the file again")),
    "overlapping offsets": (rewrite_header(overlap), (), 4, "source.shards", ("overlap", "download the file again")),
    "header of 200 MB": (huge_header, (), 4, "source.shards", ("model.safetensors", "download the file again")),
    "Git LFS pointer": (
        write("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"), (), 4, "source.shards", ("git lfs pull",),
    ),
    "no weights": (remove("model.safetensors"), (), 4, "source.shards", ("no *.safetensors", "download the weights")),
    "wrong shape": (set_tensors(reshape), (), 4, "tensors", ("model.norm.weight", "[63]", "[64]", "same release")),
    "extra tensor": (
        set_tensors(lambda tensors: {**tensors, "model.ghost": torch.ones(2)}), (), 4, "tensors", ("model.ghost", "unexpected"),
    ),
    "missing tensor": (set_tensors(without("model.norm.weight")), (), 4, "tensors", ("model.norm.weight", "missing")),
    "quantised": (set_tensors(as_float8), (), 4, "tensors", ("model.norm.weight", "F8_E4M3", "not quantised")),
    "only a pickle": (only_pickle, (), 7, "content.pickles", ("pytorch_model.bin", "never read", "safetensors")),
    "template loops": (write("chat_template.jinja", LOOP), (), 7, "content.template", ("sandbox", "do not serve")),
    "template grows": (write("chat_template.jinja", DOUBLE), (), 7, "content.template", ("sandbox", "do not serve")),
    "template breaks out": (write("chat_template.jinja", ESCAPE), (), 7, "content.template", ("sandbox", "unsafe")),
    "template is no UTF-8": (
        lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"), (), 4, "content.template", ("UTF-8", "fetch")
    ),
    "template without a name": (
        lambda folder: (folder / "chat_template.jinja").unlink() or write_named(folder), (), 4, "content.template",
        ("chat_template[0]", "name"),
    ),
    "template drops the question": (write("chat_template.jinja", "hello"), (), 4, "chat.template", ("leaves out", "publisher")),
    "vocabulary of an unknown class": (
        with_tiktoken, (), 3, "chat.tokenizer", ("tiktoken.model", "no pattern", "put a tokenizer.json")
    ),
    "template is none": (write("chat_template.jinja", "{% for %}"), (), 4, "content.template", ("not valid", "line 1")),
    "tokenizer broken": (write("tokenizer.json", "{}"), (), 4, "chat.tokenizer", ("tokenizer.json", "fetch")),
    "NaN weight": (set_tensors(with_nan), ("--deep",), 4, "tensors.values", ("model.norm.weight (1)", "download")),
    "no room for one sequence": (
        nothing, ("--kv-cache-memory", "200KiB", "--max-model-len", "400"), 5, "memory.cache",
        ("400 tokens", "204,800", "--max-model-len"),
    ),
    "no room for a superpage": (nothing, ("--kv-cache-memory", "1KiB"), 5, "memory.cache", ("1,024", "--kv-cache-memory")),
    "no room for the weights": (nothing, ("--memory", "100KiB"), 5, "memory.weights", ("100.00 KiB", "more memory")),
    "caches beyond the memory": (
        nothing, ("--memory", "10MiB", "--kv-cache-memory", "20MiB"), 5, "memory.cache", ("lower --kv-cache-memory",),
    ),
    "block size of none": (nothing, ("--block-size", "0"), 2, "usage", ("block_size",)),
    "unknown device": (nothing, ("--device", "cuda:tpu"), 2, "target", ("cuda:tpu", "cuda:h200")),
    "unknown size": (nothing, ("--memory", "much"), 2, "usage", ("'much'", "24GiB")),
    "no memory": (nothing, ("--memory", "0"), 2, "usage", ("--memory is 0", "24GiB")),
    "a size with two points": (nothing, ("--memory", "1.5.5GiB"), 2, "usage", ("'1.5.5GiB'", "24GiB")),
    "a negative size": (nothing, ("--memory", "-1GiB"), 2, "usage", ("'-1GiB'", "24GiB")),
    "an endless size": (nothing, ("--memory", "1e999"), 2, "usage", ("'1e999'", "24GiB")),
    "longer than the model": (nothing, ("--max-model-len", "99999999"), 2, "memory", ("99,999,999", "trained", "lower it")),
    "tokenizer elsewhere and not there": (nothing, ("--tokenizer", "nowhere"), 2, "chat.tokenizer", ("'nowhere'", "repo id")),
    "unknown backend": (nothing, ("--backend", "delta_rule=magic"), 2, "backends", ("magic", "reference")),
    "plug-in that fails": (
        write("plugin.py", "raise RuntimeError('boom')"), ("--plugin", "{}/plugin.py"), 6, "plugin", ("boom", "repair"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_broken_inputs_are_refused_with_their_code_and_remedy(what: str, folder: Path, check, capsys) -> None:
    break_it, arguments, code, name, words = BROKEN[what]
    break_it(folder)
    arguments = tuple(word.replace("{}", str(folder)) for word in arguments)
    found_code, report = check(folder, *arguments)
    failure = only(report, "FAIL")
    assert (found_code, failure["id"]) == (code, name), failure
    for word in words:
        assert word in f"{failure['detail']} -> {failure['fix']}"
    assert failure["fix"], failure
    assert failure["exit_code"] == code
    # The same in the lines for people.
    if what in ("missing shard", "no room for one sequence", "unknown device"):
        memory = () if "--memory" in arguments else ("--memory", "4TiB")
        assert main(["check-model", str(folder), *QUICK, *memory, *arguments]) == code
        printed = capsys.readouterr().out
        assert f"FAIL {name}: {failure['detail']} -> {failure['fix']}" in printed.splitlines()
        assert printed.rstrip().endswith(f"(exit {code})")


@pytest.mark.parametrize("what", ["truncated", "only a pickle", "a size with two points"])
def test_the_command_line_says_the_same_in_a_process_of_its_own(what: str, folder: Path) -> None:
    break_it, arguments, code, name, words = BROKEN[what]
    break_it(folder)
    command = [sys.executable, "-c", "import sys; from hybridserve.cli import main; sys.exit(main())", "check-model", str(folder)]
    memory = () if "--memory" in arguments else ("--memory", "4TiB")
    for form in ((), ("--json",)):
        done = subprocess.run([*command, *QUICK, *memory, *arguments, *form], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (code, "")
        assert all(word in done.stdout for word in words)
    failure = only(json.loads(done.stdout), "FAIL")
    assert (failure["id"], failure["exit_code"]) == (name, code)


def test_the_files_of_a_cache_are_links_and_are_followed(folder: Path, tmp_path: Path, check) -> None:
    snapshot = tmp_path / "models--o--n/snapshots/abc"
    snapshot.mkdir(parents=True)
    for place, file in enumerate(sorted(folder.iterdir())):
        file.rename(blob := tmp_path / f"models--o--n/{place}.blob")
        (snapshot / file.name).symlink_to(blob)
    code, report = check(snapshot)
    assert code == 0, report["checks"]
    assert found(report, "tensors")


@pytest.mark.parametrize(("name", "code"), [("model.gguf", 3), ("model.safetensors", 2), ("model.py", 2)])
def test_a_single_file_that_is_no_config_is_told_what_to_give(name: str, code: int, tmp_path: Path, check) -> None:
    (tmp_path / name).write_bytes(b"x")
    found_code, report = check(tmp_path / name)
    assert found_code == code
    assert only(report, "FAIL")["fix"]


def test_a_config_alone_with_a_tokenizer_is_checked_for_chat(tmp_path: Path, check) -> None:
    code, report = check(write_config("LFM2-350M", tmp_path), "--tokenizer", "demo")
    assert code == 0
    assert found(report, "chat.template")[0]["status"] == "PASS"
    assert report["not_checked"] == []


def test_without_weights_there_is_nothing_to_look_at_deeply(tmp_path: Path, check) -> None:
    code, report = check(write_config("LFM2-350M", tmp_path), "--deep")
    assert code == 0
    assert found(report, "tensors.values")[0]["status"] == "WARN"


def test_a_key_to_ignore_that_is_not_there_is_a_warning(folder: Path, check) -> None:
    code, report = check(folder, "--ignore-config-keys", "rope_parameters.nope")
    assert code == 0
    (warning,) = (one for one in found(report, "config") if one["status"] == "WARN")
    assert "rope_parameters.nope" in warning["detail"]


def test_a_path_that_is_no_text_is_printed_all_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; from hybridserve.cli import main; sys.exit(main())", "check-model"]
    for form in ((), ("--json",)):
        done = subprocess.run([*command, *form, os.fsencode(tmp_path) + b"/\xff"], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (2, b"")
        assert b"\\udcff" in done.stdout


@pytest.mark.parametrize("value", [-1, 2**40, [5, -7]])
def test_an_end_that_is_no_token_is_left_out(value: object, tmp_path: Path, check) -> None:
    shutil.copytree(DEMO, tmp_path / "demo")
    (tmp_path / "demo/generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert check(tmp_path / "demo")[0] == 0


def test_without_a_model_the_report_is_json_too(capsys, monkeypatch) -> None:
    monkeypatch.delenv("HYBRIDSERVE_MODEL", raising=False)
    assert main(["check-model", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == ""
    assert "no model is named" in only(report, "FAIL")["detail"]


@pytest.mark.parametrize("model", ["no/such/folder", "nowhere"])
def test_what_is_not_there_is_a_usage_error(model: str, check) -> None:
    code, report = check(model)
    assert code == 2
    assert model in only(report, "FAIL")["detail"]
    assert "memory" in report["not_checked"]


def test_a_config_of_another_model_under_a_known_name_is_refused(tmp_path: Path, check) -> None:
    """Kimi-K3's text config says kimi_linear, but adds an activation, residual attention and an output gate."""
    more = {"hidden_act": "situ", "attn_res_block_size": 12, "mla_use_output_gate": True, "num_hidden_layers": 93}
    code, report = check(write_config("Kimi-Linear-48B-A3B", tmp_path, **more))
    assert code == 3
    refusal = only(report, "FAIL")
    assert any(key in refusal["detail"] for key in (*more, "KimiLinearForCausalLM"))
    assert refusal["fix"]


def test_a_fault_of_the_check_itself_is_told_and_hides_nothing_else(folder: Path, check, monkeypatch) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("hybridserve.check.checker.check_numerics", fail)
    code, report = check(folder)
    assert code == 70
    assert "ZeroDivisionError: oops" in only(report, "FAIL")["detail"]
    assert found(report, "tensors")
    assert found(report, "chat")


def test_the_gravest_failure_decides_the_code(folder: Path, check) -> None:
    set_tensors(reshape)(folder)
    (folder / "chat_template.jinja").write_text(ESCAPE)
    assert check(folder, "--memory", "100KiB")[0] == 7
    (folder / "chat_template.jinja").write_text("")
    assert check(folder, "--memory", "100KiB")[0] == 4


# --- warnings ---


@pytest.mark.parametrize(
    ("break_it", "name", "words"),
    [
        (set_config(auto_map={"AutoConfig": "x.Y"}), "content.code", ("config.json", "auto_map", "ever run")),
        (write("modeling_mine.py", "print()"), "content.code", ("modeling_mine.py", "ever run")),
        (write("old.bin", "x"), "content.pickles", ("old.bin", "never read")),
        (write("generation_config.json", '{"eos_token_id": 5}'), None, ()),
        (remove("tokenizer.json"), "chat.tokenizer", ("tokenizer.json", "--tokenizer")),
        (remove("chat_template.jinja"), "chat.template", ("no chat template", "completions")),
        (write("chat_template.jinja", "{{ raise_exception('never') }}"), "chat.template", ("never",)),
        (set_config(dtype="bfloat16"), "source.dtype", ("F32", "bfloat16", "--dtype")),
    ],
)
def test_what_is_odd_is_a_warning_and_fails_only_when_strict(folder: Path, check, break_it, name, words) -> None:
    # The tiny embedding has fewer rows than the demo's tokenizer has tokens, which is a warning of its own.
    code, report = check(folder, "--strict")
    before = {one["id"] for one in report["checks"] if one["status"] == "WARN"}
    assert (code, before) == (1, {"chat.tokenizer"})
    break_it(folder)
    code, report = check(folder)
    warnings = {one["id"]: one for one in report["checks"] if one["status"] == "WARN"}
    assert code == 0
    if name is not None:
        assert all(word in f"{warnings[name]['detail']} {warnings[name]['fix']}" for word in words), warnings[name]


def test_a_demo_without_a_flaw_passes_strictly(check) -> None:
    code, report = check("demo", "--strict", "--deep")
    assert code == 0, [one for one in report["checks"] if one["status"] != "PASS"]
    assert {one["id"] for one in found(report, "features")} >= {"features.prefix_caching", "features.speculation"}
    kinds = {one["id"].partition(".")[2]: one["detail"] for one in found(report, "backends")}
    assert set(kinds) == {*(run["kind"] for run in report["layers"]), "head"}
    assert "paged_attention" in kinds["attention"]
    assert "delta_rule" in kinds["gated_delta"]
    assert " by reference: forced" in kinds["attention"]
    assert report["backends"]["paged_attention"].startswith("reference: forced")
    assert report["features_off"]["speculation"]


def test_what_is_passed_over_is_told_and_nothing_is_compiled_to_find_out(tmp_path: Path, capsys, monkeypatch) -> None:
    """The first check on a new machine must not take the minute that its first load will."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = write_config("Qwen3.8-Flash-Next", tmp_path)
    assert main(["check-model", str(config), "--device", "cpu", "--memory", "4TiB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    lines = {one["id"].partition(".")[2]: one["detail"] for one in found(report, "backends")}
    assert " by cpu: will be compiled by g++" in lines["indexed_attention"]
    for run in report["layers"]:
        for operation in run["operations"]:
            assert operation in lines[run["kind"]]
            assert report["backends"][operation] in lines[run["kind"]]
    passed_over = [text for text in report["backends"].values() if not text.startswith("cpu")]
    assert all("; not cpu: does not implement it" in text for text in passed_over)
    assert not list(tmp_path.glob("cache/**/*.so"))
    # What was foreseen is what is chosen, which compiles.
    monkeypatch.undo()
    foreseen = select(torch.device("cpu"), torch.float32, (), FORESEEN).reasons
    chosen = select(torch.device("cpu"), torch.float32, (), BACKENDS).reasons
    assert {name: choice.backend for name, choice in foreseen.items()} == {name: c.backend for name, c in chosen.items()}


def test_an_answer_that_would_not_stop_is_told(tmp_path: Path, check) -> None:
    shutil.copytree(DEMO, tmp_path / "demo")
    folder = tmp_path / "demo"
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "eos_token": "<|endoftext|>"}))
    set_config(eos_token_id=None)(folder)
    _, report = check(folder)
    (stop,) = found(report, "chat.stop")
    assert stop["status"] == "WARN"
    assert "<|im_end|>" in stop["detail"]
    assert "eos_token_id" in stop["fix"]


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ tools }}<tool_call>{{ messages }}<think>", "hermes", "<think>"),
        ("{{ tools }}<tool_call><function=x>{{ messages }}", "qwen3_coder", "no reasoning"),
        ("{{ tools }}<|tool_call_start|>{{ messages }}", "lfm2", "no reasoning"),
    ],
)
def test_the_formats_of_tools_and_reasoning_are_read_off_the_template(
    template: str, tools: str, reasoning: str, tmp_path: Path, check
) -> None:
    shutil.copytree(DEMO, tmp_path / "demo")
    (tmp_path / "demo" / "chat_template.jinja").write_text(template)
    _, report = check(tmp_path / "demo")
    assert tools in found(report, "chat.tools")[0]["detail"]
    assert reasoning in found(report, "chat.reasoning")[0]["detail"]
    assert "tools" in found(report, "chat.template")[0]["detail"].partition("; without")[0]


# --- repositories ---


def test_a_repository_is_checked_by_its_headers(tmp_path: Path, check, monkeypatch) -> None:
    """Only the JSON files are fetched; weights are known by the headers that the hub gives."""
    saved = checkpoints.save(checkpoints.make("qwen3"), tmp_path / "whole")
    cache = tmp_path / "cache"
    cache.mkdir()
    shutil.copy(saved / "config.json", cache)
    tensors = {
        name: SimpleNamespace(dtype="F32", shape=list(t.shape), data_offsets=(0, t.nbytes))
        for name, t in load_file(saved / "model.safetensors").items()
    }

    class Hub:
        def model_info(self, repo_id: str, files_metadata: bool) -> SimpleNamespace:
            names = {"config.json": 10, "model.safetensors": 1000, "pytorch_model.bin": 1000}
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in names.items()])

        def get_safetensors_metadata(self, repo_id: str) -> SimpleNamespace:
            return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)})

    patterns: list[str] = []

    def fetch(repo_id: str, allow_patterns: list[str]) -> str:
        patterns.extend(allow_patterns)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    code, report = check("owner/name", "--deep")
    assert code == 0, report["checks"]
    assert "*.safetensors" not in patterns
    assert f"{len(tensors)} tensors fill all" in found(report, "tensors")[0]["detail"]
    assert {one["id"] for one in report["checks"] if one["status"] == "WARN"} >= {"content.pickles", "tensors.values"}
    del tensors["model.norm.weight"]
    code, report = check("owner/name")
    assert code == 4
    assert "model.norm.weight" in only(report, "FAIL")["detail"]


# --- trial ---


@pytest.mark.parametrize("name", ["granite_moe", "falcon_h1"])
def test_a_trial_compares_every_way_to_the_same_tokens(name: str, tmp_path: Path, check) -> None:
    folder = checkpoints.save(checkpoints.make(name), tmp_path)
    code, report = check(folder, "--run")
    assert code == 0
    trial = {one["id"]: one for one in found(report, "run")}
    assert set(trial) == {"run", "run.batched", "run.cached", "run.resumed", "run.chunked"}
    assert all(one["status"] == "PASS" for one in trial.values()), trial
    assert "74 of 75" in trial["run.cached"]["detail"]


def test_a_trial_of_a_config_alone_takes_random_weights(tmp_path: Path, check) -> None:
    folder = checkpoints.save(checkpoints.make("lfm2"), tmp_path)
    code, report = check(folder / "config.json", "--run", "--strict")
    assert code == 0
    assert "random weights" in found(report, "run")[0]["detail"]


def test_a_trial_sees_an_answer_that_depends_on_how_it_was_computed(tmp_path: Path, check, monkeypatch) -> None:
    """A runner that perturbs the logits of passes over several sequences, as an operation that mixes rows would."""
    from hybridserve.engine.runner import PassResult, Runner

    honest = Runner.run

    def mixing(self: Runner, plan: Any, seats: Any) -> PassResult:
        result = honest(self, plan, seats)
        return result if len(plan.seats) == 1 else PassResult(result.logits.flip(-1), result.hidden)

    monkeypatch.setattr(Runner, "run", mixing)
    folder = checkpoints.save(checkpoints.make("lfm2"), tmp_path)
    code, report = check(folder, "--run", "--strict")
    assert code == 1
    assert [one["id"] for one in found(report, "run") if one["status"] == "WARN"] == ["run.batched"]


def test_a_trial_takes_no_more_memory_than_is_free_whatever_was_given(tmp_path: Path, check) -> None:
    code, report = check(write_config("Qwen3.5-397B-A17B", tmp_path), "--run", "--memory", "4TiB")
    assert code == 0
    (line,) = found(report, "run")
    assert line["status"] == "WARN"
    assert "are free here now" in line["detail"]


def test_a_trial_is_not_run_where_it_would_fail(tmp_path: Path, check) -> None:
    config = write_config("Qwen3.5-397B-A17B", tmp_path)
    code, report = check(config, "--memory", "24GiB", "--run")
    assert code == 5
    assert found(report, "run")[0]["detail"].startswith("not run")


# --- printing ---


def test_a_terminal_gets_a_table_with_colours(monkeypatch, capsys) -> None:
    class Terminal:
        def __init__(self) -> None:
            self.text = ""
            self.encoding = "utf-8"

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

        def flush(self) -> None: ...

        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["check-model", "demo", *QUICK, "--memory", "1GiB"]) == 0
    monkeypatch.undo()
    assert "\x1b[32mPASS" in terminal.text
    assert "demo: it runs (exit 0)" in terminal.text


def test_the_page_explains_every_field_check_and_code(check) -> None:
    page = (Path(__file__).parent.parent / "docs/check-model.md").read_text(encoding="utf-8")
    for kind in (Report, Finding, LayerRun, CacheTensor, Memory, GroupInfo):
        for name in kind.__struct_fields__:
            assert f"`{name}`" in page, f"{kind.__name__}.{name}"
    for name in CUDA_DEVICES:
        assert f"`cuda:{name}`" in page or name == "a100-80gb"
    _, report = check("demo", "--deep")
    for one in report["checks"]:
        assert any(f"`{name}`" in page for name in (one["id"], one["id"].partition(".")[0])), one["id"]
    for code in (0, 1, 2, 3, 4, 5, 6, 7, 70):
        assert f"\n| {code} | " in page
    assert ", ".join(map(str, PRECEDENCE)) in page
