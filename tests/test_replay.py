"""Replays: the oracles against counting by hand, the readers, and what the real cache reaches of the oracles."""

import gzip
import json
import random

import numpy as np
import pytest

from hybridserve.cli import main
from hybridserve.errors import UsageError
from hybridserve.kv.arena import plan_cache
from hybridserve.kv.checkpoints import CheckpointPolicy
from hybridserve.kv.spec import PagedSpec, StateSpec, TensorSpec
from hybridserve.replay.oracle import Span, bound_hits, visits_of
from hybridserve.replay.report import make_report
from hybridserve.replay.roofline import DEVICES, Device, Roofline, Work, read_device
from hybridserve.replay.simulate import Replay
from hybridserve.replay.trace import SYNTHETIC, Segment, TraceRequest, load_trace, read_trace, tokens_of

KV = PagedSpec((TensorSpec("k", (2, 256), "bfloat16"), TensorSpec("v", (2, 256), "bfloat16")))
STATE = StateSpec((TensorSpec("conv", (3, 8192), "bfloat16"), TensorSpec("recurrent", (32, 128, 128), "float32")))
#: Layers of Qwen3.5-35B-A3B: 30 states of 2,146,304 bytes and 10 caches of 2,048 bytes a token.
LAYERS = [{"kv": KV} if i % 4 == 3 else {"state": STATE} for i in range(40)]


def replay(trace, nbytes, *, policy="cost", num_seqs=32, max_model_len=65536, **more):
    plan = plan_cache(LAYERS, int(nbytes), max_chunk=8192)
    roofline = Roofline.of(plan, DEVICES["h200"], dense=3 * 10**9, experts=32 * 10**9, expert_share=1 / 32, itemsize=2)
    longest = max_model_len or plan.longest_sequence(65536)
    run = Replay(
        trace, plan, roofline, max_model_len=longest, max_num_seqs=num_seqs, max_num_batched_tokens=8192, policy=policy, **more
    )
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


def one_by_one(trace, nbytes, kv=1.0, state=10.0):
    """The bound when each request ends before the next one starts."""
    spans = [Span(number + 1) for number in range(len(trace))]
    return bound_hits(visits_of(trace), spans, nbytes=nbytes, kv_nbytes_per_token=kv, state_nbytes=state)


def test_the_bound_charges_a_hit_for_its_bytes_as_long_as_they_were_kept():
    a, b = Segment(1, 100), Segment(2, 100)
    trace = [TraceRequest(float(i), (s, Segment(100 + i, 10)), Segment(200 + i, 5)) for i, s in enumerate([a, b, b, a, b])]
    # Kept for b: before the third request, and before the fourth and fifth; for a: before the second, third and fourth.
    bound = one_by_one(trace, nbytes=1e9)
    assert bound.num_hit == sum(longest_prefixes(trace)) == 300
    assert bound.full_nbytes == 110 * (1 + 2 + 3) / 5
    # Of five moments with room for one prefix, b's hits take three and a's hit would take three.
    assert one_by_one(trace, nbytes=110).num_hit == pytest.approx(200 + 100 * 2 / 3)
    assert one_by_one(trace, nbytes=11).num_hit == pytest.approx(50)
    # While a request runs, nobody has to keep what it uses, and its text and its own state take room: a's hit is free, b's first
    # takes one moment, and what is left goes to b's second, of two moments.
    spans = [Span(4), Span(2), Span(3), Span(4), Span(5)]
    busy = bound_hits(visits_of(trace), spans, nbytes=110, kv_nbytes_per_token=1.0, state_nbytes=10.0)
    assert busy.num_hit == pytest.approx(100 + 100 + (5 * 110 - 3 * (110 + 10) - 110) / 220 * 100)


