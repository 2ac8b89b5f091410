"""The engine end to end, in one process, against transformers' own greedy generation on tiny models of every architecture."""

import json

import pytest
import torch

from hybridserve.config import EngineSettings
from hybridserve.engine.core import EngineCore
from hybridserve.request import EngineRequest, SamplingParams
from tests import checkpoints

NEW_TOKENS = 6
LENGTHS = (1, 3, 17, 40, 75)
#: Beyond the windows and index budgets of the tiny models, and two blocks of 16.
HIT_TOKENS = 36


#: One of each kind of cache and of their mixes; with the others the longest tests run under `slow`.
TYPICAL = (
    "qwen3_5",
    "granite_moe",
    "falcon_h1",
    "lfm3",
    "gemma3",
    "deepseek_v32",
    "kimi_linear",
    "glm5_next",
    "qwen4_exp",
    "mamba",
)

on_all = pytest.mark.parametrize("model_folder", list(checkpoints.TINY), indirect=True, scope="session")
on_typical = pytest.mark.parametrize(
    "model_folder",
    [pytest.param(name, marks=() if name in TYPICAL else pytest.mark.slow) for name in checkpoints.TINY],
    indirect=True,
    scope="session",
)


@pytest.fixture(scope="session")
def model_folder(request, tmp_path_factory):
    """A tiny checkpoint, prompts and what transformers makes of them."""
    model = checkpoints.make(request.param)
    folder = checkpoints.save(model, tmp_path_factory.mktemp(request.param))
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, checkpoints.VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]
    return folder, prompts, [greedy(model, prompt) for prompt in prompts]


