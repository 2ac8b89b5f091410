"""Why a prompt was not reused further: every reason code in a real situation, over HTTP, with a real engine behind it."""

import asyncio
import json
import random
import re
from collections import Counter

import pytest

from hybridserve.config import EngineSettings
from hybridserve.errors import OverloadedError
from hybridserve.request import Reason
from tests import checkpoints
from tests.core_client import serving

SETTINGS = {"model": "demo", "kv_cache_memory": 2**26, "max_num_seqs": 4, "threads": 1}
VOCAB = 900
#: A template as Qwen's: thinking is left out of all answers before the last question.
STRIPS = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- set content = message.content.split('</think>')[-1] if loop.index0 < ns.last else message.content %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def ids(count, seed):
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def over_http(scenario, template=None, **settings):
    """Run a scenario with a client `ask(path, body, **headers)` that gives the reply's JSON."""

    async def main():
        async with serving(EngineSettings(**{**SETTINGS, **settings}), template) as (http, core):

            async def ask(path, body=None, **headers):
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                reply = await (http.get(path, params=body) if body is None else http.post(path, json=body, headers=named))
                assert reply.status_code == 200, reply.text
                return reply.json() if "json" in reply.headers["content-type"] else reply.text

            await scenario(ask, core)
            await check_the_sums(ask, core)

    asyncio.run(main())


async def check_the_sums(ask, core):
    """The counters by reason add up to the prompt tokens, and know no other names."""
    page = await ask("/metrics")
    counted = dict(re.findall(r'prompt_tokens_by_reason_total\{.*reason="(\w+)"\} ([\d.e+]+)', page))
    (total,) = re.findall(r"hybridserve:prompt_tokens_total\{.*\} ([\d.e+]+)", page)
    assert sum(map(float, counted.values())) == float(total)
    assert set(counted) <= set(Reason.__args__)
    assert core.stats().num_prompt_tokens == float(total)


async def complete(ask, prompt, **fields):
    """The explanation that a completion carries."""
    body = {"prompt": prompt, "max_tokens": 1, "hybrid_xargs": {"explain": True}, **fields}
    return (await ask("/v1/completions", body))["choices"][0]["cache_explanation"]


async def explain(ask, prompt, **fields):
    return await ask("/v1/cache/explain", {"prompt": prompt, **fields})


def test_hit_last_token_never_seen_and_no_state():
    async def scenario(ask, core):
        first = ids(60, 1)
        told = await complete(ask, first)
        assert told["tokens"] == {"never_seen": 59, "last_token": 1}
        assert (told["reason"], told["num_hit"], told["parted_at"]) == ("never_seen", 0, 0)
        told = await complete(ask, first)
        assert told["tokens"] == {"hit": 59, "last_token": 1}
        assert (told["reason"], told["parted_at"], told["limiting_group"]) == ("hit", None, None)
        parted = [*first[:40], *ids(20, 2)]
        told = await explain(ask, parted)
        assert told["tokens"] == {"no_state": 40, "never_seen": 19, "last_token": 1}
        kinds = {str(number): group.kind for number, group in enumerate(core.info.groups)}
        by_kind = {kinds[number]: reach for number, reach in told["group_tokens"].items()}
        assert by_kind == {"state": 0, "paged": 40}
        assert kinds[str(told["limiting_group"])] == "state"
        assert (told["num_hit"], told["num_text"], told["parted_at"]) == (0, 40, 40)
        assert told == await complete(ask, parted)  # asking changed nothing
        assert (await explain(ask, [*first[:40], 5, 6]))["tokens"] == {"hit": 40, "never_seen": 1, "last_token": 1}

    over_http(scenario)


def test_evicted():
    async def scenario(ask, core):
        prompt = ids(64, 1)
        await complete(ask, prompt)
        for number in range(200):
            await complete(ask, ids(100, 100 + number))
            told = await explain(ask, [*prompt, 7])
            if told["tokens"].get("evicted", 0) > 0 and told["num_hit"] == 0:
                break
        assert told["reason"] == "evicted"
        assert told["tokens"]["evicted"] >= 48
        assert (await explain(ask, [*ids(64, 2), 7]))["tokens"] == {"never_seen": 64, "last_token": 1}

    over_http(scenario, kv_cache_memory=2**21, max_model_len=256)


