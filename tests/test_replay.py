"""Replays: the oracles against counting by hand, the readers, and what the real cache reaches of the oracles."""

import gzip
import json
import random

import numpy as np
import pytest

from hybridserve.cli import main
from hybridserve.errors import UsageError
from hybridserve.kv.arena import plan_cache
from hybridserve.kv.spec import PagedSpec, StateSpec, TensorSpec
from hybridserve.replay.oracle import capacity_hits, visits_of
from hybridserve.replay.roofline import DEVICES, Device, Roofline, Work, read_device
from hybridserve.replay.simulate import Replay
from hybridserve.replay.trace import SYNTHETIC, Segment, TraceRequest, load_trace, read_trace, tokens_of

KV = PagedSpec((TensorSpec("k", (2, 256), "bfloat16"), TensorSpec("v", (2, 256), "bfloat16")))
STATE = StateSpec((TensorSpec("conv", (3, 8192), "bfloat16"), TensorSpec("recurrent", (32, 128, 128), "float32")))
#: Layers of Qwen3.5-35B-A3B: 30 states of 2,146,304 bytes and 10 caches of 2,048 bytes a token.
LAYERS = [{"kv": KV} if i % 4 == 3 else {"state": STATE} for i in range(40)]


def replay(trace, nbytes, *, policy="cost", num_seqs=32):
    plan = plan_cache(LAYERS, int(nbytes), max_chunk=8192)
    roofline = Roofline.of(plan, DEVICES["h200"], dense=3 * 10**9, experts=32 * 10**9, expert_share=1 / 32, itemsize=2)
    run = Replay(trace, plan, roofline, max_model_len=65536, max_num_seqs=num_seqs, max_num_batched_tokens=8192, policy=policy)
    return run.run(), plan


def longest_prefixes(trace):
    return [visit.hit for visit in visits_of(trace)]


def tokens(request):
    return np.concatenate([tokens_of(segment) for segment in request.prompt])


def brute_force(requests):
    """Longest common prefixes, token by token against everything before."""
    seen, out = [], []
    for request in requests:
        prompt = tokens(request)
        best = 0
        for other in seen:
            n = min(len(prompt), len(other))
            different = np.flatnonzero(prompt[:n] != other[:n])
            best = max(best, int(different[0]) if len(different) else n)
        out.append(min(best, len(prompt) - 1))
        seen.append(np.concatenate([prompt, tokens_of(request.answer)]))
    return out


@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_oracle_equals_counting_token_by_token(name):
    trace = load_trace(name, num_requests=60, seed=3)
    assert len(trace) == 60
    assert longest_prefixes(trace) == brute_force(trace)


def test_the_capacity_oracle_keeps_what_is_used_soonest():
    a, b = Segment(1, 100), Segment(2, 100)
    order = [a, b, b, a, b]
    trace = [TraceRequest(float(i), (s, Segment(100 + i, 10)), Segment(200 + i, 5)) for i, s in enumerate(order)]
    everything = capacity_hits(visits_of(trace), nbytes=1e9, kv_nbytes_per_token=1, state_nbytes=10)
    assert everything == longest_prefixes(trace) == [0, 0, 100, 100, 100]
    # Room for one of the two (100 of text, 10 of state): b is used sooner, then a has nothing.
    assert capacity_hits(visits_of(trace), nbytes=115, kv_nbytes_per_token=1, state_nbytes=10) == [0, 0, 100, 0, 100]
    assert capacity_hits(visits_of(trace), nbytes=50, kv_nbytes_per_token=1, state_nbytes=10) == [0] * 5


def test_no_hit_beats_the_oracle():
    trace = load_trace("conversations", num_requests=150, seed=1)
    outcome, _ = replay(trace, 8e9, num_seqs=8)
    for hit, most in zip(outcome.hits, longest_prefixes(trace), strict=True):
        assert hit <= most


@pytest.mark.parametrize(("name", "most"), [("shared-prefixes", 1.1), ("bursts", 1.02)])
def test_short_shared_prefixes_cost_at_most_a_tenth_more_than_the_oracle(name, most):
    trace = load_trace(name, num_requests=400, seed=0)
    outcome, _ = replay(trace, 60e9)
    total = sum(request.num_prompt for request in trace)
    # The first requests of each kind weigh more in a short trace than in a long one.
    excess = (total - sum(outcome.hits)) / (total - sum(longest_prefixes(trace)))
    assert excess <= most + 0.06


def test_under_pressure_the_default_policy_beats_plain_lru():
    trace = load_trace("conversations", num_requests=400, seed=0)
    hits = {policy: sum(replay(trace, 5.6e9, policy=policy, num_seqs=16)[0].hits) for policy in ("cost", "lru")}
    assert hits["cost"] > 1.03 * hits["lru"]


def test_a_replay_repeats_exactly():
    trace = load_trace("branches", num_requests=80, seed=5)
    first, again = replay(trace, 4e9)[0], replay(trace, 4e9)[0]
    assert first.hits == again.hits
    assert first.timings == again.timings


