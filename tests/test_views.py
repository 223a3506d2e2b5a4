"""Parts and orders of stored matrices, read through views: whole, and put back together from chips.

What a view selects is spelled out with reshapes and transposes of the whole tensor.
"""

from dataclasses import replace

import numpy as np
import pytest

from author.families.model import Model, Order, Rotation, View, half_split, of_each, part, tiled
from author.names import Name
from kernels.q8 import dequantise
from tests.making_safetensors import make_directory
from tests.tiny import layer, model
from tp.checkpoint import CheckpointError, open_checkpoint
from tp.fitting import check_tensors
from tp.launch import devices
from tp.loader import load
from tp.operands import Layout, Operand
from tp.views import read_floats, read_q8, shape_of

RNG = np.random.default_rng(5)


def exact(*shape):
    """Numbers that q8 gives back, in blocks of 32 along either of the last two axes."""
    n = RNG.integers(-127, 128, shape).astype(np.float32)
    n[..., ::8, :] = 127
    n[..., :, ::8] = -127
    return n * np.float32(2**-6)


TENSORS = {
    "heads": exact(6 * 8, 96),  # 6 heads of 8
    "experts": exact(3, 20, 64),  # [E, out, in]
    "inputs_first": exact(3, 64, 20),  # [E, in, out]
    "column": RNG.normal(size=48).astype(np.float32),
    "rows": RNG.normal(size=(3, 20)).astype(np.float32),
    "taps": RNG.normal(size=(48, 1, 4)).astype(np.float32),
    "rates": RNG.normal(size=(1, 1, 6, 1)).astype(np.float32),
}
H, X, I, C = (TENSORS[name] for name in ("heads", "experts", "inputs_first", "column"))

