"""Where messages lie in a chat's rendering, for templates that keep, trim or strip what they are given."""

import pytest

from hybridserve.engine.render_job import Job
from hybridserve.engine.rendering import Renderer
from hybridserve.engine.text import Tokenizer
from tests.test_text import CHATML, byte_level_core

#: As Qwen's: thinking is left out of all answers before the last question.
STRIPS = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

#: Says the system message in the first question, trims everything, and leaves out notes.
FOLDS = """{%- set system = '' %}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}[INST] {% if loop.first and system %}<<{{ system }}>> {% endif %}
{{ message.content | trim }} [/INST]
{%- elif message.role == 'assistant' %} {{ message.content | trim }}</s>{%- endif %}
{%- endfor %}"""

SYSTEM = {"role": "system", "content": "Be brief."}


def chat(turns, *, system=True, thinks=False):
    thought = "<think>\nhm {}\n</think>\n\n" if thinks else ""
    messages = [SYSTEM] if system else []
    for number in range(turns):
        messages.append({"role": "user", "content": f"question {number}"})
        messages.append({"role": "assistant", "content": thought.format(number) + f"answer {number}"})
    return [*messages, {"role": "user", "content": "the last question"}]


def make(source, messages, **options):
    return Renderer(source).chat(Job(messages=messages, **options)).turns


def content_of(turns, index):
    span = turns.span_of(index)
    return None if span is None else turns.text[span.start : span.end]


@pytest.mark.parametrize("source", [CHATML, STRIPS, FOLDS], ids=["keeps", "strips", "folds"])
@pytest.mark.parametrize("thinks", [False, True])
def test_a_message_lies_where_its_text_is(source, thinks):
    messages = chat(3, thinks=thinks)
    turns = make(source, messages)
    for index, message in enumerate(messages):
        shown = message["content"].split("</think>\n\n")[-1] if source == STRIPS else message["content"]
        assert content_of(turns, index) == shown


def test_a_message_that_the_template_leaves_out_lies_nowhere():
    turns = make(FOLDS, [{"role": "user", "content": "a"}, {"role": "note", "content": "b"}, {"role": "user", "content": "c"}])
    assert [content_of(turns, index) for index in range(3)] == ["a", None, "c"]


def test_boundaries_are_where_messages_end():
    turns = make(CHATML, chat(4))
    text = turns.text
    ends = [position + len("<|im_end|>\n") for position in range(len(text)) if text.startswith("<|im_end|>\n", position)]
    # The last one is where the next turn parts from this prompt: where the answer begins.
    assert turns.boundaries() == (ends[0], *ends[-3:], len(text))
    assert [turns.end_of(index) for index in range(10)] == ends


def test_the_next_turn_of_a_chat_that_is_stripped_parts_before_the_answer():
    turns = make(STRIPS, chat(2, thinks=True))
    following = [
        *chat(2, thinks=True),
        {"role": "assistant", "content": "<think>\nx\n</think>\n\ny"},
        {"role": "user", "content": "z"},
    ]
    after = make(STRIPS, following).text
    parts_at = next(at for at, (a, b) in enumerate(zip(turns.text + "<think>", after, strict=False)) if a != b)
    assert parts_at in turns.boundaries()


@pytest.mark.parametrize("source", [CHATML, STRIPS, FOLDS], ids=["keeps", "strips", "folds"])
@pytest.mark.parametrize("system", [False, True])
def test_every_character_belongs_to_its_message(source, system):
    messages = chat(4, system=system, thinks=True)
    turns = make(source, messages)
    for index in range(len(messages)):
        span = turns.span_of(index)
        assert {turns.message_at(position) for position in range(span.start, span.end)} == {index}
    if source != FOLDS:
        assert turns.message_at(len(turns.text) - 1) is None  # what asks for the answer belongs to no message


def test_history_is_what_earlier_turns_have_computed():
    turns = make(STRIPS, chat(3, thinks=True))
    history = turns.history()
    assert turns.text[: history.start].endswith("question 0")
    assert turns.text[: history.end].endswith("answer 2")
    assert make(CHATML, chat(0)).history() is None
    assert make(CHATML, [SYSTEM, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "a"}]).history() is None


def test_an_answer_that_is_continued_is_no_history():
    messages = [*chat(1)[:-1]]
    turns = make(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert turns.text.endswith("answer 0")
    assert turns.history() is None


def test_positions_become_tokens_exactly():
    core = byte_level_core()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = Tokenizer(core, special_tokens={})
    turns = make(CHATML, chat(4))
    positions = turns.boundaries()
    ids, index_of = tokenizer.encode_at(turns.text, positions)
    assert ids == tokenizer.encode(turns.text)
    for position in positions:
        assert ids[: index_of[position]] == tokenizer.encode(turns.text[:position])
    for index in range(len(ids)):
        char = tokenizer.char_at(turns.text, index)
        assert tokenizer.encode_at(turns.text, [char])[1] == {char: index}
