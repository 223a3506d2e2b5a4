"""A layer: a mixer and a feed-forward, their norms and their additions, however a block is cut."""

from collections.abc import Callable
from typing import Protocol

from author import statements as say
from author.attention import AttentionBlock
from author.channel_delta import ChannelDeltaBlock
from author.delta import DeltaBlock
from author.experts import MoeBlock
from author.feed_forward import DenseBlock
from author.latent import LatentBlock
from author.linear import LinearBlock
from author.names import Name
from author.share import Share
from author.spec import (
    Attention,
    ChannelDelta,
    Dense,
    GatedDelta,
    Layer,
    LinearMixer,
    Mixer,
    Mla,
    Moe,
)
from author.writer import Meeting, Rows, Scope, derived, uncut


class Block(Protocol):
    """The statements of a mixer or a feed-forward, for any share of it.

    On one device `declare` and `partial` write all of it, and the partial is the result. Chips
    write `common` once, then `declare` and `partial` each: the results add up, and the bias of
    the result is added to the sum. Where they have a meeting, they write its partial before.
    """

    @property
    def result(self) -> str:
        """The base of the value that the chips' partials add up to."""
        ...

    @property
    def result_bias(self) -> str | None:
        """The base of what is added to the result, once."""
        ...

    @property
    def meeting(self) -> Meeting | None:
        """What the chips add up halfway; on one device there is nothing to it."""
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


def mixer_block(mixer: Mixer) -> Block:
    """The block of a mixer."""
    match mixer:
        case Attention():
            return AttentionBlock(a=mixer)
        case GatedDelta():
            return DeltaBlock(g=mixer)
        case Mla():
            return LatentBlock(m=mixer)
        case ChannelDelta():
            return ChannelDeltaBlock(c=mixer)
        case LinearMixer():
            return LinearBlock(m=mixer)


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
        return _normed(scope, "xn", x, "an") if layer.pre_norm else x

    def feed_forward_input() -> Name:
        stream = x if layer.normed_residual is None else scope.value("xn")
        norm = "pan" if layer.post_mixer_norm else None
        added = _add(scope, "xr", stream, mixed, norm=norm, factors=_mixer_factors(layer))
        if layer.parallel:
            return scope.value("xn")
        return _normed(scope, "x2n", added, "fn") if layer.pre_norm else added

    if layer.pre_norm:
        _declare_norm(scope, "an")
    mixed = write_block(mixer_block(layer.mixer), scope, mixer_input)
    if layer.pre_norm and not layer.parallel:
        _declare_norm(scope, "fn")
    fed = write_block(feed_forward_block(layer.ffn), scope, feed_forward_input)
    stream = scope.value("xr" if layer.normed_residual is None else "x2n")
    norm = "pfn" if layer.post_ffn_norm else None
    return _add(scope, "xo", stream, fed, norm=norm, factors=_feed_forward_factors(layer))


def _mixer_factors(layer: Layer) -> tuple[float, float]:
    """The factors on the stream and on what the mixer adds to it."""
    if layer.normed_residual is not None:
        return layer.normed_residual.mixer_alpha, layer.normed_residual.mixer_beta
    return 1.0, _residual_scale(layer)


def _feed_forward_factors(layer: Layer) -> tuple[float, float]:
    """The factors on the stream and on what the feed-forward adds to it."""
    if layer.normed_residual is not None:
        return layer.normed_residual.ffn_alpha, layer.normed_residual.ffn_beta
    return 1.0, _residual_scale(layer)


def _residual_scale(layer: Layer) -> float:
    return 1.0 if layer.residual_scale is None else layer.residual_scale


def _add(
    scope: Scope,
    base: str,
    stream: Name,
    result: Name,
    *,
    norm: str | None,
    factors: tuple[float, float],
) -> Name:
    """Add a block's result to the stream, each times its factor; `norm` norms the result first."""
    alpha, beta = factors
    added = result if norm is None else _post_normed(scope, result, norm)
    carried = _times(scope, derived(stream, "s"), stream, alpha)
    return scope.let(base, say.Plus(carried, _times(scope, derived(result, "s"), added, beta)))


def _times(scope: Scope, out: Name, x: Name, factor: float) -> Name:
    return x if factor == 1.0 else scope.writer.let(out, say.Scaled(x, factor))


def _declare_norm(scope: Scope, base: str) -> Name:
    return scope.declare(uncut(base, 1, scope.spec.d, "float"))


def _normed(scope: Scope, base: str, x: Name, weight: str) -> Name:
    return scope.let(base, scope.writer.stream_norm(x, scope.weight(weight)))


def _post_normed(scope: Scope, x: Name, base: str) -> Name:
    weight = _declare_norm(scope, base)
    return scope.writer.let(derived(x, "n"), scope.writer.stream_norm(x, weight))
