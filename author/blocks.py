"""A layer: a mixer and a feed-forward, their norms and their additions, however a block is cut."""

from collections.abc import Callable
from typing import Protocol

from author import statements as say
from author.attention import AttentionBlock
from author.delta import DeltaBlock
from author.experts import MoeBlock
from author.feed_forward import DenseBlock
from author.latent import LatentBlock
from author.names import Name
from author.share import Share
from author.spec import Attention, Dense, GatedDelta, Mla, Moe
from author.writer import Rows, Scope, derived, uncut


class Block(Protocol):
    """The statements of a mixer or a feed-forward, for any share of it.

    On one device `declare` and `partial` write all of it, and the partial is the result. Chips
    write `common` once, then `declare` and `partial` each: the results add up, and the bias of
    the result is added to the sum.
    """

    @property
    def result(self) -> str:
        """The base of the value that the chips' partials add up to."""
        ...

    @property
    def result_bias(self) -> str | None:
        """The base of what is added to the result, once."""
        ...

    def idle(self, share: Share) -> bool:
        """Whether a share holds nothing of the block."""
        ...

    def declare(self, scope: Scope) -> None:
        """Declare the weights and the states of a share."""
        ...

    def common(self, scope: Scope, x: Name) -> None:
        """Write what every chip holds and computes alike."""
        ...

    def partial(self, scope: Scope, x: Name) -> Name:
        """Write a share's part of the result."""
        ...


# Writes a block whose input is what the last argument writes and returns.
WriteBlock = Callable[[Block, Scope, Callable[[], Name]], Name]


def mixer_block(mixer: Attention | GatedDelta | Mla) -> Block:
    """The block of a mixer."""
    match mixer:
        case Attention():
            return AttentionBlock(a=mixer)
        case GatedDelta():
            return DeltaBlock(g=mixer)
        case Mla():
            return LatentBlock(m=mixer)


def feed_forward_block(ffn: Dense | Moe) -> Block:
    """The block of a feed-forward."""
    return DenseBlock(f=ffn) if isinstance(ffn, Dense) else MoeBlock(m=ffn)


def layer_input(rows: Rows, layer: int) -> Name:
    """The name of what a layer reads, or past the last layer, of what the head reads."""
    if layer == 0:
        return Name("x" if rows.stacked is None else "X")
    return Name("xo" if rows.stacked is None else "bxo", layer - 1)


def write_layer(scope: Scope, write_block: WriteBlock) -> Name:
    """Write one layer; its output."""
    layer, x = scope.layer, layer_input(scope.rows, scope.number)

    def mixer_input() -> Name:
        return scope.norm("xn", x, scope.weight("an"))

    def feed_forward_input() -> Name:
        added = _post_normed(scope, mixed, "pan") if layer.post_mixer_norm else mixed
        scope.let("xr", say.Plus(x, added))
        return scope.norm("x2n", scope.value("xr"), scope.weight("fn"))

    _declare_norm(scope, "an")
    mixed = write_block(mixer_block(layer.mixer), scope, mixer_input)
    _declare_norm(scope, "fn")
    fed = write_block(feed_forward_block(layer.ffn), scope, feed_forward_input)
    added = _post_normed(scope, fed, "pfn") if layer.post_ffn_norm else fed
    return scope.let("xo", say.Plus(scope.value("xr"), added))


def _declare_norm(scope: Scope, base: str) -> Name:
    return scope.declare(uncut(base, 1, scope.spec.d, "float"))


def _post_normed(scope: Scope, x: Name, base: str) -> Name:
    weight = _declare_norm(scope, base)
    return scope.writer.let(derived(x, "n"), say.RmsNorm(x, weight, None, scope.writer.epsilon))
