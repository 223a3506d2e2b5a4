"""The compiled operations on rows, each a chain of its own, against float64."""

from pathlib import Path

import jax
import numpy as np
import pytest

from kernels.native.chain import INEXACT
from kernels.native.library import why_not
from kernels.native.packed import Packed, packed, packs, unpacked
from kernels.q8 import dequantise, quantise
from kernels.table import pack
from tests import oracle
from tests.kernel_cases import normal, on_device
from tests.native_cases import hold, needs_native, ran, slack, threads, weight

# --- Tiles


@pytest.mark.parametrize(("outputs", "n"), [(1, 1), (32, 32), (33, 31), (70, 100), (5, 64)])
def test_a_weight_in_tiles_has_its_values_still(outputs, n):
    tiles, values = weight(outputs, n)
    assert tiles.tiles.shape == (-(-outputs // 32), -(-n // 32), 1088)
    assert tiles.shape == (outputs, n)
    assert np.array_equal(unpacked(on_device(tiles)), values)


def test_finer_blocks_and_experts_have_no_tiles():
    q = quantise(normal(4, 64))
    assert packs(q)
    assert not packs(q.refine(8))
    assert not packs(quantise(normal(2, 4, 64)))


def test_where_nothing_was_compiled_the_reason_is_told(tmp_path: Path):
    assert "they were not compiled; installing anyfold with a C++" in str(why_not(tmp_path))
    (tmp_path / "failed.txt").write_text("no g++\n")
    other = tmp_path / "other"
    other.mkdir()
    (other / "failed.txt").write_text("no g++\n")
    assert "no g++" in str(why_not(other))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "handlers.so").write_text("not a library")
    assert "invalid ELF" in str(why_not(broken)) or "installing anyfold again" in str(
        why_not(broken)
    )


@needs_native
def test_a_weight_is_packed_for_the_path_that_reads_it():
    q = quantise(normal(4, 40))
    assert isinstance(pack(q, "cpu"), Packed)
    assert isinstance(pack(q, "cpu", "native"), Packed)
    assert isinstance(pack(q, "cpu", "xla"), np.ndarray)
    assert isinstance(pack(q, "cpu", tiled=False), np.ndarray)
    assert isinstance(pack(q.refine(8), "cpu"), np.ndarray)
    assert isinstance(pack(on_device(q), "cpu").tiles, jax.Array)


# --- Products

exactly = pytest.mark.parametrize("inexact", [1, INEXACT], ids=["16 bits", "24 bits"])


@needs_native
@exactly
@pytest.mark.parametrize(("outputs", "n"), [(1, 7), (32, 32), (33, 100), (100, 33), (576, 1536)])
def test_matmul(outputs, n, inexact):
    tiles, values = weight(outputs, n)
    for rows in (1, 2, 7) if n > 100 else (1, 3, 4, 5, 6, 7, 13, 70):
        x = normal(rows, n)
        wanted = oracle.matmul(x, values.T)
        hold(ran("matmul", (x, tiles), inexact=inexact), wanted, slack(x, values, inexact=inexact))


@needs_native
def test_matmul_of_many_rows():
    tiles, values = weight(33, 100)
    for rows in (INEXACT - 1, INEXACT, 600):
        x = normal(rows, 100)
        hold(ran("matmul", (x, tiles)), oracle.matmul(x, values.T), slack(x, values))


@needs_native
@exactly
def test_matmul_of_zeros_and_of_unlike_magnitudes(inexact):
    tiles, values = weight(40, 96)
    x = normal(9, 96)
    x[0] = 0
    x[1, :32] *= 1e-20
    x[2, 32:64] *= 1e20
    x[5, 70] = 1e4
    wanted = oracle.matmul(x, values.T)
    hold(ran("matmul", (x, tiles), inexact=inexact), wanted, slack(x, values, inexact=inexact))


@needs_native
@pytest.mark.parametrize("rows", [1, 4, 5, 20])
def test_beside_a_large_activation_small_ones_keep_their_digits(rows):
    """As the first token of a text has one; that it is there is enough, however many the rows."""
    w, x = normal(33, 640), normal(rows, 640)
    w[:, 5], x[::2, 5] = 0, 4096
    q = quantise(w)
    values = np.asarray(dequantise(q))
    wanted = oracle.matmul(x, values.T)
    hold(ran("matmul", (x, packed(q))), wanted, slack(x, values))
    hold(ran("matmul", (x, packed(q)), inexact=1), wanted, slack(x, values, inexact=1))


@needs_native
@exactly
@pytest.mark.parametrize("lost", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [slice(3, 4), slice(32, 64), slice(99, 100)], ids=str)
def test_what_is_not_finite_is_not_lost_in_a_product(lost, at, inexact):
    tiles, values = weight(33, 100)
    x = normal(7, 100)
    x[2, at] = lost
    for level, found in ran("matmul", (x, tiles), inexact=inexact).items():
        assert np.isnan(found[2]).all(), level
        others = [0, 1, 3, 4, 5, 6]
        hold({level: found[others]}, oracle.matmul(x[others], values.T), 1e-3)


@needs_native
def test_threads_share_a_product_and_its_rows():
    tiles, values = weight(1030, 515)
    with threads(3):
        for rows, inexact in ((1, INEXACT), (5, INEXACT), (70, 1)):
            x = normal(rows, 515)
            wanted, most = oracle.matmul(x, values.T), slack(x, values, inexact=inexact)
            for _ in range(4):
                hold(ran("matmul", (x, tiles), inexact=inexact), wanted, most)


@needs_native
@pytest.mark.parametrize("first", [None, 0, 10])
def test_embedding(first):
    tiles, values = weight(70, 37)
    ids = np.array([0, 69, 33, 70, 9, 79, 80, 10] if first else [0, 69, 33])
    for tokens in (ids, ids[None]):
        found = ran("embedding", (tokens, tiles), {"first": first}, rows=len(ids))
        hold(found, oracle.rows(ids, values, first=first), 0)


# --- Elementwise

SIZES = [(1, 1), (1, 576), (3, 37), (600, 19)]
sizes = pytest.mark.parametrize(("rows", "cols"), SIZES)


@needs_native
@sizes
def test_functions_of_one_matrix(rows, cols):
    x = 4 * normal(rows, cols)
    x[:, 0] = -x[:, 0] * 1000  # beyond what exp can hold
    for operation, words in [
        ("silu", {}),
        ("sigmoid", {}),
        ("gelu", {}),
        ("scaled", {"factor": -0.37}),
        ("capped", {"cap": 3.5}),
    ]:
        wanted = getattr(oracle, operation)(x, **words)
        hold(ran(operation, (x,), words), wanted, 1e-6)


@needs_native
@sizes
@pytest.mark.parametrize("operation", ["plus", "hadamard", "swiglu"])
def test_functions_of_two_matrices(operation, rows, cols):
    a, b = 3 * normal(rows, cols), normal(rows, cols, seed=1)
    a[:, 0] *= 100
    for one, two in ((a, b), (a, b[:1]), (a[:1], b)):
        wanted = getattr(oracle, operation)(one, two)
        hold(ran(operation, (one, two), rows=rows), wanted, 1e-6)


# --- Norms and rotation


@needs_native
@sizes
def test_rms_norm(rows, cols):
    x, w = 3 * normal(rows, cols), normal(1, cols, seed=2)
    x[0] *= 1e-4
    for words in ({}, {"epsilon": 0.5}, {"heads": rows}):
        hold(ran("rms_norm", (x, w), words), oracle.rms_norm(x, w, **words), 1e-6)


@needs_native
@pytest.mark.parametrize(("rows", "heads", "width"), [(1, 3, 17), (6, 5, 12), (70, 2, 64)])
def test_rms_norm_by_heads(rows, heads, width):
    x, w = normal(rows, heads * width), normal(1, width)
    words = {"heads": rows * heads}
    hold(ran("rms_norm", (x, w), words), oracle.rms_norm(x, w, **words), 1e-6)


@needs_native
@pytest.mark.parametrize(("heads", "width", "half"), [(1, 2, 1), (9, 64, 32), (3, 21, 7)])
def test_rope(heads, width, half):
    cos, sin = normal(80, half), normal(80, half, seed=1)
    for rows, position in ((1, 1), (1, 80), (7, 3), (70, 2)):
        x, words = normal(rows, heads * width), {"heads": heads, "position": position}
        hold(ran("rope", (x, cos, sin), words), oracle.rope(x, cos, sin, **words), 1e-6)
    x = normal(1, heads * width)
    wanted = oracle.rope(x, cos[:1], sin[:1], heads=heads)
    hold(ran("rope", (x, cos[:1], sin[:1]), {"heads": heads}), wanted, 1e-6)


@needs_native
def test_rope_past_the_end_of_its_tables_takes_the_last_row():
    x, cos, sin = normal(3, 12), normal(5, 2), normal(5, 2, seed=1)
    found = ran("rope", (x, cos, sin), {"heads": 3, "position": 4})
    last = [
        oracle.rope(x[i : i + 1], cos, sin, heads=3, position=p) for i, p in enumerate((4, 5, 5))
    ]
    hold(found, np.concatenate(last), 1e-6)


# --- Rows that are not real, and batches


def rowwise(operation):
    """The arrays beside the rows `[n, 40]`, the keywords, and the oracle's function of the rows."""
    tiles, values = weight(33, 40)
    w = normal(1, 8)
    return {
        "matmul": ((tiles,), {}, lambda x: oracle.matmul(x, values.T)),
        "rms_norm": ((w,), {"heads": 35}, lambda x: oracle.rms_norm(x, w, heads=5 * len(x))),
        "silu": ((), {}, oracle.silu),
        "capped": ((), {"cap": 2.0}, lambda x: oracle.capped(x, cap=2.0)),
        "plus": ((normal(1, 40),), {}, lambda x: oracle.plus(x, normal(1, 40))),
    }[operation]


ROWWISE = ("matmul", "rms_norm", "silu", "capped", "plus")


@needs_native
@pytest.mark.parametrize("operation", ROWWISE)
def test_rows_that_are_not_real_are_zeros(operation):
    others, words, meant = rowwise(operation)
    for count in (0, 1, 5, 7):
        x, wanted = normal(7, 40), np.zeros((7, 33 if operation == "matmul" else 40))
        x[count:] = np.nan
        if count > 0:
            wanted[:count] = meant(x[:count])
        hold(ran(operation, (x, *others), words, count=count), wanted, 1e-4)


@needs_native
@pytest.mark.parametrize("operation", ROWWISE)
def test_a_batch_has_a_sequence_a_row(operation):
    others, words, meant = rowwise(operation)
    for sequences in (1, 2, 7):
        x = normal(sequences, 40)
        found = ran(operation, (x[:, None], *others), words, rows=1)
        hold(found, meant(x)[:, None], 1e-4)


@needs_native
def test_each_sequence_turns_at_its_own_position_and_from_its_own_table():
    x, positions = normal(4, 1, 15), np.array([1, 20, 7, 3])
    cos, sin = normal(4, 20, 2), normal(4, 20, 2, seed=1)
    for tables in ((cos, sin), (cos[0], sin[0])):
        found = ran("rope", (x, *tables), {"heads": 3, "position": positions}, rows=1)
        each = [[t if t.ndim == 2 else t[i] for t in tables] for i in range(4)]
        wanted = [
            oracle.rope(x[i], *each[i], heads=3, position=int(p)) for i, p in enumerate(positions)
        ]
        hold(found, np.stack(wanted), 1e-6)


@needs_native
def test_sequences_that_all_stand_at_one_position():
    x, cos, sin = normal(3, 1, 15), normal(20, 2), normal(20, 2, seed=1)
    words = {"heads": 3, "position": 7}
    wanted = np.stack([oracle.rope(one, cos, sin, **words) for one in x])
    hold(ran("rope", (x, cos, sin), words, rows=1), wanted, 1e-6)
