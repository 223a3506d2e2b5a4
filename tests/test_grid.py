"""Cells of the grid: batches of some families; `scripts/grid` runs it in full.

Prompts and single steps of every family are compared in test_families_dense and
test_families_mixtures_run.
"""

from pathlib import Path

import pytest

from tests.grid import cells

CHECKPOINTS = Path(__file__).parent / "checkpoints"
BATCHES = {
    "cohere2": 4,
    "deepseek_v2": 3,
    "gemma3_text": 5,
    "gpt_oss": 7,
    "kimi_linear": 3,
    "llama4_text": 2,
    "minimax": 6,
    "olmoe": 5,
    "phi3": 3,
    "qwen3_next": 2,
    "smollm2": 8,
}


@pytest.mark.parametrize(("family", "chips"), BATCHES.items())
def test_sequences_side_by_side_agree_with_transformers(family: str, chips: int) -> None:
    (cell,) = cells(CHECKPOINTS / family, chips, ["batch"])
    assert cell.holds, cell
