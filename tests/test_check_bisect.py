"""A fault put into a width is found: in its text, its weights or its execution, by statement."""

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from author.attention import AttentionBlock
from author.writer import Scope, by_cols, uncut
from kernels import table as kernels
from kernels.native import chain
from kernels.native.library import why_not
from tests.tiny import decoder, layer, model, placed, table, weight
from tp.check.bisect import Search
from tp.check.wholes import Wholes, whole_operands
from tp.engine import load_source
from tp.lower import CHIP
from tp.source import open_source

CHECKPOINTS = Path(__file__).parent / "checkpoints"
IDS = [3, 8, 1, 30, 5]
SPEC = model(layer("biases"), layer("biases"))  # four heads of six on two groups, biases
LIMIT = 1e-3


def made(chips, spec=SPEC, kernels="xla"):
    found = decoder(spec, chips, chunks=(4,))
    found.kernels = kernels
    return found


def whole(one):
    """Whole matrices as the decoder was given them, or should have been."""
    operands = {operand.name: operand for operand in one.operands.values()}

    def read(name):
        make = table if operands[name].role == "table" else weight
        return make(name, operands[name].whole).astype(np.float32)

    return read


def search(one):
    return Search(decoder=one, whole=whole(one), limit=LIMIT)


def first_fault(one, way="steps"):
    return search(one).first_fault(IDS, way, len(IDS))


def seen(fault):
    """What a person is told first."""
    return fault.of, str(fault.name), fault.chip, fault.layer


# --- The weights


def test_a_slice_that_is_off_by_one_is_named():
    one = made(2)
    operand = one.operands["Wq1"]
    _, (start, length) = (ranges[0] for ranges in operand.layout.ranges)
    ranges = (operand.layout.ranges[0], ((start - 1, length),))
    slipped = replace(operand, layout=replace(operand.layout, ranges=ranges))
    one.weights["Wq1"] = placed(slipped, weight(operand.name, operand.whole), one.devices.mesh)
    fault = first_fault(one, "prefill")
    assert seen(fault) == ("weights", "Wq1_c1", 1, 1)
    assert fault.statement == "Let Wq1_c1 be a 16 by 12 tensor of Real."
    assert fault.because == ("it is what stands 1 cols earlier in Wq1",)


# --- The execution


def test_a_missing_fold_is_named(monkeypatch):
    one = made(2)
    psum, turns = jax.lax.psum, cycle(range(5))  # x, then ao and dn of each layer

    def faulty(x, axis):
        if next(turns) != 3:
            return psum(x, axis)
        return jax.lax.all_gather(x, axis, to="invarying")[0]

    monkeypatch.setattr(jax.lax, "psum", faulty)
    fault = first_fault(one)
    assert seen(fault) == ("execution", "ao1_r", None, 1)
    assert fault.statement == "Let ao1_r be the fold of ao1_c0 across 2 chips."
    assert fault.because == ("it is ao1_c0 alone",)


def on_chip(chip, operation, word, change, monkeypatch):
    """Hand an operation another integer on one chip."""
    plain = kernels.call

    def faulty(name, platform, wanted, *arrays, **words):
        if name == operation:
            here = jax.lax.axis_index(CHIP) == chip
            words[word] = jnp.where(here, change(words[word]), words[word])
        return plain(name, platform, wanted, *arrays, **words)

    monkeypatch.setattr(kernels, "call", faulty)


def test_a_rotation_by_a_wrong_position_on_one_chip_is_named(monkeypatch):
    one = made(3)
    on_chip(2, "rope", "position", lambda position: position + 1, monkeypatch)
    fault = first_fault(one)
    assert seen(fault) == ("execution", "qp0_c2", 2, 0)
    assert fault.statement.startswith("Let qp0_c2 be rope of qr0_c2 with cos cosc0 and sin sinc0")
    assert (fault.position, fault.because) == (1, ())


def test_rows_that_go_into_a_wrong_place_of_a_cache_later_on_are_named(monkeypatch):
    one = made(2)
    beside = lambda row: jnp.where(row > 4, row + 1, row)  # noqa: E731
    on_chip(1, "set_rows", "row", beside, monkeypatch)
    fault = first_fault(one, "prefill")
    assert seen(fault) == ("execution", "Kc0_c1", 1, 0)
    assert fault.statement == "Set rows from pos_s0 of Kc0_c1 to bkp0_c1."
    # The caches count rows from 0: the fifth token's is the fifth.
    assert (fault.position, fault.row) == (5, 4)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_kernels_that_differ_are_told_from_the_split(monkeypatch):
    plain = chain.OPERATIONS["swiglu"]
    source = open_source(str(CHECKPOINTS / "smollm2"))
    one = load_source(source, chips=2, context=8).decoder
    read = Wholes(source=source, operands=whole_operands(source, 8))
    monkeypatch.setitem(chain.OPERATIONS, "swiglu", lambda chain, gate, up: plain(chain, up, gate))
    fault = Search(decoder=one, whole=read, limit=LIMIT).first_fault(IDS, "steps", 1)
    assert seen(fault) == ("execution", "hh0_c0", 0, 0)
    assert fault.statement == "Let hh0_c0 be swiglu of gt0_c0 and up0_c0."
    (said,) = fault.because
    assert said.startswith("by the native kernels; XLA's are off by")
    assert float(said.split()[-2]) < 1e-5


# --- The text


def test_a_bias_that_every_chip_adds_is_named(monkeypatch):
    project = Scope.project

    def faulty(self, base, x, weight, bias=None):
        added = uncut("Bo", 1, self.spec.d, "float") if base == "ao" else bias
        return project(self, base, x, weight, added)

    monkeypatch.setattr(AttentionBlock, "result_bias", None)
    monkeypatch.setattr(Scope, "project", faulty)
    fault = first_fault(made(2))
    assert seen(fault) == ("text", "ao0_c1", 1, 0)
    assert fault.statement == "Let ao0_c1 be ao0_c1_r plus Bo0."
    assert fault.because == ("ao0 is off by +1 times Bo0, added on chips 0, 1",)


def test_a_range_of_the_manifest_that_is_off_by_one_is_named(monkeypatch):
    def faulty(base, rows, cut, kind="q8"):
        if base == "Wq" and cut.ranges[0][0] > 0:
            cut = replace(cut, ranges=tuple((start - 1, n) for start, n in cut.ranges))
        return by_cols(base, rows, cut, kind)

    monkeypatch.setattr("author.attention.by_cols", faulty)
    fault = first_fault(made(2))
    # A bias of a column lower down is added, so that this is the first value to differ.
    assert seen(fault) == ("text", "qr0_c1", 1, 0)
    assert fault.statement == "Let qr0_c1 be qr0_c1_r plus Bq0_c1."
    assert fault.because == (
        "manifest: cols 23 of Wq0 are on no chip; wanted each on one",
        "manifest: cols 11 of Wq0 are on several chips; wanted each on one",
    )
