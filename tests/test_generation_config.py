"""generation_config.json: what the sampler can do is honoured, what it can't is told with a reason, what none can is refused."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

import hybridserve
from hybridserve.check.chat import check_defaults
from hybridserve.check.tensors import check_not_empty, scan_values
from hybridserve.cli import main
from hybridserve.engine.generation_config import read_sampling_defaults
from hybridserve.engine.text import Tokenizer
from hybridserve.errors import WeightsError
from hybridserve.models.shards import read_entries
from hybridserve.server.sampling import sampling_params
from hybridserve.server.wire import CompletionRequest

DEMO = Path(hybridserve.__file__).parent / "demo"
VOCAB_SIZE = 968


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(DEMO, tmp_path / "model")
    return tmp_path / "model"


def with_values(folder: Path, **values: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 0.0},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 10**400},
        {"top_p": 2.0},
        {"top_k": -5},
        {"top_k": 1.5},
        {"min_p": "high"},
        {"max_new_tokens": 0},
        {"stop_strings": [""]},
        {"stop_strings": [3]},
    ],
)
def test_a_value_that_no_request_may_have_is_refused(folder: Path, values: dict[str, object]) -> None:
    with pytest.raises(WeightsError, match=r"generation_config\.json: .*correct the file"):
        read_sampling_defaults(with_values(folder, **values))


def test_the_check_refuses_what_serving_would(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_values(folder, repetition_penalty=0.0, do_sample=True)
    assert main(["check-model", str(folder), "--backend", "reference", "--device", "cpu"]) == 4
    assert "repetition_penalty" in capsys.readouterr().out
    assert main(["generate", str(folder), "--prompt", "a", "--backend", "reference"]) == 4
    assert "repetition_penalty" in capsys.readouterr().err


def test_what_the_sampler_can_do_is_honoured(folder: Path) -> None:
    found = read_sampling_defaults(
        with_values(
            folder,
            temperature=0.6,
            top_k=-1,
            min_new_tokens=3,
            stop_strings=["END"],
            suppress_tokens=[5, 7, VOCAB_SIZE + 1],
            bad_words_ids=[[9], [1, 2]],
            do_sample=True,
        )
    )
    assert found.items() == {
        "temperature": 0.6,
        "top_k": 0,
        "min_tokens": 3,
        "stop": ("END",),
        "logit_bias": {5: -100.0, 7: -100.0, 9: -100.0},
    }
    assert found.unsupported == ("bad_words_ids=[1, 2]",)
    request = CompletionRequest(prompt="a", logit_bias={7: 1.0, 8: 2.0})
    sampling = sampling_params(request, found.items(), max_tokens=2, logprobs=None, vocab_size=VOCAB_SIZE)
    assert sampling.logit_bias == {5: -100.0, 7: 1.0, 9: -100.0, 8: 2.0}
    assert (sampling.stop, sampling.min_tokens) == (("END",), 2)
    request = CompletionRequest(prompt="a", stop=["STOP"], min_tokens=0)
    sampling = sampling_params(request, found.items(), max_tokens=2, logprobs=None, vocab_size=VOCAB_SIZE)
    assert (sampling.stop, sampling.min_tokens) == (("STOP",), 0)


def test_a_token_that_the_author_suppresses_is_not_generated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "generate",
        str(folder),
        "--chat",
        "--prompt",
        "What is 2 plus 3?",
        "--backend",
        "reference",
        "--max-tokens",
        "8",
    ]
    assert main(arguments) == 0
    before = capsys.readouterr().out
    first = Tokenizer.from_folder(folder).encode(before.strip(), add_special_tokens=False)[0]
    with_values(folder, do_sample=False, eos_token_id=2, suppress_tokens=[first])
    assert main(arguments) == 0
    after = capsys.readouterr().out
    assert first not in Tokenizer.from_folder(folder).encode(after.strip(), add_special_tokens=False)[:1]
    assert after != before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("no_repeat_ngram_size", 3),
        ("num_beams", 4),
        ("penalty_alpha", 0.6),
        ("typical_p", 0.9),
        ("forced_eos_token_id", 2),
        ("begin_suppress_tokens", [3]),
        ("exponential_decay_length_penalty", [5, 1.1]),
        ("guidance_scale", 1.5),
    ],
)
def test_what_it_can_not_do_is_told_with_a_reason_code(
    folder: Path, key: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    read_sampling_defaults(with_values(folder, **{key: value}))
    assert f"{key}={value!r}" in caplog.text
    assert "not_implemented" in caplog.text
    finding = check_defaults(SimpleNamespace(folder=SimpleNamespace(path=folder)))  # type: ignore[arg-type]
    assert finding.status == "WARN"
    assert "not_implemented" in finding.detail


def test_what_libraries_write_without_meaning_it_is_not_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    neutral = {"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "bad_words_ids": None, "num_return_sequences": 1}
    assert read_sampling_defaults(with_values(folder, **neutral)).unsupported == ()
    assert caplog.text == ""


def test_an_end_beyond_the_vocabulary_is_left_out_and_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_values(folder, eos_token_id=[2, VOCAB_SIZE])
    assert Tokenizer.from_folder(folder).eos_token_ids == (2,)
    assert main(["check-model", str(folder), "--backend", "reference", "--device", "cpu", "--json"]) == 0
    (finding,) = (one for one in json.loads(capsys.readouterr().out)["checks"] if one["id"] == "chat.stop")
    assert finding["status"] == "WARN"
    assert f"eos_token_id {VOCAB_SIZE} is beyond" in finding["detail"]


def test_weights_of_zeros_alone_are_no_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    check_not_empty(read_entries(folder))
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    save_file({**tensors, name: tensors[name] * 0}, path)
    check_not_empty(read_entries(folder))
    finding = scan_values(read_entries(folder))
    assert finding.status == "WARN"
    assert name in finding.detail
    save_file({name: tensor * 0 for name, tensor in tensors.items()}, path)
    assert scan_values(read_entries(folder)).status == "FAIL"
    assert main(["check-model", str(folder), "--backend", "reference", "--device", "cpu"]) == 4
    assert "zeros alone" in capsys.readouterr().out
