"""Tokens to text and back, held to the `tokenizers` package; chat templates, held to transformers' renderer."""

import itertools
import json
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from hybridserve.engine.chat import ChatTemplate, TemplateError, read_source
from hybridserve.engine.generation_config import read_sampling_defaults
from hybridserve.engine.render_job import Job
from hybridserve.engine.rendering import Renderer
from hybridserve.engine.text import Detokenizer, Tokenizer
from hybridserve.errors import ModelError, RequestError, UnsafeContentError

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café 東京 日本語 🎉🎉 привет",
    "def f(x):\n    return x",
] * 4


def byte_level_core() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False))
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    core.add_tokens([AddedToken("<tool call>", special=False)])
    return core


def byte_fallback_core() -> tokenizers.Tokenizer:
    """A SentencePiece-like vocabulary: spaces as U+2581, unknown characters as byte tokens."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz.,!\n",
    ]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("i", "n")]
    pieces += ["".join(merge) for merge in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return core


BYTE_LEVEL = byte_level_core()
BYTE_FALLBACK = byte_fallback_core()
CORES = {"byte_level": BYTE_LEVEL, "byte_fallback": BYTE_FALLBACK}


def make(core: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(core, special_tokens={"bos_token": "<s>"}, eos_token_ids=())


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = sorted({min(cut, len(ids)) for cut in cuts} | {0, len(ids)})
    return [ids[low:high] for low, high in itertools.pairwise(bounds)]


def stream(tokenizer: Tokenizer, pieces: list[list[int]], **options: object) -> str:
    detokenizer = Detokenizer(tokenizer, **options)
    return "".join(detokenizer.push(piece) for piece in pieces) + detokenizer.finish()


@pytest.mark.parametrize("kind", list(CORES))
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 120), max_size=20))
def test_I30_streamed_text_is_the_one_shot_decode_for_any_unicode(kind: str, text: str, cuts: list[int]) -> None:
    core = CORES[kind]
    ids = core.encode(text, add_special_tokens=False).ids
    assert stream(make(core), split(ids, cuts)) == core.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=30), cuts=st.lists(st.integers(0, 30)))
def test_I30_any_token_ids_even_invalid_utf8_and_unknown_ones(skip: bool, ids: list[int], cuts: list[int]) -> None:
    streamed = stream(make(BYTE_LEVEL), split(ids, cuts), skip_special_tokens=skip)
    assert streamed == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), max_size=14))
def test_I30_runs_of_byte_tokens_that_are_not_utf8(ids: list[int]) -> None:
    pieces = [[token_id] for token_id in ids]
    assert stream(make(BYTE_FALLBACK), pieces) == BYTE_FALLBACK.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", list(CORES))
def test_a_split_character_is_held_back_and_flushed(kind: str) -> None:
    core = CORES[kind]
    ids = core.encode("ok 𓀀 x", add_special_tokens=False).ids
    detokenizer = Detokenizer(make(core))
    for token_id in ids:
        assert "\ufffd" not in detokenizer.push([token_id])
    detokenizer.finish()
    cut = Detokenizer(make(core))
    text = cut.push(ids[:5])
    assert text + cut.finish() == core.decode(ids[:5])


def test_I29_an_endless_run_of_byte_tokens_is_sent_before_it_ends() -> None:
    detokenizer = Detokenizer(make(BYTE_FALLBACK))
    ids = BYTE_FALLBACK.encode("東" * 40, add_special_tokens=False).ids
    sent = [len(detokenizer.push([token_id])) for token_id in ids]
    gaps = "".join("x" if count else "." for count in sent).split("x")
    assert max(map(len, gaps)) <= 18
    assert sum(sent) + len(detokenizer.finish()) == 40


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abc東 ", max_size=40),
    stop=st.lists(st.text(alphabet="abc東 ", min_size=1, max_size=6), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=20),
    include=st.booleans(),
)
def test_stop_strings_end_the_text_where_a_search_finds_them(text: str, stop: list[str], cuts: list[int], include: bool) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    ends = [(text.find(item) + len(item), -len(item)) for item in stop if item in text]
    expected = text
    if ends:
        end, minus = min(ends)
        expected = text[: end if include else end + minus]
    streamed = stream(make(BYTE_LEVEL), split(ids, cuts), stop=stop, include_stop_str_in_output=include)
    assert streamed == expected


def test_I29_holds_back_only_what_may_begin_a_stop_string() -> None:
    tokenizer = make(BYTE_LEVEL)
    detokenizer = Detokenizer(tokenizer, stop=("END",))
    assert detokenizer.push(tokenizer.encode("xE")) == "x"
    assert detokenizer.push(tokenizer.encode("Nx")) == "ENx"
    assert detokenizer.push(tokenizer.encode("EN")) == ""
    assert detokenizer.push([*tokenizer.encode("D"), *tokenizer.encode("more")]) == ""
    assert detokenizer.stop_string == "END"
    assert detokenizer.num_tokens == len(tokenizer.encode("xE") + tokenizer.encode("Nx") + tokenizer.encode("EN")) + 1


def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    tokenizer = make(BYTE_LEVEL)
    ids = tokenizer.encode("aXbXc")
    assert len(ids) == 5
    assert stream(tokenizer, [ids], stop=("X",), min_tokens=2) == "aXb"


def test_token_text_is_unique_for_parts_of_characters() -> None:
    tokenizer = make(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode("𓀀").ids
    assert b"".join(map(tokenizer.token_bytes, ids)) == "𓀀".encode()
    assert len({tokenizer.token_text(token_id) for token_id in ids}) == len(set(ids))
    assert all(tokenizer.token_text(token_id).startswith("bytes:\\x") for token_id in ids)
    fallback = make(BYTE_FALLBACK)
    assert fallback.token_bytes(BYTE_FALLBACK.token_to_id("▁the")) == b" the"
    assert fallback.token_bytes(BYTE_FALLBACK.token_to_id("<0xE6>")) == b"\xe6"


def test_a_long_stream_costs_the_same_per_token() -> None:
    tokenizer = make(BYTE_FALLBACK)
    detokenizer = Detokenizer(tokenizer, stop=("never in there",))
    ids = tokenizer.encode("the fox 東 ") * 50

    def seconds() -> float:
        start = time.perf_counter()
        for token_id in ids:
            detokenizer.push([token_id])
        return time.perf_counter() - start

    first = min(seconds() for _ in range(3))
    for _ in range(10):
        last = seconds()
    assert last < 5 * first + 0.05


def folder_with(path: Path, core: tokenizers.Tokenizer, **files: object) -> Path:
    core.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_from_folder_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    core = byte_level_core()
    bos = core.token_to_id("<s>")
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    core.enable_truncation(4)
    config = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "add_bos_token": False,
        "pad_token": None,
    }
    folder = folder_with(tmp_path, core, tokenizer_config=config, generation_config={"eos_token_id": [7, 9], "top_k": 20})
    tokenizer = Tokenizer.from_folder(folder)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    reference.backend_tokenizer.no_truncation()
    for text in ["the quick <s> fox", "naïve </s> 🎉", ""]:
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)
        assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(reference.encode(text), skip_special_tokens=True)
    assert tokenizer.eos_token_ids == (7, 9, core.token_to_id("</s>"))
    assert tokenizer.bos_token_id == bos
    assert tokenizer.vocab_size == len(reference)


def test_eos_falls_back_to_the_nested_model_config(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, byte_level_core(), config={"text_config": {"eos_token_id": 5}})
    assert Tokenizer.from_folder(folder).eos_token_ids == (5,)


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not readable"):
        Tokenizer.from_folder(tmp_path)


def test_sampling_defaults_of_a_model(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path).items() == {}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "pad_token_id": 1}))
    assert read_sampling_defaults(tmp_path).items() == {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    path.write_text(json.dumps({"do_sample": False}))
    assert read_sampling_defaults(tmp_path).items() == {"temperature": 0.0}
    path.write_text(json.dumps({"top_p": "high"}))
    with pytest.raises(ModelError, match="top_p"):
        read_sampling_defaults(tmp_path)


CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

RICH = """{{ bos_token }}{% if messages[0].role == 'system' %}
    {% set system = messages[0].content | trim %}
    {% set rest = messages[1:] %}
{% else %}
    {% set system = 'default' %}
    {% set rest = messages %}
{% endif %}
[SYS]{{ system }}[/SYS]
{% set ns = namespace(count=0) %}
{% for message in rest %}
    {% if loop.index > 5 %}{% break %}{% endif %}
    {% if message.role == 'user' %}
