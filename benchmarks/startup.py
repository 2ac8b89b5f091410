"""Cold start of the demo: from the start of the process to the first token over HTTP.

    python -m benchmarks.startup [--repeats 5] [--cold-cache] [--json FILE]

Medians, by stage, as the server's own log tells them. The floor is `import torch` in a process of its own, taken in turn with the
starts, since nothing that computes with torch can be up sooner. With `--cold-cache` one more start has to compile the native
kernels, which happens once on a machine. Load of others makes every figure larger: the load average is printed beside.
"""

import argparse
import http.client
import json
import os
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold-cache", action="store_true", help="also start once without compiled kernels")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
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
