"""The shape of every expression, from the shapes of what it reads."""

from collections.abc import Callable
from typing import Any

from author import statements as say
from author.english import write
from author.fits import Shape, Shapes, by, known, refuse, split, want, within
from author.forms import Expression
from author.names import listed


def shape_of(expression: Expression, shapes: Shapes) -> Shape:
    """Rows and columns of the value; raises ProgramError where the operands do not fit.

    A row or a position is held against its matrix only where it is a number. A join is as wide as
    the partials of all chips, so its shape needs all of theirs.
    """
    return SHAPE_RULES[type(expression)](expression, known(expression, shapes))


def check_set(statement: say.SetRow | say.SetRows, shapes: Shapes) -> None:
    """Raise ProgramError unless the rows fit the matrix that they are written into."""
    shapes = known(statement, shapes)
    (rows, cols), (new, width) = shapes[statement.name], shapes[statement.x]
    if width != cols:
        refuse(
            statement,
            f"{statement.x} has {width} columns and {statement.name} has {cols}",
            f"rows of {cols} columns",
        )
    if isinstance(statement, say.SetRow) and new != 1:
        refuse(statement, f"{statement.x} has {new} rows", "one row")
    within(statement, "row", statement.row, new, rows)


# --- A rule a form


def _row(e: say.Row, shapes: Shapes) -> Shape:
    rows, cols = shapes[e.x]
    if e.first is None:
        within(e, "row", e.row, 1, rows)
    return 1, cols


def _rows(e: say.Rows, shapes: Shapes) -> Shape:
    return shapes[e.tokens][1], shapes[e.x][1]


def _matmul(e: say.Matmul, shapes: Shapes) -> Shape:
    (rows, inner), (w_rows, cols) = shapes[e.x], shapes[e.w]
    if inner != w_rows:
        refuse(e, f"{e.x} has {inner} columns and {e.w} has {w_rows} rows", "as many of each")
    if e.heads is None:
        return rows, cols
    split(e, e.x, inner, e.heads, "columns")
    return rows, e.heads * cols


def _elementwise(e: say.Plus | say.Hadamard, shapes: Shapes) -> Shape:
    (a_rows, a_cols), (b_rows, b_cols) = shapes[e.a], shapes[e.b]
    if a_cols != b_cols or (a_rows != b_rows and 1 not in (a_rows, b_rows)):
        refuse(
            e,
            f"{e.a} is {by(shapes[e.a])} and {e.b} is {by(shapes[e.b])}",
            "equal shapes, or one of them a row of as many columns",
        )
    return max(a_rows, b_rows), a_cols


def _same(e: say.Scaled | say.Capped | say.Silu | say.Sigmoid | say.Gelu, shapes: Shapes) -> Shape:
    return shapes[e.x]


def _clamped(e: say.Clamped, shapes: Shapes) -> Shape:
    if e.low > e.high:
        refuse(e, f"between {e.low} and {e.high}", "the lower of the two first")
    return shapes[e.x]


def _xielu(e: say.Xielu, shapes: Shapes) -> Shape:
    for field in ("positive", "negative"):
        want(e, field, shapes, (1, 1))
    return shapes[e.x]