def test_mooncake_files_are_read_plain_and_gzipped(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 7, "hash_ids": [5, 6]},
        {"timestamp": 2500, "input_length": 1536, "output_length": 1, "hash_ids": [5, 6, 9]},
    ]
    text = "\n".join(map(json.dumps, rows))
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    trace = read_trace(str(plain))
    assert trace == read_trace(str(packed))
    assert [request.num_prompt for request in trace] == [1000, 1536]
    assert trace[1].arrival_s == 2.5
    assert longest_prefixes(trace) == [0, 1000]
    np.testing.assert_array_equal(tokens(trace[0]), tokens(trace[1])[:1000])


def test_the_tokens_behind_the_last_id_go_on_as_the_next_prompt_of_the_session_does(tmp_path):
    rows = [
        {"session": "a", "timestamp_ms": 0, "input_length": 150, "output_length": 9, "hash_ids": [1, 2]},
        {"session": "b", "timestamp_ms": 1, "input_length": 150, "output_length": 9, "hash_ids": [1, 2]},
        {"session": "a", "timestamp_ms": 2, "input_length": 200, "output_length": 9, "hash_ids": [1, 2, 3]},
    ]
    path = tmp_path / "sessions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(str(path))
    assert [request.num_prompt for request in trace] == [150, 150, 200]
    assert longest_prefixes(trace) == [0, 0, 150]
    assert longest_prefixes(trace) == brute_force(trace)


def test_unreadable_traces_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no synthetic trace; known: shared-prefixes"):
        load_trace("nothing", num_requests=1, seed=0)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0, "input_length": 3}\n')
    with pytest.raises(UsageError, match="each line needs input_length, output_length and hash_ids"):
        load_trace(str(bad), num_requests=1, seed=0)


def test_the_command_prints_its_documented_keys(tmp_path, capsys):
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = [
        "replay",
        "bursts",
        "--model",
        str(tmp_path / "config.json"),
        "--memory",
        "64MiB",
        "--num-requests",
        "20",
        "--json",
    ]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"hit_ratio", "oracle_ratio", "capacity_oracle_ratio", "excess_prefill"} <= set(report)
    assert report["num_requests"] == 20
    assert report["hit_ratio"] <= report["oracle_ratio"] + 1e-9


def test_segments_of_one_key_are_prefixes_of_each_other_and_keys_differ_at_once():
    rng = random.Random(0)
    for _ in range(50):
        key = rng.randrange(2**60)
        np.testing.assert_array_equal(tokens_of(Segment(key, 50))[:20], tokens_of(Segment(key, 20)))
    first = {int(tokens_of(Segment(key, 1))[0]) for key in range(2000)}
    assert len(first) > 1990


def test_a_pass_takes_what_its_bytes_or_its_flop_take():
    plan = plan_cache(LAYERS, 10**10)
    device = Device(nbytes_per_s=1e9, flop_per_s=1e12, step_s=0.5)
    of = Roofline.of(plan, device, dense=10**9, experts=0, expert_share=1.0, itemsize=2, attention_width=10 * 16 * 256)
    # One token of one sequence that looks at 1,000: 2 GB of weights, 20,480 bytes a token of KV, its states read and written.
    states = 30 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    assert of.seconds(Work(1, 1, 1000, 1000)) == pytest.approx((2e9 + 1000 * 20_480 + 2 * states) / 1e9 + 0.5)
    # 10,000 tokens at once compute: 2 FLOP a parameter each, and 4 for each value of the attention of each pair.
    pairs = 10_000 * 10_001 // 2
    assert of.seconds(Work(10_000, 1, 10_000, pairs)) == pytest.approx((10_000 * 2e9 + pairs * 4 * 40_960) / 1e12 + 0.5)


def test_measured_rates_replace_a_device(tmp_path, capsys):
    rates = tmp_path / "rates.json"
    rates.write_text('{"nbytes_per_s": 2e9, "flop_per_s": 3e10, "step_s": 0.002}')
    assert read_device(str(rates)) == Device(2e9, 3e10, 0.002)
    command = [
        "replay",
        "bursts",
        "--model",
        "demo",
        "--memory",
        "64MiB",
        "--num-requests",
        "20",
        "--max-model-len",
        "2400",
        "--json",
    ]
    times = []
    for more in (["--calibration", str(rates)], ["--device", "h200"]):
        assert main([*command, *more]) == 0
        times.append(json.loads(capsys.readouterr().out)["end_to_end_s"]["p50"])
    assert times[0] > 10 * times[1]


@pytest.mark.parametrize("text", ["", "{}", '{"nbytes_per_s": 0, "flop_per_s": 1, "step_s": 0}', '{"speed": 1}'])
def test_rates_that_cannot_be_are_refused(tmp_path, text):
    rates = tmp_path / "rates.json"
    rates.write_text(text)
    with pytest.raises(UsageError, match="give a JSON file with nbytes_per_s, flop_per_s and step_s"):
        read_device(str(rates))


def test_a_prompt_whose_last_token_is_left_to_the_next_pass_is_timed():
    """A budget that ends one token before the prompt does: nothing may be written ahead of its first token."""
    trace = [TraceRequest(0.0, (Segment(1, 8193),), Segment(2, 50))]
    outcome, _ = replay(trace, 10e9)
    (timing,) = outcome.timings
    assert timing is not None
    assert 0 < timing.first_token_s < timing.end_s
