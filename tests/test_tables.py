"""The tables of the host against formulas written out a number at a time, and numbers by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from author.families.config import Config, ConfigError
from author.families.model import Linear, Llama3, LongRope, Rotation, Yarn
from author.families.rope import numbered, rotation, rotations_by_type
from author.names import Name
from author.spec import Temperature
from tests.tiny import PLAIN, layer, model
from tp.tables import frequencies, host_table

SPEC = model(layer("qk_norm"))
PLAIN_TURN = Rotation(dims=8, theta=100.0)


def read(width=8, **keys):
    """The rotation of a config of these keys, which must have no others."""
    config = Config({"max_position_embeddings": 64, **keys}, "config.json")
    config.get("max_position_embeddings")
    found = rotation(config, width)
    config.done()
    return found


def table(name, rows, cols, *rotations, **words):
    return host_table(Name.of(name), (rows, cols), spec=SPEC, rotations=rotations, **words)


# --- What a program declares


def test_a_cached_table_has_a_row_a_position_and_the_other_that_of_one():
    cosines = table("cosc0", 5, 4, PLAIN_TURN)
    for position in range(1, 6):
        one = table("cos0", 1, 4, PLAIN_TURN, position=position)
        np.testing.assert_array_equal(one[0], cosines[position - 1])
    np.testing.assert_array_equal(cosines[0], np.ones(4, np.float32))


def test_sines_and_cosines_of_a_pair_by_hand():
    turn = Rotation(dims=4, theta=10000.0)  # frequencies 1 and 0.01
    wanted = [[math.sin(2 * 1), math.sin(2 * 0.01)]]
    np.testing.assert_allclose(table("sinc0", 3, 2, turn)[2:], wanted, rtol=1e-7)
    assert table("cosc0", 3, 2, turn).dtype == np.float32


def test_each_number_is_a_rotation():
    turns = (PLAIN_TURN, Rotation(dims=4, theta=50.0))
    np.testing.assert_array_equal(
        table("cosc1", 3, 2, *turns), table("cosc0", 3, 2, Rotation(dims=4, theta=50.0))
    )


def test_the_attention_factor_stretches_cosines_and_sines():
    stretched = replace(PLAIN_TURN, attention=1.5)
    for base in ("cosc0", "sinc0"):
        wanted = 1.5 * table(base, 6, 4, PLAIN_TURN).astype(np.float64)
        np.testing.assert_allclose(table(base, 6, 4, stretched), wanted, rtol=2e-7)


@pytest.mark.parametrize("offset", [0, 1])
def test_queries_are_tempered_by_steps_of_their_position(offset):
    heat = Temperature(floor=4.0, scale=0.5, offset=offset)
    spec = model(replace(layer("qk_norm"), mixer=replace(PLAIN, temperature=heat)))
    half = PLAIN.head_dim // 2
    found = host_table(Name.of(f"tcosc{half}"), (12, half), spec=spec, rotations=())
    wanted = [1 + 0.5 * math.log(1 + math.floor((p + offset) / 4)) for p in range(12)]
    np.testing.assert_allclose(found, np.repeat(np.array(wanted)[:, None], half, 1), rtol=1e-6)
    sines = host_table(Name.of(f"tsinc{half}"), (12, half), spec=spec, rotations=())
    assert not sines.any()


# --- Frequencies


def plain(n, theta):
    return [theta ** (-2 * i / n) for i in range(n // 2)]


def test_linear_divides_every_frequency():
    found = frequencies(Rotation(dims=8, theta=100.0, scaling=Linear(factor=4.0)))
    np.testing.assert_allclose(found, [f / 4 for f in plain(8, 100.0)], rtol=1e-14)


def test_divisors_of_a_file_take_the_place_of_a_scaling():
    found = frequencies(PLAIN_TURN, np.array([1.0, 2.0, 4.0, 8.0]))
    wanted = [f / d for f, d in zip(plain(8, 100.0), (1, 2, 4, 8), strict=True)]
    np.testing.assert_allclose(found, wanted, rtol=1e-14)


def by_wavelength(f, *, factor, low, high, length):
    wave = 2 * math.pi / f
    if wave < length / high:
        return f
    if wave > length / low:
        return f / factor
    s = (length / wave - low) / (high - low)
    return (1 - s) * f / factor + s * f


@pytest.mark.parametrize("length", [16, 64, 8192])
def test_llama3_keeps_short_waves_and_stretches_long_ones(length):
    scaling = Llama3(factor=8.0, low=1.0, high=4.0, original=float(length))
    found = frequencies(Rotation(dims=32, theta=10000.0, scaling=scaling))
    wanted = [
        by_wavelength(f, factor=8.0, low=1.0, high=4.0, length=length) for f in plain(32, 10000.0)
    ]
    np.testing.assert_allclose(found, wanted, rtol=1e-13)


def test_yarn_by_hand():
    # c(1) = 24 ln(16 / 2 pi) / (2 ln 200) = 2.12 and c(0.1) = 7.33: a ramp from pair 2 to 8.
    scaling = Yarn(factor=8.0, original=16.0, beta_fast=1.0, beta_slow=0.1)
    found = frequencies(Rotation(dims=24, theta=200.0, scaling=scaling))
    shares = found / np.array(plain(24, 200.0))
    kept = [1, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0, 0, 0, 0]
    np.testing.assert_allclose(shares, [k + (1 - k) / 8 for k in kept], rtol=1e-12)


def test_yarn_without_truncation_by_hand():
    scaling = Yarn(factor=8.0, original=16.0, beta_fast=1.0, beta_slow=0.1, truncate=False)
    found = frequencies(Rotation(dims=24, theta=200.0, scaling=scaling))
    low, high = (24 * math.log(16 / (2 * math.pi * r)) / (2 * math.log(200)) for r in (1, 0.1))
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(12)]
    wanted = [f * (r / 8 + 1 - r) for f, r in zip(plain(24, 200.0), ramp, strict=True)]
    np.testing.assert_allclose(found, wanted, rtol=1e-13)


def test_yarn_ends_its_ramp_at_n_less_one_and_keeps_equal_ends_apart():
    wide = Yarn(factor=4.0, original=700.0)  # c(32) = 2.17 and c(1) = 8.19: from pair 2 to 7
    found = frequencies(Rotation(dims=8, theta=10.0, scaling=wide))
    wanted = [f * s for f, s in zip(plain(8, 10.0), (1, 1, 1, 0.8 + 0.2 / 4), strict=True)]
    np.testing.assert_allclose(found, wanted, rtol=1e-14)
    # Both ends are 8 ln(16 / 2 pi) / (2 ln 10) = 1.62.
    steep = Yarn(factor=4.0, original=16.0, beta_fast=1.0, beta_slow=1.0, truncate=False)
    found = frequencies(Rotation(dims=8, theta=10.0, scaling=steep))
    wanted = [f * s for f, s in zip(plain(8, 10.0), (1, 1, 1 / 4, 1 / 4), strict=True)]
    np.testing.assert_allclose(found, wanted, rtol=1e-14)


def test_longrope_has_factors_for_short_sequences_and_for_long_ones():
    scaling = LongRope(short=(1.0, 1.5), long=(2.0, 8.0), original=32)
    turn = Rotation(dims=4, theta=100.0, scaling=scaling)
    np.testing.assert_allclose(frequencies(turn), [1.0, 0.1 / 1.5], rtol=1e-14)
    np.testing.assert_allclose(frequencies(turn, long=True), [0.5, 0.1 / 8], rtol=1e-14)
    assert not np.array_equal(table("cosc0", 4, 2, turn), table("cosc0", 4, 2, turn, long=True))


def test_dynamic_with_alpha_raises_the_base():
    found = read(rope_theta=100.0, rope_scaling={"type": "dynamic", "alpha": 16.0, "factor": 1.0})
    base = 100.0 * 16 ** (8 / 6)
    assert found.scaling is None
    np.testing.assert_allclose(frequencies(found), plain(8, base), rtol=1e-13)


# --- What a config says of them


M8 = 0.1 * math.log(8) + 1


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, M8),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, (0.0707 * math.log(8) + 1) / M8),
        ({"mscale": 2.0}, M8),
        ({"mscale": 2.0, "mscale_all_dim": 0.0}, M8),
        ({"mscale": 2.0, "mscale_all_dim": 1.0, "attention_factor": 1.2}, 1.2),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_the_attention_factor_of_yarn(said, wanted):
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, **said}
    assert read(rope_theta=100.0, rope_scaling=scaling).attention == pytest.approx(wanted, 1e-14)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, math.sqrt(1 + math.log(4) / math.log(16))),  # 64 positions, 16 at first
        ({"factor": 2.0}, math.sqrt(1 + math.log(2) / math.log(16))),
        ({"factor": 1.0}, 1.0),
        ({"attention_factor": 1.3}, 1.3),
    ],
)
def test_the_attention_factor_of_longrope(said, wanted):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    found = read(
        rope_theta=100.0,
        original_max_position_embeddings=16,
        rope_scaling={"type": "longrope", **factors, **said},
    )
    assert found.attention == pytest.approx(wanted, 1e-14)
    assert found.scaling == LongRope(short=(1.0,) * 4, long=(2.0,) * 4, original=16)


THETAS = {
    "top": {"rope_theta": 5e5},
    "nested": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    "both": {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}},
    "old": {"rope_theta": 5e5, "rope_scaling": None},
}


@pytest.mark.parametrize("keys", THETAS.values(), ids=THETAS)
def test_the_base_is_found_wherever_a_config_has_it(keys):
    assert read(**keys) == Rotation(dims=8, theta=5e5)


REFUSED = {
    "two bases": ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta is"),
    "two factors": (
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 4.0},
        },
        "differ in factor",
    ),
    "two parts": (
        {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
        "partial_rotary_factor is 0.5 at the top and 0.25",
    ),
    "two widths": ({"partial_rotary_factor": 0.5, "rotary_dim": 2}, "rotary_dim is 2"),
    "an odd width": ({"rotary_dim": 3}, "3 of 8 entries of a head turn"),
    "no such type": ({"rope_scaling": {"type": "spiral"}}, "'spiral' is not supported"),
    "an unknown key": ({"rope_parameters": {"rope_type": "default", "tilt": 1}}, "of tilt"),
    "no alpha": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "wants a number alpha"),
    "too few factors": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}},
        "wants 4 numbers short_factor",
    ),
}


@pytest.mark.parametrize(("keys", "said"), REFUSED.values(), ids=REFUSED)
def test_a_rotation_that_contradicts_itself_is_refused(keys, said):
    with pytest.raises(ConfigError, match=said):
        read(**keys)


def test_part_of_a_head_turns():
    assert read(partial_rotary_factor=0.5).dims == 4
    assert read(rope_parameters={"partial_rotary_factor": 0.25}).dims == 2
    assert read(rotary_dim=6).dims == 6


def test_layer_types_have_rotations_of_their_own():
    by_type = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100.0},
        "sliding_attention": {"rope_type": "default"},
    }
    config = Config({"rope_parameters": by_type}, "config.json")
    found = rotations_by_type(config, 8, {"full_attention": 1e6, "sliding_attention": 1e4})
    config.done()
    assert found == {
        "full_attention": Rotation(dims=8, theta=100.0, scaling=Linear(factor=8.0)),
        "sliding_attention": Rotation(dims=8, theta=1e4),
    }


def test_rotations_alike_but_for_their_scaling_are_told_apart():
    scaled = replace(PLAIN_TURN, scaling=Linear(factor=8.0))
    ropes, distinct = numbered([scaled, None, PLAIN_TURN, scaled])
    assert distinct == (scaled, PLAIN_TURN)
    assert ropes[1] is None
    assert [r.variant for r in ropes if r is not None] == [0, 1, 0]
