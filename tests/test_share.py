"""Shares: whatever the width, every head and every column is held, and by whom it should be."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from author.share import (
    Share,
    attention_heads,
    by_head,
    counts_keys,
    delta_heads,
    lone_heads,
    run_of,
    share,
    shares_keys,
)
from author.spec import Attention, GatedDelta

WIDTHS = range(1, 17)
HEADS = [(9, 3), (7, 7), (14, 2), (8, 1), (10, 5), (6, 3), (1, 1), (32, 8), (64, 4), (12, 12)]

ATTENTION = Attention(
    heads=1,
    kv_heads=1,
    head_dim=4,
    value_dim=4,
    rope=None,
    qk_norm=False,
    qk_norm_whole=False,
    qk_unit_norm=False,
    temperature=None,
    bias=False,
    output_bias=False,
    sinks=False,
    output_gate=False,
    fused_qkv=False,
    window=None,
    scale=0.5,
    softcap=None,
)


def spread(run):
    return range(run[0], run[0] + run[1])


def shares(width):
    return [Share(chip=chip, chips=width) for chip in range(width)]


@given(n=st.integers(0, 400), width=st.integers(1, 40), align=st.integers(1, 64))
def test_runs_cover_everything_once_and_in_order(n, width, align):
    runs = [run_of(n, width, chip, align) for chip in range(width)]
    assert [i for run in runs for i in spread(run)] == list(range(n))


@given(n=st.integers(1, 400), width=st.integers(1, 40), align=st.integers(1, 64))
def test_runs_are_cut_at_multiples_and_differ_by_one_unit(n, width, align):
    runs = [run_of(n, width, chip, align) for chip in range(width)]
    assert all(first % align == 0 for first, count in runs if count > 0)
    units = [ceil(count / align) for _, count in runs]
    assert max(units) - min(units) <= 1


def test_the_last_piece_may_be_short():
    assert [run_of(100, 3, chip, 32) for chip in range(3)] == [(0, 32), (32, 32), (64, 36)]
    assert [run_of(40, 4, chip, 32) for chip in range(4)] == [(0, 0), (0, 32), (32, 0), (32, 8)]


@given(units=st.integers(1, 24), parts=st.integers(1, 12), width=st.integers(1, 40))
def test_every_part_of_every_unit_is_held_once(units, parts, width):
    held = [
        (unit, part)
        for chip in range(width)
        for run, within in [share(units, parts, width, chip)]
        for unit in spread(run)
        for part in spread(within)
    ]
    assert sorted(held) == [(unit, part) for unit in range(units) for part in range(parts)]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_query_head_is_held_once_with_its_group(heads, kv_heads, width):
    a = replace(ATTENTION, heads=heads, kv_heads=kv_heads)
    held = []
    for part in shares(width):
        queries, groups = attention_heads(a, part)
        held += spread(queries)
        wanted = {head // (heads // kv_heads) for head in spread(queries)}
        assert set(spread(groups)) == wanted
        assert groups[1] == 0 or queries[1] % groups[1] == 0
    assert held == list(range(heads))


@pytest.mark.parametrize(("v_heads", "k_heads"), HEADS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_value_head_is_held_once_with_its_key_head(v_heads, k_heads, width):
    g = GatedDelta(k_heads=k_heads, v_heads=v_heads, head_dim=4, conv_taps=3, gate="silu")
    held = []
    for part in shares(width):
        keys, values = delta_heads(g, part)
        heads = [head for run in values for head in spread(run)]
        held += heads
        # Head j of a share reads its key head j mod G, as the whole reads j mod k_heads.
        read = [spread(keys)[j % keys[1]] for j in range(len(heads))]
        assert read == [head % k_heads for head in heads]
    assert sorted(held) == list(range(v_heads))


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_key_head_counts_on_one_chip_of_those_that_hold_it(heads, kv_heads, width):
    a = replace(ATTENTION, heads=heads, kv_heads=kv_heads)
    counted = [
        head
        for part in shares(width)
        for head in spread(attention_heads(a, part)[1])
        if counts_keys(a, part) or not shares_keys(a, part)
    ]
    assert counted == list(range(kv_heads))


@given(heads=st.integers(1, 40), width=st.integers(1, 16))
def test_every_lone_head_is_held_once(heads, width):
    runs = [lone_heads(heads, part) for part in shares(width)]
    assert [head for run in runs for head in spread(run)] == list(range(heads))


def test_the_whole_share_has_every_head():
    a = replace(ATTENTION, heads=9, kv_heads=3)
    assert attention_heads(a, Share()) == ((0, 9), (0, 3))


def test_heads_are_cut_by_their_width():
    cut = by_head(6, 4, (0, 1), (3, 2))
    assert (cut.total, cut.ranges, cut.held) == (24, ((0, 4), (12, 8)), 12)
