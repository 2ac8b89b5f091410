"""Two layers of each headline model at the released widths, over HTTP in bf16: everything of them runs together.

The benchmark of the same name takes four layers, more experts and prompts beyond the index's budget.
"""

import pytest

from benchmarks.headline_slices import VOCAB, requests, run_slice
from tests.flash_shapes import flash_next_slice, glm_flash_slice

SLICES = {
    "flash-next": flash_next_slice(layers=3, experts=12, vocab=VOCAB, ngram_rows=1000),
    "glm-flash": glm_flash_slice(layers=2, experts=9, vocab=VOCAB, dense=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLICES)
def test_a_slice_of_the_real_shapes_is_served(name: str) -> None:
    result = run_slice(SLICES[name], requests(130))
    assert result["all_hit"]
    assert result["same"]
    answers = result["answers"]
    assert isinstance(answers, dict)
    assert all(one["output_tokens"] == 12 for one in answers["at once"])
    assert answers["next"][0]["cached_tokens"] > answers["at once"][1]["prompt_tokens"] // 2
