"""The grid at a few widths; `scripts/grid` runs it in full."""

from pathlib import Path

import pytest

from tests.grid import WAYS, cells

CHECKPOINTS = Path(__file__).parent / "checkpoints"

# Each family at one width, so that every width and every way has its turn.
FAMILIES = sorted(p.parent.name for p in CHECKPOINTS.glob("*/expected.npz"))
CELLS = [(name, i % 8 + 1, WAYS[i % 3]) for i, name in enumerate(FAMILIES)]


@pytest.mark.parametrize(("family", "chips", "way"), CELLS)
def test_a_family_agrees_with_transformers(family: str, chips: int, way: str) -> None:
    (cell,) = cells(CHECKPOINTS / family, chips, [way])
    assert cell.holds, cell