def best_policy(trace, nbytes, kv, state):
    """By trying all: what may be kept before each request is any part of what was kept before, and of what the last one wrote."""
    texts = [tokens(request).tolist() for request in trace]
    answers = [tokens_of(request.answer).tolist() for request in trace]
    useful = {tuple(text[:n]) for text in texts for n in range(1, len(text))}
    best = {frozenset(): 0}
    for text, answer in zip(texts, answers, strict=True):
        prefixes = [tuple(text[:n]) for n in range(1, len(text))]
        written = [tuple((text + answer)[:n]) for n in range(1, len(text + answer) + 1)]
        following = {}
        for kept, hits in best.items():
            whole = 0
            while whole < len(prefixes) and ("text", prefixes[whole]) in kept:
                whole += 1
            hits += max((n for n in range(1, whole + 1) if ("state", prefixes[n - 1]) in kept), default=0)
            items = kept | {(kind, prefix) for prefix in written if prefix in useful for kind in ("text", "state")}
            # What nothing that comes later begins with is not worth keeping.
            for part in parts(sorted(items), nbytes, {"text": kv, "state": state}):
                following[part] = max(following.get(part, 0), hits)
        best = following
    return max(best.values())


def parts(items, nbytes, sizes):
    """All parts of a collection that fit."""
    found = [(frozenset(), 0.0)]
    for item in items:
        size = sizes[item[0]]
        found += [(part | {item}, used + size) for part, used in found if used + size <= nbytes]
    return [part for part, _ in found]


@pytest.mark.parametrize("seed", range(40))
def test_nothing_beats_the_bound(seed):
    """Against the best of all policies, on traces small enough to try them all."""
    rng = random.Random(seed)
    trace = []
    for number in range(rng.randint(2, 4)):
        prompt = [Segment(rng.randint(1, 2), rng.randint(1, 2)) for _ in range(rng.randint(1, 2))]
        trace.append(TraceRequest(float(number), (*prompt, Segment(100 + number, 1)), Segment(rng.randint(1, 2), 1)))
    kv, state, nbytes = 1.0, rng.choice([0.5, 1.0, 3.0]), rng.choice([1.0, 2.0, 3.5, 5.0])
    best = best_policy(trace, nbytes, kv, state)
    assert best <= one_by_one(trace, nbytes, kv, state).num_hit + 1e-9
    assert best <= sum(longest_prefixes(trace))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", ["cost", "lru"])
def test_no_replay_beats_the_bound(seed, policy):
    rng = random.Random(seed)
    trace = load_trace(rng.choice(list(SYNTHETIC)), num_requests=150, seed=seed)
    if seed % 2:  # far more at once than the machine serves: requests wait, overlap and are preempted
        trace = [TraceRequest(request.arrival_s / 20, request.prompt, request.answer) for request in trace]
    nbytes = rng.choice([4e8, 1e9, 3e9])
    outcome, plan = replay(trace, nbytes, policy=policy, max_model_len=None)
    report = make_report(trace, plan, outcome, policy=policy, nbytes=int(nbytes), wall_s=1.0)
    assert 0 < report.hit_ratio <= report.bound_ratio <= report.oracle_ratio + 1e-9


def test_no_hit_beats_the_oracle():
    trace = load_trace("conversations", num_requests=150, seed=1)
    outcome, _ = replay(trace, 8e9, num_seqs=8)
    for hit, most in zip(outcome.hits, longest_prefixes(trace), strict=True):
        assert hit <= most


@pytest.mark.parametrize("name", SYNTHETIC)
def test_with_ample_memory_hardly_more_is_computed_than_with_perfect_knowledge(name):
    trace = load_trace(name, num_requests=250, seed=2)
    outcome, plan = replay(trace, 2e12)
    report = make_report(trace, plan, outcome, policy="cost", nbytes=int(2e12), wall_s=1.0)
    # The first requests of each kind weigh more in a short trace than in a long one.
    assert 1.0 <= report.excess_prefill < 1.07