@pytest.mark.parametrize("name", ["gemma3", "lfm3"])
def test_window(name, tmp_path):
    """Under pressure the blocks that a window has left behind go before the text that other layers hold."""

    async def scenario(ask, core):
        prompt = [token % checkpoints.VOCAB_SIZE for token in ids(90, 1)]
        part = [*prompt[:50], 1, 2, 3]
        await complete(ask, part)
        await complete(ask, prompt)
        for number in range(300):
            told = await explain(ask, part)
            if "window" in told["tokens"]:
                break
            await complete(ask, [token % checkpoints.VOCAB_SIZE for token in ids(20, 100 + number)])
        assert "window" in told["tokens"], told
        windows = [str(number) for number, group in enumerate(core.info.groups) if group.window is not None]
        assert str(told["limiting_group"]) in windows
        assert told["group_tokens"][str(told["limiting_group"])] == told["num_hit"]

    folder = checkpoints.save(checkpoints.make(name), tmp_path)
    info = {"kv_cache_memory": 200 * 2**10, "max_model_len": 100, "max_num_batched_tokens": 32}
    over_http(scenario, model=str(folder), dtype="float32", **info)


def test_salted():
    async def scenario(ask, core):
        prompt = ids(60, 1)
        await complete(ask, prompt, cache_salt="one")
        assert (await explain(ask, prompt, cache_salt="two"))["tokens"] == {"salted": 59, "last_token": 1}
        assert (await explain(ask, prompt))["tokens"] == {"never_seen": 59, "last_token": 1}
        assert (await explain(ask, prompt, cache_salt="one"))["tokens"] == {"hit": 59, "last_token": 1}

    over_http(scenario)


def test_prompt_logprobs():
    async def scenario(ask, core):
        prompt = ids(60, 1)
        await complete(ask, prompt)
        told = await complete(ask, prompt, prompt_logprobs=1)
        assert told["tokens"] == {"prompt_logprobs": 59, "last_token": 1}

    over_http(scenario)


def test_caching_off():
    async def scenario(ask, core):
        prompt = ids(60, 1)
        await complete(ask, prompt)
        assert (await complete(ask, prompt))["tokens"] == {"caching_off": 59, "last_token": 1}
        assert (await explain(ask, prompt))["tokens"] == {"caching_off": 59, "last_token": 1}
        limits = await ask("/v1/limits")
        assert "prefix_caching" in limits["features_off"]

    over_http(scenario, enable_prefix_caching=False)


# -- chats ----------------------------------------------------------------------------------------------------------------


def question(number):
    return {"role": "user", "content": f"The code of Anna is {10 + number}. What is the code of Anna?"}


def answer(text):
    return {"role": "assistant", "content": text}


async def turn(ask, messages, **fields):
    """The answer's text, and the explanation."""
    body = {"messages": messages, "max_tokens": 24, "hybrid_xargs": {"explain": True}, **fields}
    choice = (await ask("/v1/chat/completions", body))["choices"][0]
    return choice["message"]["content"], choice["cache_explanation"]


def test_template_drift_names_the_message_and_the_token():
    async def scenario(ask, core):
        messages = [{"role": "system", "content": "Codes are numbers."}]
        for number in range(5):
            messages.append(question(number))
            said, told = await turn(ask, messages)
            assert "template_drift" not in told["tokens"], "a chat that is sent as it was answered has not drifted"
            messages.append(answer(said))
        messages.append(question(9))
        for drifted in (2, 6):
            changed = [*messages]
            changed[drifted] = answer("I would rather not say.")
            _, told = await turn(ask, changed, max_tokens=1)
            assert told["parted_in_message"] == drifted
            assert told["tokens"]["template_drift"] > 0
            tokens = (await ask("/tokenize", {"messages": changed, "return_token_strs": True}))["token_strs"]
            before = (await ask("/tokenize", {"messages": messages, "return_token_strs": True}))["token_strs"]
            parted = next(at for at, (a, b) in enumerate(zip(tokens, before, strict=False)) if a != b)
            assert (told["parted_at"], told["parted_token"]) == (parted, tokens[parted])
            assert sum(told["tokens"].values()) == told["num_prompt"] == len(tokens)

    over_http(scenario)


@pytest.mark.parametrize("max_tokens", [1, 3, 24])
def test_an_answer_that_is_sent_back_as_it_was_is_not_named(max_tokens):
    """Whether it ended by itself or was cut short: what is new is the message behind it."""

    async def scenario(ask, core):
        messages = [question(0)]
        said, _ = await turn(ask, messages, max_tokens=max_tokens)
        messages += [answer(said), question(1)]
        told = await ask("/v1/cache/explain", {"messages": messages})
        assert told["parted_in_message"] == 2, told
        assert "template_drift" not in told["tokens"]

    over_http(scenario)


