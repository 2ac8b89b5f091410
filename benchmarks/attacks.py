"""How long `/health` takes while one client attacks: large, deep and many-valued bodies, long texts, bodies that do not end.

`python -m benchmarks.attacks [--out FILE]` serves the demo on loopback. Each attack is a process of its own that sends 12 times,
four at once; meanwhile a probe asks every 5 ms on one connection, and one short chat must be answered. The row `nothing` is the
machine's own floor.
"""

import argparse
import concurrent.futures
import http.client
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.server_process import ServerProcess

AT_ONCE = 4
NUM_REQUESTS = 12
PAUSE_S = 0.005
SIZE = 12 * 2**20
_IDS = b"5," * 3_000_000 + b"5"


def _items(item: bytes, count: int) -> bytes:
    return b",".join([item] * count)


#: By name: the route, and what makes the body.
ATTACKS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "nothing": ("/health", lambda: b""),
    "a text of 12 MiB": ("/v1/completions", lambda: b'{"prompt":"%s"}' % (b"x" * SIZE)),
    "10.5 million spaces": ("/v1/completions", lambda: b'{"prompt":"%s"}' % (b" " * 10_500_000)),
    "2 million escapes": ("/v1/completions", lambda: b'{"prompt":"%s"}' % (b"\\u0041" * 2_000_000)),
    "3 million token ids": ("/v1/completions", lambda: b'{"prompt":[%s]}' % _IDS),
    "130,000 token ids": ("/v1/completions", lambda: b'{"prompt":[%s]}' % _items(b"5", 130_000)),
    "2 million texts": ("/v1/completions", lambda: b'{"prompt":[%s]}' % _items(b'"a"', 2_000_000)),
    "400,000 unknown fields": (
        "/v1/completions",
        lambda: b'{"prompt":"a",%s}' % b",".join(b'"u%d":1' % number for number in range(400_000)),
    ),
    "5 million deep": ("/v1/completions", lambda: b'{"prompt":"a","x":%s}' % (b"[" * 5_000_000)),
    "a chat of 12 MiB": (
        "/v1/chat/completions",
        lambda: b'{"messages":[{"role":"user","content":"%s"}]}' % (b"word " * (SIZE // 5)),
    ),
    "3 million content parts": (
        "/v1/chat/completions",
        lambda: b'{"messages":[{"role":"user","content":[%s]}]}' % _items(b"{}", 3_000_000),
    ),
    "4,000 messages": (
        "/v1/chat/completions",
        lambda: b'{"messages":[%s]}' % _items(b'{"role":"user","content":"hello there"}', 4000),
    ),
    "3 million variables": (
        "/v1/chat/completions",
        lambda: b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":[%s]}}' % _IDS,
    ),
    "detokenize 3 million": ("/detokenize", lambda: b'{"tokens":[%s]}' % _IDS),
    "tokenize 12 MiB": ("/tokenize", lambda: b'{"prompt":"%s","return_token_strs":true}' % (b"word " * (SIZE // 5))),
    "explain 3 million": ("/v1/cache/explain", lambda: b'{"prompt":[%s]}' % _IDS),
    "60 bodies half sent": ("/v1/completions", lambda: b'{"prompt":"' + b"x" * 2**17),
}
HALF_SENT = "60 bodies half sent"


def _post(address: str, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        return connection.getresponse().status
    except OSError:
        return 0  # refused before the whole body was sent
    finally:
        connection.close()


def _hold_half(address: str, path: str, body: bytes) -> None:
    held = []
    for _ in range(60):
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.putrequest("POST", path)
        connection.putheader("content-length", str(2 * len(body)))
        connection.endheaders()
        connection.send(body)
        held.append(connection)
    time.sleep(3)


def send(name: str, address: str) -> None:
    """The attacker: build the body, say so, send it, print the statuses."""
    path, make = ATTACKS[name]
    body = make()
    print("ready", flush=True)
    sys.stdin.readline()
    if name == "nothing":
        time.sleep(3)
    elif name == HALF_SENT:
        _hold_half(address, path, body)
    else:
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            statuses = pool.map(lambda _: _post(address, path, body), range(NUM_REQUESTS))
            print(json.dumps(Counter(map(str, statuses))), flush=True)


def measure(name: str, address: str) -> dict[str, object]:
    """One attack's row: latencies of `/health` in ms, and what the attacker and the short chats were answered."""
    command = [sys.executable, "-m", "benchmarks.attacks", "--send", name, "--address", address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdin is not None and attacker.stdout is not None, "both are pipes"  # noqa: PT018
        attacker.stdout.readline()
        probe = http.client.HTTPConnection(address, timeout=60)
        _ask(probe)
        attacker.stdin.write("go\n")
        attacker.stdin.flush()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            chat = pool.submit(_post, address, "/v1/chat/completions", _CHAT)
            latencies = []
            while attacker.poll() is None:
                latencies.append(_ask(probe))
                time.sleep(PAUSE_S)
            neighbour = chat.result()
        said = attacker.stdout.read().strip()
    latencies.sort()
    return {
        "attack": name,
        "probes": len(latencies),
        "p99_ms": round(1000 * latencies[int(0.99 * (len(latencies) - 1))], 1),
        "max_ms": round(1000 * latencies[-1], 1),
        "attacker_got": json.loads(said) if said else {},
        "neighbour_got": neighbour,
    }


_CHAT = b'{"messages":[{"role":"user","content":"What is 3 plus 4?"}],"max_tokens":8}'


def _ask(probe: http.client.HTTPConnection) -> float:
    start = time.perf_counter()
    probe.request("GET", "/health")
    reply = probe.getresponse()
    reply.read()
    assert reply.status == 200, reply.status
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results/attacks.json")
    parser.add_argument("--send", choices=[*ATTACKS], help="be the attacker; for the benchmark's own use")
    parser.add_argument("--address")
    arguments = parser.parse_args()
    if arguments.send:
        send(arguments.send, arguments.address)
        return
    rows = []
    with ServerProcess("demo", "--client-share", "1") as server:
        address = urlsplit(server.url).netloc
        for name in ATTACKS:
            rows.append(measure(name, address))
            print(json.dumps(rows[-1]), flush=True)
    Path(arguments.out).write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print("| attack | `/health` p99 ms | max ms | the attacker got | a short chat got |\n| --- | ---: | ---: | --- | ---: |")
    for row in rows:
        got = ", ".join(f"{count} x {status}" for status, count in dict(row["attacker_got"]).items())  # type: ignore[call-overload]
        print(f"| {row['attack']} | {row['p99_ms']} | {row['max_ms']} | {got or '-'} | {row['neighbour_got']} |")


if __name__ == "__main__":
    main()
