"""Chats of ten turns with the demo's template: every turn resumes exactly where its text parts from what was computed before."""

from pathlib import Path

import pytest

import hybridserve
from hybridserve.config import EngineSettings
from hybridserve.engine.chat import ChatTemplate
from hybridserve.engine.core import EngineCore
from hybridserve.engine.text import Tokenizer
from hybridserve.llm import LLM
from hybridserve.request import CacheHints, EngineRequest, SamplingParams
from tests import checkpoints

DEMO = Path(hybridserve.__file__).parent / "demo"
QUESTIONS = [f"The code of Anna is {10 + i}. What is the code of Anna?" for i in range(10)]


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Chat:
    """Turns over an engine, as the server makes them: render, find the boundaries, run."""

    def __init__(self):
        self.core = EngineCore(EngineSettings(model="demo", kv_cache_memory=2**27, max_num_seqs=4))
        self.tokenizer = Tokenizer.from_folder(DEMO)
        self.template = ChatTemplate.from_folder(
            DEMO, special_tokens=self.tokenizer.special_tokens, added_tokens=self.tokenizer.added_tokens
        )
        self.number = 0

    def turn(self, messages):
        """Prompt ids, answer ids, and the tokens that were reused."""
        chat = self.template.render(messages, places=True)
        ids, index_of = self.tokenizer.encode_chat(chat, chat.boundaries)
        self.number += 1
        self.core.add(
            EngineRequest(
                request_id=str(self.number),
                prompt_token_ids=ids,
                sampling=SamplingParams(temperature=0.0, max_tokens=24),
                eos_token_ids=self.tokenizer.eos_token_ids,
                cache=CacheHints(boundaries=tuple(sorted(index_of.values()))),
            )
        )
        answer, cached = [], 0
        while self.core.has_work:
            for output in self.core.step():
                answer += output.new_token_ids
                cached = output.num_cached_tokens if output.num_cached_tokens is not None else cached
        return ids, answer, cached


@pytest.mark.parametrize("strips_thinking", [False, True])
def test_each_turn_computes_only_what_is_new_to_the_token(strips_thinking):
    chat, messages, computed = Chat(), [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        ids, answer, cached = chat.turn(messages)
        known = max((shared(ids, before) for before in computed), default=0)
        # Where the template leaves out the whole answer's beginning, the turns part at the end of the prompt before; the
        # state kept there is that of its last token but one, which serves a resend too.
        assert min(known, len(ids) - 1) - strips_thinking <= cached <= known
        # The last token of an answer is chosen and never computed.
        computed.append([*ids, *answer[:-1]])
        said = chat.tokenizer.decode(answer, skip_special_tokens=True)
        # What templates do to reasoning: history has the rest of the answer without its beginning.
        messages.append({"role": "assistant", "content": said[len(said) // 2 :] if strips_thinking else said})
    chat.core.check()


def test_a_corrupted_entry_can_be_dropped_and_does_not_survive(tmp_path):
    """A bit flipped in a cached state changes the answer until the cache is cleared; then the answer is right again."""
    model = checkpoints.make("qwen3_5")
    core = EngineCore(
        EngineSettings(model=str(checkpoints.save(model, tmp_path)), dtype="float32", kv_cache_memory=2**25, max_num_seqs=2)
    )
    prompt = [(7 * i) % checkpoints.VOCAB_SIZE for i in range(50)]

    def answer(name):
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
        tokens = []
        while core.has_work:
            tokens += [token for output in core.step() for token in output.new_token_ids]
        return tokens

    right = answer("a")
    core.corrupt_cached_states()
    assert answer("b") != right
    core.clear_cache()
    assert answer("c") == right
    core.check()


def test_a_chat_in_ones_own_process_tells_where_later_chats_part_from_it(monkeypatch):
    sent, add = [], EngineCore.add
    monkeypatch.setattr(EngineCore, "add", lambda self, request: sent.append(request) or add(self, request))
    with LLM("demo", kv_cache_memory=2**26) as llm:
        chat = [{"role": "user", "content": "What is the code of Anna?"}]
        first = llm.chat(chat, SamplingParams(temperature=0.0, max_tokens=4))[0]
        question = len(llm.tokenizer.encode("<|im_start|>user\nWhat is the code of Anna?<|im_end|>\n", add_special_tokens=False))
        assert question in sent[0].cache.boundaries
        assert max(sent[0].cache.boundaries) == len(first.prompt_token_ids)
        again = llm.chat([*chat, {"role": "user", "content": "And of Ben?"}], SamplingParams(temperature=0.0, max_tokens=4))[0]
        assert again.num_cached_tokens == question