[U{{ ns.count }}]{{ message.content | trim }}[/U]
        {% set ns.count = ns.count + 1 %}
    {% elif message.role == 'assistant' %}
{% generation %}[A]{{ message.content }}{{ eos_token }}{% endgeneration %}

        {% if message.tool_calls %}{{ message.tool_calls | tojson }} {{ message.tool_calls|tojson(indent=2) }}{% endif %}
    {% else %}
{{ raise_exception('unknown role ' ~ message.role) }}
    {% endif %}
{% endfor %}
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{{ dict(a=1) | tojson }} {{ strftime_now('%Y')|length }}
{% if add_generation_prompt %}[A]{% endif %}"""

CHATS = [
    [{"role": "user", "content": "hi <b> & 'x' é"}],
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": " a \n"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "tool_calls": [{"name": "f<", "arguments": {"x": "é&"}}]},
        {"role": "user", "content": "three"},
    ],
]


def rendering(source: str, messages: list[dict[str, object]], *, special_tokens: object = None, **options: object) -> str:
    """What the render process would answer, without the process."""
    return Renderer(source, special_tokens=special_tokens).chat(Job(messages=messages, **options)).placed().text


@pytest.mark.parametrize("source", [CHATML, RICH], ids=["chatml", "rich"])
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("generate", [True, False])
def test_renders_as_transformers_does(source: str, messages: list[dict[str, object]], generate: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    rendered, _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=generate, enable_thinking=False, **special
    )
    options = {"add_generation_prompt": generate, "variables": {"enable_thinking": False}}
    ours = rendering(source, messages, special_tokens=special, **options)
    assert ours == rendered[0]


@pytest.mark.parametrize("source", [CHATML, RICH], ids=["chatml", "rich"])
@pytest.mark.parametrize("tail", ["and then", "and then  "])
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_continues_the_final_message_as_transformers_does(source: str, tail: str, role: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "go"}, {"role": role, "content": tail}]
    rendered, _ = render_jinja_template([messages], chat_template=source, continue_final_message=True, bos_token="", eos_token="")
    ours = rendering(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == rendered[0]
    with pytest.raises(RequestError, match="both true"):
        rendering(source, messages, continue_final_message=True)


def test_a_template_that_refuses_is_a_400_with_its_words() -> None:
    with pytest.raises(RequestError, match="unknown role ghost") as caught:
        ChatTemplate(RICH).render([{"role": "ghost", "content": "x"}])
    assert caught.value.status == 400
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate("{{ messages[0]['content'] + 1 }}").render([{"role": "user", "content": "x"}])
    with pytest.raises(ModelError, match="line 1"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "_x", "chat_template"])
def test_variables_cannot_shadow_what_the_renderer_passes(name: str) -> None:
    with pytest.raises(RequestError, match="belongs to the renderer"):
        rendering(CHATML, CHATS[0], special_tokens={"bos_token": "<s>"}, variables={name: 1})


#: Templates that want too much, after a word that only the chat below has.
HOSTILE = {
    "dunders": "{{ ''.__class__.__mro__ }}",
    "private names": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "changed messages": "{{ messages.append(1) }}",
    "repeated": "{{ 'x' * 10000000000 }}",
    "powers": "{{ (messages | length + 8) ** 999999999 }}",
    "loops without a call": "{% set r = range(99999) %}" + "{% for a in r %}" * 3 + "{% endfor %}" * 3,
    "concatenated": "{% set ns = namespace(x='x' * 99999) %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "format filter": "{{ '%*d' | format(9999999999, 1) }}",
    "center": "{{ 'x' | center(9999999999) }}",
    "join": "{% set r = range(99999) | list %}{{ r | map('center', 99999) | join('-') }}",
    "added lists": "{% set ns = namespace(x=[1]) %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "added text": "{% set ns = namespace(x='xx') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
}


SLOW = ("powers", "loops without a call")


@pytest.mark.parametrize("name", list(HOSTILE))
def test_R5_a_hostile_template_is_stopped_and_the_next_chat_is_served(name: str) -> None:
    template = ChatTemplate("{% if messages[0].content == 'go' %}" + HOSTILE[name] + "{% else %}safe{% endif %}")
    try:
        with pytest.raises(TemplateError) as caught:
            template.render([{"role": "user", "content": "go"}], limit_s=1.0 if name in SLOW else 20.0)
        assert ("longer than 1 s" in str(caught.value)) == (name in SLOW)  # the others are stopped by what they want, not by time
        assert caught.value.status == 400
        assert caught.value.kind in ("unsafe", "failed")
        assert template.render(CHATS[0]).text == "safe"
    finally:
        template.close()


@pytest.mark.parametrize("name", ["loops without a call", "concatenated"])
def test_a_template_that_wants_too_much_of_any_chat_is_refused_at_once(name: str) -> None:
    with pytest.raises(UnsafeContentError, match="do not serve it"):
        ChatTemplate(HOSTILE[name])
    with pytest.raises(UnsafeContentError, match="do not serve it"):
        ChatTemplate("{{ 'x' | center(9999999999) }}" if name == "concatenated" else "{{ 9 ** 99999999999 }}")


def test_templates_of_a_folder(tmp_path: Path) -> None:
    assert read_source(tmp_path) is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": named}))
    assert read_source(tmp_path) == "D"
    for wrong, word in (([{"x": 1}], r"chat_template\[0\]"), (["T"], r"chat_template\[0\]"), ({"x": 1}, "dict"), (1, "int")):
        config.write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(ModelError, match=word):
            read_source(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("J")
    assert read_source(tmp_path) == "J"
    (tmp_path / "chat_template.jinja").write_bytes(b"J\xff")
    with pytest.raises(ModelError, match="UTF-8"):
        read_source(tmp_path)


def test_messages_without_nulls_and_with_known_roles() -> None:
    source = "{% for m in messages %}{{ m.role }}{{ m.keys()|list }}{% endfor %}"
    assert rendering(source, [{"role": "developer", "content": "x", "name": None}]) == "system['role', 'content']"


def test_reasoning_comes_under_the_name_that_the_template_reads() -> None:
    source = "{% for m in messages %}{{ m.thinking }}{{ m.content }}{% endfor %}"
    assert rendering(source, [{"role": "assistant", "content": "x", "reasoning_content": "hm"}]) == "hmx"
    source = "{% for m in messages %}{{ m['reasoning_content'] }}/{{ m.thinking }}{% endfor %}"
    assert rendering(source, [{"role": "assistant", "content": "x", "reasoning_content": "hm"}]) == "hm/"
