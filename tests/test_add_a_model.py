"""The architecture of docs/add-a-model.md: the page shows the file, and what is served is the published model, over HTTP too."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
import transformers

from hybridserve import LLM, SamplingParams
from hybridserve.cli import main
from tests.registries import forgetting
from tests.test_cli import served

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/add-a-model.md"
ARCHITECTURE = ROOT / "docs/examples/diff_llama.py"
PLUGINS = (str(ROOT / "docs/examples/diff_attention.py"), str(ARCHITECTURE))
FLAGS = tuple(word for plugin in PLUGINS for word in ("--plugin", plugin))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def tables() -> Iterator[None]:
    """What the examples register is forgotten after this file."""
    with forgetting():
        yield


def code_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_the_page_shows_the_file_whole() -> None:
    shown = re.findall(r"^```python diff_llama.py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    source = ARCHITECTURE.read_text()
    assert code_lines("".join(shown)) == code_lines(source)
    assert len(source.splitlines()) < 100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[transformers.PreTrainedModel, Path]:
    """A small published model in which every parameter matters, and its folder."""
    torch.manual_seed(11)
    config = transformers.DiffLlamaConfig(
        vocab_size=2048,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    published = transformers.DiffLlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in published.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25 + (parameter.dim() == 1) * 0.5)
    folder = tmp_path_factory.mktemp("diff_llama")
    published.save_pretrained(folder)
    return published, folder


def wanted(published: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    """The tokens that transformers gives, from the whole text each time: no cache of anybody's is involved."""
    tokens = list(prompt)
    for _ in range(GREEDY.max_tokens):
        with torch.no_grad():
            tokens.append(int(published(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 2000, (n,), generator=generator).tolist() for n in (40, 1, 23)]


def test_its_tokens_are_those_of_transformers(model: tuple[transformers.PreTrainedModel, Path]) -> None:
    published, folder = model
    expected = [wanted(published, prompt) for prompt in prompts()]
    assert len({token for tokens in expected for token in tokens}) > 8
    for budget in (2048, 7):
        with LLM(
            str(folder), plugin=PLUGINS, dtype="float32", max_num_seqs=4, max_num_batched_tokens=budget, kv_cache_memory=2**23
        ) as llm:
            asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
            assert [result.outputs[0].token_ids for result in llm.generate(asked, GREEDY)] == expected
            again = llm.generate(asked[0], GREEDY)[0]
            assert (again.outputs[0].token_ids, again.num_cached_tokens) == (expected[0], 39)


def test_check_model_finds_nothing_wrong(
    model: tuple[transformers.PreTrainedModel, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-model", str(model[1]), *FLAGS, "--memory", "1GiB", "--backend", "reference", "--run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(run["layers"], run["kind"]) for run in report["layers"]] == [("0-2", "diff_attention")]
    assert {cache["name"]: cache["shape"] for cache in report["layers"][0]["caches"]} == {
        "k1": [2, 8],
        "k2": [2, 8],
        "v": [2, 16],
    }
    assert "paged_attention" in report["layers"][0]["operations"]
    run = {one["id"]: one["status"] for one in report["checks"] if one["id"].startswith("run")}
    assert set(run.values()) == {"PASS"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention_bias": True}, ("attention_bias", "--ignore-config-keys")),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, ("rope_parameters", "plain")),
        ({"lambda_schedule": "cosine"}, ("lambda_schedule", "--ignore-config-keys")),
    ],
)
def test_what_it_does_not_implement_is_refused(
    change: dict[str, object],
    words: tuple[str, ...],
    model: tuple[transformers.PreTrainedModel, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = json.loads((model[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    assert main(["check-model", str(tmp_path / "config.json"), *FLAGS, "--memory", "1GiB"]) == 3
    printed = capsys.readouterr().out
    assert all(word in printed for word in words), printed


def test_it_is_served_over_http(model: tuple[transformers.PreTrainedModel, Path]) -> None:
    published, folder = model
    with served(*FLAGS, "--tokenizer", "demo", "--dtype", "float32", "--kv-cache-memory", "8MiB", model=str(folder)) as (
        _,
        url,
        _,
    ):
        prompt = prompts()[0]
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
        replies = [httpx.post(url + "/v1/completions", json=body, timeout=60).json() for _ in range(2)]
    first, second = (reply["choices"][0] for reply in replies)
    assert first["token_ids"] == wanted(published, prompt)
    assert (first["text"], first["token_ids"]) == (second["text"], second["token_ids"])
    assert replies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
