"""Some layers of each headline model at the released widths, over HTTP: everything of them runs together.

The benchmark of the same name takes four layers, more experts and a prompt beyond the released budget of the index. Here that
budget is cut as well, so that short prompts make the index choose.
"""

import pytest

from benchmarks.headline_slices import VOCAB, requests, run_slice
from tests.flash_shapes import flash_next_slice, glm_flash_slice

BUDGET = 64
SLICES = {
    "flash-next": flash_next_slice(layers=3, experts=12, vocab=VOCAB, ngram_rows=1000, indexer_budget=BUDGET),
    "glm-flash": glm_flash_slice(layers=2, experts=9, vocab=VOCAB, dense=1, index_topk=BUDGET),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SLICES)
def test_a_slice_of_the_real_shapes_is_served(name: str, dtype: str) -> None:
    result = run_slice(SLICES[name], requests(2 * BUDGET + 2), "--dtype", dtype)
    assert result["all_hit"]
    # In bf16 two tokens of random weights can be as good as each other.
    assert result["same"] or dtype == "bfloat16"
    answers = result["answers"]
    assert isinstance(answers, dict)
    assert all(one["output_tokens"] == 12 for one in answers["at once"])
    assert answers["next"][0]["cached_tokens"] > answers["at once"][1]["prompt_tokens"] // 2
