"""A gated feed-forward: its statements, for a share of the hidden columns."""

from dataclasses import dataclass

from author import statements as say
from author.names import Name
from author.share import Share, by_run
from author.spec import Dense
from author.writer import Scope, by_cols, by_rows, derived


@dataclass(frozen=True, kw_only=True)
class DenseBlock:
    """The statements of one layer's feed-forward."""

    f: Dense

    @property
    def result(self) -> str:
        """The value that the chips' partials add up to."""
        return "dn"

    @property
    def result_bias(self) -> str | None:
        """What is added to the result once: nothing."""
        return None

    def idle(self, share: Share) -> bool:
        """Whether a share has no columns."""
        return by_run(self.f.dff, share).held == 0

    def declare(self, scope: Scope) -> None:
        """Declare the weights of a share."""
        d, hidden = scope.spec.d, by_run(self.f.dff, scope.share)
        scope.declare(by_cols("Wg", d, hidden))
        scope.declare(by_cols("Wu", d, hidden))
        scope.declare(by_rows("Wd", hidden, d))

    def common(self, scope: Scope, x: Name) -> None:
        """Write what every chip computes alike: nothing."""

    def partial(self, scope: Scope, x: Name) -> Name:
        """Write a share's part of the result."""
        gate = scope.project("gt", x, "Wg")
        up = scope.project("up", x, "Wu")
        return scope.project("dn", self._gated(scope, gate, up), "Wd")

    def _gated(self, scope: Scope, gate: Name, up: Name) -> Name:
        if self.f.act == "silu":
            return scope.let("hh", say.Swiglu(gate, up))
        active = scope.writer.let(derived(scope.value("hh"), "_a"), say.Gelu(gate))
        return scope.let("hh", say.Hadamard(active, up))
