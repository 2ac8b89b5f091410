"""What one key sent cannot be found out with another unless sharing was asked for; of what is shared only hits are explained."""

import asyncio
import hashlib
import hmac
import random

import pytest

from hybridserve.config import EngineSettings, ServerSettings, resolve
from hybridserve.errors import UsageError
from hybridserve.server.keys import tenant_salt
from tests.core_client import serving

SETTINGS = EngineSettings(model="demo", kv_cache_memory=2**26, max_num_seqs=4, threads=1)
KEYS = ("victim-key", "attacker-key")
SECRET = random.Random(1).sample(range(3, 900), 60)


def ask_after(secret, question, *, victim=None, attacker=None, **server):
    """What the attacker's `question` is answered after the victim ran its prompt."""

    async def main():
        async with serving(SETTINGS, **{"api_key": KEYS, **server}) as (http, _):

            async def post(key, path, body):
                headers = {"authorization": f"Bearer {key}"}
                reply = await http.post(path, json=body, headers=headers)
                assert reply.status_code == 200, reply.text
                return reply.json()

            await post(KEYS[0], "/v1/completions", {"prompt": secret, "max_tokens": 2, **(victim or {})})
            return [await post(KEYS[1], path, {**body, **(attacker or {})}) for path, body in question]

    return asyncio.run(main())


def guesses(lengths):
    return [("/v1/cache/explain", {"prompt": [*SECRET[:length], *range(900, 905)]}) for length in lengths]


def test_I36_another_keys_text_is_never_seen():
    run = ("/v1/completions", {"prompt": SECRET, "max_tokens": 1, "hybrid_xargs": {"explain": True}})
    told, answer = ask_after(SECRET, [("/v1/cache/explain", {"prompt": SECRET}), run])
    assert told["tokens"] == {"never_seen": len(SECRET) - 1, "last_token": 1}
    assert (told["num_hit"], told["num_text"], told["parted_at"]) == (0, 0, 0)
    assert answer["choices"][0]["cache_explanation"]["tokens"] == told["tokens"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


SHARED = [
    ({"share_cache_between_keys": True}, {}),
    ({"api_key": ()}, {}),
    ({}, {"cache_salt": "what we both know"}),
]


@pytest.mark.parametrize(("server", "fields"), SHARED, ids=["flag", "no keys", "salt"])
def test_sharing_on_purpose_hits(server, fields):
    (told,) = ask_after(SECRET, [("/v1/cache/explain", {"prompt": SECRET})], victim=fields, attacker=fields, **server)
    assert told["num_hit"] == len(SECRET) - 1


@pytest.mark.parametrize(("server", "fields"), SHARED, ids=["flag", "no keys", "salt"])
def test_I36_what_is_explained_of_a_shared_cache_does_not_grow_with_each_right_token(server, fields):
    """Only what can be resumed from is told, which a run would show as well."""
    replies = ask_after(SECRET, guesses(range(0, 48, 4)), victim=fields, attacker=fields, **server)
    for told in replies:
        told.pop("parted_token")
        told["num_prompt"] = told["tokens"] = None
    assert all(told == replies[0] for told in replies)
    assert replies[0]["num_text"] == replies[0]["num_hit"] == 0


def test_a_salt_derives_from_its_key_and_no_caller_can_name_it():
    expected = hmac.new(b"victim-key", b"hybridserve cache salt 1", hashlib.sha256).hexdigest()
    assert tenant_salt("victim-key") == "@" + expected

    async def main():
        async with serving(SETTINGS, api_key=KEYS) as (http, _):
            body = {"prompt": SECRET, "cache_salt": tenant_salt("victim-key")}
            return await http.post("/v1/cache/explain", json=body, headers={"authorization": f"Bearer {KEYS[1]}"})

    reply = asyncio.run(main())
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "cache_salt")


def test_a_comma_is_part_of_a_key():
    assert resolve(ServerSettings, {"api_key": "a,b"}).api_key == ("a,b",)
    assert resolve(ServerSettings, {"api_key": ["a,b", "c"]}).api_key == ("a,b", "c")


@pytest.mark.parametrize("key", ["", " ", "\t", " padded", "padded\n", "schlüssel", "a\x00b", "null\u200b"])
def test_a_key_that_no_client_could_send_is_refused_at_start_and_not_shown(key):
    for given in (key, ["good", key]):
        with pytest.raises(UsageError, match="api-key") as caught:
            resolve(ServerSettings, {"api_key": given})
        assert not key.strip() or key not in str(caught.value)


def test_a_key_of_the_wrong_type_is_not_shown():
    with pytest.raises(UsageError, match="api_key") as caught:
        resolve(ServerSettings, {"api_key": ["secret", 12345]})
    assert "12345" not in str(caught.value)
    assert "secret" not in str(caught.value)
