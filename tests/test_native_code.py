"""How the steps of a chain are written: which are done together, and where their values lie."""

import numpy as np
import pytest

from kernels.native.code import (
    Binary,
    Kind,
    Layout,
    Made,
    Read,
    Step,
    Unary,
    code,
    together,
)
from tests.kernel_cases import normal

# --- Steps that are done together: values by number, the first ones given

X, Y, A, B, C = range(5)
GATE, UP, ACT, OUT, MORE = range(10, 15)


def product(x, w, out):
    return Step(Kind.PRODUCTS, (Read(x), -1, 1, Read(w), Made(out)))


def unary(kind, x, out):
    return Step(Kind.UNARY, (kind, Read(x), 0.0, Made(out)))


def binary(kind, a, b, out):
    return Step(Kind.BINARY, (kind, Read(a), Read(b), Made(out)))


def products(x, weights, made, *, following, gate=-1, meets=0, beside=0):
    """Several products of the same rows, and the weights that are read next."""
    parts = (Read(x), gate, len(weights), *map(Read, weights), *map(Made, made))
    return Step(Kind.PRODUCTS, (*parts, meets, beside, len(following), *map(Read, following)))


GATES = [product(X, A, GATE), product(X, B, UP)]
BOTH = products(X, (A, B), (GATE, UP), following=(A, B))


def gated(kind):
    return products(X, (A, B), (OUT,), following=(A, B), gate=kind, beside=1)


def test_products_of_the_same_rows_are_one_step():
    three = [product(X, A, 10), product(X, B, 11), product(X, C, 12)]
    one = products(X, (A, B, C), (10, 11, 12), following=(A, B, C))
    assert together(three, [10, 11, 12]) == [one]


def test_products_of_other_rows_or_with_a_step_between_stay_apart():
    assert together([product(X, A, 10), product(Y, B, 11)], [10, 11]) == [
        products(X, (A,), (10,), following=(B,)),
        products(Y, (B,), (11,), following=(A,)),
    ]
    silu = unary(Unary.SILU, 10, 11)
    assert together([product(X, A, 10), silu, product(X, B, 12)], [11, 12]) == [
        products(X, (A,), (10,), following=(B,)),
        silu,
        products(X, (B,), (12,), following=(A,)),
    ]


def test_products_say_whether_chips_meet_before_the_next():
    fold = Step(Kind.FOLD, (Read(11), Made(12)))
    steps = [product(X, A, 10), unary(Unary.SILU, 10, 13), product(13, B, 11), fold]
    assert together(steps, [12]) == [
        products(X, (A,), (10,), following=(B,)),
        steps[1],
        products(13, (B,), (11,), following=(A,), meets=1),
        fold,
    ]


def test_a_gate_and_what_it_gates_are_one_step():
    steps = [*GATES, binary(Binary.SWIGLU, GATE, UP, OUT)]
    assert together(steps, [OUT]) == [gated(Binary.SWIGLU)]
    steps = [*GATES, unary(Unary.GELU, GATE, ACT), binary(Binary.HADAMARD, ACT, UP, OUT)]
    assert together(steps, [OUT]) == [gated(Binary.GEGLU)]


@pytest.mark.parametrize("middle", [GATE, UP])
def test_a_gate_that_is_wanted_itself_is_made(middle):
    swiglu = binary(Binary.SWIGLU, GATE, UP, OUT)
    assert together([*GATES, swiglu], [OUT, middle]) == [BOTH, swiglu]
    again = [swiglu, unary(Unary.SILU, middle, MORE)]
    assert together([*GATES, *again], [OUT, MORE]) == [BOTH, *again]


def test_a_gelu_that_is_wanted_itself_is_made():
    steps = [unary(Unary.GELU, X, ACT), binary(Binary.HADAMARD, ACT, Y, OUT)]
    assert together(steps, [OUT]) == [binary(Binary.GEGLU, X, Y, OUT)]
    assert together(steps, [OUT, ACT]) == steps
    squared = [unary(Unary.GELU, X, ACT), binary(Binary.HADAMARD, ACT, ACT, OUT)]
    assert together(squared, [OUT]) == squared
    silu = [unary(Unary.SILU, X, ACT), binary(Binary.HADAMARD, ACT, Y, OUT)]
    assert together(silu, [OUT]) == silu


def test_only_a_gate_before_what_it_gates_is_one():
    turned = binary(Binary.SWIGLU, UP, GATE, OUT)
    assert together([*GATES, turned], [OUT]) == [BOTH, turned]
    added = binary(Binary.PLUS, GATE, UP, OUT)
    assert together([*GATES, added], [OUT]) == [BOTH, added]
    one_more = [*GATES, product(X, C, MORE), binary(Binary.SWIGLU, GATE, UP, OUT)]
    assert [step.kind for step in together(one_more, [OUT, MORE])] == [Kind.PRODUCTS, Kind.BINARY]


# --- Where values lie


def results(integers, given, count):
    """What a chain of sums and multiples computes, its integers read as `handlers.cc` says."""
    numbers = iter(map(int, integers))
    assert [next(numbers) for _ in range(6)] == [-1, 1, 0, 1, -1, 0]
    made = {next(numbers): np.full_like(given[0], np.nan) for _ in range(next(numbers))}
    slots = {**dict(enumerate(given)), **made}
    held, room = next(numbers), np.full(next(numbers), np.nan, np.float32)
    for slot in range(len(given) + count + 1, len(given) + count + 1 + held):
        begin, rows, cols = next(numbers), next(numbers), next(numbers)
        slots[slot] = room[begin : begin + rows * cols].reshape(rows, cols)
    for kind in numbers:
        what, x, y, out = (next(numbers) for _ in range(4))
        if kind == Kind.BINARY:
            assert what == Binary.PLUS
            slots[out][:] = slots[x] + slots[y]
        else:
            assert (kind, what) == (Kind.UNARY, Unary.SCALED)
            slots[out][:] = slots[x] * np.int32(y).view(np.float32)
    return [slots[len(given) + i] for i in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_no_value_is_overwritten_before_it_was_read(seed):
    random = np.random.default_rng(seed)
    given = [normal(2, 9), normal(2, 9, seed=1)]
    values, steps = list(given), []
    for number in range(2, 40):
        a, b = map(int, random.integers(max(0, number - 6), number, 2))
        if random.random() < 0.7:
            steps.append(binary(Binary.PLUS, a, b, number))
            values.append(values[a] + values[b])
        else:
            steps.append(Step(Kind.UNARY, (Unary.SCALED, Read(a), -0.5, Made(number))))
            values.append(values[a] * np.float32(-0.5))
    wanted = [39, *map(int, random.choice(range(2, 39), 3, replace=False))]
    shapes = dict.fromkeys(range(40), (2, 9))
    integers = code(steps, Layout(arguments=[0, 1], results=wanted, shapes=shapes))
    for found, number in zip(results(integers, given, 4), wanted, strict=True):
        assert np.array_equal(found, values[number])


def test_a_place_that_nobody_reads_any_more_is_taken_again():
    steps = [unary(Unary.SILU, n, n + 1) for n in range(20)]
    shapes = dict.fromkeys(range(21), (3, 10))
    floats = [
        int(code(steps[:n], Layout(arguments=[0], results=[n], shapes=shapes))[9])
        for n in (2, 3, 20)
    ]
    assert floats == [32, 64, 64]