# name: (view, the matrix that it is, outputs first)
VIEWS = {
    "all of it": (View(tensor="heads"), H),
    "a range": (View(tensor="heads", rows=part(8, 16)), H[8:24]),
    "pairs side by side": (
        View(tensor="heads", rows=half_split(6, 8, 8)),
        H.reshape(6, 4, 2, 96).transpose(0, 2, 1, 3).reshape(48, 96),
    ),
    "pairs in the first half of a head": (
        View(tensor="heads", rows=half_split(6, 8, 4)),
        np.concatenate(
            [H.reshape(6, 8, 96)[:, [0, 2, 1, 3]], H.reshape(6, 8, 96)[:, 4:]], axis=1
        ).reshape(48, 96),
    ),
    "pairs in the second half of a head": (
        View(tensor="heads", rows=half_split(6, 8, 4, first=4)),
        H.reshape(6, 8, 96)[:, [0, 1, 2, 3, 4, 6, 5, 7]].reshape(48, 96),
    ),
    "pairs of heads that stand apart": (
        View(tensor="heads", rows=half_split(3, 8, 8, start=8, stride=16)),
        H.reshape(3, 2, 4, 2, 96)[:, 1].transpose(0, 2, 1, 3).reshape(24, 96),
    ),
    "the gate of each head": (
        View(tensor="heads", rows=of_each(3, 16, (8, 8, 1))),
        H.reshape(3, 2, 8, 96)[:, 1].reshape(24, 96),
    ),
    "value heads tiled": (
        View(tensor="heads", rows=tiled(2, 3, 8)),
        H.reshape(2, 3, 8, 96).transpose(1, 0, 2, 3).reshape(48, 96),
    ),
    "value heads tiled, in blocks with more": (
        View(tensor="heads", rows=tiled(2, 2, 8, start=8, stride=24)),
        H.reshape(2, 3, 8, 96)[:, 1:].transpose(1, 0, 2, 3).reshape(32, 96),
    ),
    "inputs by tiled heads": (
        View(tensor="heads", cols=tiled(4, 3, 8)),
        H.reshape(48, 4, 3, 8).transpose(0, 2, 1, 3).reshape(48, 96),
    ),
    "the first rows of every expert": (
        View(tensor="experts", rows=of_each(3, 20, (0, 10, 1))),
        X[:, :10].reshape(30, 64),
    ),
    "alternate columns of experts with inputs first": (
        View(tensor="inputs_first", turned=64, rows=of_each(3, 20, (1, 10, 2))),
        I[:, :, 1::2].transpose(0, 2, 1).reshape(30, 64),
    ),
    "a tensor turned, and some inputs": (
        View(tensor="inputs_first", turned=64, cols=part(32, 32)),
        I.transpose(0, 2, 1).reshape(60, 64)[:, 32:],
    ),
    "a head's rows as inputs": (
        View(tensor="heads", turned=8, cols=part(0, 4)),
        H.reshape(6, 8, 96).transpose(0, 2, 1).reshape(576, 8)[:, :4],
    ),
}
FLOATS = {
    "a vector": (View(tensor="column"), C[:, None]),
    "one more": (View(tensor="column", plus=1.0), 1 + C[:, None]),
    "pairs of a vector": (
        View(tensor="column", rows=half_split(6, 8, 8)),
        C.reshape(6, 4, 2).transpose(0, 2, 1).reshape(48, 1),
    ),
    "a softplus": (
        View(tensor="column", function="softplus", plus=0.5),
        0.5 + np.log1p(np.exp(C.astype(np.float64)))[:, None],
    ),
    "biases of experts": (
        View(tensor="rows", turned=3, rows=Order(runs=((0, 10, 2),))),
        TENSORS["rows"][:, ::2].T,
    ),
    "taps": (View(tensor="taps"), TENSORS["taps"][:, 0]),
    "rates": (View(tensor="rates"), TENSORS["rates"].reshape(6, 1)),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    arrays = {name: (array, "F32") for name, array in TENSORS.items()}
    return open_checkpoint(make_directory(tmp_path_factory.mktemp("views") / "c", arrays))


@pytest.mark.parametrize("name", VIEWS)
def test_a_quantised_view_is_its_part_of_the_tensor(checkpoint, name):
    view, wanted = VIEWS[name]
    assert shape_of(view, checkpoint.tensors[view.tensor]) == wanted.shape
    outputs, inputs = wanted.shape
    np.testing.assert_array_equal(dequantise(read_q8(checkpoint, [view], 0, outputs, None)), wanted)
    ranges = ((3, 5), (inputs - 4, 4)) if inputs > 8 else ((1, 2), (3, 1))
    some = dequantise(read_q8(checkpoint, [view], 5, 11, ranges))
    columns = [i for start, length in ranges for i in range(start, start + length)]
    np.testing.assert_array_equal(some, wanted[5:16, columns])


@pytest.mark.parametrize("name", [*VIEWS, *FLOATS])
def test_a_view_in_floats_is_its_part_of_the_tensor(checkpoint, name):
    view, wanted = {**VIEWS, **FLOATS}[name]
    outputs, inputs = wanted.shape
    found = read_floats(checkpoint, [view], 0, outputs, 0, inputs)
    np.testing.assert_allclose(found, wanted, rtol=1e-7)
    some = read_floats(checkpoint, [view], 2, outputs - 3, inputs // 2, inputs - inputs // 2)
    np.testing.assert_allclose(some, wanted[2:-1, inputs // 2 :], rtol=1e-7)


def test_views_follow_one_another(checkpoint):
    views = [View(tensor="heads", rows=part(40, 8)), View(tensor="heads", rows=part(0, 8))]
    found = dequantise(read_q8(checkpoint, views, 6, 5, None))
    np.testing.assert_array_equal(found, np.concatenate([H[46:48], H[0:3]]))


def test_a_slice_reads_no_more_than_it_needs(checkpoint):
    before = checkpoint.bytes_read
    view, _ = VIEWS["alternate columns of experts with inputs first"]
    read_q8(checkpoint, [view], 0, 5, ((32, 32),))
    assert checkpoint.bytes_read - before == 32 * 5 * 4  # inputs, outputs, bytes


# --- Put back together


def operand(shape, axis, widths, *, quantised, stored="plain"):
    """A matrix cut into runs of these widths."""
    starts = np.cumsum([0, *widths]).tolist()
    ranges = tuple(((start, n),) for start, n in zip(starts, widths, strict=False))
    return Operand(
        name=Name("W", 0),
        role="weight",
        whole=shape,
        layout=Layout(axis=axis, ranges=ranges, widths=(max(widths),)),
        quantised=quantised,
        stored=stored,
    )


def model_of(*views, **fields):
    """A model that is one matrix."""
    usual = {
        "family": "made up",
        "spec": model(layer("qk_norm")),
        "rotations": (Rotation(dims=6, theta=100.0),),
        "tied": False,
        "context": 8,
    }
    return Model(views={Name("W", 0): views} if views else {}, **usual, **fields)


def held(made, axis, model, path, chips=3, unit=1):
    """What the chips hold of a matrix, put back together without the padding.

    `unit` is how many of what the layout counts make one of what is stored.
    """
    checkpoint = open_checkpoint(path)
    weights, _ = load(model, {"W0": made}, checkpoint, devices(chips), kernels="xla")
    slices = np.split(np.asarray(weights["W0"]), chips, axis)
    lengths = [made.layout.held(chip) // unit for chip in range(chips)]
    kept = [np.take(s, range(n), axis) for s, n in zip(slices, lengths, strict=True)]
    return np.concatenate(kept, axis)


UNEVEN = {
    **{48: (32, 0, 16), 96: (64, 32, 0), 64: (32, 0, 32), 60: (20, 40, 0), 576: (96, 0, 480)},
    **{8: (5, 0, 3), 4: (2, 0, 2), 1: (1, 0, 0), 6: (1, 3, 2)},
}
WHOLE = {
    **{k: ((view,), w) for k, (view, w) in VIEWS.items() if w.size == TENSORS[view.tensor].size},
    "halves changed over": (
        (View(tensor="heads", rows=part(24, 24)), View(tensor="heads", rows=part(0, 24))),
        np.concatenate([H[24:], H[:24]]),
    ),
    "a tensor turned": (
        (View(tensor="inputs_first", turned=64),),
        I.swapaxes(1, 2).reshape(60, 64),
    ),
}


@pytest.mark.parametrize("axis", ["rows", "cols"])
@pytest.mark.parametrize("stored", ["plain", "turned"])
@pytest.mark.parametrize("name", WHOLE)
def test_the_slices_of_chips_make_up_the_whole(tmp_path, name, stored, axis):
    views, wanted = WHOLE[name]
    path = make_directory(tmp_path / "c", {views[0].tensor: (TENSORS[views[0].tensor], "F32")})
    shape = wanted.shape if stored == "plain" else wanted.shape[::-1]
    made = operand(shape, axis, UNEVEN[shape[axis == "cols"]], quantised=True, stored=stored)
    along = int((axis == "cols") != (stored == "turned"))
    np.testing.assert_array_equal(held(made, along, model_of(*views), path), wanted)


@pytest.mark.parametrize("name", ["a vector", "one more", "pairs of a vector", "taps", "rates"])
def test_the_slices_of_floats_make_up_the_whole(tmp_path, name):
    view, wanted = FLOATS[name]
    path = make_directory(tmp_path / "c", {view.tensor: (TENSORS[view.tensor], "F32")})
    made = operand(wanted.T.shape, "cols", UNEVEN[len(wanted)], quantised=False)
    np.testing.assert_array_equal(held(made, 1, model_of(view), path), wanted.T.astype(np.float32))


def test_a_matrix_turned_head_by_head_is_cut_by_heads(tmp_path):
    path = make_directory(tmp_path / "c", {"heads": (H, "F32")})
    # 6 heads of 96 inputs and 8 outputs.
    made = operand((576, 8), "rows", (96, 0, 480), quantised=True, stored="heads")
    model = model_of(View(tensor="heads"))
    found = held(replace(made, heads=6), 0, model, path, unit=96 // 8)
    np.testing.assert_array_equal(found, H)


def test_a_constant_is_cut_like_a_tensor(tmp_path):
    rows = ((1.0, 2.0, 3.0, 4.0, 5.0, 6.0), (0.0, 0.5, 0.25, 7.0, 8.0, 9.0))
    path = make_directory(tmp_path / "c", {})
    made = operand((2, 6), "cols", UNEVEN[6], quantised=False)
    found = held(made, 1, model_of(constants={Name("W", 0): rows}), path)
    np.testing.assert_array_equal(found, np.array(rows, np.float32))


# --- What does not fit


def refusal(tmp_path, tensors, model, shape=(48, 96), **fields):
    path = make_directory(tmp_path / "c", {name: (array, "F32") for name, array in tensors.items()})
    made = Operand(name=Name("W", 0), role="weight", whole=shape, quantised=True, **fields)
    with pytest.raises(CheckpointError) as caught:
        check_tensors(model, {"W0": made}, open_checkpoint(path))
    return str(caught.value)


REFUSED = {
    "missing": ((View(tensor="tails"),), "tails is missing"),
    "another shape": ((View(tensor="experts"),), "[3, 20, 64], wanted [48, 96]"),
    "rows that are not there": ((View(tensor="heads", rows=part(16, 48)),), "wanted 64 of its 48"),
    "no whole blocks": ((View(tensor="heads", turned=7),), "wanted blocks of 7 rows"),
    "nothing": ((), "W0 has no tensor"),
}


@pytest.mark.parametrize(("views", "said"), REFUSED.values(), ids=REFUSED)
def test_a_view_that_a_checkpoint_cannot_fill_is_refused(tmp_path, views, said):
    assert said in refusal(tmp_path, {"heads": H, "experts": X}, model_of(*views))


def test_a_tensor_of_which_something_is_left_is_refused(tmp_path):
    view = View(tensor="heads", rows=part(0, 40))
    said = refusal(tmp_path, {"heads": H}, model_of(view), shape=(40, 96))
    assert "heads is [48, 96], and the config asks for 3840 entries of it" in said


def test_a_number_that_is_not_the_program_s_is_refused(tmp_path):
    tensors = {"heads": H, "beta": np.array([0.75], np.float32)}
    model = model_of(View(tensor="heads"), numbers={"beta": 0.5})
    assert "beta holds [0.75], wanted 0.5" in refusal(tmp_path, tensors, model)


def test_what_is_skipped_has_a_reason_and_nothing_else_is_left_over(tmp_path):
    tensors = {"heads": H, "layers.4.x": C, "layers.3.x": C}
    skips = model_of(View(tensor="heads"), skipped={"layers.4.*": "of a layer past the last"})
    assert "layers.3.x belongs to nothing that a made up model" in refusal(tmp_path, tensors, skips)
