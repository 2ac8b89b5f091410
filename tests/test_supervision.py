"""The watch over the engine process: it survives every end of it, finds one that hangs, and says so. With scripted processes.

What an engine's own loop does with messages, an abort among them, is here too, step by step and without processes.
"""

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from hybridserve.config import EngineSettings
from hybridserve.engine import client as client_module
from hybridserve.engine.client import Supervision, start_engine
from hybridserve.engine.messages import Abort, AskExplanation, AskStats, EngineStats, Outputs, Shutdown, encoder, from_engine
from hybridserve.engine.process import EngineLoop
from hybridserve.engine.progress import Progress
from hybridserve.engine.unread import Unread
from hybridserve.errors import DeadlineError, EngineDeadError, EngineError, OverloadedError, SlowReaderError
from hybridserve.request import CacheHints, EngineRequest, RequestOutput, SamplingParams
from hybridserve.server import lifecycle
from hybridserve.server.lifecycle import Lifecycle
from tests import scripted_engine as does

LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Pauses and limits that a test can wait for, and a folder for sockets that it can see."""
    monkeypatch.setattr(client_module, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(client_module, "_PING_S", 0.05)
    monkeypatch.setattr(client_module, "_EXIT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(lifecycle, "STALL_LIMIT_S", 0.15)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root = str(Path(__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))


def watched(scenario, **supervision):
    """Run a coroutine function on a client of a scripted engine, and close it."""
    chosen = {"step_timeout_s": 60.0, "watch_every_s": 0.02, "command": does.COMMAND, **supervision}

    async def main():
        client = await start_engine(EngineSettings(model="scripted"), supervision=Supervision(**chosen))
        try:
            return await asyncio.wait_for(scenario(client), LIMIT_S)
        finally:
            await client.close(0)

    return asyncio.run(main())


def request(todo, name="a"):
    return EngineRequest(request_id=name, prompt_token_ids=[todo], sampling=SamplingParams(max_tokens=1))


async def answer(client, todo, name="a"):
    return [token async for output in client.submit(request(todo, name)) for token in output.new_token_ids]


async def until(holds):
    while not holds():
        await asyncio.sleep(0.005)


async def replaced(client, old):
    """Wait until another process than `old` serves, and see that it does and that the old one is gone."""
    await until(lambda: client.is_alive and client.pid != old)
    assert await answer(client, does.ANSWER) == [7]
    assert not Path(f"/proc/{old}").exists()


def test_P6_an_engine_that_answers_and_never_steps_is_not_ready_and_is_replaced():
    async def scenario(client):
        state = Lifecycle().state
        assert await answer(client, does.ANSWER) == [7]
        assert state(client) == "ready"
        old = client.pid
        stuck = asyncio.create_task(answer(client, does.NEVER_STEP))
        answered = 0
        while state(client) == "ready":
            answered += isinstance(await client.stats(), EngineStats)
            await asyncio.sleep(0.01)
        assert answered > 1
        assert state(client) == "stalled"
        with pytest.raises(EngineDeadError, match="stopped"):
            await stuck
        await replaced(client, old)
        assert state(client) == "ready"

    watched(scenario, step_timeout_s=0.4)


@pytest.mark.parametrize("is_busy", [True, False])
def test_P6_a_stopped_engine_is_not_ready_and_is_replaced(is_busy, caplog):
    async def scenario(client):
        old = client.pid
        os.kill(old, signal.SIGSTOP)
        asked = asyncio.create_task(answer(client, does.ANSWER)) if is_busy else None
        await until(lambda: Lifecycle().state(client) == "stalled")
        if asked is not None:
            with pytest.raises(EngineDeadError, match="stopped"):
                await asked
        await replaced(client, old)

    watched(scenario, step_timeout_s=0.4)
    assert "completed no step; it is killed" in caplog.text


def test_steps_that_produce_nothing_are_progress():
    async def scenario(client):
        old = client.pid
        assert await answer(client, does.STEP_WITHOUT_OUTPUT) == [7]
        assert client.pid == old

    # One second of steps in all; a limit that would end an engine whose steps are not seen.
    watched(scenario, step_timeout_s=0.6)


def test_a_server_that_was_held_up_does_not_take_its_engine_for_hung():
    async def scenario(client):
        old = client.pid
        waiting = asyncio.create_task(answer(client, does.STEP_WITHOUT_OUTPUT))
        await asyncio.sleep(0.1)
        time.sleep(0.9)  # the whole event loop, while the engine goes on
        assert await waiting == [7]
        assert client.pid == old

    watched(scenario, step_timeout_s=0.5)


def test_progress_is_steps_while_there_is_work():
    now = [0.0]
    progress = Progress(lambda: now[0])
    assert progress.stalled_s == 0
    progress.note_asked()
    now[0] = 5.0
    progress.note_asked()
    assert progress.stalled_s == 5
    progress.note_steps(0)
    assert progress.stalled_s == 5
    progress.note_steps(1)
    assert progress.stalled_s == 0
    now[0] = 6.0
    assert progress.stalled_s == 1
    progress.note_idle()
    assert progress.stalled_s == 0


def test_P7_a_removed_folder_of_the_socket_does_not_matter(tmp_path):
    async def scenario(client):
        old = client.pid
        (folder,) = tmp_path.glob("hybridserve-*")
        shutil.rmtree(folder)
        assert await answer(client, does.ANSWER) == [7]
        os.kill(old, signal.SIGKILL)
        await until(lambda: not client.is_alive)
        await replaced(client, old)

    watched(scenario)
    assert not list(tmp_path.glob("hybridserve-*"))


def test_P7_what_keeps_an_engine_from_starting_is_told_and_tried_again(tmp_path, caplog):
    python = tmp_path / "python"

    def install():
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o700)

    install()

    async def scenario(client):
        old = client.pid
        python.unlink()
        os.kill(old, signal.SIGKILL)
        await until(lambda: caplog.text.count("could not be started") >= 2)
        with pytest.raises(EngineDeadError):
            await answer(client, does.ANSWER)
        install()
        await replaced(client, old)

    watched(scenario, command=(str(python), does.__file__))


def test_P7_an_engine_that_says_what_cannot_be_read_is_replaced(caplog):
    async def scenario(client):
        old = client.pid
        with pytest.raises(EngineDeadError, match="stopped"):
            await answer(client, does.SAY_NONSENSE)
        await replaced(client, old)

    watched(scenario)
    assert "cannot be read" in caplog.text


def test_a_restart_takes_the_spare_process(caplog):
    caplog.set_level(logging.WARNING)

    async def scenario(client):
        for _ in range(2):
            old = client.pid
            await until(lambda old=old: children() - {old})
            (spare,) = children() - {old}
            with pytest.raises(EngineDeadError):
                await answer(client, does.EXIT)
            await replaced(client, old)
            assert client.pid == spare
        await until(lambda: len(children()) == 2)

    watched(scenario, keeps_spare=True, spare_delay_s=0.0)
    assert not children()


def children():
    found = [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    return {pid for pid in found if b"scripted_engine" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def test_an_engine_that_ends_before_it_connects_is_told():
    async def main():
        with pytest.raises(EngineDeadError, match="exit code 3"):
            await start_engine(
                EngineSettings(model="x"), supervision=Supervision(command=(sys.executable, "-c", "import sys; sys.exit(3)"))
            )

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_a_question_without_an_answer_has_a_limit(monkeypatch):
    monkeypatch.setattr(client_module, "ANSWER_LIMIT_S", 0.05)

    async def scenario(client):
        with pytest.raises(DeadlineError, match=r"within 0\.05 s"):
            await client.explain([1], CacheHints())
        os.kill(client.pid, signal.SIGSTOP)
        for _ in range(3):
            with pytest.raises(DeadlineError, match=r"within 0\.05 s"):
                await client.stats()

    watched(scenario)


def test_a_silent_engine_does_not_fill_the_servers_memory(monkeypatch):
    monkeypatch.setattr(client_module, "_MAX_UNHEARD_NBYTES", 5000)

    async def scenario(client):
        os.kill(client.pid, signal.SIGSTOP)
        errors = []
        while len(errors) < 100 and not isinstance(errors[-1] if errors else None, OverloadedError):
            left = asyncio.create_task(answer(client, does.ANSWER, f"r{len(errors)}"))
            await asyncio.sleep(0)
            left.cancel()
            errors += await asyncio.gather(left, return_exceptions=True)
        assert 1 < len(errors) < 100
        assert "bytes of requests wait for an engine that is silent" in str(errors[-1])

    watched(scenario)


def test_I34_what_nobody_reads_is_bounded_and_aborted():
    async def scenario(client):
        unread = Unread(20_000)
        stream = client.submit(request(does.FLOOD), unread)
        # Where all has come before the first can be read, the error is what is read first.
        errors = await asyncio.gather(anext(stream), return_exceptions=True)
        while not unread.was_full:  # nobody reads meanwhile
            await client.stats()
        assert (await client.stats()).num_running == 0
        assert unread.nbytes < 20_000
        errors += await asyncio.gather(anext(stream), return_exceptions=True)
        (error,) = [one for one in errors if isinstance(one, SlowReaderError)]
        assert "more than 20000 bytes" in str(error)
        assert unread.nbytes == 0
        assert client.stalled_s == 0
        # Of one that is read, an output may be larger than all that may wait.
        small = Unread(100)
        stream, num_read = client.submit(request(does.FLOOD, "c"), small), 0
        while num_read < 500:
            num_read += len((await anext(stream)).new_token_ids)
        assert not small.was_full
        await stream.aclose()
        # One whose outputs fit is read to its end.
        stream, num_read = client.submit(request(does.FLOOD, "b"), Unread(2_000_000)), 0
        while num_read < 400:
            num_read += len((await anext(stream)).new_token_ids)
        await stream.aclose()
        await client.stats()  # this may be the answer to a question that was on its way
        assert (await client.stats()).num_running == 0

    watched(scenario)


# The engine's own loop, over a socket inside this process.


class CountingCore:
    """A core of which every request runs for ever. Counts its steps, and calls `at_step` in each."""

    def __init__(self):
        self.num_steps = 0
        self.open = []
        self.aborted_at = {}
        self.at_step = lambda number: None

    @property
    def has_work(self):
        return bool(self.open)

    @property
    def num_unfinished(self):
        return len(self.open)

    def add(self, request):
        if request.request_id == "bad":
            raise ValueError("a fault of ours")
        self.open.append(request.request_id)

    def abort(self, request_ids):
        for name in request_ids:
            self.open.remove(name)
            self.aborted_at[name] = self.num_steps
        return [RequestOutput(request_id=name, finish_reason="abort") for name in request_ids]

    def step(self):
        self.num_steps += 1
        self.at_step(self.num_steps)
        assert self.num_steps < 1000, "nothing ended it"
        return [RequestOutput(request_id=name, new_token_ids=[1]) for name in self.open]

    def stats(self):
        return EngineStats(num_steps=self.num_steps, num_running=len(self.open))

    def explain(self, tokens, hints):
        raise ValueError("a fault of ours")


def looped(core, *first):
    """Run the loop on `core` until it is told to stop, with these messages waiting. `core.at_step` may send more."""
    context = zmq.Context()
    theirs, ours = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://loop")
    theirs.connect("inproc://loop")
    send = ours.send
    for message in first:
        send(message if isinstance(message, bytes) else encoder.encode(message))
    at_step = core.at_step
    core.at_step = lambda number: [send(encoder.encode(message)) for message in at_step(number) or ()]
    try:
        EngineLoop(theirs, core).run()
        said = []
        while ours.poll(0):
            said.append(from_engine.decode(ours.recv()))
        return said
    finally:
        context.destroy(0)


def test_P4_an_abort_is_handled_before_the_next_step():
    core = CountingCore()
    core.at_step = lambda number: {5: [Abort(["a"])], 9: [Abort(["b"]), Shutdown(drain=False)]}.get(number, [])
    said = looped(core, request(1, "a"), request(1, "b"))
    assert core.aborted_at == {"a": 5, "b": 9}
    outputs = [output for message in said for output in message.outputs]
    assert [output.finish_reason for output in outputs if output.request_id == "a"] == [None] * 5 + ["abort"]
    assert [message.num_steps for message in said] == sorted(message.num_steps for message in said)


def test_what_cannot_be_read_or_taken_ends_itself_alone(caplog):
    core = CountingCore()
    core.at_step = lambda number: [Shutdown(drain=False)] if number == 3 else []
    half = msgspec.msgpack.encode({"type": "add", "request_id": "half", "prompt_token_ids": "no list"})
    explain = AskExplanation(number=4, prompt_token_ids=[1], cache=CacheHints())
    first = (b"\xc1", half, request(1, "bad"), explain, AskStats(), request(1, "good"))
    said = looped(core, *first)
    refused = [output for message in said if isinstance(message, Outputs) for output in message.outputs if output.error]
    assert {output.request_id: output.error_type for output in refused} == {"half": "EngineError", "bad": "EngineError"}
    assert [message.explanation for message in said if hasattr(message, "explanation")] == [None]
    assert [message.num_running for message in said if isinstance(message, EngineStats)] == [0]
    assert core.num_steps == 3
    assert "cannot be read" in caplog.text


def test_an_explanation_that_fails_is_that_requests_own_error(monkeypatch):
    async def scenario(client):
        asked = asyncio.create_task(client.explain([1], CacheHints()))
        await asyncio.sleep(0)
        client._take(from_engine.decode(encoder.encode(client_module.Explained(1, None))))
        with pytest.raises(EngineError, match="could not explain"):
            await asked

    watched(scenario)
