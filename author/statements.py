"""Every form of the language: its fields and its English, once, in the order of LANGUAGE.md."""

from author.forms import Expression, Part, Scalar, Statement, form
from author.names import Name

# --- Declarations and scalars


@form("Let {name} be a {rows} by {cols} tensor of Real")
class Tensor(Statement):
    """A matrix: bound from outside where a table or the caller names it, else zeros."""

    name: Name
    rows: int
    cols: int


@form("Let {name} be a 1 by {cols} tensor of Int")
class Tokens(Statement):
    """The token ids of the rows."""

    name: Name
    cols: int


@form("Set item {item} of {name} to {token}")
class SetItem(Statement):
    """One token id; items count from 1, ids from 0."""

    item: int
    name: Name
    token: int


@form("Let {name} be {value}")
class Number(Statement):
    """A run-time integer: a token id or a position."""

    name: Name
    value: int


# --- Expressions


@form("row {row} of {x}[ counted from {first}]")
class Row(Expression):
    """One row; of an embedding, the row of a token id.

    With `first`, `x` holds the rows from that one on (ids count from 0); a row it does not
    hold reads as zeros.
    """

    row: Scalar
    x: Name
    first: int | None = None


@form("rows {tokens} of {x}[ counted from {first}]")
class Rows(Expression):
    """One row of `x` for each id of `tokens`; `first` as in `Row`."""

    tokens: Name
    x: Name
    first: int | None = None


@form("{x} matmul {w}[ across {heads} heads]")
class Matmul(Expression):
    """The matrix product; with heads, block-diagonal."""

    x: Name
    w: Name
    heads: int | None = None


@form("{a} plus {b}")
class Plus(Expression):
    """The elementwise sum; a row vector is added to every row."""

    a: Name
    b: Name


@form("{a} hadamard {b}")
class Hadamard(Expression):
    """The elementwise product."""

    a: Name
    b: Name


@form("{x} scaled by {factor}")
class Scaled(Expression):
    """A multiple."""

    x: Name
    factor: float


@form("{x} capped at {cap}")
class Capped(Expression):
    """A soft cap, `cap * tanh(x / cap)`."""

    x: Name
    cap: float


@form("{x} clamped between {low} and {high}")
class Clamped(Expression):
    """Every column brought into a range."""

    x: Name
    low: float
    high: float


@form("rmsnorm of {x} with weight {weight}[ across {heads} heads][ with epsilon {epsilon}]")
class RmsNorm(Expression):
    """Each segment over its root mean square, times the weight; heads count the whole matrix."""

    x: Name
    weight: Name
    heads: int | None = None
    epsilon: float | None = None


@form("layernorm of {x} with weight {weight}[ with epsilon {epsilon}]")
class LayerNorm(Expression):
    """Each row less its mean, over the root of its variance, times the weight."""

    x: Name
    weight: Name
    epsilon: float | None = None


@form("the square sum of {x}")
class SquareSum(Expression):
    """The sum of the squares of each row, as one column."""

    x: Name


@form(
    "{x} over the root of {squares} of {columns} columns with weight {weight}"
    "[ with epsilon {epsilon}]"
)
class OverRoot(Expression):
    """An rmsnorm of rows that lie over several chips, from the square sum of all their columns."""

    x: Name
    squares: Name
    columns: int
    weight: Name
    epsilon: float | None = None


@form("l2norm of {x} across {heads} heads[ with epsilon {epsilon}]")
class L2Norm(Expression):
    """Each segment over its length; heads count the whole matrix."""

    x: Name
    heads: int
    epsilon: float | None = None


@form("rope of {x} with cos {cos} and sin {sin}[ from position {position}] across {heads} heads")
class Rope(Expression):
    """Rotary embedding, half-split, of each of the heads of a row."""

    x: Name
    cos: Name
    sin: Name
    heads: int
    position: Scalar | None = None


@form("the first {kept} of every {run} of {x}")
class First(Expression):
    """The first columns of each run of columns."""

    x: Name
    kept: int
    run: int


@form("the last {kept} of every {run} of {x}")
class Last(Expression):
    """The last columns of each run of columns."""

    x: Name
    kept: int
    run: int


@form("{x} joined with {y}[ across {heads} heads]")
class Joined(Expression):
    """Columns side by side; with heads, head by head."""

    x: Name
    y: Name
    heads: int | None = None


@form("swiglu of {gate} and {up}")
class Swiglu(Expression):
    """`silu(gate) * up`."""

    gate: Name
    up: Name


@form("silu of {x}")
class Silu(Expression):
    """`x * sigmoid(x)`."""

    x: Name


@form("sigmoid of {x}")
class Sigmoid(Expression):
    """`1 / (1 + exp(-x))`."""

    x: Name


@form("gelu of {x}")
class Gelu(Expression):
    """Gelu in the tanh form."""

    x: Name


@form("xielu of {x} with positive {positive} negative {negative} beta {beta} cut at {cut}")
class Xielu(Expression):
    """`positive * x² + beta * x` above zero, a scaled exponential and `beta * x` below.

    `positive` and `negative` are single numbers, already made positive.
    """

    x: Name
    positive: Name
    negative: Name
    beta: float
    cut: float


@form("argmax of {x}")
class Argmax(Expression):
    """The index, from 0, of the largest column: a token id."""

    x: Name


