"""A feed-forward, gated or not: its statements, for a share of the hidden columns."""

from dataclasses import dataclass

from author import statements as say
from author.forms import Expression
from author.names import Name
from author.share import Cut, Share, by_run
from author.spec import Dense
from author.writer import Matrix, Scope, by_cols, by_rows, derived, uncut


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
        """What is added to the result once."""
        return "Bd" if self.f.output_bias else None

    @property
    def meeting(self) -> None:
        """What the chips add up halfway: nothing."""

    def idle(self, share: Share) -> bool:
        """Whether a share has no columns."""
        return self._hidden(share).held == 0

    def _hidden(self, share: Share) -> Cut:
        return by_run(self.f.dff, share)

    def declare(self, scope: Scope) -> None:
        """Declare the weights of a share."""
        d, hidden = scope.spec.d, self._hidden(scope.share)
        if self.f.gated:
            scope.declare(by_cols("Wg", d, hidden))
        scope.declare(by_cols("Wu", d, hidden))
        scope.declare(by_rows("Wd", hidden, d))
        if scope.share.whole:
            self._declare_xielu(scope)

    def _declare_xielu(self, scope: Scope) -> None:
        if self.f.xielu is not None:
            scope.declare(uncut("Xp", 1, 1, "float"))
            scope.declare(uncut("Xn", 1, 1, "float"))

    def common(self, scope: Scope, x: Name) -> None:
        """Write what every chip computes alike: nothing, but the numbers of a xIELU."""
        self._declare_xielu(scope)

    def partial(self, scope: Scope, x: Name) -> Name:
        """Write a share's part of the result."""
        bias = uncut("Bd", 1, scope.spec.d, "float") if self.f.output_bias else None
        active = self._gated(scope, x) if self.f.gated else self._ungated(scope, x)
        return scope.project("dn", active, "Wd", bias if scope.share.whole else None)

    def _gated(self, scope: Scope, x: Name) -> Name:
        gate = scope.project("gt", x, "Wg", self._bias(scope, "Bg"))
        up = scope.project("up", x, "Wu", self._bias(scope, "Bu"))
        if self.f.act == "silu":
            return scope.let("hh", say.Swiglu(gate, up))
        active = scope.writer.let(derived(scope.value("hh"), "_a"), say.Gelu(gate))
        return scope.let("hh", say.Hadamard(active, up))

    def _ungated(self, scope: Scope, x: Name) -> Name:
        up = scope.project("up", x, "Wu", self._bias(scope, "Bu"))
        return scope.let("hh", self._activated(scope, up))

    def _bias(self, scope: Scope, base: str) -> Matrix | None:
        return by_cols(base, 1, self._hidden(scope.share), "float") if self.f.bias else None

    def _activated(self, scope: Scope, x: Name) -> Expression:
        if self.f.xielu is None:
            return say.Silu(x) if self.f.act == "silu" else say.Gelu(x)
        common, xielu = scope.everywhere, self.f.xielu
        return say.Xielu(x, common.weight("Xp"), common.weight("Xn"), xielu.beta, xielu.cut)