def test_no_message_is_named_where_it_is_not_known_which():
    """After eviction the place is known to sixteen tokens, which here are those of an answer and of the next question."""

    async def scenario(ask, core):
        messages = [question(0), answer("It is 10, and that is all I know about it, I am afraid."), question(1)]
        await turn(ask, messages, max_tokens=1)
        for number in range(300):
            told = await ask("/v1/cache/explain", {"messages": messages})
            if told["tokens"].get("evicted", 0) > 30:
                break
            await complete(ask, ids(200, 100 + number))
        seen = set()
        for cut in range(1, 40, 3):
            text = messages[1]["content"]
            changed = [messages[0], answer(text[:-cut] + "?" * cut), question(1)]
            told = await ask("/v1/cache/explain", {"messages": changed})
            if "evicted" in told["tokens"]:
                seen.add(told["parted_in_message"])
        assert seen == {1, None}
        told = await ask("/v1/cache/explain", {"messages": [*messages[:2], question(7)]})
        assert "evicted" in told["tokens"]
        assert told["parted_in_message"] in (2, None)

    over_http(scenario, kv_cache_memory=2**21, max_model_len=256)


def test_stripped_thinking_is_drift_and_another_question_is_not():
    async def scenario(ask, core):
        first = [question(0)]
        await turn(ask, first)
        # The answer that the engine computed is not what the template makes of it in the next turn.
        thought = [*first, answer("<think>let me see</think>It is 10."), question(1)]
        _, told = await turn(ask, thought, max_tokens=1)
        assert told["parted_in_message"] == 1
        assert told["reason"] in ("template_drift", "never_seen")
        assert told["tokens"]["template_drift"] > 1
        other = [question(5), answer("It is 15."), question(6)]
        _, told = await turn(ask, other, max_tokens=1)
        assert "template_drift" not in told["tokens"], "another chat with the same system text has not drifted"
        assert told["parted_in_message"] == 0

    over_http(scenario, template=STRIPS)


def test_a_chat_can_be_explained_without_running_it():
    async def scenario(ask, core):
        messages = [question(0)]
        said, ran = await turn(ask, messages)
        messages += [answer(said), question(1)]
        posted = await ask("/v1/cache/explain", {"messages": messages})
        query = "/v1/cache/explain?messages=" + json.dumps(messages).replace("&", "%26")
        assert await ask(query) == posted
        _, told = await turn(ask, messages)
        assert told == posted
        assert told["num_hit"] > ran["num_prompt"]
        generated = await ask("/v1/cache/explain", {"messages": messages, "add_generation_prompt": False})
        assert generated["num_prompt"] < told["num_prompt"]

    over_http(scenario)


# -- asking for it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_header_asks_as_the_field_does(path, stream):
    async def scenario(ask, core):
        given = {"prompt": ids(40, 1)} if path == "/v1/completions" else {"messages": [question(0)]}
        body = {**given, "max_tokens": 3, "stream": stream}

        async def explanations(body, **headers):
            reply = await ask(path, body, **headers)
            if stream:
                events = [json.loads(line[6:]) for line in reply.split("\n") if line.startswith("data: {")]
                return [c["cache_explanation"] for event in events for c in event["choices"] if "cache_explanation" in c]
            return [choice["cache_explanation"] for choice in reply["choices"] if "cache_explanation" in choice]

        assert await explanations(body) == []
        assert await explanations(body, X_Hybridserve_Explain="0") == []
        (by_header,) = await explanations(body, X_Hybridserve_Explain="1")
        (by_field,) = await explanations({**body, "hybrid_xargs": {"explain": True}})
        assert by_header == by_field
        assert by_header["tokens"]["hit"] == by_header["num_prompt"] - 1

    over_http(scenario)


def test_each_of_several_choices_is_explained():
    async def scenario(ask, core):
        reply = await ask(
            "/v1/completions", {"prompt": [ids(40, 1), ids(30, 2)], "n": 2, "max_tokens": 1}, X_Hybridserve_Explain="true"
        )
        told = [choice["cache_explanation"] for choice in reply["choices"]]
        assert [one["num_prompt"] for one in told] == [40, 40, 30, 30]
        assert Counter(sum(one["tokens"].values()) for one in told) == {40: 2, 30: 2}

    over_http(scenario)


def test_an_answer_does_not_fail_with_its_explanation(monkeypatch):
    """The place in the chat is looked for by a worker; when none is free, the rest is told."""

    async def scenario(ask, core):
        await turn(ask, [question(0)])
        monkeypatch.setattr("hybridserve.engine.chat.ChatTemplate.message_at", refuse)
        said, told = await turn(ask, [question(1)])
        assert said
        assert told["parted_in_message"] is None
        assert told["parted_token"]

    def refuse(self, messages, position, **options):
        raise OverloadedError("busy")

    over_http(scenario)