@form(" within the last {last}")
class Sliding(Part):
    """A window of the last positions, one's own counted."""

    last: int


@form(" within chunks of {chunk}")
class Chunked(Part):
    """Only the positions of one's own chunk."""

    chunk: int


@form(
    "attention of {q} over {k} and {v} with {heads} heads {groups} groups[ up to {position}]"
    "[{window}][ scaled by {scale}][ capped at {cap}][ with sinks {sinks}]"
)
class Attention(Expression):
    """One row of queries over rows 1 to `position` of keys and values."""

    q: Name
    k: Name
    v: Name
    heads: int
    groups: int
    position: Scalar | None = None
    window: Sliding | Chunked | None = None
    scale: float | None = None
    cap: float | None = None
    sinks: Name | None = None


@form(
    "causal attention of {q} over {k} and {v} with {heads} heads {groups} groups from {position}"
    "[{window}][ scaled by {scale}][ capped at {cap}][ with sinks {sinks}]"
)
class CausalAttention(Expression):
    """Row `j` (from 0) of the queries stands at `position + j` and reads rows up to its own."""

    q: Name
    k: Name
    v: Name
    heads: int
    groups: int
    position: Scalar
    window: Sliding | Chunked | None = None
    scale: float | None = None
    cap: float | None = None
    sinks: Name | None = None


@form("causal conv of {x} with weight {weight} state {state} over {taps} taps")
class CausalConv(Expression):
    """A depthwise convolution over the last inputs of each column, kept in the state."""

    x: Name
    weight: Name
    state: Name
    taps: int
    UPDATES = ("state",)


@form("decay of {x} with bias {bias} rate {rate}[ across {heads} heads]")
class Decay(Expression):
    """`exp(-exp(rate) * softplus(x + bias))`, a column for each value head.

    With heads, a column for each channel, and one rate for each head.
    """

    x: Name
    bias: Name
    rate: Name
    heads: int | None = None


@form(
    "gated delta of {q} over {k} and {v} with [{!sigmoid_gate}sigmoid ]gate {gate} beta {beta}"
    " decay {decay}[{!by_channel} by channel] state {state} norm {norm}"
    " with {heads} heads {groups} groups[ with epsilon {epsilon}]"
)
class GatedDelta(Expression):
    """The gated delta rule, row after row, its output normed and gated.

    `by_channel`: the decay has a column for each key channel of each head.
    """

    q: Name
    k: Name
    v: Name
    gate: Name
    beta: Name
    decay: Name
    state: Name
    norm: Name
    heads: int
    groups: int
    sigmoid_gate: bool = False
    by_channel: bool = False
    epsilon: float | None = None
    UPDATES = ("state",)


@form("linear attention of {q} over {k} and {v} decay {decay} state {state} with {heads} heads")
class LinearAttention(Expression):
    """Attention as a decaying sum of outer products, row after row, one decay a head."""

    q: Name
    k: Name
    v: Name
    decay: Name
    state: Name
    heads: int
    UPDATES = ("state",)


@form("within the top {used_groups} of {group_count} groups")
class ExpertGroups(Part):
    """Only experts of the best runs may be chosen."""

    used_groups: int
    group_count: int


@form("using a swiglu clamped at {limit} with slope {slope}")
class ClampedSwiglu(Part):
    """`(u + 1) * g * sigmoid(slope * g)` of clamped gate and up."""

    limit: float
    slope: float


@form(
    "moe of {x} with router {router}[ plus {router_bias}] gate {gate}[ plus {gate_bias}]"
    " up {up}[ plus {up_bias}] down {down}[ plus {down_bias}] choosing {chosen} of {experts}"
    "[{!by_sigmoid} by sigmoid][ biased by {choice_bias}][ {groups}]"
    "[{!without_renormalizing} without renormalizing][ scaled by {scale}]"
    "[{!weighting_inputs} weighting the inputs][ {activation}]"
)
class Moe(Expression):
    """A mixture of experts over one row."""

    x: Name
    router: Name
    gate: Name
    up: Name
    down: Name
    chosen: int
    experts: int
    router_bias: Name | None = None
    gate_bias: Name | None = None
    up_bias: Name | None = None
    down_bias: Name | None = None
    by_sigmoid: bool = False
    choice_bias: Name | None = None
    groups: ExpertGroups | None = None
    without_renormalizing: bool = False
    scale: float | None = None
    weighting_inputs: bool = False
    activation: ClampedSwiglu | None = None


@form("the fold of {partial} across {chips} chips")
class Fold(Expression):
    """The sum of every chip's `partial`."""

    partial: Name
    chips: int


@form("the join of {partial} across {chips} chips")
class Join(Expression):
    """The columns of every chip's `partial`, in chip order."""

    partial: Name
    chips: int


# --- Statements over expressions; `Let` comes last, since any line that starts so may be one.


@form("Set row {row} of {name} to {x}")
class SetRow(Statement):
    """Write one row in place; rows count from 1."""

    row: Scalar
    name: Name
    x: Name
    UPDATES = ("name",)


@form("Set rows from {row} of {name} to {x}")
class SetRows(Statement):
    """Write rows in place, the first at `row`."""

    row: Scalar
    name: Name
    x: Name
    UPDATES = ("name",)


@form("Let {name} be {value}")
class Let(Statement):
    """Bind a name to the value of an expression."""

    name: Name
    value: Expression
