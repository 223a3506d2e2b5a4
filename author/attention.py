"""Attention with query, key and value heads: its statements, for a share of the heads."""

import math
from dataclasses import dataclass

from author import statements as say
from author.names import Name
from author.rows import attending, by_state, keep
from author.share import Cut, Share, attention_heads, by_head, counts_keys, shares_keys
from author.spec import Attention, Window
from author.tables import ones, rotated, tempered
from author.writer import Meeting, Scope, by_cols, by_rows, uncut

# The turn of each value in a manifest.
PLACED = ("qr", "kr", "vr", "ct", "ao", "gr", "gs", "cg", "qm", "km", "qp", "kp", "qu", "ku", "qt")


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a share holds of an attention: its query heads, its groups, and what they span."""

    heads: int
    groups: int
    queries: Cut
    keys: Cut
    values: Cut
    outputs: Cut
    sinks: Cut


def held(a: Attention, share: Share) -> Held:
    """What a share holds of an attention."""
    queries, groups = attention_heads(a, share)
    return Held(
        heads=queries[1],
        groups=groups[1],
        queries=by_head(a.heads, a.head_dim, queries),
        keys=by_head(a.kv_heads, a.head_dim, groups),
        values=by_head(a.kv_heads, a.value_dim, groups),
        outputs=by_head(a.heads, a.value_dim, queries),
        sinks=by_head(a.heads, 1, queries),
    )


@dataclass(frozen=True, kw_only=True)
class AttentionBlock:
    """The statements of one layer's attention."""

    a: Attention

    @property
    def result(self) -> str:
        """The value that the chips' partials add up to."""
        return "ao"

    @property
    def result_bias(self) -> str | None:
        """What is added to the result once."""
        return "Bo" if self.a.output_bias else None

    @property
    def meeting(self) -> Meeting | None:
        """The squares of all queries and of all keys, where a norm runs over all heads."""
        if not self.a.qk_norm_whole:
            return None
        return Meeting(base="sq", cols=2, partial=self._squares, after=_part_squares)

    def _crossed(self, scope: Scope) -> bool:
        """Whether the chips have met before the statements of a share."""
        return self.a.qk_norm_whole and not scope.share.whole

    def idle(self, share: Share) -> bool:
        """Whether a share has no heads."""
        return held(self.a, share).heads == 0

    def declare(self, scope: Scope) -> None:
        """Declare the weights and the caches of a share."""
        d, part = scope.spec.d, held(self.a, scope.share)
        if not self._crossed(scope):
            self._declare_projections(scope)
        self._declare_norms(scope)
        scope.declare(by_rows("Wo", part.outputs, d))
        if scope.rows.ctx is not None:
            for holder in scope.holders():
                holder.declare(by_cols("Kc", scope.rows.ctx, part.keys, "cache"))
                holder.declare(by_cols("Vc", scope.rows.ctx, part.values, "cache"))

    def _declare_projections(self, scope: Scope) -> None:
        d, part = scope.spec.d, held(self.a, scope.share)
        scope.declare(by_cols("Wq", d, part.queries))
        if self.a.output_gate:
            scope.declare(by_cols("Wqg", d, part.queries))
        scope.declare(by_cols("Wk", d, part.keys))
        scope.declare(by_cols("Wv", d, part.values))

    def _declare_norms(self, scope: Scope) -> None:
        """Declare the weights of the norms: a head's, or those of all heads, cut with them."""
        a, part = self.a, held(self.a, scope.share)
        if a.qk_norm_whole:
            scope.declare(by_cols("Qn", 1, part.queries, "float"))
            scope.declare(by_cols("Kn", 1, part.keys, "float"))
        elif a.qk_norm:
            scope.declare(uncut("Qn", 1, a.head_dim, "float"))
            scope.declare(uncut("Kn", 1, a.head_dim, "float"))

    def common(self, scope: Scope, x: Name) -> None:
        """Write what every chip computes alike: nothing, but the weights of a head's norms."""
        if not self.a.qk_norm_whole:
            self._declare_norms(scope)

    def _squares(self, scope: Scope, x: Name) -> Name:
        """Write the projections of a share and their square sums, each head's on one chip alone."""
        self._declare_projections(scope)
        self._project(scope, x, held(self.a, scope.share))
        queries = scope.let("qq", say.SquareSum(scope.value("qr")))
        keys = scope.let("kq", say.SquareSum(scope.value("kr")))
        if shares_keys(self.a, scope.share):
            counted = 1.0 if counts_keys(self.a, scope.share) else 0.0
            keys = scope.let("kf", say.Scaled(keys, counted))
        return scope.let("sq", say.Joined(queries, keys))

    def partial(self, scope: Scope, x: Name) -> Name:
        """Write a share's part of the result."""
        part = held(self.a, scope.share)
        scope.reserve(*PLACED)
        taken = ("qr", "kr", "vr")
        if self._crossed(scope):
            taken = (*self._over_roots(scope), "vr")
        else:
            self._project(scope, x, part)
        out = by_state(scope, taken, "ct", part.outputs.held, self._attend)
        if self.a.output_gate:
            gate = scope.let("gs", say.Sigmoid(scope.value("gr")))
            out = scope.let("cg", say.Hadamard(out, gate))
        bias = uncut("Bo", 1, scope.spec.d, "float") if self.a.output_bias else None
        return scope.project("ao", out, "Wo", bias if scope.share.whole else None)

    def _project(self, scope: Scope, x: Name, part: Held) -> None:
        a = self.a
        biases = {
            base: by_cols(base, 1, cut, "float") if a.bias else None
            for base, cut in (("Bq", part.queries), ("Bk", part.keys), ("Bv", part.values))
        }
        scope.project("qr", x, "Wq", biases["Bq"])
        if a.output_gate:
            scope.project("gr", x, "Wqg")
        scope.project("kr", x, "Wk", biases["Bk"])
        scope.project("vr", x, "Wv", biases["Bv"])

    def _attend(self, scope: Scope) -> None:
        """Write the attention of rows that stand in one state."""
        part = held(self.a, scope.share)
        scope.reserve(*PLACED)
        q, k = self._positioned(scope, part)
        sinks = scope.declare(by_cols("Sk", 1, part.sinks, "float")) if self.a.sinks else None
        v = self._clipped(scope, "vl", scope.value("vr"))
        if scope.rows.ctx is not None:
            k, v = keep(scope, "Kc", k), keep(scope, "Vc", v)
        value = attending(
            scope,
            q=q,
            k=k,
            v=v,
            heads=part.heads,
            groups=part.groups,
            window=_window(self.a.window),
            scale=_scale(self.a),
            cap=self.a.softcap,
            sinks=sinks,
        )
        scope.let("ct", value)

    def _positioned(self, scope: Scope, part: Held) -> tuple[Name, Name]:
        """Norm and turn queries and keys, as far as this attention does."""
        a = self.a
        q, k = scope.value("qr"), scope.value("kr")
        if not a.qk_norm_after_rope:
            q, k = self._normed(scope, part, q, k)
        if a.rope is not None:
            q = rotated(scope, "qp", q, a.rope, part.heads)
            k = rotated(scope, "kp", k, a.rope, part.groups)
        if a.qk_norm_after_rope:
            q, k = self._normed(scope, part, q, k)
        if a.qk_unit_norm:
            one = ones(scope.writer, a.head_dim)
            q = scope.norm("qu", q, one, part.heads)
            k = scope.norm("ku", k, one, part.groups)
        if a.temperature is not None:
            q = tempered(scope, "qt", q, a.head_dim, part.heads)
        return q, k

    def _normed(self, scope: Scope, part: Held, q: Name, k: Name) -> tuple[Name, Name]:
        """Norm queries and keys by a weight and clip them, as far as this attention does."""
        a = self.a
        if self._crossed(scope):
            q, k = scope.value("qm"), scope.value("km")
        elif a.qk_norm:
            heads, groups = (1, 1) if a.qk_norm_whole else (part.heads, part.groups)
            q = scope.norm("qm", q, scope.everywhere.weight("Qn"), heads)
            k = scope.norm("km", k, scope.everywhere.weight("Kn"), groups)
        return self._clipped(scope, "ql", q), self._clipped(scope, "kl", k)

    def _over_roots(self, scope: Scope) -> tuple[str, str]:
        """Norm the queries and keys of a share by the square sums of all chips."""
        a, common = self.a, scope.everywhere
        for stream, heads in (("q", a.heads), ("k", a.kv_heads)):
            value = say.OverRoot(
                x=scope.value(f"{stream}r"),
                squares=common.value(f"sq{stream}"),
                columns=heads * a.head_dim,
                weight=scope.weight(f"{stream.upper()}n"),
                epsilon=scope.writer.epsilon,
            )
            scope.let(f"{stream}m", value)
        return "qm", "km"

    def _clipped(self, scope: Scope, base: str, x: Name) -> Name:
        clip = self.a.clip
        return x if clip is None else scope.let(base, say.Clamped(x, -clip, clip))


def _part_squares(scope: Scope) -> None:
    """Write the square sum of all queries and that of all keys, out of the sum over the chips."""
    scope.let("sqq", say.First(scope.value("sq"), 1, 2))
    scope.let("sqk", say.Last(scope.value("sq"), 1, 2))


def _window(window: Window | None) -> say.Sliding | say.Chunked | None:
    if window is None:
        return None
    return say.Sliding(window.n) if window.kind == "sliding" else say.Chunked(window.n)


def _scale(a: Attention) -> float | None:
    """The factor on the scores, where it is not the usual one."""
    usual = 1 / math.sqrt(a.head_dim)
    return a.scale if abs(a.scale - usual) > 1e-15 else None
