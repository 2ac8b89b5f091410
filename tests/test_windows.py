"""Window attention at the window's edge, where published conventions differ by one: against transformers, token by token."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridserve.backends.select import select
from hybridserve.models import build_model, load_weights, resolve
from tests.checkpoints import VOCAB_SIZE, make, read_config, rewrite_config, save
from tests.driver import Driver
from tests.tiny_models import WINDOW

CPU = torch.device("cpu")
OPS = select(CPU, torch.float32, ["reference"]).ops
NAMES = ["gpt_oss", "gemma3", "olmo3", "lara_mini", "lfm3"]


def logits(folder: Path, ids: list[int], size: int) -> Tensor:
    """What the folder's model makes of the prompt, `size` tokens a pass. Returns [len(ids), vocab]."""
    found = resolve(str(folder))
    model = build_model(found.config, OPS, torch.float32)
    load_weights(model, found, CPU)
    return Driver(model).run_chunks("a", ids, size)


@pytest.mark.parametrize("name", NAMES)
def test_the_edge_of_the_window_is_transformers(name: str, tmp_path: Path) -> None:
    reference = make(name)
    folder = save(reference, tmp_path)
    config = read_config(folder)
    ids = torch.randint(VOCAB_SIZE, (WINDOW + 2,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        expected = [reference(torch.tensor([ids[:n]]), use_cache=False).logits[0, -1] for n in range(1, len(ids) + 1)]
    for size in (1, WINDOW - 1, WINDOW, WINDOW + 1, len(ids)):
        torch.testing.assert_close(logits(folder, ids, size), torch.stack(expected), atol=1e-4, rtol=1e-4)
    # One token more or less to see shows in the first row that has so many, and in no row before.
    for window, first in ((WINDOW + 1, WINDOW), (WINDOW - 1, WINDOW - 1)):
        rewrite_config(folder, {**config, "sliding_window": window})
        other = (logits(folder, ids, len(ids)) - torch.stack(expected)).abs().amax(-1)
        assert other[:first].max() < 1e-4
        assert other[first] > 1e-3
