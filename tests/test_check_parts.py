"""What chips compute stands beside the text, without its padding, for every kind of layer."""

from dataclasses import replace

import numpy as np
import pytest

from author.statements import Let, Tensor
from tests.test_check_bisect import LIMIT, made, whole
from tests.tiny import layer, model
from tp.check.beside import Beside, lines, targets
from tp.check.executed import Execution
from tp.check.parts import parts_of
from tp.check.shown import Shown, pieces, text_of
from tp.operands import operands
from tp.roll import roll

IDS = [3, 8, 1, 30, 5]
SPECS = {
    "tiled_heads_and_shared_experts": model(layer("gated_delta", "shared_gated")),
    "latent_and_biased_experts": model(layer("latent_no_q_lora", "biased_oai")),
    "norms_over_all_chips": model(layer("norm_of_all_heads"), layer("linear_attention")),
}
READ = [*zip(SPECS, ("steps", "prefill", "prefill"), strict=True)]


def beside(one, piece):
    text = text_of(one, piece, one.devices.chips)
    parts = parts_of(operands(roll(text)).values())
    return Beside(text, whole=whole(one), before={}, parts=parts)


def stepped(one, way):
    """A first piece of a prompt, its text, and what the chips made of it."""
    piece = next(iter(pieces(IDS, way, one.chunks)))
    execution = Execution(shown=Shown(decoder=one), length=len(IDS))
    return piece, execution, execution.step(piece, one.fresh())


@pytest.mark.parametrize(("name", "way"), READ)
def test_every_value_of_every_chip_is_compared_and_right(name, way):
    one = made(5, SPECS[name], kernels="auto")
    piece, execution, step = stepped(one, way)
    text = beside(one, piece)
    found = list(execution.differences(text, step))
    assert max(difference.off for difference in found) < LIMIT
    compared = {difference.made.name for difference in found}
    bound = {n for _, s in lines(text.program) if isinstance(s, Let | Tensor) for n in targets(s)}
    # Token ids are chosen elsewhere, and a zero that an idle chip puts in has no value of its own.
    left = {str(n) for n in bound - compared if n.base != "next" and n.tail != "_z"}
    assert left == set()


def test_whatever_a_chip_does_otherwise_is_named_with_the_chip():
    one = made(3, SPECS["tiled_heads_and_shared_experts"])
    piece, execution, step = stepped(one, "steps")
    keys = [key for key in step.values if "_c{c}" in key or key.startswith(("xr", "ao", "x2"))]
    assert len(keys) > 20
    for number, key in enumerate(keys[::7]):
        chip = number % 3
        changed = np.array(step.values[key])
        changed[chip] += 1.0
        other = replace(step, values={**step.values, key: changed})
        found = execution.differences(beside(one, piece), other)
        first = next(difference for difference in found if difference.off > LIMIT)
        assert (str(first.made.name).replace(f"_c{chip}", "_c{c}"), first.chip) == (key, chip)
