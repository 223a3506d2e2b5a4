"""The shape of every expression, from the shapes of what it reads."""

from collections.abc import Callable, Mapping
from typing import Any, Never

from author import statements as say
from author.english import write
from author.forms import Expression, Form, slots
from author.names import Name, listed
from author.program import Complaint, ProgramError

Shape = tuple[int, int]  # rows, columns
Shapes = Mapping[Name, Shape]


def shape_of(expression: Expression, shapes: Shapes) -> Shape:
    """Rows and columns of the value; raises ProgramError where the operands do not fit.

    A row or a position is held against its matrix only where it is a number. A join is as wide as
    the partials of all chips, so its shape needs all of theirs.
    """
    return SHAPE_RULES[type(expression)](expression, _known(expression, shapes))


def check_set(statement: say.SetRow | say.SetRows, shapes: Shapes) -> None:
    """Raise ProgramError unless the rows fit the matrix that they are written into."""
    shapes = _known(statement, shapes)
    (rows, cols), (new, width) = shapes[statement.name], shapes[statement.x]
    if width != cols:
        _refuse(
            statement,
            f"{statement.x} has {width} columns and {statement.name} has {cols}",
            f"rows of {cols} columns",
        )
    if isinstance(statement, say.SetRow) and new != 1:
        _refuse(statement, f"{statement.x} has {new} rows", "one row")
    _within(statement, "row", statement.row, new, rows)


def _known(form: Form, shapes: Shapes) -> Shapes:
    missing = [n for n in _matrices(form) if n not in shapes and not isinstance(form, say.Join)]
    if missing:
        _refuse(form, f"nothing gives {listed(missing)} a shape", "a statement before it", missing)
    return shapes


def _matrices(form: Form) -> list[Name]:
    """The matrices that a form names."""
    values = [getattr(form, s.field) for s in slots(type(form)) if s.kind == "name"]
    return [v for v in values if v is not None]


def _refuse(form: Form, found: str, wanted: str, names: list[Name] | None = None) -> Never:
    about = tuple(_matrices(form) if names is None else names)
    complaint = Complaint(where=write(form), found=found, wanted=f"wanted {wanted}", names=about)
    raise ProgramError((complaint,))


def _want(form: Form, field: str, shapes: Shapes, shape: Shape) -> None:
    """Refuse unless the matrix of a field, where it has one, has this shape."""
    name = getattr(form, field)
    if name is not None and shapes[name] != shape:
        _refuse(form, f"{field} {name} is {_by(shapes[name])}", _by(shape), [name])


def _by(shape: Shape) -> str:
    return f"{shape[0]} by {shape[1]}"


def _split(form: Form, name: Name, size: int, parts: int, called: str) -> int:
    """The size of each of `parts` equal parts."""
    if parts < 1 or size % parts != 0:
        _refuse(form, f"{name} has {size} {called}", f"a multiple of {parts}", [name])
    return size // parts


def _within(form: Form, called: str, first: Name | int, count: int, rows: int) -> None:
    """Refuse rows that reach outside a matrix, where the first of them is a number."""
    if isinstance(first, int) and not 1 <= first <= rows - count + 1:
        end = f" to {first + count - 1}" if count > 1 else ""
        _refuse(form, f"{called} {first}{end}", f"{called}s from 1 to {rows}")


# --- A rule a form


def _row(e: say.Row, shapes: Shapes) -> Shape:
    rows, cols = shapes[e.x]
    if e.first is None:
        _within(e, "row", e.row, 1, rows)
    return 1, cols


def _rows(e: say.Rows, shapes: Shapes) -> Shape:
    return shapes[e.tokens][1], shapes[e.x][1]


def _matmul(e: say.Matmul, shapes: Shapes) -> Shape:
    (rows, inner), (w_rows, cols) = shapes[e.x], shapes[e.w]
    if inner != w_rows:
        _refuse(e, f"{e.x} has {inner} columns and {e.w} has {w_rows} rows", "as many of each")
    if e.heads is None:
        return rows, cols
    _split(e, e.x, inner, e.heads, "columns")
    return rows, e.heads * cols


