"""A lowered step computes what the interpreter makes of the written-out text, at every width."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from author.english import read_program
from author.manifest import Placed, TpCollective, TpManifest
from author.names import Name
from author.program import Program, ProgramError
from tests.tiny import (
    FEEDS,
    MIXERS,
    STREAMS,
    layer,
    lowering,
    model,
    outcome,
    random_spec,
    states,
    written,
)
from tp.interpret import cut
from tp.roll import roll
from tp.step import whole_step
from tp.stretch import stretch

HUGE = 1e30


def close(found, wanted, tolerance=1e-4):
    found, wanted = np.asarray(found), np.asarray(wanted)
    if wanted.dtype.kind == "i":
        np.testing.assert_array_equal(found, wanted)
        return
    scale = max(1.0, np.nanmax(np.abs(wanted), initial=0))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * scale)


def stepped(made, weights, before, inputs):
    """One step on the mesh: outputs by key, states by whole matrix."""
    step = whole_step(made.lowered, made.mesh, tuple(made.outputs))
    out, after = step(weights, made.states(before), inputs)
    return out, made.wholes(after)


def same_step(program, *, kernels="auto"):
    """A program lowered and the same program interpreted give the same results and states."""
    made = lowering(program, kernels=kernels)
    before = states(program)
    wanted = outcome(program, before)
    out, after = stepped(made, made.weights(padding=HUGE), before, made.inputs())
    assert len(out) > 0
    for key, names in made.outputs.items():
        rows = [np.asarray(wanted[name]) for name in names]
        whole = rows[0] if rows[0].ndim != 0 and len(rows) == 1 else np.stack(rows)
        close(np.asarray(out[key]).reshape(whole.shape), whole)
    same_states(program, after, wanted)


def same_states(program, after, wanted):
    for name, whole in after.items():
        pieces = [] if program.manifest is None else program.manifest.placed
        slices = [p for p in pieces if p.slice is not None and p.slice.of == name]
        if not slices:
            close(whole, wanted[name])
        for piece in slices:
            part = cut(whole, piece.slice.axis, piece.slice.ranges)
            close(part, wanted[piece.name])


# --- Every mixer and feed-forward; kinds and widths take turns

WIDTHS = (3, 2, 5, 7, 8)
LONE = ("tp_decode_step", "tp_prefill", "tp_prefill_logits")
BATCHES = [(mixer, WIDTHS[n % 5]) for n, mixer in enumerate(MIXERS)]
OTHERS = [
    (mixer, feed, LONE[n % 3], WIDTHS[(n + 2) % 5])
    for n, (mixer, feed) in enumerate(zip(reversed(MIXERS), FEEDS, strict=False))
]
MIXTURES = ("softmax", "sigmoid_biased_in_groups", "shared_gated", "biased_oai")


def cuts(width):
    """Whole or split vocabulary, cut anywhere or in blocks."""
    return {"tp": width, "vocabulary": width != 5, "align": 4 if width % 2 else 1}


@pytest.mark.parametrize(("mixer", "width"), BATCHES)
def test_a_batch_computes_what_its_text_says(mixer, width):
    same_step(written(model(layer(mixer)), "tp_decode_batch", **cuts(width)))


@pytest.mark.parametrize(("mixer", "feed", "kind", "width"), OTHERS)
def test_a_step_computes_what_its_text_says(mixer, feed, kind, width):
    spec = model(layer(mixer, feed, normed=True), final_logit_softcap=2.0)
    same_step(written(spec, kind, **cuts(width)))


@pytest.mark.parametrize("feed", MIXTURES)
def test_a_mixture_of_a_batch_computes_what_its_text_says(feed):
    spec = model(layer("one_kv_head", feed))
    same_step(written(spec, "tp_decode_batch", **cuts(7)))


@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_runs_as_its_text_says(stream):
    spec = model(replace(layer("biases"), **STREAMS[stream]), norm="layer", head_bias=True)
    same_step(written(spec, "tp_prefill", **cuts(3)))


@pytest.mark.parametrize(
    ("seed", "kind", "width"), [(300, "tp_decode_batch", 4), (301, "tp_prefill", 6)]
)
def test_random_layers_compute_what_their_text_says(seed, kind, width):
    same_step(written(random_spec(seed), kind, **cuts(width)))


PARTS = [
    ("sinks", "tp_decode_layer", {"tp": 3}),
    ("gated_delta", "tp_stacked_layer", {"tp": 5, "rows": "shared"}),
    ("latent", "tp_stacked_layer", {"tp": 2, "rows": "per_sequence"}),
    ("biases", "tp_forward", {"tp": 4, "vocabulary": True}),
    ("attention", "tp_prefill_head", {"tp": 7, "vocabulary": True}),
    ("attention", "tp_decode_batch_embed", {"tp": 3, "vocabulary": True}),
    ("output_gate", "tp_decode_step", {"tp": 1, "vocabulary": True}),
    ("gated_delta", "decode_step", {}),
]


@pytest.mark.parametrize(("mixer", "kind", "args"), PARTS, ids=lambda part: str(part))
def test_a_part_of_a_step_computes_what_its_text_says(mixer, kind, args):
    same_step(written(model(layer(mixer, "shared_gated")), kind, **args))


def test_the_plain_paths_compute_the_same():
    spec = model(layer("sinks", "biased_oai"), layer("gated_delta_sigmoid"))
    same_step(written(spec, "tp_decode_batch", **cuts(3)), kernels="reference")


# --- Rows that are not there

POISON = np.float32("nan")


def poisoned(program, lengths):
    """Full states, but for the rows of caches that nobody has written yet."""
    before = {}
    for name, value in states(program).items():
        before[name] = value.copy()
        if name.base in ("Kc", "Vc"):
            before[name][lengths.get(name.sequence, 0) :] = POISON
    return before


@pytest.mark.parametrize(
    ("mixer", "feed", "kind"),
    [
        ("sliding_window", "softmax", "tp_prefill_logits"),
        ("gated_delta", "silu", "tp_prefill"),
        ("latent", "gelu", "tp_prefill_logits"),
    ],
)
def test_a_chunk_may_have_fewer_rows_than_it_is_compiled_for(mixer, feed, kind):
    spec, real, start = model(layer(mixer, feed)), 4, 3
    text = written(spec, kind, toks=[1, 2, 3, 4], pos0=start, **cuts(3))
    two = written(spec, kind, toks=[1, 2], pos0=start, **cuts(3))
    made = lowering(text, rolled=stretch(roll(two), 8))
    before = poisoned(text, {None: start - 1})
    wanted = outcome(text, before)
    tokens = jnp.asarray([[1, 2, 3, 4, 36, 0, 9, 9]], jnp.int32)
    inputs = {"toks": tokens, "pos": jnp.int32(start), "count": jnp.int32(real)}
    out, after = stepped(made, made.weights(padding=HUGE), before, inputs)
    name = "blogits" if kind == "tp_prefill_logits" else "logits"
    close(out[name][:real], wanted[Name(name)])
    same_states(text, after, wanted)
    assert np.isfinite(np.asarray(out[name])).all()


def test_a_chunk_may_end_past_the_context_it_does_not_fill():
    spec = model(layer("attention"))
    text = written(spec, "tp_prefill", toks=[1, 2], pos0=11, **cuts(2))
    made = lowering(text, rolled=stretch(roll(text), 8))
    before = poisoned(text, {None: 10})
    wanted = outcome(text, before)
    tokens = jnp.asarray([[1, 2, 9, 9, 9, 9, 9, 9]], jnp.int32)
    inputs = {"toks": tokens, "pos": jnp.int32(11), "count": jnp.int32(2)}
    out, after = stepped(made, made.weights(), before, inputs)
    close(out["logits"], wanted[Name("logits")])
    same_states(text, after, wanted)


@pytest.mark.parametrize("mixer", ["chunked_window", "gated_delta"])
def test_a_sequence_of_nonsense_leaves_the_others_alone(mixer):
    spec = model(layer(mixer, "softmax"))
    text = written(spec, "tp_decode_batch", seqs=[[5, 4], [6, 1], [2, 7], [1, 9]], **cuts(3))
    made = lowering(text)
    before = poisoned(text, {0: 3, 1: 0, 2: 6, 3: 8})
    clean = outcome(text, before)
    for name in before:
        if name.sequence == 3:
            before[name] = np.full_like(before[name], POISON)
    out, after = stepped(made, made.weights(), before, made.inputs())
    close(out["blogits"][:3], clean[Name("blogits")][:3])
    same_states(text, {n: v for n, v in after.items() if n.sequence != 3}, clean)


# --- What cannot be lowered


def test_a_join_of_anything_but_the_columns_of_a_weight_is_refused():
    lines = ["Let x be a 1 by 2 tensor of Real."]
    lines += [f"Let z_c{chip} be x scaled by 3.0." for chip in (0, 1)]
    lines += ["Let z be z_c0 joined with z_c1.", "Let y be z scaled by 2.0.", ""]
    names = tuple(Name("z", chip=chip) for chip in (0, 1))
    joined = TpCollective(out=Name("z"), partials=names, steps=(Name("z"),), kind="join")
    placed = tuple(Placed(name=name, chip=name.chip) for name in names)
    manifest = TpManifest(chips=2, placed=placed, collectives=(joined,))
    statements = read_program("\n".join(["## Main", *lines]))
    with pytest.raises(ProgramError, match=r"the join of z_c\{c\} across 2 chips.*a product with"):
        lowering(Program(statements=statements, manifest=manifest))


def test_a_path_that_there_is_not_is_refused_by_name():
    made = lowering(written(model(layer("attention")), "decode_step"), kernels="fastest")
    with pytest.raises(ValueError, match="has no path 'fastest'"):
        stepped(made, made.weights(), states(made.program), made.inputs())
