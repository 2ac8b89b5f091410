"""Cold start of the demo: from the start of the process to the first token over HTTP.

    python -m benchmarks.startup [--repeats 5] [--cold-cache] [--json FILE]
    python -m benchmarks.startup --restarts 3 [--json FILE]

Medians, by stage, as the server's own log tells them. The floor is `import torch` in a process of its own, taken in turn with the
starts, since nothing that computes with torch can be up sooner. With `--cold-cache` one more start has to compile the native
kernels, which happens once on a machine. With `--restarts` the engine process is killed instead, and the time is until a token
comes again, with a spare process and without one; beside it is the memory that the spare holds. Load of others makes every figure
larger: the load average is printed beside.
"""

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.server_process import ServerProcess

#: Stage -> what the log says when it has ended.
STAGES = {
    "command line": "hybridserve ",
    "engine process: imports": "engine: choosing backends",
    "native kernels": "engine: loading weights",
    "weights, caches, HTTP": "ready: ",
}
FIRST_TOKEN = "first token"
BODY = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 1, "temperature": 0}


def floor_s() -> float:
    """Seconds of a Python that imports torch and does nothing else."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


def start(model: str, environment: dict[str, str] | None = None) -> dict[str, float]:
    """Seconds from the start of a server until the end of each stage."""
    with ServerProcess(model, environment=environment) as server:
        ends = {stage: next(at for at, line in server.lines if sign in line) for stage, sign in STAGES.items()}
        first_token(server.url)
        ends[FIRST_TOKEN] = time.perf_counter() - server.started
    return ends


def first_token(url: str) -> None:
    """Ask for one token by what the standard library has: a client's own imports are not what is measured."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(BODY), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    content = json.loads(reply.read())
    if reply.status != 200 or content["usage"]["completion_tokens"] != 1:
        raise SystemExit(f"no token came: {content}")


def lasted(ends: dict[str, float]) -> dict[str, float]:
    """The seconds of each stage by itself."""
    times = [0.0, *ends.values()]
    return {stage: end - before for (stage, end), before in zip(ends.items(), times, strict=False)}


def children(pid: int) -> list[int]:
    """A server's engine process, and behind it the spare, where there is one: it has no model, so it is smaller."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return sorted(map(int, found), key=lambda child: -memory_kib(child)["Rss"])


def settled_children(pid: int, count: int) -> list[int]:
    """The same, once there are so many and they compute nothing: a spare that still imports is not one yet."""
    while True:
        found = children(pid)
        before = [cpu_ticks(child) for child in found]
        time.sleep(2)
        if len(found) == count and before == [cpu_ticks(child) for child in found]:
            return found


def cpu_ticks(pid: int) -> int:
    """What a process has computed, in ticks of a hundredth of a second; an idle engine answers now and then, in less."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) // 5


def memory_kib(pid: int) -> dict[str, int]:
    """What a process holds, in KiB, as the kernel tells it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}


def restarts(model: str, repeats: int, *, with_spare: bool) -> dict[str, object]:
    """Seconds from the engine's death until a token comes again, several times on one server; and what a spare weighs."""
    seconds, spare = [], {}
    with ServerProcess(model, *(() if with_spare else ("--no-spare-engine",))) as server:
        first_token(server.url)
        for _ in range(repeats):
            engine, *others = settled_children(server.pid, 1 + with_spare)
            spare = memory_kib(others[0]) if others else {}
            os.kill(engine, signal.SIGKILL)
            killed = time.perf_counter()
            while not answers(server.url):
                time.sleep(0.02)
            seconds.append(time.perf_counter() - killed)
    private = spare.get("Private_Clean", 0) + spare.get("Private_Dirty", 0)
    return {"seconds": seconds, "spare_private_kib": private, "spare_shared_proportionally_kib": spare.get("Pss", 0)}


def answers(url: str) -> bool:
    """Whether one token comes; a server without an engine says 503."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(BODY), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    reply.read()
    if reply.status not in (200, 503):
        raise SystemExit(f"status {reply.status}")
    return reply.status == 200


def measure_restarts(model: str, repeats: int, file: Path | None) -> None:
    """Print restarts with and without a spare, and write them."""
    result: dict[str, object] = {"load_average_before": os.getloadavg()[0]}
    for name, with_spare in (("with a spare process", True), ("without", False)):
        found = restarts(model, repeats, with_spare=with_spare)
        result[name] = found
        print(f"{name:>28} {found}")
    result["load_average_after"] = os.getloadavg()[0]
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold-cache", action="store_true", help="also start once without compiled kernels")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--restarts", type=int, help="kill the engine so often, with and without a spare process")
    arguments = parser.parse_args()
    if arguments.restarts:
        measure_restarts(arguments.model, arguments.restarts, arguments.json)
        return
    loads = [os.getloadavg()[0]]
    start(arguments.model)  # files that no one has read yet, and kernels that are not compiled, are another matter
    floors, runs = [], []
    for _ in range(arguments.repeats):
        floors.append(floor_s())
        runs.append(start(arguments.model))
    loads.append(os.getloadavg()[0])
    print(
        f"{os.cpu_count()} cores, load average {loads[0]:.1f} before and {loads[1]:.1f} after; "
        f"medians of {arguments.repeats}, seconds"
    )
    stages = {stage: statistics.median(lasted(run)[stage] for run in runs) for stage in runs[0]}
    ready = statistics.median(run[list(STAGES)[-1]] for run in runs)
    total = statistics.median(run[FIRST_TOKEN] for run in runs)
    floor = statistics.median(floors)
    for stage, seconds in stages.items():
        print(f"{stage:>28} {seconds:6.2f}")
    print(f"{'until ready':>28} {ready:6.2f}")
    print(f"{'until the first token':>28} {total:6.2f}  (floor, import torch: {floor:.2f}; {total / floor:.2f} times that)")
    result = {"load_average": loads, "stages_s": stages, "ready_s": ready, "first_token_s": total, "floor_s": floor}
    if arguments.cold_cache:
        result["cold_cache_s"] = cold = start_without_cache(arguments.model)
        print(f"{'without compiled kernels':>28} {cold:6.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({**result, "runs": runs, "floors": floors}, indent=1) + "\n", encoding="utf-8")


def start_without_cache(model: str) -> float:
    """Seconds until the first token with an empty cache folder."""
    with tempfile.TemporaryDirectory() as folder:
        return start(model, {"XDG_CACHE_HOME": folder})[FIRST_TOKEN]


if __name__ == "__main__":
    main()
