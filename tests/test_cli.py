"""The command: settings and their sources, errors, and the subcommands against the demo model."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

import hybridserve as package
from hybridserve.cli import COMMANDS, main
from hybridserve.cli.bench_serve import percentile
from hybridserve.cli.flags import Sources, add_config, add_settings, changed
from hybridserve.cli.folder import names_of, text_folder
from hybridserve.cli.progress import loading_bar
from hybridserve.cli.report import describe, nbytes
from hybridserve.config import EngineSettings, ServerSettings, let_idle_threads_sleep
from hybridserve.errors import UsageError
from tests.fake_engine import make_info

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}


def hybridserve(*arguments: str, prelude: str = "", **options: object) -> "subprocess.CompletedProcess[str]":
    code = f"import sys; {prelude}from hybridserve.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, timeout=120, **options)


def parse(arguments: list[str]) -> Sources:
    import argparse

    parser = argparse.ArgumentParser()
    add_settings(parser, EngineSettings, positional="model")
    add_settings(parser, ServerSettings)
    add_config(parser)
    return Sources(parser.parse_args(arguments))


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max-num-seqs: 3\nblock_size: 4\ndtype: float32\nport: 1\napi_key: [a, b]\nkv-cache-memory: 2GiB\n")
    for name in list(os.environ):
        if name.startswith("HYBRIDSERVE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HYBRIDSERVE_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("HYBRIDSERVE_BLOCK_SIZE", "6")
    monkeypatch.setenv("HYBRIDSERVE_UI", "false")
    sources = parse(
        ["m", "--config", str(file), "--max-num-seqs", "7", "--no-enable-prefix-caching", "--plugin", "x", "--plugin", "y"]
    )
    engine, server = sources.settings(EngineSettings), sources.settings(ServerSettings)
    assert (engine.model, engine.max_num_seqs, engine.block_size, engine.dtype) == ("m", 7, 6, "float32")
    assert (engine.enable_prefix_caching, engine.plugin, engine.kv_cache_memory) == (False, ("x", "y"), 2 * 2**30)
    assert (server.port, server.ui, server.api_key, server.host) == (1, False, ("a", "b"), "127.0.0.1")
    assert "max_num_batched_tokens" not in changed(engine)
    assert changed(engine)["max_num_seqs"] == 7


def test_unknown_names_warn_in_the_environment_and_fail_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYBRIDSERVE_MAXNUMSEQS", "5")
    parse(["m"])
    assert "HYBRIDSERVE_MAXNUMSEQS is no setting" in capsys.readouterr().err
    file = tmp_path / "settings.yaml"
    file.write_text("max_seqs: 3\n")
    with pytest.raises(UsageError, match="max_seqs"):
        parse(["m", "--config", str(file)])


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_complete_and_waits_for_no_torch(command: str) -> None:
    done = hybridserve(*command.split(), "--help", prelude="sys.modules['torch'] = None; ")  # so that importing it fails
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS if not command)
    if command == "serve":
        for name in (*EngineSettings.__struct_fields__, *ServerSettings.__struct_fields__):
            assert name == "model" or "--" + name.replace("_", "-") in done.stdout


@pytest.mark.parametrize("module", [module for _, module in COMMANDS.values()])
def test_no_subcommand_imports_what_is_slow_before_it_needs_it(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'starlette', 'tokenizers', 'uvicorn', 'zmq') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, ""),
        (["serve"], 2, "no model is named"),
        (["fly"], 2, "unknown command 'fly'"),
        (["serve", "demo", "--port", "70000"], 2, "port"),
        (["serve", "demo", "--host", "0.0.0.0"], 2, "--allow-open-bind"),
        (["serve", "demo", "--config", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["generate", "demo", "--prompt", ""], 2, "empty"),
        (["generate", "demo", "--prompt", "x", "--max-tokens", "0"], 2, "from 1 to 2147483647"),
        (["generate", "demo", "--prompt", "x", "--max-model-len", "1"], 2, "max_model_len"),
        (["bench", "serve", "--base-url", "http://127.0.0.1:9"], 2, "cannot be reached"),
        (["bench", "serve", "--base-url", "ftp://x"], 2, "no HTTP URL"),
        (["chat", "--url", "http://127.0.0.1:9"], 2, "cannot be reached"),
    ],
)
def test_errors_are_one_line_with_their_exit_code(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(arguments) == code
    errors = capsys.readouterr().err
    assert words in errors
    assert "Traceback" not in errors
    assert len([line for line in errors.splitlines() if line.startswith("error: ")]) == bool(words)


def test_the_start_up_report_tells_layers_caches_and_users() -> None:
    text = "\n".join(describe(make_info(500)))
    for words in ("FakeForCausalLM", "0,2: short_conv", "reference: a fake", "5.00 MiB", "32 superpages of 64.00 KiB"):
        assert words in text
    for words in ("1.50 %", "512 B a token", "4.00 KiB of state", "3 with 1,024 tokens", "speculation: not_implemented"):
        assert words in text
    assert nbytes(3 * 2**30) == "3.00 GiB"


def test_operations_of_one_backend_share_a_line_of_the_report() -> None:
    info = msgspec.structs.replace(
        make_info(500), backends={"norm": "cpu: native", "moe": "reference: plain", "conv": "cpu: native"}
    )
    lines = [line for line in describe(info) if line.startswith("backend ")]
    assert lines == ["backend cpu: native: conv, norm", "backend reference: plain: moe"]


def test_loading_is_told_once_a_stage_in_a_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), loading_bar() as show:
        for stage, fraction in (("choosing backends", 0.0), ("loading weights", 0.0), ("loading weights", 1.0)):
            show(stage, fraction)
    assert [record.getMessage() for record in caplog.records] == ["engine: choosing backends", "engine: loading weights"]


def test_a_models_name_tells_no_path(tmp_path: Path) -> None:
    name, aliases = names_of(f"{tmp_path}/", ())
    assert name == tmp_path.name
    assert set(aliases) == {str(tmp_path), f"{tmp_path}/"}
    assert names_of("owner/name", ()) == ("owner/name", ())
    assert names_of(str(tmp_path), ("mine", "old")) == ("mine", ("old",))
    assert text_folder(str(tmp_path)) == tmp_path
    (tmp_path / "config.json").write_text("{}")
    assert text_folder(str(tmp_path / "config.json")) == tmp_path


@pytest.mark.parametrize("source", ["demo", "owner/name", "config.json"])
def test_finding_a_tokenizer_brings_no_torch_into_the_servers_process(source: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys, huggingface_hub\n"
        "from hybridserve.cli.folder import text_folder\n"
        "def fetch(repo_id, allow_patterns): return 'all of it' if '*.safetensors' in allow_patterns else '.'\n"
        "huggingface_hub.snapshot_download = fetch\n"
        f"print(text_folder({source!r}), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    folder, has_torch = done.stdout.split()
    assert has_torch == "False"
    assert folder == "." or folder.endswith("demo")
    assert (text_folder("demo") / "tokenizer.json").is_file()


def test_percentiles_are_numpys() -> None:
    import numpy as np

    values = [3.0, 1.0, 2.5, 9.0, 4.0, 4.5]
    for share in (0, 10, 50, 75, 99, 100):
        assert percentile(values, share) == pytest.approx(np.percentile(values, share))


# Against the demo model.


@pytest.mark.slow
def test_generate_in_process() -> None:
    done = hybridserve(
        "generate", "demo", "--prompt", "one two", "--prompt", "three", "--json", "--max-tokens", "4", "--ignore-eos"
    )
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["prompt"], second["prompt"], first["finish_reason"]) == ("one two", "three", "length")


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "is_told"), [([], True), (["--chat"], False), (["--max-tokens", "4", "--ignore-eos"], False)])
def test_a_chat_model_that_has_nothing_to_add_to_a_bare_prompt_gets_a_note(flags: list[str], is_told: bool) -> None:
    ends_at_once = ["--stop", "a", "--stop", "e", "--stop", "i"] if is_told else []
    done = hybridserve("generate", "demo", "--prompt", "Repeat: a", "--temperature", "0", *flags, *ends_at_once)
    assert done.returncode == 0, done.stderr
    assert ("try --chat" in done.stderr) == (is_told and not done.stdout.strip())


@pytest.mark.slow
def test_bench_in_process(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ["--model", "demo", "--load-format", "dummy", "--input-len", "12", "--output-len", "5"]
    done = hybridserve("bench", "throughput", *arguments, "--num-prompts", "6", "--output-json", str(file))
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert json.loads(done.stdout) == result
    assert result["total_num_tokens"] == 6 * 17
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / result["elapsed_time"])
    done = hybridserve("bench", "latency", *arguments, "--batch-size", "2", "--num-iters", "3", "--num-iters-warmup", "1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["latencies"]) == 3
    assert result["percentiles"]["50"] == sorted(result["latencies"])[1]


@contextmanager
def served(*arguments: str, model: str = "demo") -> Iterator[tuple["subprocess.Popen[str]", str, list[str]]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "import sys; from hybridserve.cli import main; sys.exit(main())"]
    child = subprocess.Popen(
        [*command, "serve", model, "--port", str(port), *arguments], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT
    )
    log: list[str] = []
    assert child.stderr is not None
    reader = threading.Thread(target=log.extend, args=(child.stderr,))
    reader.start()
    try:
        end = time.monotonic() + 90
        while not any("ready: " in line for line in log):
            assert child.poll() is None, log
            assert time.monotonic() < end, log
            time.sleep(0.05)
        yield child, f"http://127.0.0.1:{port}", log
    finally:
        child.kill()
        child.wait()
        reader.join()
        child.stderr.close()


def test_serve_with_the_real_engine_and_its_clients() -> None:
    with served("--api-key", "k", "--served-model-name", "mine", "--max-num-seqs", "8", "--drain-timeout-s", "30") as (
        child,
        url,
        log,
    ):
        headers = {"authorization": "Bearer k"}
        body = {
            "messages": [{"role": "user", "content": "hello there, you"}],
            "max_tokens": 8,
            "ignore_eos": True,
            "logprobs": True,
        }
        replies = [httpx.post(url + "/v1/chat/completions", json=body, headers=headers, timeout=60).json() for _ in range(2)]
        first, second = (reply["choices"][0] for reply in replies)
        assert first["message"] == second["message"]
        assert len(first["logprobs"]["content"]) == 8
        prompt_tokens = replies[1]["usage"]["prompt_tokens"]
        assert replies[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert replies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt_tokens - 1

        lengths = ["--input-len", "20", "--output-len", "6", "--prefix-len", "10"]
        access = ["--base-url", url, "--api-key", "k"]
        done = hybridserve(
            "bench", "serve", *access, "--num-prompts", "12", *lengths, "--max-concurrency", "4", "--save-detailed"
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert (result["completed"], result["failed"], result["model_id"]) == (12, 0, "mine")
        assert (result["total_input_tokens"], result["total_output_tokens"]) == (240, 72)
        for name in ("ttft", "tpot", "itl", "e2el"):
            assert 0 <= result[f"median_{name}_ms"] <= result[f"p99_{name}_ms"]
        assert 0 < result["mean_ttft_ms"] < result["mean_e2el_ms"]

        said = hybridserve(
            "chat", "--url", url, "--api-key", "k", "--max-tokens", "5", "--ignore-eos", input="hello\n/new\n/fly\nhello\n"
        )
        assert said.returncode == 0, said.stderr
        lines = said.stdout.splitlines()
        assert len(lines) >= 2
        assert "unknown command /fly" in said.stderr
        refused = hybridserve("chat", "--url", url, "--api-key", "wrong", input="hello\n")
        assert refused.returncode == 2
        assert "API key" in refused.stderr

        text = "".join(log)
        for words in ("Qwen3_5ForCausalLM", "gated_delta", "superpages", "users at once", "as 'mine', a key is needed"):
            assert words in text
        assert "hello" not in text
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0


#: Figures of the report that a running server has no use for.
HERE_ONLY = ("memory_nbytes", "host_nbytes", "memory_users_at")


def test_limits_in_force_are_those_that_check_model_foretold() -> None:
    flags = ["--kv-cache-memory", "12MiB", "--max-num-seqs", "5", "--block-size", "8", "--max-model-len", "300"]
    done = hybridserve("check-model", "demo", *flags, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    with served(*flags) as (_, url, _):
        limits = httpx.get(url + "/v1/limits", timeout=60).json()
        card = httpx.get(url + "/v1/models", timeout=60).json()["data"][0]
    foretold = {name: value for name, value in report["memory"].items() if name not in HERE_ONLY}
    assert limits["memory"] == foretold
    for name in ("backends", "features_off"):
        assert limits[name] == report[name]
    assert (limits["max_model_len"], limits["max_num_seqs"]) == (300, 5)
    assert (card["architecture"], card["dtype"]) == (report["architecture"], report["dtype"])
    assert card["layer_plan"] == "  ".join(f"{run['layers']}: {run['kind']}" for run in report["layers"])


def test_a_signal_while_the_engine_loads_ends_the_server_at_once() -> None:
    command = [
        sys.executable,
        "-c",
        "import sys; from hybridserve.cli import main; sys.exit(main())",
        "serve",
        "demo",
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT) as child:
        assert child.stderr is not None
        child.stderr.readline()  # it has begun
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        child.wait(30)
        assert "Traceback" not in child.stderr.read()


@pytest.mark.slow
def test_chat_in_process_uses_the_same_path() -> None:
    done = hybridserve("chat", "demo", "--max-tokens", "5", "--ignore-eos", "--temperature", "0", input="hello\n\nhello\n/quit\n")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) >= 2


@pytest.mark.slow
def test_P7_a_dead_engine_ends_streams_with_an_error_and_is_started_again() -> None:
    with served() as (child, url, _):
        engine = int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()[0])
        body = {"prompt": "one", "max_tokens": 1500, "ignore_eos": True, "stream": True, "skip_special_tokens": False}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(engine, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert httpx.get(url + "/ready").status_code == 503
        assert httpx.get(url + "/health").status_code == 200
        assert httpx.post(url + "/v1/completions", json={"prompt": "one"}).status_code == 503
        end = time.monotonic() + 90
        while httpx.get(url + "/ready").status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.2)
        assert httpx.post(url + "/v1/completions", json={"prompt": "one"}, timeout=60).status_code == 200


@pytest.mark.slow
def test_a_folder_that_does_not_exist_is_one_line() -> None:
    done = hybridserve("serve", "no/such/folder")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") or "\nerror: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("before", "is_torch_there", "has_effect", "after"),
    [({}, False, True, "passive"), ({}, True, False, "passive"), ({"OMP_WAIT_POLICY": "active"}, True, True, "active")],
)
def test_idle_threads_sleep_unless_the_user_wants_otherwise(monkeypatch, before, is_torch_there, has_effect, after):
    environ = dict(before)
    if not is_torch_there:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert let_idle_threads_sleep(environ) is has_effect
    assert environ["OMP_WAIT_POLICY"] == after


def test_the_package_lists_what_it_offers():
    assert set(package.__all__) <= set(dir(package))


def test_the_package_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hybridserve", "--version"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout == f"hybridserve {package.__version__}\n"
