"""A mixture of experts and its shared experts: its statements, for a share of each one's columns.

Every expert is cut inside, so that any width balances and every chip routes alike.
"""

from dataclasses import dataclass

from author import statements as say
from author.names import Name
from author.rows import take
from author.share import Cut, Share, by_run
from author.spec import Moe, SigmoidGating, SwigluOai
from author.tables import ones
from author.writer import Scope, by_cols, by_rows, derived, uncut


@dataclass(frozen=True, kw_only=True)
class MoeBlock:
    """The statements of one layer's mixture of experts."""

    m: Moe

    @property
    def result(self) -> str:
        """The value that the chips' partials add up to."""
        return "me" if self.m.shared_experts > 0 else "mo"

    @property
    def result_bias(self) -> str | None:
        """What is added to the result once: nothing, an expert's bias is weighted with it."""
        return None

    @property
    def meeting(self) -> None:
        """What the chips add up halfway: nothing."""

    # --- What a share holds

    def _hidden(self, share: Share) -> Cut:
        """The columns of one expert."""
        return by_run(self.m.expert_dff, share)

    def _stacked_hidden(self, share: Share) -> Cut:
        """The same columns of every expert, where the experts stand one after another."""
        one, width = self._hidden(share), self.m.expert_dff
        ranges = ((e * width + start, n) for e in range(self.m.experts) for start, n in one.ranges)
        return Cut(total=self.m.experts * width, ranges=tuple(ranges))

    def _shared(self, share: Share) -> Cut:
        return by_run(self.m.shared_dff if self.m.shared_experts > 0 else 0, share)

    def idle(self, share: Share) -> bool:
        """Whether a share has columns of no expert."""
        return self._hidden(share).held == 0 and self._shared(share).held == 0

    # --- Declarations

    def declare(self, scope: Scope) -> None:
        """Declare the matrices of the experts; biases and shared experts stand where they act."""
        if scope.share.whole:
            self._declare_router(scope)
        d, hidden = scope.spec.d, self._stacked_hidden(scope.share)
        scope.declare(by_rows("Wg", hidden, d))
        scope.declare(by_rows("Wu", hidden, d))
        scope.declare(by_cols("Wd", self.m.experts * d, self._hidden(scope.share)))

    def _declare_router(self, scope: Scope) -> None:
        scope.declare(uncut("Wr", scope.spec.d, self.m.experts))

    def _declare_router_biases(self, scope: Scope) -> None:
        if self.m.biases:
            scope.declare(uncut("Br", 1, self.m.experts, "float"))

    def _declare_expert_biases(self, scope: Scope) -> None:
        if not self.m.biases:
            return
        experts, hidden = self.m.experts, self._hidden(scope.share)
        scope.declare(by_cols("Bg", experts, hidden, "float"))
        scope.declare(by_cols("Bu", experts, hidden, "float"))
        _declare_output_bias(scope, "Bd", experts, hidden)

    def _declare_choice_bias(self, scope: Scope) -> None:
        if self._choice_bias:
            scope.declare(uncut("Bs", 1, self.m.experts, "float"))

    @property
    def _choice_bias(self) -> bool:
        gating = self.m.gating
        return gating.bias if isinstance(gating, SigmoidGating) else self.m.choice_bias

    # --- Mathematics

    def common(self, scope: Scope, x: Name) -> None:
        """Write what every chip computes alike: the router's rows, the gate of shared experts."""
        self._declare_router(scope)
        self._declare_router_biases(scope)
        self._declare_choice_bias(scope)
        if scope.stacked:
            for number, row in enumerate(scope.split(), start=1):
                take(scope, row, number, _row_base(scope, x))
        if self.m.shared_gate:
            self._gate(scope, x)

    def partial(self, scope: Scope, x: Name) -> Name:
        """Write a share's part of the result.

        A share may have columns of the shared experts alone, or of the others: those that it has
        none of are written over no columns, so that all chips read alike.
        """
        routed = self._routed(scope, x)
        if self.m.shared_experts == 0:
            return routed
        return scope.let("me", say.Plus(routed, self._shared_experts(scope, x)))

    def _routed(self, scope: Scope, x: Name) -> Name:
        whole = scope.share.whole
        if whole:
            self._declare_router_biases(scope)
        self._declare_expert_biases(scope)
        if whole:
            self._declare_choice_bias(scope)
        if not scope.stacked:
            return scope.let("mo", self._moe(scope, x))
        base = _row_base(scope, x)
        stack = scope.writer.tensor(scope.value("mo"), scope.rows.count, scope.spec.d)
        for number, row in enumerate(scope.split(), start=1):
            if whole:
                take(scope, row, number, base)
            out = row.let("mo", self._moe(row, row.everywhere.value(base)))
            scope.writer.say(say.SetRow(number, stack, out))
        return stack

    def _moe(self, scope: Scope, x: Name) -> say.Moe:
        m, common, biased = self.m, scope.everywhere, self.m.biases
        return say.Moe(
            x=x,
            router=common.weight("Wr"),
            gate=scope.weight("Wg"),
            up=scope.weight("Wu"),
            down=scope.weight("Wd"),
            chosen=m.top_k,
            experts=m.experts,
            router_bias=common.weight("Br") if biased else None,
            gate_bias=scope.weight("Bg") if biased else None,
            up_bias=scope.weight("Bu") if biased else None,
            down_bias=scope.weight("Bd") if biased else None,
            by_sigmoid=isinstance(m.gating, SigmoidGating) or m.gating == "sigmoid_scaled_input",
            choice_bias=common.weight("Bs") if self._choice_bias else None,
            groups=_groups(m),
            without_renormalizing=m.gating != "softmax_of_top_k" and not m.norm_top_k,
            scale=None if m.weights_scale in (0.0, 1.0) else m.weights_scale,
            weighting_inputs=m.gating == "sigmoid_scaled_input",
            activation=_activation(m),
        )

    def _shared_experts(self, scope: Scope, x: Name) -> Name:
        hidden = self._shared(scope.share)
        scope.declare(by_cols("Wsg", scope.spec.d, hidden))
        scope.declare(by_cols("Wsu", scope.spec.d, hidden))
        scope.declare(by_rows("Wsd", hidden, scope.spec.d))
        biased = self.m.shared_bias
        gate = scope.project("sg", x, "Wsg", by_cols("Bsg", 1, hidden, "float") if biased else None)
        up = scope.project("su", x, "Wsu", by_cols("Bsu", 1, hidden, "float") if biased else None)
        active = scope.let("sh", say.Swiglu(gate, up))
        out = self._shared_down(scope, active, hidden)
        return self._gated(scope, x, out) if self.m.shared_gate else out

    def _shared_down(self, scope: Scope, x: Name, hidden: Cut) -> Name:
        if not self.m.shared_bias:
            return scope.project("sd", x, "Wsd")
        bias = _declare_output_bias(scope, "Bsd", 1, hidden)
        raw = scope.writer.let(derived(scope.value("sd"), "_r"), say.Matmul(x, scope.weight("Wsd")))
        return scope.let("sd", say.Plus(raw, bias))

    def _gated(self, scope: Scope, x: Name, out: Name) -> Name:
        if scope.share.whole:
            self._gate(scope, x)
        return scope.let("sdg", say.Hadamard(out, scope.everywhere.value("sgr")))

    def _gate(self, scope: Scope, x: Name) -> None:
        """The gate of the shared experts, one factor a row, spread over the columns."""
        scope.declare(uncut("Wsgi", scope.spec.d, 1, "float"))
        width = ones(scope.writer, scope.spec.d)
        raw = scope.project("sgi", x, "Wsgi")
        factor = scope.let("sgw", say.Sigmoid(raw))
        scope.let("sgr", say.Matmul(factor, width))


def _declare_output_bias(scope: Scope, base: str, rows: int, hidden: Cut) -> Name:
    """Declare the bias of outputs: it counts on the first chip with columns, and once.

    The fold would count it again: elsewhere it is a matrix that nobody fills, zeros.
    """
    d = scope.spec.d
    if hidden.held > 0 and hidden.ranges[0][0] == 0:
        return scope.declare(by_cols(base, rows, Cut(total=d, ranges=((0, d),)), "float"))
    return scope.writer.tensor(scope.weight(base), rows, d)


def _row_base(scope: Scope, x: Name) -> str:
    """The base of one row of a stack."""
    return x.base.removeprefix("b") if scope.stacked else x.base


def _groups(m: Moe) -> say.ExpertGroups | None:
    if m.groups is None:
        return None
    count, used = m.groups
    return say.ExpertGroups(used_groups=used, group_count=count)


def _activation(m: Moe) -> say.ClampedSwiglu | None:
    if not isinstance(m.act, SwigluOai):
        return None
    return say.ClampedSwiglu(limit=m.act.limit, slope=m.act.alpha)
