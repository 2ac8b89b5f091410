"""Strict reading of config.json: what names a file or a tool passes, what could change the mathematics does not."""

import pytest

from hybridserve.errors import UnsupportedModelError
from hybridserve.models.reader import ConfigReader


def reader(**values: object) -> ConfigReader:
    return ConfigReader(values, architecture="LlamaForCausalLM")


@pytest.mark.parametrize(
    "values",
    [
        # what transformers writes for a model that it read from a GGUF file
        {"_model_name_or_path": "Smollm2 135M 8k Lc100K Mix1 Ep2", "unk_token_id": 0},
        # what SmolLM2-135M-Instruct was published with, beside Llama's own keys
        {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
        {"_commit_hash": "0123abcd", "license": "apache-2.0", "tie_encoder_decoder": True},
    ],
)
def test_keys_that_only_name_things_pass(values: dict[str, object]) -> None:
    reader(**values).finish()


@pytest.mark.parametrize("key", ["rope_interleaved", "compression_config", "attn_logit_softcapping", "model_name_or_paths"])
def test_a_key_that_nobody_has_read_is_refused_with_the_way_out(key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{key}=True.*--ignore-config-keys {key}"):
        reader(**{key: True}).finish()
