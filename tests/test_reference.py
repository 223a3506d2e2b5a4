import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from author import statements
from author.forms import EXPRESSIONS, STATEMENTS, Form, Part, field_names, slots
from kernels import reference
from kernels.table import PATHS
from tests import oracle

DECLARATIONS = {
    statements.Tensor,
    statements.Tokens,
    statements.SetItem,
    statements.Number,
    statements.Let,
}
FORMS = [form for form in EXPRESSIONS + STATEMENTS if form not in DECLARATIONS]
COUNTED = {"set_rows", "causal_attention", "causal_conv", "gated_delta", "linear_attention"}


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def snake(form: type[Form]) -> str:
    name = form.__name__.replace("L2N", "L2_n")
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()


def wanted_parameters(form: type[Form]) -> tuple[list[str], set[str]]:
    """Names of matrices in the order of the fields; the names of all other fields."""
    kinds = {slot.field: slot for slot in slots(form)}
    matrices, others = [], set()
    for field in field_names(form):
        slot = kinds.get(field)
        if slot is not None and slot.kind == "name":
            matrices.append(
                "matrix" if issubclass(form, statements.Statement) and field == "name" else field
            )
        elif slot is not None and slot.kind == "part":
            others |= {inner for part in slot.parts for inner in field_names(part)}
        else:
            others.add(field)
    return matrices, others


@pytest.mark.parametrize("form", FORMS, ids=snake)
def test_parameters_are_the_fields_of_the_form(form):
    name = snake(form)
    function = getattr(reference, name)
    parameters = inspect.signature(function).parameters.values()
    if name in ("fold", "join"):
        assert [p.name for p in parameters] == ["partials"]
        return
    matrices, others = wanted_parameters(form)
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert set(positional) == set(matrices)
    assert keywords == others | ({"count"} if name in COUNTED else set())
    if not name.startswith("set_"):
        assert positional == matrices


@pytest.mark.parametrize("form", FORMS, ids=snake)
def test_no_form_lacks_its_row_in_the_table(form):
    assert [path.name for path in PATHS[snake(form)]] == ["xla", "reference"]


def test_parts_have_fields_of_their_own_names():
    parts = {part for form in FORMS for slot in slots(form) for part in slot.parts}
    names = [name for part in parts for name in field_names(part)]
    assert all(issubclass(part, Part) for part in parts)
    assert len(names) == len(set(names))


