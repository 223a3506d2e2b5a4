"""The gated delta rule behind a causal convolution: its statements, for a share of the heads."""

from collections.abc import Iterator
from dataclasses import dataclass

from author import statements as say
from author.names import Name
from author.rows import by_state
from author.share import Cut, Share, by_head, delta_heads
from author.spec import GatedDelta
from author.writer import Matrix, Scope, by_cols, by_rows, said_epsilon, uncut

STATES = ("Csq", "Csk", "Csv", "St")
STACKED = ("qr", "kr", "vr", "zz", "br", "ar")  # what is projected for all rows at once


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a share holds of a gated delta: its key and value heads, and what they span."""

    keys: Cut
    values: Cut
    key_heads: Cut
    value_heads: Cut


def held(g: GatedDelta, share: Share) -> Held:
    """What a share holds of a gated delta."""
    keys, values = delta_heads(g, share)
    return Held(
        keys=by_head(g.k_heads, g.head_dim, keys),
        values=by_head(g.v_heads, g.head_dim, *values),
        key_heads=by_head(g.k_heads, 1, keys),
        value_heads=by_head(g.v_heads, 1, *values),
    )


@dataclass(frozen=True, kw_only=True)
class DeltaBlock:
    """The statements of one layer's gated delta."""

    g: GatedDelta

    @property
    def result(self) -> str:
        """The value that the chips' partials add up to."""
        return "ao"

    @property
    def result_bias(self) -> str | None:
        """What is added to the result once: nothing."""
        return None

    @property
    def meeting(self) -> None:
        """What the chips add up halfway: nothing."""

    def idle(self, share: Share) -> bool:
        """Whether a share has no value heads."""
        return held(self.g, share).value_heads.held == 0

    def declare(self, scope: Scope) -> None:
        """Declare the weights and the states of a share, in the order that the goldens have."""
        matrices = {m.base: m for m in self._matrices(scope)}
        for base in self._order(scope):
            if base != "states":
                scope.declare(matrices[base])
                continue
            for holder in scope.holders():
                for state in STATES:
                    holder.declare(matrices[state])

    def _order(self, scope: Scope) -> tuple[str, ...]:
        first = ("Wq", "Wk", "Wv", "Wz", "Wcq", "Wck", "Wcv")
        if not scope.share.whole:
            return (*first, "Wb", "Wa", "Dt", "Al", "Wo", "states")
        if scope.stacked:
            return (*first, "states", "Wb", "Wa", "Dt", "Al", "Gn", "Wo")
        return (*first, *STATES[:3], "Wb", "Wa", "Dt", "Al", "St", "Gn", "Wo")

    def _matrices(self, scope: Scope) -> Iterator[Matrix]:
        g, d, part = self.g, scope.spec.d, held(self.g, scope.share)
        streams = {"q": part.keys, "k": part.keys, "v": part.values}
        for stream, cut in streams.items():
            yield by_cols(f"W{stream}", d, cut)
            yield by_cols(f"Wc{stream}", g.conv_taps, cut, "float")
            yield by_cols(f"Cs{stream}", g.conv_taps, cut, "state")
        yield by_cols("Wz", d, part.values)
        yield by_cols("Wb", d, part.value_heads)
        yield by_cols("Wa", d, part.value_heads)
        yield by_cols("Dt", 1, part.value_heads, "float")
        yield by_cols("Al", 1, part.value_heads, "float")
        yield by_rows("St", part.values, g.head_dim, "state")
        yield self._norm
        yield by_rows("Wo", part.values, d)

    @property
    def _norm(self) -> Matrix:
        return uncut("Gn", 1, self.g.head_dim, "float")

    def common(self, scope: Scope, x: Name) -> None:
        """Write what every chip computes alike: nothing, but the weight of the norm."""
        scope.declare(self._norm)

    def partial(self, scope: Scope, x: Name) -> Name:
        """Write a share's part of the result."""
        part = held(self.g, scope.share)
        if scope.stacked:
            scope.reserve(*STACKED, "od", "ao")
        for base in STACKED if scope.stacked else STACKED[:4]:
            _project(scope, base, x)
        out = by_state(scope, STACKED, "od", part.values.held, lambda row: self._step(row, x))
        return scope.project("ao", out, "Wo")

    def _step(self, scope: Scope, x: Name) -> None:
        """Write the rule for rows that stand in one state."""
        part, lone = held(self.g, scope.share), scope.rows.stacked is None
        heads = part.key_heads.held
        q, k, v = streams(scope, taps=self.g.conv_taps, heads=heads, epsilon=self._unit(scope))
        if lone:
            _project(scope, "br", x)
        beta = scope.let("bt", say.Sigmoid(scope.value("br")))
        if lone:
            _project(scope, "ar", x)
        rate = say.Decay(scope.value("ar"), scope.weight("Dt"), scope.weight("Al"))
        decay = scope.let("dy", rate)
        value = say.GatedDelta(
            q=q,
            k=k,
            v=v,
            gate=scope.value("zz"),
            beta=beta,
            decay=decay,
            state=scope.state("St"),
            norm=scope.everywhere.weight("Gn"),
            heads=part.value_heads.held,
            groups=heads,
            sigmoid_gate=self.g.gate == "sigmoid",
            epsilon=scope.writer.epsilon,
        )
        scope.let("od", value)

    def _unit(self, scope: Scope) -> float | None:
        own = self.g.unit_eps
        return scope.writer.epsilon if own is None else said_epsilon(own)


def streams(
    scope: Scope, *, taps: int, heads: int, epsilon: float | None
) -> tuple[Name, Name, Name]:
    """Convolve queries, keys and values; make queries and keys of so many heads unit vectors."""
    for stream in "qkv":
        _convolved(scope, stream, taps)
    q, k, v = (scope.let(f"{s}s", say.Silu(scope.value(f"{s}c"))) for s in "qkv")
    q = scope.let("qn", say.L2Norm(q, heads * scope.height, epsilon))
    k = scope.let("kn", say.L2Norm(k, heads * scope.height, epsilon))
    return q, k, v


def _convolved(scope: Scope, stream: str, taps: int) -> Name:
    value = say.CausalConv(
        x=scope.value(f"{stream}r"),
        weight=scope.weight(f"Wc{stream}"),
        state=scope.state(f"Cs{stream}"),
        taps=taps,
    )
    return scope.let(f"{stream}c", value)


def _project(scope: Scope, base: str, x: Name) -> Name:
    """A projection, its weight named like it: `qr` by `Wq`."""
    return scope.project(base, x, f"W{base[0]}")