@torch.no_grad()
def greedy(model, prompt):
    """Greedy tokens by recomputing everything for each: no cache of transformers is trusted."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def engine(folder, **settings):
    return EngineCore(
        EngineSettings(model=str(folder), dtype="float32", **{"max_num_seqs": 8, "kv_cache_memory": 2**26, **settings})
    )


def request(name, prompt, max_tokens=NEW_TOKENS, **sampling):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **sampling)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=params)


def run(core, requests, on_step=None):
    """Tokens by request id, and the cached tokens that were reported."""
    tokens, cached = {}, {}
    for one in requests:
        assert core.add(one) is None
    for number in range(5_000):
        if not core.has_work:
            break
        for output in core.step():
            assert output.error is None, output.error
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.num_cached_tokens is not None:
                cached[output.request_id] = output.num_cached_tokens
        core.check()
        if on_step is not None:
            on_step(number)
    return tokens, cached


@on_all
@pytest.mark.parametrize("budget", [8, pytest.param(13, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow), 2048])
def test_any_chunking_and_batch_gives_the_reference(model_folder, budget):
    folder, prompts, expected = model_folder
    core = engine(folder, max_num_batched_tokens=budget)
    tokens, _ = run(core, [request(str(i), prompt) for i, prompt in enumerate(prompts)])
    assert [tokens[str(i)] for i in range(len(prompts))] == expected


@on_all
def test_prefix_hits_give_the_reference(model_folder):
    folder, prompts, expected = model_folder
    core = engine(folder)
    prompt, want = prompts[-1], expected[-1]
    assert run(core, [request("a", prompt)])[0]["a"] == want
    tokens, cached = run(core, [request("b", prompt)])
    assert (tokens["b"], cached["b"]) == (want, len(prompt) - 1)
    for length in range(1, len(prompt), 7):
        # Every one of these parts from the first prompt at another token.
        other = [*prompt[:length], (prompt[length] + 1) % checkpoints.VOCAB_SIZE, *prompt[length + 1 :]]
        run(core, [request(f"w{length}", other, max_tokens=1)])
        tokens, _ = run(core, [request(f"r{length}", prompt)])
        assert tokens[f"r{length}"] == want
    continued = [*prompt, *want, 1, 2, 3]
    cold = run(engine(folder, enable_prefix_caching=False), [request("c", continued)])
    warm, cached = run(core, [request("c", continued)])
    assert warm["c"] == cold[0]["c"]
    assert cold[1]["c"] == 0
    assert cached["c"] == len(prompt) + len(want) - 1


@on_typical
def test_a_hit_on_any_token_gives_what_no_hit_gives(model_folder):
    """Texts that part from the prompt at each of its tokens, on top of what was left there: the end of an answer to that much."""
    folder, prompts, _ = model_folder
    prompt = prompts[-1][:HIT_TOKENS]
    texts = {p: [*prompt[:p], (prompt[p] + 1) % checkpoints.VOCAB_SIZE, 5, p] for p in range(1, len(prompt))}
    cold = engine(folder, enable_prefix_caching=False, max_num_seqs=64)
    expected, _ = run(cold, [request(str(p), text, 2) for p, text in texts.items()])
    core = engine(folder)
    for p, text in texts.items():
        _, cached = run(core, [request(f"left {p}", prompt[:p], max_tokens=1)])
        assert cached[f"left {p}"] == p - 1
        tokens, cached = run(core, [request(str(p), text, 2)])
        assert cached[str(p)] == p
        assert tokens[str(p)] == expected[str(p)], p


@on_typical
def test_preemption_under_little_memory_gives_the_reference(model_folder):
    folder, prompts, expected = model_folder
    info = engine(folder).info
    repeated = [(f"{copy}.{i}", prompt) for copy in range(2) for i, prompt in enumerate(prompts)]
    # So many that the pages of any group run out, whatever a superpage holds of them.
    fillers = [(f"filler.{i}", [(token + i) % checkpoints.VOCAB_SIZE for token in prompts[-1][:60]]) for i in range(1, 13)]
    # Where one superpage holds the text of all requests, only states run out, and what was admitted can finish.
    most_blocks = (len(repeated) + len(fillers)) * 96 // 16
    grows_never = all(group.kind == "state" or group.pages_per_superpage >= most_blocks for group in info.groups)
    num_preemptions = 0
    # How much too little it takes depends on the sizes of pages; every amount must give the reference.
    for spare in (1, 2, 3, 0):
        settings = {"max_num_batched_tokens": 128, "max_num_seqs": 24, "max_model_len": 96}
        core = engine(folder, kv_cache_memory=pinched(info, spare), **settings)
        tokens, _ = run(core, [request(name, prompt, 20) for name, prompt in (*repeated, *fillers)])
        for name, _ in repeated:
            assert tokens[name][:NEW_TOKENS] == expected[int(name.split(".")[1])]
        assert {len(found) for found in tokens.values()} == {20}
        num_preemptions = core.stats().num_preemptions
        if num_preemptions or grows_never:
            break
    assert num_preemptions > 0 or grows_never


def pinched(info, spare):
    """Bytes that hold one sequence of 96 tokens and `spare` superpages more."""
    pages = sum(-(-(96 // 16 if g.kind == "paged" else 1) // g.pages_per_superpage) for g in info.groups)
    return (pages + spare) * info.superpage_nbytes


@on_typical
def test_aborting_neighbours_changes_nothing(model_folder):
    folder, prompts, expected = model_folder
    core = engine(folder, max_num_batched_tokens=24)
    requests = [request(str(i), prompt) for i, prompt in enumerate(prompts)]
    victims = [request(f"v{i}", prompt, 50) for i, prompt in enumerate(prompts[1:])]
    order = [r for pair in zip(victims, requests[1:], strict=True) for r in pair] + requests[:1]
    tokens, _ = run(core, order, on_step=lambda number: core.abort([f"v{number % 4}"]) if number > 2 else None)
    core.abort([victim.request_id for victim in victims])
    assert [tokens[str(i)] for i in range(len(prompts))] == expected


def test_refusals_and_failures_touch_nobody_else(tmp_path):
    model = checkpoints.make("qwen3_5")
    core = engine(checkpoints.save(model, tmp_path))
    refused = core.add(request("bad", [checkpoints.VOCAB_SIZE]))
    assert refused.error_type == "RequestError"
    assert str(checkpoints.VOCAB_SIZE) in refused.error
    tokens, _ = run(core, [request("good", [1, 2, 3])])
    assert tokens["good"] == greedy(model, [1, 2, 3])


def raise_(error):
    raise error


#: How a mixer goes wrong: what it returns or raises, given its right output.
FAULTS = {
    "raises": lambda y: raise_(RuntimeError("a test")),
    "host memory": lambda y: raise_(MemoryError()),
    "device memory": lambda y: raise_(torch.OutOfMemoryError("a test")),
    "one row": lambda y: y[:1],
    "a row too many": lambda y: torch.cat([y, y[:1]]),
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A tiny hybrid, prompts of lengths that tell them apart, and what transformers makes of them."""
    model = checkpoints.make("qwen3_5")
    folder = checkpoints.save(model, tmp_path_factory.mktemp("hybrid"))
    generator = torch.Generator().manual_seed(5)
    lengths = {"a": 3, "b": 17, "c": 40, "prompt": 75, "answer": 60}
    prompts = {name: torch.randint(0, checkpoints.VOCAB_SIZE, (n,), generator=generator).tolist() for name, n in lengths.items()}
    return folder, prompts, {name: greedy(model, prompt) for name, prompt in prompts.items()}