CASES = {
    "row": ([normal(5, 7)], {"row": 5}),
    "embedding_row of the first id": ([normal(5, 7)], {"row": 0}),
    "embedding_row counted from": ([normal(5, 7)], {"row": 12, "first": 10}),
    "embedding_row not held": ([normal(5, 7)], {"row": 15, "first": 10}),
    "rows": ([np.array([[4, 0, 4]]), normal(5, 7)], {}),
    "rows counted from": ([np.array([[9, 10, 14, 15, 0]]), normal(5, 7)], {"first": 10}),
    "rows of nothing": ([np.array([[9, 0]]), normal(0, 7)], {"first": 0}),
    "set_row": ([normal(6, 5), normal(1, 5)], {"row": 6}),
    "set_rows": ([normal(6, 5), normal(3, 5)], {"row": 2}),
    "set_rows at the end": ([normal(6, 5), normal(3, 5)], {"row": 4}),
    "set_rows past the end": ([normal(6, 5), normal(3, 5)], {"row": 5, "count": 2}),
    "set_rows longer than all": ([normal(2, 5), normal(3, 5)], {"row": 2, "count": 1}),
    "set_rows of nothing": ([normal(6, 5), normal(3, 5)], {"row": 2, "count": 0}),
    "matmul": ([normal(3, 7), normal(7, 5)], {}),
    "matmul by heads": ([normal(3, 15), normal(15, 4)], {"heads": 5}),
    "plus": ([normal(3, 7), normal(3, 7, seed=1)], {}),
    "plus a row": ([normal(3, 7), normal(1, 7)], {}),
    "plus from a row": ([normal(1, 7), normal(3, 7)], {}),
    "hadamard": ([normal(3, 7), normal(1, 7)], {}),
    "scaled": ([normal(3, 7)], {"factor": -2.5}),
    "capped": ([5 * normal(3, 7)], {"cap": 2.0}),
    "clamped": ([5 * normal(3, 7)], {"low": -2.0, "high": 3.0}),
    "rms_norm": ([normal(3, 8), normal(1, 8)], {}),
    "rms_norm by heads of all rows": ([normal(3, 8), normal(1, 4)], {"heads": 6, "epsilon": 0.5}),
    "rms_norm without epsilon": ([normal(3, 8), normal(1, 8)], {"epsilon": 0.0}),
    "layer_norm": ([4 + normal(3, 8), normal(1, 8)], {}),
    "layer_norm with epsilon": ([normal(3, 8), normal(1, 8)], {"epsilon": 0.5}),
    "layer_norm of equals": ([np.full((2, 4), 3, np.float32), normal(1, 4)], {}),
    "square_sum": ([normal(3, 8)], {}),
    "square_sum of nothing": ([normal(3, 0)], {}),
    "over_root": ([normal(3, 4), 4 * normal(3, 1) ** 2, normal(1, 4)], {"columns": 12}),
    "over_root with epsilon": (
        [normal(1, 4), normal(1, 1) ** 2, normal(1, 4)],
        {"columns": 5, "epsilon": 0.5},
    ),
    "over_root of nothing": ([normal(3, 0), normal(3, 1) ** 2, normal(1, 0)], {"columns": 12}),
    "l2_norm": ([normal(3, 8)], {"heads": 6}),
    "l2_norm of small numbers": ([1e-4 * normal(3, 8)], {"heads": 12, "epsilon": 1e-5}),
    "rope": ([normal(3, 10), normal(6, 2), normal(6, 2, seed=1)], {"heads": 2, "position": 3}),
    "rope to the end": ([normal(3, 8), normal(6, 4), normal(6, 4)], {"heads": 1, "position": 4}),
    "rope of the only row": ([normal(3, 8), normal(1, 1), normal(1, 1, seed=1)], {"heads": 2}),
    "first": ([normal(3, 10)], {"kept": 2, "run": 5}),
    "last": ([normal(3, 10)], {"kept": 2, "run": 5}),
    "last of none": ([normal(3, 10)], {"kept": 0, "run": 5}),
    "joined": ([normal(3, 10), normal(3, 4)], {}),
    "joined by heads": ([normal(3, 10), normal(3, 4)], {"heads": 2}),
    "swiglu": ([normal(3, 7), normal(3, 7, seed=1)], {}),
    "silu": ([40 * normal(3, 7)], {}),
    "sigmoid": ([40 * normal(3, 7)], {}),
    "gelu": ([3 * normal(3, 7)], {}),
    "xielu": (
        [3 * normal(3, 70), np.full((1, 1), 0.7, np.float32), np.full((1, 1), 1.3, np.float32)],
        {"beta": 0.5, "cut": -1e-6},
    ),
    "xielu far off": (
        [
            np.array([[-1e4, -0.25, -0.0, 0.0, 100.0]], np.float32),
            *[np.ones((1, 1), np.float32)] * 2,
        ],
        {"beta": 0.25, "cut": -0.5},
    ),
    "argmax": ([normal(1, 70)], {}),
    "argmax of equals": ([np.array([[1.0, 3.0, 3.0]], np.float32)], {}),
    "decay by heads": (
        [4 * normal(3, 6), normal(1, 6), normal(1, 2, seed=1)],
        {"heads": 2},
    ),
    "decay": ([4 * normal(3, 5), normal(1, 5), normal(1, 5, seed=1)], {}),
}


def same(found, wanted, tolerance=2e-5):
    found = found if isinstance(found, tuple) else (found,)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for a, b in zip(found, wanted, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_a_form_means_what_the_language_says(case):
    arguments, words = CASES[case]
    name = case.split()[0]
    found = getattr(reference, name)(*map(jnp.asarray, arguments), **words)
    same(found, getattr(oracle, name)(*arguments, **words))


@pytest.mark.parametrize("case", CASES)
def test_run_time_integers_may_be_traced(case):
    arguments, words = CASES[case]
    function = getattr(reference, case.split()[0])
    traced = {k: jnp.int32(v) for k, v in words.items() if k in ("row", "position", "count")}
    fixed = {k: v for k, v in words.items() if k not in traced}
    found = jax.jit(lambda a, t: function(*a, **t, **fixed))([*map(jnp.asarray, arguments)], traced)
    same(found, getattr(oracle, case.split()[0])(*arguments, **words))


def test_padded_rows_of_a_rotation_do_not_move_the_real_ones():
    x, cos, sin = normal(4, 8), normal(6, 4), normal(6, 4, seed=1)
    found = reference.rope(*map(jnp.asarray, (x, cos, sin)), heads=1, position=5)
    same(found[:2], oracle.rope(x[:2], cos, sin, heads=1, position=5))
    assert np.isfinite(np.asarray(found)).all()


def test_fold_and_join_take_the_partials_of_all_chips():
    parts = [normal(2, 3, seed=i) for i in range(3)]
    same(reference.fold([*map(jnp.asarray, parts)]), oracle.fold(parts))
    same(reference.join([*map(jnp.asarray, parts)]), oracle.join(parts))


def test_square_sums_of_two_chips_make_a_norm():
    x, weight = normal(3, 10), normal(1, 10)
    parts = [(jnp.asarray(x[:, i]), jnp.asarray(weight[:, i])) for i in (slice(0, 4), slice(4, 10))]
    squares = reference.fold([reference.square_sum(part) for part, _ in parts])
    words = {"columns": 10, "epsilon": 1e-5}
    normed = [reference.over_root(part, squares, w, **words) for part, w in parts]
    same(reference.join(normed), oracle.rms_norm(x, weight, epsilon=1e-5))
