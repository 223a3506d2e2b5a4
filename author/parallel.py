"""Several chips: each block once for every chip's share, and the folds and joins between them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from author import statements as say
from author.blocks import Block
from author.manifest import TpCollective, TpSlice
from author.names import Name
from author.share import Share
from author.single import declare_tokens, finished_logits, logits, looked_up, scaled_embedding
from author.writer import Meeting, Scope, Writer, derived, uncut


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a program is split: over how many chips, cut at what multiples, and how far.

    `vocabulary` parts the embedding by rows and the head by columns; `beyond` goes past the
    blocks that the goldens refuse to split.
    """

    chips: int
    align: int = 1
    vocabulary: bool = False
    beyond: bool = False

    def shares(self) -> Iterator[Share]:
        """The share of every chip."""
        for chip in range(self.chips):
            yield Share(chip=chip, chips=self.chips, align=self.align)


def write_block(
    block: Block, scope: Scope, write_input: Callable[[], Name], *, split: Split
) -> Name:
    """Write a block for every chip; the sum of their results."""
    x = write_input()
    block.common(scope, x)
    scopes = tuple(replace(scope, share=share) for share in split.shares())
    if block.meeting is not None:
        _meet(block, block.meeting, scopes, x)
    partials = tuple(_partial(block, each, x) for each in scopes)
    out = scope.value(block.result)
    if block.result_bias is None:
        return fold(scope.writer, out, partials)
    total = fold(scope.writer, derived(out, "_r"), partials)
    bias = scope.declare(uncut(block.result_bias, 1, scope.spec.d, "float"))
    return scope.writer.let(out, say.Plus(total, bias))


def _meet(block: Block, meeting: Meeting, scopes: tuple[Scope, ...], x: Name) -> None:
    """Write what the chips add up halfway, and what each makes of the sum."""
    partials = tuple(
        _nothing(scope, meeting, x) if block.idle(scope.share) else meeting.partial(scope, x)
        for scope in scopes
    )
    everywhere = scopes[0].everywhere
    fold(everywhere.writer, everywhere.value(meeting.base), partials)
    if meeting.after is not None:
        meeting.after(everywhere)


def _nothing(scope: Scope, meeting: Meeting, x: Name) -> Name:
    """A zero of so many columns, made from an input of more."""
    name = derived(scope.value(meeting.base), "_z")
    like = scope.writer.let(name, say.First(x, meeting.cols, scope.spec.d))
    return scope.zero(meeting.base, like)


def _partial(block: Block, scope: Scope, x: Name) -> Name:
    if block.idle(scope.share):
        return scope.zero(block.result, x)
    block.declare(scope)
    return block.partial(scope, x)


# --- The vocabulary. A chip without rows or columns of it holds an empty slice: a row that is not
# held reads as zeros, and no columns join as none.


def write_embedding(writer: Writer, tokens: tuple[int, ...] | None, *, split: Split) -> Name:
    """Write the embedded rows: each chip looks up what it holds, and the rest reads as zeros."""
    shape = (writer.spec.vocab, writer.spec.d)
    if tokens is not None:
        declare_tokens(writer, tokens)

    def write(out: Name) -> Name:
        partials = []
        for share in split.shares():
            run = share.run(writer.spec.vocab)
            piece = TpSlice(of=Name("Emb"), of_shape=shape, axis="rows", ranges=(run,))
            table = writer.slice(Name("Emb", chip=share.chip), piece, q8=True)
            row = looked_up(table, tokens, first=run[0])
            partials.append(writer.let(out._replace(chip=share.chip), row))
        return fold(writer, out, tuple(partials))

    return scaled_embedding(writer, tokens, write)


def write_logits(
    writer: Writer, out: Name, write_input: Callable[[], Name], *, split: Split
) -> Name:
    """Write the logits: each chip its run of the vocabulary, joined in order."""
    shape, x = (writer.spec.d, writer.spec.vocab), write_input()

    def write(raw: Name) -> Name:
        partials = []
        for share in split.shares():
            run = share.run(writer.spec.vocab)
            piece = TpSlice(of=Name("Wout"), of_shape=shape, axis="cols", ranges=(run,))
            weight = writer.slice(Name("Wout", chip=share.chip), piece, q8=True)
            bias = _head_bias(writer, share)
            partials.append(logits(writer, raw._replace(chip=share.chip), x, weight, bias))
        return join(writer, raw, tuple(partials))

    return finished_logits(writer, out, write)


def _head_bias(writer: Writer, share: Share) -> Name | None:
    """Declare the bias of a share's run of the vocabulary, where the head has one."""
    if not writer.spec.head_bias:
        return None
    shape, run = (1, writer.spec.vocab), share.run(writer.spec.vocab)
    piece = TpSlice(of=Name("Bout"), of_shape=shape, axis="cols", ranges=(run,))
    return writer.slice(Name("Bout", chip=share.chip), piece, q8=False)


# --- Where the chips meet


def fold(writer: Writer, out: Name, partials: tuple[Name, ...]) -> Name:
    """Add up the chips' partials; a lone one is bound by a fold over one chip."""
    return _gathered(writer, out, partials, say.Plus, say.Fold)


def join(writer: Writer, out: Name, partials: tuple[Name, ...]) -> Name:
    """Put the chips' columns side by side; a lone partial is bound by a join over one chip."""
    return _gathered(writer, out, partials, say.Joined, say.Join)


def _gathered(
    writer: Writer,
    out: Name,
    partials: tuple[Name, ...],
    pair: type[say.Plus] | type[say.Joined],
    alone: type[say.Fold] | type[say.Join],
) -> Name:
    steps = _steps(out, len(partials), "f" if pair is say.Plus else "j")
    so_far = partials[0]
    for step, partial in zip(steps, partials[1:], strict=True):
        so_far = writer.let(step, pair(so_far, partial))
    if not steps:
        writer.let(out, alone(partials[0], 1))
    kind = "fold" if pair is say.Plus else "join"
    writer.collectives.append(TpCollective(out=out, partials=partials, steps=steps, kind=kind))
    return out


def _steps(out: Name, partials: int, letter: str) -> tuple[Name, ...]:
    """The names bound on the way to `out`, which is the last of them."""
    between = (derived(out, f"_{letter}{i}") for i in range(1, partials - 1))
    return (*between, out) if partials > 1 else ()
