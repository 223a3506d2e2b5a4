"""The float64 meanings against numbers worked out by hand."""

import math

import numpy as np
import pytest

import author.statements  # noqa: F401  (declares the forms)
from author.forms import EXPRESSIONS
from tests import oracle

NAN = float("nan")


def near(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def snake(name):
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


@pytest.mark.parametrize("form", EXPRESSIONS)
def test_every_expression_has_its_meaning(form):
    names = {"RmsNorm": "rms_norm", "L2Norm": "l2_norm"}
    assert callable(getattr(oracle, names.get(form.__name__, snake(form.__name__))))


def test_rows_count_from_one_and_ids_from_zero():
    x = [[1, 2], [3, 4], [5, 6]]
    near(oracle.row(x, row=1), [[1, 2]])
    near(oracle.embedding_row(x, row=1), [[3, 4]])
    near(oracle.rows([[2, 0]], x), [[5, 6], [1, 2]])


def test_an_id_that_a_slice_does_not_hold_reads_as_zeros():
    x = [[1, 2], [3, 4]]  # ids 5 and 6
    near(oracle.rows([[4, 5, 6, 7]], x, first=5), [[0, 0], [1, 2], [3, 4], [0, 0]])


def test_set_rows_leaves_its_argument_alone_and_stops_at_count():
    k = np.zeros((4, 1))
    near(oracle.set_rows(k, [[7], [8], [9]], row=3, count=2), [[0], [0], [7], [8]])
    near(oracle.set_row(k, [[5]], row=4), [[0], [0], [0], [5]])
    near(k, np.zeros((4, 1)))


def test_block_diagonal_matmul():
    near(oracle.matmul([[1, 2, 3, 4]], [[1], [10], [100], [1000]], heads=2), [[21, 4300]])


def test_runs_and_joins():
    x = [[1, 2, 3, 4, 5, 6]]
    near(oracle.first(x, kept=1, run=3), [[1, 4]])
    near(oracle.last(x, kept=2, run=3), [[2, 3, 5, 6]])
    near(oracle.joined([[1, 2]], [[3, 4]]), [[1, 2, 3, 4]])
    near(oracle.joined([[1, 2]], [[3, 4]], heads=2), [[1, 3, 2, 4]])


def test_rope_turns_the_halves_and_passes_the_rest():
    cos, sin = [[1, 1], [0, 0.6]], [[0, 0], [1, 0.8]]
    x = [[1, 2, 3, 4, 9, 5, 6, 7, 8, 9]]  # two heads of 5, of which 4 turn
    turned = [[-3, 2 * 0.6 - 4 * 0.8, 1, 4 * 0.6 + 2 * 0.8, 9]]
    turned[0] += [-7, 6 * 0.6 - 8 * 0.8, 5, 8 * 0.6 + 6 * 0.8, 9]
    near(oracle.rope(x, cos, sin, heads=2, position=2), turned)
    near(oracle.rope(x, cos[:1], sin[:1], heads=2), x)


def test_row_j_of_a_rope_reads_table_row_position_plus_j():
    x = [[1, 0], [1, 0]]
    near(oracle.rope(x, [[9], [1], [0]], [[9], [0], [1]], heads=1, position=2), [[1, 0], [0, 1]])


def test_heads_of_a_norm_count_the_whole_matrix():
    x = [[3, 4, 0, 5], [6, 8, 1, 0]]
    found = oracle.l2_norm(x, heads=4, epsilon=0.0)
    near(found, [[0.6, 0.8, 0, 1], [0.6, 0.8, 1, 0]])
    normed = oracle.rms_norm([[3, 4]], [[2, 1]], epsilon=0.0)
    near(normed, [[6 / math.sqrt(12.5), 4 / math.sqrt(12.5)]])


def test_the_epsilon_of_a_norm_is_1e_minus_6():
    near(oracle.rms_norm([[1e-3]], [[1]]), [[1e-3 / math.sqrt(2e-6)]])
    near(oracle.l2_norm([[0.0, 1e-3]], heads=1), [[0, 1e-3 / math.sqrt(2e-6)]])


def test_elementwise_forms_at_a_point():
    near(oracle.silu([[2]]), [[2 * sigmoid(2)]])
    near(oracle.capped([[3]], cap=2.0), [[2 * math.tanh(1.5)]])
    near(oracle.gelu([[0, 1]]), [[0, 0.8411919906082768]])
    near(oracle.decay([[0]], [[0]], [[0]]), [[0.5]])
    near(oracle.sigmoid([[-1000, 1000]]), [[0, 1]])
    assert oracle.argmax([[1, 3, 3, 2]]) == 1


def test_clamped_columns_stay_within_both_ends():
    near(oracle.clamped([[-3, 0.5, 9]], low=-1.0, high=2.0), [[-1, 0.5, 2]])


def test_xielu_is_a_parabola_above_zero_and_an_exponential_below():
    words = {"beta": 0.5, "cut": -1.0}
    found = oracle.xielu([[2, 0, -0.5, -2]], [[2]], [[3]], **words)
    below = [3 * (math.exp(-1) - 1), 3 * (math.exp(-1) - 0.5) - 0.25, 3 * (math.exp(-2) + 1) - 1]
    near(found, [[9, *below]])


def test_a_layer_norm_takes_the_mean_off():
    near(
        oracle.layer_norm([[1, 3], [7, 7]], [[2, 1]], epsilon=0.5),
        [[-2 / 1.5**0.5, 1 / 1.5**0.5], [0, 0]],
    )
    near(oracle.layer_norm([[1, 3]], [[2, 1]], epsilon=3.0), [[-1, 0.5]])
    near(oracle.layer_norm([[0, 2e-3]], [[1, 1]]), [[-(0.5**0.5), 0.5**0.5]])


def test_a_norm_over_chips_by_hand():
    near(oracle.square_sum([[3, 4], [1, 2]]), [[25], [5]])
    x, squares = [[3, 4], [1, 2]], [[100], [0]]
    found = oracle.over_root(x, squares, [[1, 10]], columns=5, epsilon=16.0)
    near(found, [[0.5, 40 / 6], [0.25, 5]])
    near(oracle.over_root([[1e-3]], [[0]], [[1]], columns=4), [[1]])


def test_a_decay_by_heads_has_a_rate_for_each_run_of_columns():
    rate = [[0, math.log(2)]]
    found = oracle.decay([[0] * 4], [[0, math.log(3), 0, math.log(3)]], rate, heads=2)
    near(found, [[1 / 2, 1 / 4, 1 / 4, 1 / 16]])


def one_hot(positions):
    """Values that show the weight of each position; rows past it hold NaN."""
    v = np.full((6, 6), NAN)
    v[:positions] = np.eye(6)[:positions]
    return v


@pytest.mark.parametrize(
    ("position", "window", "seen"),
    [
        (5, {}, [1, 2, 3, 4, 5]),
        (5, {"last": 2}, [4, 5]),
        (1, {"last": 2}, [1]),
        (4, {"chunk": 2}, [3, 4]),
        (5, {"chunk": 2}, [5]),
        (5, {"chunk": 4}, [5]),
        (4, {"chunk": 4}, [1, 2, 3, 4]),
    ],
)
def test_attention_reads_its_window_and_nothing_past_the_position(position, window, seen):
    k = np.where(np.arange(6)[:, None] < position, 0.0, NAN)
    out = oracle.attention(
        [[1]], k, one_hot(position), heads=1, groups=1, position=position, **window
    )
    near(out, [[1 / len(seen) if t in seen else 0 for t in range(1, 7)]])


def test_causal_rows_stand_one_after_another():
    k, v = np.where(np.arange(6)[:, None] < 4, 0.0, NAN), one_hot(4)
    out = oracle.causal_attention([[1], [1]], k, v, heads=1, groups=1, position=3, last=3)
    near(out, [[1 / 3, 1 / 3, 1 / 3, 0, 0, 0], [0, 1 / 3, 1 / 3, 1 / 3, 0, 0]])


def test_heads_share_groups_in_runs_and_scores_are_scaled_capped_and_sunk():
    k, v = [[1, 10], [0, 0]], [[1, 1], [0, 0]]  # two groups of width 1
    q = [[1, 2, 0.1, 0.2]]
    near(oracle.attention(q, k, v, heads=4, groups=2), [[sigmoid(s) for s in (1, 2, 1, 2)]])
    near(
        oracle.attention(q, k, v, heads=4, groups=2, scale=3.0, cap=4.0),
        [[sigmoid(4 * math.tanh(3 * s / 4)) for s in (1, 2, 1, 2)]],
    )
    sunk = oracle.attention(q, k, v, [[0, 0, 0, 1]], heads=4, groups=2)
    near(sunk[0, 0], math.e / (math.e + 1 + 1))
    near(sunk[0, 3], math.e**2 / (math.e**2 + 1 + math.e))


def test_scores_are_scaled_by_the_root_of_the_head_width():
    out = oracle.attention([[1, 1, 1, 1]], [[2, 2, 2, 2], [0] * 4], [[1], [0]], heads=1, groups=1)
    near(out, [[sigmoid(4)]])


def test_the_last_tap_is_the_current_input():
    state = np.array([[1.0], [2.0], [3.0]])
    out, new = oracle.causal_conv([[4], [5]], [[100], [10], [1]], state, taps=3)
    near(out, [[234], [345]])
    near(new, [[3], [4], [5]])
    near(state, [[1], [2], [3]])


def test_rows_past_count_do_not_reach_the_state():
    out, new = oracle.causal_conv([[4], [NAN]], [[10], [1]], [[2], [3]], taps=2, count=1)
    near(out[:1], [[34]])
    near(new, [[3], [4]])


def delta(rng, rows, heads=4, groups=2, width=3):
    shapes = [(rows, groups * width)] * 2 + [(rows, heads * width)] * 2
    q, k, v, z = (rng.normal(size=s) for s in shapes)
    beta, decay = rng.uniform(size=(rows, heads)), rng.uniform(size=(rows, heads))
    state, norm = rng.normal(size=(heads * width, width)), rng.normal(size=(1, width))
    return q, k, v, z, beta, decay, state, norm


def test_gated_delta_follows_the_recurrence_of_its_paper():
    """There the state is [key, value]: the transpose of ours."""
    q, k, v, z, beta, decay, state, norm = delta(np.random.default_rng(0), rows=3)
    out, new = oracle.gated_delta(q, k, v, z, beta, decay, state, norm, heads=4, groups=2)
    for j in range(4):
        s = state[3 * j : 3 * j + 3].T
        of_key, of_value = slice(3 * (j % 2), 3 * (j % 2) + 3), slice(3 * j, 3 * j + 3)
        for r in range(3):
            s = decay[r, j] * s
            e = beta[r, j] * (v[r, of_value] - s.T @ k[r, of_key])
            s = s + np.outer(k[r, of_key], e)
            o = s.T @ q[r, of_key] * 3**-0.5
            o = o / np.sqrt(np.mean(o**2) + 1e-6) * norm[0]
            near(out[r, of_value], o * z[r, of_value] / (1 + np.exp(-z[r, of_value])))
        near(new[of_value], s.T)


def test_gated_delta_by_hand():
    """One head of width 1: s = 0.5 * 4 + 0.25 * (6 - 2 * 3) * 3 = 2, unit after the norm."""
    given = ([[7]], [[3]], [[6]], [[0]], [[0.25]], [[0.5]], [[4]], [[10]])
    out, new = oracle.gated_delta(*given, heads=1, groups=1, sigmoid_gate=True, epsilon=0.0)
    near(out, [[5]])
    near(new, [[2]])


def test_gated_delta_decays_by_channel_by_hand():
    """S becomes [[0.5, 0.5], [1.5, 1]], then [[1.5, 0.5], [2.5, 1]]."""
    root = math.sqrt(2)
    given = ([[2 * root, -2 * root]], [[1, 0]], [[2.5, 3.5]], [[0, 0]], [[0.5]], [[0.5, 0.25]])
    state, norm = [[1, 2], [3, 4]], [[1, 10]]
    words = {"heads": 1, "groups": 1, "sigmoid_gate": True, "by_channel": True, "epsilon": 0.0}
    out, new = oracle.gated_delta(*given, state, norm, **words)
    near(new, [[1.5, 0.5], [2.5, 1]])
    near(out, [[2 / math.sqrt(6.5) / 2, 30 / math.sqrt(6.5) / 2]])


def test_value_heads_decay_by_the_channels_of_their_key_head():
    zeros, one = [[0, 0]], [[1]]
    given = (
        zeros,
        zeros,
        [[0] * 4],
        [[0] * 4],
        [[0] * 4],
        [[0.5, 0.25]],
        [[1], [1], [2], [2]],
        one,
    )
    _, new = oracle.gated_delta(*given, heads=4, groups=2, by_channel=True)
    near(new, [[0.5], [0.25], [1], [0.5]])


def test_linear_attention_by_hand():
    state = [[1, 2], [3, 4]]
    out, new = oracle.linear_attention([[2, 1]], [[1, 2]], [[1, 10]], [[0.5]], state, heads=1)
    near(new, [[1.5, 3], [11.5, 22]])
    near(out, [[6, 45]])


def test_heads_of_a_linear_attention_decay_at_their_own_rates_up_to_count():
    given = ([[1, 1], [1, 2]], [[2, 3], [1, 1]], [[1, 1], [10, 20]], [[0.5, 0.25]], [[4], [8]])
    out, new = oracle.linear_attention(*given, heads=2)
    near(out, [[4, 5], [12, 42.5]])
    near(new, [[12], [21.25]])
    out, new = oracle.linear_attention(*given, heads=2, count=1)
    near(out[:1], [[4, 5]])
    near(new, [[4], [5]])


def test_gated_delta_stops_at_count():
    given = delta(np.random.default_rng(1), rows=2)
    short = [m[:1] if i < 6 else m for i, m in enumerate(given)]
    wanted, state = oracle.gated_delta(*short, heads=4, groups=2)
    for m in given[:6]:
        m[1] = NAN
    out, new = oracle.gated_delta(*given, heads=4, groups=2, count=1)
    near(out[:1], wanted)
    near(new, state)


def experts(logits, **options):
    """How loudly each expert answers: expert e says 1 in column e, x is 1 and SiLU is undone."""
    n = len(logits)
    x = np.zeros((1, n))
    x[0, 0] = 1.0
    router = np.zeros((n, n))
    router[0] = logits
    ones = np.zeros((n, n))
    ones[:, 0] = 1.0
    down = np.eye(n).reshape(n * n, 1) / sigmoid(1)
    return oracle.moe(x, router, ones, ones, down, experts=n, **options)[0]


def test_softmax_weights_are_renormalised_over_the_chosen():
    logits = np.log([1, 2, 4, 1])
    near(experts(logits, chosen=2), [0, 2 / 6, 4 / 6, 0])
    near(experts(logits, chosen=2, without_renormalizing=True), [0, 2 / 8, 4 / 8, 0])
    near(experts(logits, chosen=2, scale=3.0), [0, 1, 2, 0])


def test_a_choice_bias_chooses_and_never_weighs():
    s = [sigmoid(v) for v in (0, 1, 2, 3)]
    found = experts([0, 1, 2, 3], chosen=2, by_sigmoid=True, choice_bias=[[9, 0, 0, 0]])
    near(found, [s[0] / (s[0] + s[3]), 0, 0, s[3] / (s[0] + s[3])])


def test_groups_are_worth_their_best_or_their_two_best_biased():
    limits = {"chosen": 1, "used_groups": 1, "group_count": 2, "by_sigmoid": True}
    logits = [3, 3, 4, -9]  # one best: the second run; two best: the first
    assert np.flatnonzero(experts(logits, **limits)).tolist() == [2]
    biased = experts(logits, **limits, choice_bias=np.zeros((1, 4)))
    assert np.flatnonzero(biased).tolist() == [0]


def test_a_choice_bias_may_stand_beside_a_softmax():
    logits = np.log([1, 2, 4, 1])
    near(experts(logits, chosen=2, choice_bias=[[9, 0, 0, 0]]), [1 / 5, 0, 4 / 5, 0])
    # Its groups are worth their one best: the sum of two would prefer the first run.
    limits = {"chosen": 1, "used_groups": 1, "group_count": 2}
    found = experts(np.log([3, 3, 4, 0.1]), choice_bias=np.zeros((1, 4)), **limits)
    assert np.flatnonzero(found).tolist() == [2]
    found = experts(np.log([3, 3, 4, 0.1]), choice_bias=[[0, 9, 0, 0]], **limits)
    assert np.flatnonzero(found).tolist() == [1]


def test_equal_experts_are_chosen_in_order():
    assert np.flatnonzero(experts([1, 1, 1], chosen=2)).tolist() == [0, 1]


def test_a_weight_may_multiply_the_input():
    x, router, ones = [[1.0]], [[0.0]], [[1.0]]
    options = {"chosen": 1, "experts": 1, "by_sigmoid": True, "without_renormalizing": True}
    inside = oracle.moe(x, router, ones, ones, ones, weighting_inputs=True, **options)
    near(inside, [[0.5 * sigmoid(0.5) * 0.5]])
    near(oracle.moe(x, router, ones, ones, ones, **options), [[0.5 * sigmoid(1)]])


def test_biased_experts_and_the_clamped_swiglu():
    given = ([[2.0]], [[0.0]], [[3.0]], [[1.0]], [[2.0]])
    biases = ([[0.0]], [[5.0]], [[-9.0]], [[0.5]])  # g = 11, clamped to 4; u = -7, clamped to -4
    out = oracle.moe(*given, *biases, chosen=1, experts=1, limit=4.0, slope=1.5)
    near(out, [[2 * (-4 + 1) * 4 * sigmoid(6) + 0.5]])


def test_collectives():
    near(oracle.fold([[[1, 2]], [[3, 4]], [[5, 6]]]), [[9, 12]])
    near(oracle.join([[[1]], [[2, 3]]]), [[1, 2, 3]])