def _segment(e: say.RmsNorm | say.L2Norm, shapes: Shapes) -> int:
    """The width of a segment; heads count those of the whole matrix."""
    rows, cols = shapes[e.x]
    if e.heads is None:
        return cols
    if e.heads < 1 or e.heads % rows != 0 or cols % (e.heads // rows) != 0:
        refuse(
            e,
            f"{e.heads} heads over {e.x}, {by(shapes[e.x])}",
            "heads of the whole matrix that cut each row into equal segments",
        )
    return cols // (e.heads // rows)


def _rms_norm(e: say.RmsNorm, shapes: Shapes) -> Shape:
    want(e, "weight", shapes, (1, _segment(e, shapes)))
    return shapes[e.x]


def _layer_norm(e: say.LayerNorm, shapes: Shapes) -> Shape:
    want(e, "weight", shapes, (1, shapes[e.x][1]))
    return shapes[e.x]


def _square_sum(e: say.SquareSum, shapes: Shapes) -> Shape:
    return shapes[e.x][0], 1


def _over_root(e: say.OverRoot, shapes: Shapes) -> Shape:
    rows, cols = shapes[e.x]
    want(e, "squares", shapes, (rows, 1))
    want(e, "weight", shapes, (1, cols))
    if e.columns < max(1, cols):
        refuse(e, f"{e.columns} columns and {e.x} has {cols}", "as many or more", [e.x])
    return rows, cols


def _l2_norm(e: say.L2Norm, shapes: Shapes) -> Shape:
    _segment(e, shapes)
    return shapes[e.x]


def _rope(e: say.Rope, shapes: Shapes) -> Shape:
    (rows, cols), (table_rows, half) = shapes[e.x], shapes[e.cos]
    want(e, "sin", shapes, shapes[e.cos])
    width = split(e, e.x, cols, e.heads, "columns")
    if 2 * half > width:
        refuse(e, f"{e.cos} has {half} columns", f"at most half a head of {width}", [e.cos])
    if e.position is None and table_rows != 1:
        refuse(e, f"{e.cos} has {table_rows} rows", "a position, or a table of one row", [e.cos])
    if e.position is not None:
        within(e, "position", e.position, rows, table_rows)
    return rows, cols


def _cut(e: say.First | say.Last, shapes: Shapes) -> Shape:
    rows, cols = shapes[e.x]
    runs = cols // e.run if e.run > 0 and cols % e.run == 0 else 0
    if runs == 0 or e.kept > e.run:
        refuse(e, f"{e.kept} of every {e.run} of {cols} columns", "runs that divide the columns")
    return rows, runs * e.kept


def _joined(e: say.Joined, shapes: Shapes) -> Shape:
    (rows, x_cols), (y_rows, y_cols) = shapes[e.x], shapes[e.y]
    if rows != y_rows:
        refuse(e, f"{e.x} has {rows} rows and {e.y} has {y_rows}", "as many of each")
    for name, cols in ((e.x, x_cols), (e.y, y_cols)):
        split(e, name, cols, 1 if e.heads is None else e.heads, "columns")
    return rows, x_cols + y_cols


def _swiglu(e: say.Swiglu, shapes: Shapes) -> Shape:
    want(e, "up", shapes, shapes[e.gate])
    return shapes[e.gate]


def _argmax(e: say.Argmax, shapes: Shapes) -> Shape:
    if shapes[e.x][0] != 1:
        refuse(e, f"{e.x} has {shapes[e.x][0]} rows", "one row")
    return 1, 1


def _attention(e: say.Attention | say.CausalAttention, shapes: Shapes) -> Shape:
    (rows, q_cols), (positions, k_cols), (v_rows, v_cols) = (shapes[n] for n in (e.q, e.k, e.v))
    width = split(e, e.q, q_cols, e.heads, "columns")
    if e.groups < 1 or e.heads % e.groups != 0:
        refuse(e, f"{e.heads} heads in {e.groups} groups", "groups of equally many heads")
    if k_cols != e.groups * width:
        refuse(e, f"{e.k} has {k_cols} columns", f"{e.groups} groups of {width}", [e.k])
    if v_rows != positions:
        refuse(e, f"{e.k} has {positions} rows and {e.v} has {v_rows}", "as many of each")
    v_width = split(e, e.v, v_cols, e.groups, "columns")
    want(e, "sinks", shapes, (1, e.heads))
    if isinstance(e, say.Attention) and rows != 1:
        refuse(e, f"{e.q} has {rows} rows", "one row, or causal attention", [e.q])
    if e.position is not None:
        within(e, "position", e.position, rows, positions)
    return rows, e.heads * v_width


def _causal_conv(e: say.CausalConv, shapes: Shapes) -> Shape:
    for field in ("weight", "state"):
        want(e, field, shapes, (e.taps, shapes[e.x][1]))
    return shapes[e.x]


def _decay(e: say.Decay, shapes: Shapes) -> Shape:
    rows, cols = shapes[e.x]
    if e.heads is not None:
        split(e, e.x, cols, e.heads, "columns")
    want(e, "bias", shapes, (1, cols))
    want(e, "rate", shapes, (1, cols if e.heads is None else e.heads))
    return rows, cols


def _gated_delta(e: say.GatedDelta, shapes: Shapes) -> Shape:
    rows, width = shapes[e.q][0], shapes[e.norm][1]
    if e.groups < 1 or e.heads % e.groups != 0:
        refuse(e, f"{e.heads} heads in {e.groups} groups", "groups of equally many heads")
    wanted = {"q": e.groups * width, "k": e.groups * width, "v": e.heads * width}
    wanted |= {"gate": e.heads * width, "beta": e.heads}
    wanted["decay"] = e.groups * width if e.by_channel else e.heads
    for field, cols in wanted.items():
        want(e, field, shapes, (rows, cols))
    want(e, "norm", shapes, (1, width))
    want(e, "state", shapes, (e.heads * width, width))
    return rows, e.heads * width


def _linear_attention(e: say.LinearAttention, shapes: Shapes) -> Shape:
    rows, cols = shapes[e.v]
    width = split(e, e.v, cols, e.heads, "columns")
    for field in ("q", "k"):
        want(e, field, shapes, (rows, cols))
    want(e, "decay", shapes, (1, e.heads))
    want(e, "state", shapes, (cols, width))
    return rows, cols


def _moe(e: say.Moe, shapes: Shapes) -> Shape:
    rows, cols = shapes[e.x]
    if rows != 1:
        refuse(e, f"{e.x} has {rows} rows", "one row", [e.x])
    _check_choice(e)
    dff = split(e, e.gate, shapes[e.gate][0], e.experts, "rows")
    wanted = {"router": (cols, e.experts), "router_bias": (1, e.experts)}
    wanted |= {"choice_bias": (1, e.experts), "down": (e.experts * cols, dff)}
    wanted |= dict.fromkeys(("gate", "up"), (e.experts * dff, cols))
    wanted |= dict.fromkeys(("gate_bias", "up_bias"), (e.experts, dff))
    wanted["down_bias"] = (e.experts, cols)
    for field, shape in wanted.items():
        want(e, field, shapes, shape)
    return 1, cols


def _check_choice(e: say.Moe) -> None:
    eligible = e.experts
    if e.groups is not None:
        used, count = e.groups.used_groups, e.groups.group_count
        if count < 1 or e.experts % count != 0 or not 1 <= used <= count:
            refuse(e, f"{e.experts} experts, {write(e.groups)}", "groups of equally many", [])
        eligible = used * (e.experts // count)
    if not 1 <= e.chosen <= eligible:
        refuse(e, f"choosing {e.chosen}", f"1 to {eligible} experts", [])


def _fold(e: say.Fold, shapes: Shapes) -> Shape:
    return shapes[e.partial]


def _join(e: say.Join, shapes: Shapes) -> Shape:
    """A partial without a chip in its name is the only one."""
    partials = [e.partial]
    if e.chips != 1:
        partials = [e.partial._replace(chip=chip) for chip in range(e.chips)]
    missing = [p for p in partials if p not in shapes]
    if missing:
        refuse(e, f"nothing gives {listed(missing)} a shape", "the partial of every chip", missing)
    rows = {shapes[p][0] for p in partials}
    if len(rows) != 1:
        refuse(e, f"partials of {listed(sorted(rows))} rows", "as many of each", partials)
    return rows.pop(), sum(shapes[p][1] for p in partials)


SHAPE_RULES: dict[type[Expression], Callable[[Any, Shapes], Shape]] = {
    say.Row: _row,
    say.Rows: _rows,
    say.Matmul: _matmul,
    say.Plus: _elementwise,
    say.Hadamard: _elementwise,
    say.Scaled: _same,
    say.Capped: _same,
    say.Clamped: _clamped,
    say.RmsNorm: _rms_norm,
    say.LayerNorm: _layer_norm,
    say.SquareSum: _square_sum,
    say.OverRoot: _over_root,
    say.L2Norm: _l2_norm,
    say.Rope: _rope,
    say.First: _cut,
    say.Last: _cut,
    say.Joined: _joined,
    say.Swiglu: _swiglu,
    say.Silu: _same,
    say.Sigmoid: _same,
    say.Gelu: _same,
    say.Xielu: _xielu,
    say.Argmax: _argmax,
    say.Attention: _attention,
    say.CausalAttention: _attention,
    say.CausalConv: _causal_conv,
    say.Decay: _decay,
    say.GatedDelta: _gated_delta,
    say.LinearAttention: _linear_attention,
    say.Moe: _moe,
    say.Fold: _fold,
    say.Join: _join,
}