@pytest.mark.parametrize(
    ("layer", "fault"),
    [("first", "raises"), ("middle", "raises"), ("last", "raises"), *(("middle", name) for name in FAULTS if name != "raises")],
)
def test_I33_a_layer_that_fails_on_one_sequence_costs_the_others_no_token(hybrid, layer, fault):
    """It fails after it has written states and entries, on the prompt of one request and in the answer of another."""
    folder, prompts, expected = hybrid
    core = engine(folder, max_num_batched_tokens=48)
    passes = []

    def fail(module, arguments, output):
        lengths_now = set(arguments[1].kv_lens_host)  # of the requests named so, and of no other at any time
        passes.append(lengths_now)
        return FAULTS[fault](output) if not lengths_now.isdisjoint({75, 63}) else output

    layers = core._loaded.model.layers
    chosen = layers[{"first": 0, "middle": len(layers) // 2, "last": -1}[layer]]
    next(iter(chosen.mixers.values())).mixer.register_forward_hook(fail)
    for name, prompt in prompts.items():
        core.add(request(name, prompt, prompt_logprobs=2 if name == "c" else None))
    tokens, ends, logprobs = {}, {}, []
    while core.has_work:
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            logprobs += output.prompt_logprobs or []
            if output.finish_reason is not None:
                ends[output.request_id] = output
        core.check()
    for name in "abc":
        assert (ends[name].finish_reason, tokens[name]) == ("length", expected[name])
    assert [one.token_id for one in logprobs[1:]] == prompts["c"][1:]
    for name in ("prompt", "answer"):
        assert ends[name].finish_reason == "error"
        assert ends[name].error.startswith("the engine failed on this request")
    assert tokens["answer"] == expected["answer"][:3]
    assert len(passes) < 40


def test_prompt_logprobs_are_complete_when_a_prompt_is_computed_again_in_other_chunks(hybrid):
    core = engine(hybrid[0], max_num_batched_tokens=16)
    prompt = list(range(40))
    alone = engine(hybrid[0])
    alone.add(request("alone", prompt, 1, prompt_logprobs=0))
    (wanted,) = alone.step()
    passes = []

    def fail_third(module, arguments, output):
        passes.append(len(output))
        return FAULTS["raises"](output) if len(passes) == 3 else output

    core._loaded.model.layers[0].register_forward_hook(fail_third)
    core.add(request("short", [1, 2], 9))
    core.step()
    core.add(request("long", prompt, 1, prompt_logprobs=0))
    found = [one for _ in range(30) for output in core.step() for one in output.prompt_logprobs or []]
    assert [one and one.token_id for one in found] == [one and one.token_id for one in wanted.prompt_logprobs]
    assert [one.logprob for one in found[1:]] == pytest.approx([one.logprob for one in wanted.prompt_logprobs[1:]], abs=1e-4)


def test_nan_fails_only_its_own_request_and_leaves_no_cache(tmp_path):
    model = checkpoints.make("qwen3_5")
    folder = checkpoints.save(model, tmp_path)
    tensors = checkpoints.load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    poison = 7
    tensors[name] = tensors[name].clone()
    tensors[name][poison] = float("nan")
    config = checkpoints.read_config(folder)
    checkpoints.rewrite_tensors(folder, {**tensors, "lm_head.weight": torch.nan_to_num(tensors[name])})
    checkpoints.rewrite_config(folder, {**config, "tie_word_embeddings": False})
    core = engine(folder)
    for one in (request("bad", [1, 2, poison, 4]), request("good", [1, 2, 3])):
        core.add(one)
    ends = {}
    while core.has_work:
        for output in core.step():
            if output.finish_reason:
                ends[output.request_id] = output
        core.check()
    assert ends["bad"].finish_reason == "error"
    assert "NaN" in ends["bad"].error
    assert ends["good"].finish_reason == "length"


def test_info_tells_the_plan_that_storage_allocates(tmp_path):
    folder = checkpoints.save(checkpoints.make("qwen3_5"), tmp_path)
    info = engine(folder).info
    assert info.superpage_nbytes * info.num_superpages <= 2**26
    assert info.layer_plan == "0-1,3: gated_delta  2: attention"
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == info.vocab_size
    assert info.kv_nbytes_per_token == sum(g.natural_nbytes for g in info.groups if g.kind == "paged") // info.block_size
