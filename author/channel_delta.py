"""The gated delta rule with a decay for each key channel: its statements, for a share of the heads.

Kimi delta attention, of Kimi Linear (arXiv 2510.26692).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from author import statements as say
from author.delta import STATES, streams
from author.names import Name
from author.rows import by_state
from author.share import Cut, Share, by_head, lone_heads
from author.spec import ChannelDelta
from author.writer import Matrix, Scope, by_cols, by_rows, uncut

TAKEN = ("qr", "kr", "vr", "zz", "bt", "dy")  # what is there for all rows before the rule runs


@dataclass(frozen=True, kw_only=True)
class ChannelDeltaBlock:
    """The statements of one layer's channel delta; the first factors are on every chip."""

    c: ChannelDelta

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

    def _cut(self, share: Share, width: int) -> Cut:
        return by_head(self.c.heads, width, lone_heads(self.c.heads, share))

    def idle(self, share: Share) -> bool:
        """Whether a share has no heads."""
        return self._cut(share, 1).held == 0

    # --- Declarations

    def declare(self, scope: Scope) -> None:
        """Declare the weights and the states of a share; on one device, the first factors too."""
        if scope.share.whole:
            self._declare_factors(scope)
        for matrix in self._matrices(scope):
            if matrix.base not in STATES:
                scope.declare(matrix)
        for holder in scope.holders():
            for matrix in self._matrices(scope):
                if matrix.base in STATES:
                    holder.declare(matrix)

    def _declare_factors(self, scope: Scope) -> None:
        scope.declare(uncut("Wfa", scope.spec.d, self.c.decay_rank))
        scope.declare(uncut("Wga", scope.spec.d, self.c.gate_rank))
        scope.declare(uncut("Gn", 1, self.c.head_dim, "float"))

    def _matrices(self, scope: Scope) -> Iterator[Matrix]:
        c, d = self.c, scope.spec.d
        cols, heads = self._cut(scope.share, c.head_dim), self._cut(scope.share, 1)
        for stream in "qkv":
            yield by_cols(f"W{stream}", d, cols)
            yield by_cols(f"Wc{stream}", c.conv_taps, cols, "float")
            yield by_cols(f"Cs{stream}", c.conv_taps, cols, "state")
        yield by_cols("Wfb", c.decay_rank, cols)
        yield by_cols("Dt", 1, cols, "float")
        yield by_cols("Al", 1, heads, "float")
        yield by_cols("Wb", d, heads)
        yield by_cols("Wgb", c.gate_rank, cols)
        yield by_rows("St", cols, c.head_dim, "state")
        yield by_rows("Wo", cols, d)

    # --- Mathematics

    def common(self, scope: Scope, x: Name) -> None:
        """Write what every chip computes alike: the first factors of decay and gate."""
        self._declare_factors(scope)
        self._first_factors(scope, x)

    def _first_factors(self, scope: Scope, x: Name) -> None:
        scope.project("fa", x, "Wfa")
        scope.project("ga", x, "Wga")

    def partial(self, scope: Scope, x: Name) -> Name:
        """Write a share's part of the result."""
        if scope.share.whole:
            self._first_factors(scope, x)
        for stream in "qkv":
            scope.project(f"{stream}r", x, f"W{stream}")
        self._rates(scope, x)
        width = self._cut(scope.share, self.c.head_dim).held
        out = by_state(scope, TAKEN, "od", width, self._step)
        return scope.project("ao", out, "Wo")

    def _rates(self, scope: Scope, x: Name) -> None:
        """Write gate, beta and decay, which know no state."""
        scope.project("zz", scope.everywhere.value("ga"), "Wgb")
        scope.let("bt", say.Sigmoid(scope.project("br", x, "Wb")))
        raw = scope.project("ar", scope.everywhere.value("fa"), "Wfb")
        heads = self._cut(scope.share, 1).held
        scope.let("dy", say.Decay(raw, scope.weight("Dt"), scope.weight("Al"), heads))

    def _step(self, scope: Scope) -> None:
        """Write the rule for rows that stand in one state."""
        heads = self._cut(scope.share, 1).held
        q, k, v = streams(scope, taps=self.c.conv_taps, heads=heads, epsilon=None)
        value = say.GatedDelta(
            q=q,
            k=k,
            v=v,
            gate=scope.value("zz"),
            beta=scope.value("bt"),
            decay=scope.value("dy"),
            state=scope.state("St"),
            norm=scope.everywhere.weight("Gn"),
            heads=heads,
            groups=heads,
            sigmoid_gate=True,
            by_channel=True,
            epsilon=scope.writer.epsilon,
        )
        scope.let("od", value)
