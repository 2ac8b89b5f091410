"""The engine process and its client: life, death, abort, bounds. With the demo model and real processes."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridserve.config import EngineSettings
from hybridserve.engine.client import start_engine
from hybridserve.errors import EngineDeadError, OverloadedError, RequestError, UsageError
from hybridserve.request import EngineRequest, SamplingParams

SETTINGS = EngineSettings(model="demo", kv_cache_memory=2**26, max_num_seqs=4, max_num_queued_reqs=4, threads=1)


def request(name, max_tokens=8, prompt=(1, 5, 6, 7)):
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=list(prompt), sampling=sampling)


def with_engine(scenario, settings=SETTINGS):
    """Run a coroutine function on a started client, and close it."""

    async def main():
        client = await start_engine(settings)
        try:
            return await scenario(client)
        finally:
            await client.close(0)

    return asyncio.run(main())


async def collect(client, one):
    return [token async for output in client.submit(one) for token in output.new_token_ids]


async def until_idle(client, seconds=10.0):
    """Stats once nothing runs any more."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        stats = await client.stats()
        if stats.num_running == stats.num_waiting == 0:
            return stats
        await asyncio.sleep(0.05)
    raise AssertionError(f"still busy: {stats}")


def test_requests_at_once_answer_as_alone():
    async def scenario(client):
        alone = await collect(client, request("a"))
        together = await asyncio.gather(*(collect(client, request(str(i))) for i in range(4)))
        assert len(alone) == 8
        assert together == [alone] * 4
        assert (await until_idle(client)).slots_used == 0

    with_engine(scenario)


def test_P4_leaving_a_stream_frees_everything_before_the_next_step():
    async def scenario(client):
        stream = client.submit(request("a", max_tokens=1500))
        async for _ in stream:
            break
        await stream.aclose()
        # The question follows the abort, and the engine takes all messages that are there before it steps.
        stats = await client.stats()
        assert stats.num_running == stats.num_waiting == stats.blocks_used == stats.slots_used == 0

    with_engine(scenario)


def test_refusals_come_as_their_own_class():
    async def scenario(client):
        with pytest.raises(RequestError, match="outside the vocabulary"):
            await collect(client, request("a", prompt=[10**6]))
        with pytest.raises(RequestError, match="shorten it"):
            await collect(client, request("b", prompt=[1] * 5000))
        assert len(await collect(client, request("c"))) == 8

    with_engine(scenario)


def test_a_full_queue_is_refused_at_once():
    async def scenario(client):
        streams = [client.submit(request(str(i), max_tokens=1000)) for i in range(8)]
        tasks = [asyncio.create_task(anext(stream)) for stream in streams]
        await asyncio.sleep(0.2)
        with pytest.raises(OverloadedError, match="limit is 8"):
            await collect(client, request("x"))
        for task, stream in zip(tasks, streams, strict=True):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()
        await until_idle(client)

    with_engine(scenario)


def test_a_dead_engine_ends_open_requests_and_comes_back():
    async def scenario(client):
        stream = client.submit(request("a", max_tokens=1900))
        await anext(stream)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="stopped"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError):
            await collect(client, request("b"))
        for _ in range(300):
            await asyncio.sleep(0.1)
            if client.is_alive:
                break
        assert len(await collect(client, request("c"))) == 8

    with_engine(scenario)


def test_an_engine_that_cannot_start_says_why():
    async def main():
        with pytest.raises(UsageError, match="no folder"):
            await start_engine(EngineSettings(model="no/such/folder/here"))

    asyncio.run(main())


def test_draining_finishes_what_runs_and_refuses_what_comes():
    async def main():
        client = await start_engine(SETTINGS)
        task = asyncio.create_task(collect(client, request("a", max_tokens=200)))
        await asyncio.sleep(0.1)
        closing = asyncio.create_task(client.close(60.0))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="shutting down"):
            await collect(client, request("b"))
        assert len(await task) == 200
        await closing

    asyncio.run(main())


def test_the_engine_dies_with_its_parent():
    script = (
        "import asyncio, os, sys\n"
        "from hybridserve.config import EngineSettings\n"
        "from hybridserve.engine.client import start_engine\n"
        "async def main():\n"
        "    client = await start_engine(EngineSettings(model='demo', kv_cache_memory=2**26, threads=1))\n"
        "    print(client.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{child}/stat").read_text().split(")")[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the engine outlived its parent")
