"""Linear attention with a fixed decay a head: its statements, for a share of the heads.

Lightning attention, of MiniMax-01 (arXiv 2501.08313).
"""

from dataclasses import dataclass

from author import statements as say
from author.names import Name
from author.rows import by_state
from author.share import Cut, Share, by_head, lone_heads
from author.spec import LinearMixer
from author.writer import Meeting, Scope, by_cols, by_rows, said_epsilon


@dataclass(frozen=True, kw_only=True)
class LinearBlock:
    """The statements of one layer's linear attention; its norm runs over all heads."""

    m: LinearMixer

    @property
    def result(self) -> str:
        """The value that the chips' partials add up to."""
        return "ao"

    @property
    def result_bias(self) -> str | None:
        """What is added to the result once: nothing."""
        return None

    @property
    def meeting(self) -> Meeting:
        """The squares of all heads, for the norm."""
        return Meeting(base="lq", cols=1, partial=self._squares)

    def _cut(self, share: Share, width: int) -> Cut:
        return by_head(self.m.heads, width, lone_heads(self.m.heads, share))

    def _columns(self, share: Share) -> Cut:
        return self._cut(share, self.m.head_dim)

    def idle(self, share: Share) -> bool:
        """Whether a share has no heads."""
        return self._cut(share, 1).held == 0

    # --- Declarations

    def declare(self, scope: Scope) -> None:
        """Declare the weights of a share; on one device, those of the rule too."""
        if scope.share.whole:
            self._declare_rule(scope)
        d, cols = scope.spec.d, self._columns(scope.share)
        scope.declare(by_cols("Ln", 1, cols, "float"))
        scope.declare(by_cols("Wz", d, cols))
        scope.declare(by_rows("Wo", cols, d))

    def _declare_rule(self, scope: Scope) -> None:
        cols = self._columns(scope.share)
        for stream in "qkv":
            scope.declare(by_cols(f"W{stream}", scope.spec.d, cols))
        scope.declare(by_cols("Ld", 1, self._cut(scope.share, 1), "float"))
        for holder in scope.holders():
            holder.declare(by_rows("St", cols, self.m.head_dim, "state"))

    # --- Mathematics

    def common(self, scope: Scope, x: Name) -> None:
        """Write what every chip computes alike: nothing."""

    def _squares(self, scope: Scope, x: Name) -> Name:
        """Write the rule and the square sum of what comes out of it."""
        self._declare_rule(scope)
        return scope.let("lq", say.SquareSum(self._attended(scope, x)))

    def _attended(self, scope: Scope, x: Name) -> Name:
        for stream in "qkv":
            raw = scope.project(f"{stream}r", x, f"W{stream}")
            scope.let(f"{stream}s", say.Silu(raw))
        width = self._columns(scope.share).held
        return by_state(scope, ("qs", "ks", "vs"), "lo", width, self._attend)

    def _attend(self, scope: Scope) -> None:
        """Write the rule for rows that stand in one state."""
        value = say.LinearAttention(
            q=scope.value("qs"),
            k=scope.value("ks"),
            v=scope.value("vs"),
            decay=scope.weight("Ld"),
            state=scope.state("St"),
            heads=self._cut(scope.share, 1).held,
        )
        scope.let("lo", value)

    def partial(self, scope: Scope, x: Name) -> Name:
        """Write a share's part of the result."""
        if scope.share.whole:
            self._attended(scope, x)
        normed = scope.let("lm", self._normed(scope))
        gate = scope.let("gs", say.Sigmoid(scope.project("zz", x, "Wz")))
        out = scope.let("cg", say.Hadamard(normed, gate))
        return scope.project("ao", out, "Wo")

    def _normed(self, scope: Scope) -> say.RmsNorm | say.OverRoot:
        x, weight, epsilon = scope.value("lo"), scope.weight("Ln"), said_epsilon(self.m.norm_eps)
        if scope.share.whole:
            return say.RmsNorm(x, weight, None, epsilon)
        squares, columns = scope.everywhere.value("lq"), self.m.heads * self.m.head_dim
        return say.OverRoot(x, squares, columns, weight, epsilon)