def _elementwise(e: say.Plus | say.Hadamard, shapes: Shapes) -> Shape:
    (a_rows, a_cols), (b_rows, b_cols) = shapes[e.a], shapes[e.b]
    if a_cols != b_cols or (a_rows != b_rows and 1 not in (a_rows, b_rows)):
        _refuse(
            e,
            f"{e.a} is {_by(shapes[e.a])} and {e.b} is {_by(shapes[e.b])}",
            "equal shapes, or one of them a row of as many columns",
        )
    return max(a_rows, b_rows), a_cols


def _same(e: say.Scaled | say.Capped | say.Silu | say.Sigmoid | say.Gelu, shapes: Shapes) -> Shape:
    return shapes[e.x]


def _segment(e: say.RmsNorm | say.L2Norm, shapes: Shapes) -> int:
    """The width of a segment; heads count those of the whole matrix."""
    rows, cols = shapes[e.x]
    if e.heads is None:
        return cols
    if e.heads < 1 or e.heads % rows != 0 or cols % (e.heads // rows) != 0:
        _refuse(
            e,
            f"{e.heads} heads over {e.x}, {_by(shapes[e.x])}",
            "heads of the whole matrix that cut each row into equal segments",
        )
    return cols // (e.heads // rows)


def _rms_norm(e: say.RmsNorm, shapes: Shapes) -> Shape:
    _want(e, "weight", shapes, (1, _segment(e, shapes)))
    return shapes[e.x]


def _l2_norm(e: say.L2Norm, shapes: Shapes) -> Shape:
    _segment(e, shapes)
    return shapes[e.x]


def _rope(e: say.Rope, shapes: Shapes) -> Shape:
    (rows, cols), (table_rows, half) = shapes[e.x], shapes[e.cos]
    _want(e, "sin", shapes, shapes[e.cos])
    width = _split(e, e.x, cols, e.heads, "columns")
    if 2 * half > width:
        _refuse(e, f"{e.cos} has {half} columns", f"at most half a head of {width}", [e.cos])
    if e.position is None and table_rows != 1:
        _refuse(e, f"{e.cos} has {table_rows} rows", "a position, or a table of one row", [e.cos])
    if e.position is not None:
        _within(e, "position", e.position, rows, table_rows)
    return rows, cols


def _cut(e: say.First | say.Last, shapes: Shapes) -> Shape:
    rows, cols = shapes[e.x]
    runs = cols // e.run if e.run > 0 and cols % e.run == 0 else 0
    if runs == 0 or e.kept > e.run:
        _refuse(e, f"{e.kept} of every {e.run} of {cols} columns", "runs that divide the columns")
    return rows, runs * e.kept


def _joined(e: say.Joined, shapes: Shapes) -> Shape:
    (rows, x_cols), (y_rows, y_cols) = shapes[e.x], shapes[e.y]
    if rows != y_rows:
        _refuse(e, f"{e.x} has {rows} rows and {e.y} has {y_rows}", "as many of each")
    for name, cols in ((e.x, x_cols), (e.y, y_cols)):
        _split(e, name, cols, 1 if e.heads is None else e.heads, "columns")
    return rows, x_cols + y_cols


def _swiglu(e: say.Swiglu, shapes: Shapes) -> Shape:
    _want(e, "up", shapes, shapes[e.gate])
    return shapes[e.gate]


def _argmax(e: say.Argmax, shapes: Shapes) -> Shape:
    if shapes[e.x][0] != 1:
        _refuse(e, f"{e.x} has {shapes[e.x][0]} rows", "one row")
    return 1, 1


def _attention(e: say.Attention | say.CausalAttention, shapes: Shapes) -> Shape:
    (rows, q_cols), (positions, k_cols), (v_rows, v_cols) = (shapes[n] for n in (e.q, e.k, e.v))
    width = _split(e, e.q, q_cols, e.heads, "columns")
    if e.groups < 1 or e.heads % e.groups != 0:
        _refuse(e, f"{e.heads} heads in {e.groups} groups", "groups of equally many heads")
    if k_cols != e.groups * width:
        _refuse(e, f"{e.k} has {k_cols} columns", f"{e.groups} groups of {width}", [e.k])
    if v_rows != positions:
        _refuse(e, f"{e.k} has {positions} rows and {e.v} has {v_rows}", "as many of each")
    v_width = _split(e, e.v, v_cols, e.groups, "columns")
    _want(e, "sinks", shapes, (1, e.heads))
    if isinstance(e, say.Attention) and rows != 1:
        _refuse(e, f"{e.q} has {rows} rows", "one row, or causal attention", [e.q])
    if e.position is not None:
        _within(e, "position", e.position, rows, positions)
    return rows, e.heads * v_width


def _causal_conv(e: say.CausalConv, shapes: Shapes) -> Shape:
    for field in ("weight", "state"):
        _want(e, field, shapes, (e.taps, shapes[e.x][1]))
    return shapes[e.x]


def _decay(e: say.Decay, shapes: Shapes) -> Shape:
    for field in ("bias", "rate"):
        _want(e, field, shapes, (1, shapes[e.x][1]))
    return shapes[e.x]


def _gated_delta(e: say.GatedDelta, shapes: Shapes) -> Shape:
    rows, width = shapes[e.q][0], shapes[e.norm][1]
    if e.groups < 1 or e.heads % e.groups != 0:
        _refuse(e, f"{e.heads} heads in {e.groups} groups", "groups of equally many heads")
    wanted = {"q": e.groups * width, "k": e.groups * width, "v": e.heads * width}
    wanted |= {"gate": e.heads * width, "beta": e.heads, "decay": e.heads}
    for field, cols in wanted.items():
        _want(e, field, shapes, (rows, cols))
    _want(e, "norm", shapes, (1, width))
    _want(e, "state", shapes, (e.heads * width, width))
    return rows, e.heads * width


def _moe(e: say.Moe, shapes: Shapes) -> Shape:
    rows, cols = shapes[e.x]
    if rows != 1:
        _refuse(e, f"{e.x} has {rows} rows", "one row", [e.x])
    _check_choice(e)
    dff = _split(e, e.gate, shapes[e.gate][0], e.experts, "rows")
    wanted = {"router": (cols, e.experts), "router_bias": (1, e.experts)}
    wanted |= {"choice_bias": (1, e.experts), "down": (e.experts * cols, dff)}
    wanted |= dict.fromkeys(("gate", "up"), (e.experts * dff, cols))
    wanted |= dict.fromkeys(("gate_bias", "up_bias"), (e.experts, dff))
    wanted["down_bias"] = (e.experts, cols)
    for field, shape in wanted.items():
        _want(e, field, shapes, shape)
    return 1, cols


def _check_choice(e: say.Moe) -> None:
    eligible = e.experts
    if e.groups is not None:
        used, count = e.groups.used_groups, e.groups.group_count
        if count < 1 or e.experts % count != 0 or not 1 <= used <= count:
            _refuse(e, f"{e.experts} experts, {write(e.groups)}", "groups of equally many", [])
        eligible = used * (e.experts // count)
    if not 1 <= e.chosen <= eligible:
        _refuse(e, f"choosing {e.chosen}", f"1 to {eligible} experts", [])


def _fold(e: say.Fold, shapes: Shapes) -> Shape:
    return shapes[e.partial]


def _join(e: say.Join, shapes: Shapes) -> Shape:
    """A partial without a chip in its name is the only one."""
    partials = [e.partial]
    if e.chips != 1:
        partials = [e.partial._replace(chip=chip) for chip in range(e.chips)]
    missing = [p for p in partials if p not in shapes]
    if missing:
        _refuse(e, f"nothing gives {listed(missing)} a shape", "the partial of every chip", missing)
    rows = {shapes[p][0] for p in partials}
    if len(rows) != 1:
        _refuse(e, f"partials of {listed(sorted(rows))} rows", "as many of each", partials)
    return rows.pop(), sum(shapes[p][1] for p in partials)


SHAPE_RULES: dict[type[Expression], Callable[[Any, Shapes], Shape]] = {
    say.Row: _row,
    say.Rows: _rows,
    say.Matmul: _matmul,
    say.Plus: _elementwise,
    say.Hadamard: _elementwise,
    say.Scaled: _same,
    say.Capped: _same,
    say.RmsNorm: _rms_norm,
    say.L2Norm: _l2_norm,
    say.Rope: _rope,
    say.First: _cut,
    say.Last: _cut,
    say.Joined: _joined,
    say.Swiglu: _swiglu,
    say.Silu: _same,
    say.Sigmoid: _same,
    say.Gelu: _same,
    say.Argmax: _argmax,
    say.Attention: _attention,
    say.CausalAttention: _attention,
    say.CausalConv: _causal_conv,
    say.Decay: _decay,
    say.GatedDelta: _gated_delta,
    say.Moe: _moe,
    say.Fold: _fold,
    say.Join: _join,
}
