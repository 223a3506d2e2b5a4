"""The compiled step holds just the collectives that the manifest names."""

import re
from dataclasses import replace

import pytest

from author.program import ProgramError
from author.statements import Fold, Join, Let, Scaled
from kernels.native.library import why_not
from tests.tiny import layer, lowering, model, states, written
from tp.roll import roll
from tp.step import whole_step

# Every instruction by which chips talk; one in two halves counts by its start.
TALKING = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)"
    r"(?:-start)?\("
)
ONE_PLACE = {"all-reduce": "fold", "all-gather": "join"}


def compiled_text(made):
    step = whole_step(made.lowered, made.mesh, tuple(made.outputs))
    given = made.weights(), made.states(states(made.program)), made.inputs()
    return step.lower(*given).compile().as_text()


def talk(text):
    """The collectives of a compiled step, by kind."""
    found = TALKING.findall(text)
    return {kind: found.count(kind) for kind in dict.fromkeys(found)}


def named(program):
    """The collectives of a manifest, by the instruction that each becomes."""
    kinds = [c.kind for c in program.manifest.collectives]
    return {word: kinds.count(kind) for word, kind in ONE_PLACE.items() if kind in kinds}


@pytest.mark.parametrize(
    ("kind", "width", "layers", "wanted"),
    [
        # A fold after each mixer and each feed-forward; of the vocabulary, a fold and a join.
        ("tp_decode_step", 2, ["attention", "latent"], {"all-reduce": 5, "all-gather": 1}),
        ("tp_decode_step", 3, ["gated_delta"], {"all-reduce": 3, "all-gather": 1}),
        ("tp_decode_batch", 3, ["biases"], {"all-reduce": 3, "all-gather": 1}),
        ("tp_prefill", 2, ["sinks"], {"all-reduce": 3, "all-gather": 1}),
    ],
)
def test_a_step_holds_the_collectives_of_its_manifest_alone(kind, width, layers, wanted):
    spec = model(*(layer(mixer, "shared") for mixer in layers))
    program = written(spec, kind, tp=width, vocabulary=True, align=4)
    assert named(program) == wanted
    assert talk(compiled_text(lowering(program, kernels="xla"))) == wanted


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("mixers", [("attention", "biases"), ("gated_delta", "latent")])
def test_simulated_chips_meet_inside_the_compiled_kernels_instead(mixers):
    spec = model(*(layer(mixer, "shared") for mixer in mixers))
    program = written(spec, "tp_decode_step", tp=3, vocabulary=True, align=4)
    made = lowering(program)
    assert talk(compiled_text(made)) == {}
    met = [
        t.statement
        for t in made.lowered.taken
        if isinstance(getattr(t.statement, "value", None), Fold | Join)
    ]
    assert sorted(s.name for s in met) == sorted(c.out for c in program.manifest.collectives)
    assert {t.path for t in made.lowered.taken if t.statement in met} == {"native"}


def test_a_vocabulary_that_every_chip_holds_needs_no_collective():
    program = written(model(layer("attention")), "tp_decode_step", tp=3)
    assert talk(compiled_text(lowering(program, kernels="xla"))) == {"all-reduce": 2}


def test_a_program_of_one_device_talks_to_nobody():
    assert talk(compiled_text(lowering(written(model(layer("attention")), "decode_step")))) == {}


def test_collectives_are_counted_in_halves_and_in_whole():
    text = """
      %a = f32[1,4]{1,0} all-reduce(%x), channel_id=1
      %b = (f32[1,4], f32[1,4]) all-reduce-start(%y), channel_id=2
      %c = f32[1,4] all-reduce-done(%b)
      %d = f32[1,8] all-gather(%c), metadata={op_name="all-reduce"}
    """
    assert talk(text) == {"all-reduce": 2, "all-gather": 1}


@pytest.mark.parametrize(("forgotten", "vocabulary"), [(Fold, True), (Join, True), (Fold, False)])
def test_a_step_with_a_collective_left_out_is_refused_when_it_is_traced(forgotten, vocabulary):
    program = written(model(layer("attention")), "tp_decode_step", tp=2, vocabulary=vocabulary)
    rolled = roll(program)
    at = max(
        n
        for n, item in enumerate(rolled.items)
        if isinstance(item, Let) and isinstance(item.value, forgotten)
    )
    kept = rolled.items[at]
    alone = Let(kept.name, Scaled(kept.value.partial, 1.0))
    items = (*rolled.items[:at], alone, *rolled.items[at + 1 :])
    made = lowering(program, rolled=replace(rolled, items=items))
    given = made.weights(), made.states(states(program)), made.inputs()
    step = whole_step(made.lowered, made.mesh, ("logits",))
    with pytest.raises(ProgramError, match=f"{kept.name} differs from chip to chip; wanted a fold"):
        step.lower(*given)
