"""An engine process without an engine: it speaks the messages, and what it does with a request is what the first token says.

Run by tests as `python scripted_engine.py ADDRESS` in place of `python -m hybridserve.engine ADDRESS`.
"""

import os
import sys
import threading
import time

import zmq

from hybridserve.engine.messages import Abort, AskExplanation, AskStats, EngineStats, Outputs, Shutdown, encoder, to_engine
from hybridserve.request import EngineRequest, RequestOutput
from tests.fake_engine import make_info

ANSWER = 1
NEVER_STEP = 2
SAY_NONSENSE = 3
EXIT = 4
STEP_WITHOUT_OUTPUT = 5  # twenty steps of 50 ms before the first token
FLOOD = 7  # five hundred outputs at once, and no end

COMMAND = (sys.executable, __file__)


def die_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def main(address: str) -> None:
    threading.Thread(target=die_with_parent, daemon=True).start()
    socket = zmq.Context().socket(zmq.PAIR)
    socket.connect(address)
    socket.recv()  # the settings
    socket.send(encoder.encode(make_info(100)))
    num_steps, flooding = 0, set()
    while True:
        message = to_engine.decode(socket.recv())
        if isinstance(message, AskStats):
            socket.send(encoder.encode(EngineStats(num_steps=num_steps, num_running=len(flooding))))
        elif isinstance(message, Abort):
            flooding -= set(message.request_ids)
        elif isinstance(message, Shutdown):
            os._exit(0)
        elif isinstance(message, AskExplanation):
            continue  # it never explains
        elif isinstance(message, EngineRequest):
            todo = message.prompt_token_ids[0]
            if todo == EXIT:
                os._exit(1)
            if todo == SAY_NONSENSE:
                socket.send(b"\xc1 nonsense")
            if todo == STEP_WITHOUT_OUTPUT:
                for _ in range(20):
                    time.sleep(0.05)
                    num_steps += 1
                    socket.send(encoder.encode(Outputs([], num_steps)))
            if todo == FLOOD:
                flooding.add(message.request_id)
                for _ in range(500):
                    num_steps += 1
                    output = RequestOutput(request_id=message.request_id, new_token_ids=[7])
                    socket.send(encoder.encode(Outputs([output], num_steps)))
            if todo in (ANSWER, STEP_WITHOUT_OUTPUT):
                num_steps += 1
                output = RequestOutput(request_id=message.request_id, new_token_ids=[7], finish_reason="length")
                socket.send(encoder.encode(Outputs([output], num_steps)))


if __name__ == "__main__":
    main(sys.argv[1])
