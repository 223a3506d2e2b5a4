"""One device: every block whole, the embedding and the head in one piece."""

from collections.abc import Callable

from author import statements as say
from author.blocks import Block
from author.names import Name
from author.writer import Scope, Writer, derived


def write_block(block: Block, scope: Scope, write_input: Callable[[], Name]) -> Name:
    """Write a block; its result."""
    block.declare(scope)
    return block.partial(scope, write_input())


def write_embedding(writer: Writer, tokens: tuple[int, ...] | None) -> Name:
    """Write the embedded row of `tok`, or the rows of so many tokens."""
    table = writer.q8_matrix(Name("Emb"), writer.spec.vocab, writer.spec.d)
    if tokens is not None:
        declare_tokens(writer, tokens)
    return scaled_embedding(writer, tokens, lambda out: writer.let(out, looked_up(table, tokens)))


def write_logits(writer: Writer, out: Name, write_input: Callable[[], Name]) -> Name:
    """Write the logits."""
    weight = writer.q8_matrix(Name("Wout"), writer.spec.d, writer.spec.vocab)
    bias = None
    if writer.spec.head_bias:
        bias = writer.float_matrix(Name("Bout"), 1, writer.spec.vocab)
    x = write_input()
    return finished_logits(writer, out, lambda raw: logits(writer, raw, x, weight, bias))


# --- What one device and several share


def declare_tokens(writer: Writer, tokens: tuple[int, ...]) -> None:
    """Declare the ids of the rows."""
    name = Name("toks")
    writer.say(say.Tokens(name, len(tokens)))
    for item, token in enumerate(tokens, start=1):
        writer.say(say.SetItem(item, name, token))


def looked_up(
    table: Name, tokens: tuple[int, ...] | None, first: int | None = None
) -> say.Row | say.Rows:
    """The rows of the step's tokens in a table, which may start at an id other than 0."""
    if tokens is None:
        return say.Row(Name("tok"), table, first)
    return say.Rows(Name("toks"), table, first)


def scaled_embedding(
    writer: Writer, tokens: tuple[int, ...] | None, write: Callable[[Name], Name]
) -> Name:
    """Scale what `write` looks up under a name, where the model scales it."""
    out, scale = Name("x" if tokens is None else "X"), writer.spec.embedding_scale
    if scale is None:
        return write(out)
    return writer.let(out, say.Scaled(write(derived(out, "e")), scale))


def logits(writer: Writer, out: Name, x: Name, weight: Name, bias: Name | None) -> Name:
    """Write a product with a head, and its bias added."""
    product = say.Matmul(x, weight)
    if bias is None:
        return writer.let(out, product)
    return writer.let(out, say.Plus(writer.let(derived(out, "_r"), product), bias))


def finished_logits(writer: Writer, out: Name, write: Callable[[Name], Name]) -> Name:
    """Scale and cap the logits that `write` binds to a name, as far as the model does."""
    scale, cap = writer.spec.logit_scale, writer.spec.final_logit_softcap
    if scale is None and cap is None:
        return write(out)
    raw = write(derived(out, "_raw"))
    if scale is not None:
        raw = writer.let(out if cap is None else derived(out, "_scaled"), say.Scaled(raw, scale))
    return raw if cap is None else writer.let(out, say.Capped(raw, cap))
