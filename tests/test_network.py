"""No network unless asked: a whole server with its engine, where nothing but loopback and local sockets can be opened.

A file that Python imports at start-up in every process refuses all other addresses, and name look-ups, and notes each attempt.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import hybridserve

COMMAND = [sys.executable, "-c", "import sys; from hybridserve.cli import main; sys.exit(main())"]
#: Put into every process by its name: Python imports `sitecustomize` at start-up.
GUARD = """
import os, socket

def _note(what):
    with open(os.environ["NETWORK_ATTEMPTS_FILE"], "a") as file:
        file.write(f"{os.getpid()} {what!r}\\n")
    raise OSError(f"the network is cut off: {what!r}")

def _is_local(address):
    return not isinstance(address, tuple) or address[0] in ("127.0.0.1", "::1", "localhost", "")

def _guarded(name):
    plain = getattr(socket.socket, name)
    def call(self, *args):
        address = args[-1] if name != "connect" and name != "connect_ex" else args[0]
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(address):
            _note((name, address))
        return plain(self, *args)
    return call

class Socket(socket.socket):
    connect, connect_ex, sendto, bind = (_guarded(name) for name in ("connect", "connect_ex", "sendto", "bind"))

def _look_up(name):
    plain = getattr(socket, name)
    def call(host, *args, **kwargs):
        text = host.decode() if isinstance(host, bytes) else host
        if text not in (None, "", "127.0.0.1", "::1", "localhost"):
            _note((name, host))
        return plain(host, *args, **kwargs)
    return call

socket.socket = Socket
for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex"):
    setattr(socket, name, _look_up(name))
"""


@pytest.fixture
def cut_off(tmp_path):
    """An environment without network, and the file that attempts are noted in."""
    (tmp_path / "sitecustomize.py").write_text(GUARD)
    attempts = tmp_path / "attempts"
    attempts.touch()
    paths = [str(tmp_path), str(Path(hybridserve.__file__).parents[1])]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}  # nothing else keeps it offline
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "NETWORK_ATTEMPTS_FILE": str(attempts)}, attempts


def python(code, environment):
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def test_the_guard_refuses_what_is_not_local(cut_off):
    environment, attempts = cut_off
    for code in (
        "import socket; socket.create_connection(('203.0.113.1', 80), timeout=1)",
        "import socket; socket.getaddrinfo('example.org', 80)",
        "import httpx; httpx.get('http://203.0.113.1/')",
    ):
        ended = python(code, environment)
        assert ended.returncode != 0
        assert "the network is cut off" in ended.stderr
    assert len(attempts.read_text().splitlines()) >= 3
    assert (
        python(
            "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())", environment
        ).returncode
        == 0
    )


def test_P13_a_server_runs_with_the_network_cut_off(cut_off):
    environment, attempts = cut_off
    arguments = ["serve", "demo", "--port", "0", "--kv-cache-memory", "16MiB", "--threads", "1"]
    server = subprocess.Popen(
        [*COMMAND, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        lines = []
        for line in server.stdout:
            lines.append(line)
            if "http://127.0.0.1" in line:
                break
        url = next((word for word in "".join(lines[-1:]).split() if word.startswith("http://")), None)
        assert url is not None, lines
        with httpx.Client(base_url=url, timeout=60) as http:
            chat = {"messages": [{"role": "user", "content": "What is 3 plus 4?"}], "max_tokens": 8}
            assert http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
            with http.stream("POST", "/v1/completions", json={"prompt": "3 plus 4", "stream": True}) as reply:
                assert list(reply.iter_lines())[-2] == "data: [DONE]"
            for path in ("/", "/metrics", "/v1/models", "/v1/limits", "/openapi.json", "/ready"):
                assert http.get(path).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait(60)
    assert attempts.read_text() == "", "something tried to reach the network"


@pytest.mark.parametrize(
    "arguments", [["check-model", "demo", "--json"], ["generate", "demo", "--prompt", "3 plus 4", "--max-tokens", "4"]]
)
def test_P13_commands_run_with_the_network_cut_off(cut_off, arguments):
    environment, attempts = cut_off
    ended = subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    if "--json" in arguments:
        assert json.loads(ended.stdout)
    assert attempts.read_text() == ""


def test_only_a_repo_id_asks_for_the_network(cut_off, tmp_path):
    environment, attempts = cut_off
    environment["HF_HOME"] = str(tmp_path / "empty")
    ended = subprocess.run(
        [*COMMAND, "check-model", "someone/some-model"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode != 0
    assert "huggingface.co" in attempts.read_text()