@pytest.mark.parametrize("shared", [400, 900, 2500])
def test_the_second_request_behind_a_shared_prefix_hits_most_of_it(shared):
    """Nothing marks where it parts, and a state weighs 3,100 tokens of text."""
    trace = [TraceRequest(10.0 * i, (Segment(1, shared), Segment(10 + i, 100)), Segment(20 + i, 20)) for i in range(3)]
    hits = replay(trace, 1e10)[0].hits
    assert shared - 128 <= hits[1] <= shared
    assert hits[2] == shared


@pytest.mark.parametrize("name", ["conversations", "retrieval"])
def test_optional_checkpoints_push_nothing_better_out(name, monkeypatch):
    trace = load_trace(name, num_requests=250, seed=0)
    hits = [sum(replay(trace, 2e9)[0].hits)]
    monkeypatch.setattr(CheckpointPolicy, "optional", lambda self, start, num_prompt: range(0))
    hits.append(sum(replay(trace, 2e9)[0].hits))
    assert hits[0] > 0.97 * hits[1]


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


GOOD = {"timestamp": 0, "input_length": 1000, "output_length": 7, "hash_ids": [5, 6]}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"hash_ids": list(range(90))}, "line 3: 90 hash_ids for 1000 tokens; at 512 tokens an id, as 5 of 6 lines have it"),
        ({"hash_ids": []}, "line 3: 0 hash_ids for 1000 tokens"),
        ({"input_length": 0}, "line 3: Expected `int` >= 1"),
        ({"output_length": -1}, "line 3: Expected `int` >= 0"),
        ({"input_length": 10**12}, "line 3: Expected `int` <="),
        ({"timestamp": -5}, "line 3: Expected `float` >= 0"),
        ({"timestamp": 1e300}, "line 3: Expected `float` <="),
        ({"hash_ids": "5"}, "line 3: Expected `array`"),
        (None, "line 3: .*each line needs"),
    ],
)
def test_one_bad_line_is_named_and_says_nothing_about_the_others(tmp_path, bad, says):
    lines = [json.dumps(GOOD)] * 5
    lines.insert(2, "{broken" if bad is None else json.dumps(GOOD | bad))
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(UsageError, match=says):
        read_trace(str(path))


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_trace_is_an_error(tmp_path, text):
    path = tmp_path / "empty.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match="holds no requests"):
        read_trace(str(path))


@pytest.mark.parametrize(
    "flags",
    [["--max-num-seqs", "0"], ["--max-num-batched-tokens", "0"], ["--num-requests", "0"], ["--max-model-len", "1"]],
)
def test_a_replay_of_nothing_or_without_seats_is_refused(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["replay", "bursts", "--model", "demo", "--memory", "64MiB", *flags])
    assert stopped.value.code == 2
    assert "is too small; at least" in capsys.readouterr().err


def test_a_trace_that_nothing_of_fits_is_an_error(capsys):
    assert (
        main(["replay", "bursts", "--model", "demo", "--memory", "64MiB", "--num-requests", "4", "--max-model-len", "100"]) == 2
    )
    assert "none of the 4 requests fits" in capsys.readouterr().err


def test_what_is_computed_again_after_a_preemption_is_excess():
    """Two that fit alone and not together: whichever gives way computes its text again, from its last checkpoint at best."""
    trace = [TraceRequest(0.0, (Segment(1 + i, 2000),), Segment(10 + i, 6000)) for i in range(4)]
    outcome, plan = replay(trace, 6e8, max_model_len=None)
    assert outcome.num_preemptions > 0
    report = make_report(trace, plan, outcome, policy="cost", nbytes=int(6e8), wall_s=1.0)
    needed = sum(request.num_prompt + request.answer.length - 1 for request in trace)
    assert outcome.num_computed > needed
    assert report.excess_prefill == (8000 + outcome.num_computed - needed) / 8000 > 1.0


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
    assert {"hit_ratio", "oracle_ratio", "bound_ratio", "excess_prefill", "tokens_per_s", "output_tokens_per_s"} <= set(report)
    assert set(report["first_token_s"]) == set(report["end_to_end_s"]) == {"mean", "p50", "p90", "p99"}
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
