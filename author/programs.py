"""Every kind of program, written once: on one device, or with `split` over chips."""

from author.parallel import Split
from author.program import Program
from author.spec import ModelSpec, SpecError
from author.step import Step
from author.writer import Rows

# --- Whole steps


def forward(spec: ModelSpec, *, folder: str, split: Split | None = None) -> Program:
    """One row that sees itself alone, from its embedding to its logits."""
    made = Step(spec, folder, Rows(), split)
    made.input(0)
    made.rotations()
    made.layers()
    made.head()
    return made.program


def decode_step(
    spec: ModelSpec, *, folder: str, ctx: int, tok: int, pos: int, split: Split | None = None
) -> Program:
    """One token at a position, from its id to the next id."""
    made = Step(spec, folder, Rows(ctx=ctx), split)
    made.token(tok)
    made.position(pos)
    made.embedding()
    made.rotations()
    made.layers()
    made.next_token(made.head())
    return made.program


def prefill(
    spec: ModelSpec,
    *,
    folder: str,
    ctx: int,
    toks: tuple[int, ...],
    pos0: int,
    split: Split | None = None,
) -> Program:
    """Tokens that follow one another, to the id that comes next."""
    made = _prefilled(spec, folder, ctx, toks, pos0, split)
    made.next_token(made.last_row_head())
    return made.program


def prefill_logits(
    spec: ModelSpec,
    *,
    folder: str,
    ctx: int,
    toks: tuple[int, ...],
    pos0: int,
    split: Split | None = None,
) -> Program:
    """Tokens that follow one another, to the logits of every row."""
    made = _prefilled(spec, folder, ctx, toks, pos0, split)
    made.head()
    return made.program


def _prefilled(
    spec: ModelSpec,
    folder: str,
    ctx: int,
    toks: tuple[int, ...],
    pos0: int,
    split: Split | None,
) -> Step:
    _refuse_overflow(ctx, len(toks), pos0)
    made = Step(spec, folder, _sequence(ctx, len(toks)), split)
    made.positions(pos0)
    made.embedding(toks)
    made.rotations()
    made.layers()
    return made


def _refuse_overflow(ctx: int, rows: int, pos0: int) -> None:
    if rows < 1 or pos0 < 1 or pos0 + rows - 1 > ctx:
        raise SpecError(f"a chunk of {rows} tokens from position {pos0} fits a context of {ctx}")


def _sequence(ctx: int | None, count: int) -> Rows:
    return Rows(count=count, ctx=ctx, stacked="shared")


def _sequences(ctx: int | None, count: int) -> Rows:
    return Rows(count=count, ctx=ctx, stacked="per_sequence")


def decode_batch(
    spec: ModelSpec,
    *,
    folder: str,
    ctx: int,
    seqs: tuple[tuple[int, int], ...],
    split: Split | None = None,
) -> Program:
    """One (token, position) of each sequence, to the next id of each."""
    made = Step(spec, folder, _sequences(ctx, len(seqs)), split)
    made.positions(*(pos for _, pos in seqs))
    made.embedding(tuple(tok for tok, _ in seqs))
    made.rotations()
    made.layers()
    made.next_tokens(made.head())
    return made.program


# --- A layer


def layer(spec: ModelSpec, *, number: int, folder: str, split: Split | None = None) -> Program:
    """One layer of `forward`."""
    return _lone_layer(Step(spec, folder, Rows(), split), number)


def decode_layer(
    spec: ModelSpec, *, number: int, folder: str, ctx: int, pos: int, split: Split | None = None
) -> Program:
    """One layer of `decode_step`."""
    made = Step(spec, folder, Rows(ctx=ctx), split)
    made.position(pos)
    return _lone_layer(made, number)


def stacked_layer(
    spec: ModelSpec,
    *,
    number: int,
    folder: str,
    ctx: int,
    poss: tuple[int, ...],
    rows: str = "per_sequence",
    split: Split | None = None,
) -> Program:
    """One layer of `decode_batch`, or with `rows` "shared" of `prefill`."""
    shared = rows == "shared"
    if shared:
        _refuse_overflow(ctx, len(poss), poss[0])
    stack = _sequence(ctx, len(poss)) if shared else _sequences(ctx, len(poss))
    made = Step(spec, folder, stack, split)
    made.positions(*(poss[:1] if shared else poss))
    return _lone_layer(made, number)


def _lone_layer(made: Step, number: int) -> Program:
    if number >= len(made.spec.layers):
        raise SpecError(f"l is {number}, wanted a layer from 0 to {len(made.spec.layers) - 1}")
    made.input(number)
    made.rotations(number)
    made.layer(number)
    return made.program


# --- The embedding and the head


def decode_embed(spec: ModelSpec, *, folder: str, tok: int, split: Split | None = None) -> Program:
    """The embedded row of a token."""
    made = Step(spec, folder, Rows(), split)
    made.token(tok)
    made.embedding()
    return made.program


def decode_batch_embed(
    spec: ModelSpec, *, folder: str, toks: tuple[int, ...], split: Split | None = None
) -> Program:
    """The embedded rows of tokens."""
    made = Step(spec, folder, _sequences(None, len(toks)), split)
    made.embedding(toks)
    return made.program


def head(spec: ModelSpec, *, folder: str, split: Split | None = None) -> Program:
    """The logits of one row."""
    made = _headed(spec, folder, Rows(), split)
    made.head()
    return made.program


def decode_head(spec: ModelSpec, *, folder: str, split: Split | None = None) -> Program:
    """The next id after one row."""
    made = _headed(spec, folder, Rows(), split)
    made.next_token(made.head())
    return made.program


def decode_batch_head(
    spec: ModelSpec, *, folder: str, bsz: int, split: Split | None = None
) -> Program:
    """The next id of each sequence."""
    made = _headed(spec, folder, _sequences(None, bsz), split)
    made.next_tokens(made.head())
    return made.program


def prefill_head(
    spec: ModelSpec, *, folder: str, chunk: int, split: Split | None = None
) -> Program:
    """The id that comes after the last of some rows."""
    made = _headed(spec, folder, _sequence(None, chunk), split)
    made.next_token(made.last_row_head())
    return made.program


def prefill_logits_head(
    spec: ModelSpec, *, folder: str, chunk: int, split: Split | None = None
) -> Program:
    """The logits of some rows."""
    made = _headed(spec, folder, _sequence(None, chunk), split)
    made.head()
    return made.program


def _headed(spec: ModelSpec, folder: str, rows: Rows, split: Split | None) -> Step:
    made = Step(spec, folder, rows, split)
    made.input(len(spec.layers))
    return made
