"""Latent attention: its statements, for a share of the heads; the latent is on every chip."""

from dataclasses import dataclass

from author import statements as say
from author.names import Name
from author.rows import attending, by_state, keep, take
from author.share import Cut, Share, by_head, lone_heads
from author.spec import Mla
from author.tables import rotated
from author.writer import Matrix, Scope, by_cols, by_rows, said_epsilon, uncut


@dataclass(frozen=True, kw_only=True)
class LatentBlock:
    """The statements of one layer's latent attention."""

    m: Mla

    @property
    def result(self) -> str:
        """The value that the chips' partials add up to."""
        return "ao"

    @property
    def result_bias(self) -> str | None:
        """What is added to the result once."""
        return "Bo" if self.m.output_bias else None

    @property
    def meeting(self) -> None:
        """What the chips add up halfway: nothing."""

    @property
    def _head(self) -> int:
        """The width of a query head."""
        return self.m.qk_nope + self.m.qk_rope

    @property
    def _latent(self) -> int:
        """The width of a cached row."""
        return self.m.kv_lora_rank + self.m.qk_rope

    def _cut(self, share: Share, width: int) -> Cut:
        return by_head(self.m.heads, width, lone_heads(self.m.heads, share))

    def _heads(self, share: Share) -> int:
        return self._cut(share, 1).held

    def idle(self, share: Share) -> bool:
        """Whether a share has no heads."""
        return self._heads(share) == 0

    # --- Declarations

    def declare(self, scope: Scope) -> None:
        """Declare the weights of a share; on one device, the latent's too, where they stand."""
        m, share = self.m, scope.share
        if m.q_lora_rank is not None:
            self._declare_query_factor(scope, m.q_lora_rank)
        scope.declare(self._query(scope))
        if share.whole:
            self._declare_latent(scope)
        scope.declare(by_rows("Wkb", self._cut(share, m.qk_nope), m.kv_lora_rank))
        scope.declare(by_rows("Wvb", self._cut(share, m.kv_lora_rank), m.v_dim))
        scope.declare(by_rows("Wo", self._cut(share, m.v_dim), scope.spec.d))
        if share.whole:
            self._declare_caches(scope)

    def _query(self, scope: Scope) -> Matrix:
        cut = self._cut(scope.share, self._head)
        if self.m.q_lora_rank is None:
            return by_cols("Wq", scope.spec.d, cut)
        return by_cols("Wqb", self.m.q_lora_rank, cut)

    def _declare_query_factor(self, scope: Scope, rank: int) -> None:
        scope.declare(uncut("Wqa", scope.spec.d, rank))
        scope.declare(uncut("Qan", 1, rank, "float"))

    def _declare_latent(self, scope: Scope) -> None:
        scope.declare(uncut("Wkva", scope.spec.d, self._latent))
        scope.declare(uncut("Kan", 1, self.m.kv_lora_rank, "float"))

    def _declare_caches(self, scope: Scope) -> None:
        if scope.rows.ctx is not None:
            for holder in scope.holders():
                holder.declare(uncut("Kc", scope.rows.ctx, self._latent, "cache"))

    # --- Mathematics: the latent is `everywhere`, the queries are a share's

    def common(self, scope: Scope, x: Name) -> None:
        """Write what every chip computes alike: the queries' first factor, and the latent."""
        if self.m.q_lora_rank is not None:
            self._declare_query_factor(scope, self.m.q_lora_rank)
        self._declare_latent(scope)
        self._declare_caches(scope)
        self._query_factor(scope, x)
        self._project_latent(scope, x)
        for number, row in enumerate(scope.holders(), start=1):
            if row is not scope:
                take(scope, row, number, "kvn", "kpe")
            self._turn_latent(row)
            self._keep_latent(row)

    def partial(self, scope: Scope, x: Name) -> Name:
        """Write a share's part of the result."""
        share, whole = scope.share, scope.share.whole
        if whole:
            self._query_factor(scope, x)
        self._project_query(scope, x)
        if whole:
            self._project_latent(scope, x)
        self._cut_query(scope)
        taken = ("kvn", "kpe", "ql", "qe") if whole else ("ql", "qe")
        width = self._cut(share, self.m.kv_lora_rank).held
        out = by_state(scope, taken, "ol", width, self._attend)
        heads = self._heads(share)
        out = scope.let("ct", say.Matmul(out, scope.weight("Wvb"), heads))
        bias = uncut("Bo", 1, scope.spec.d, "float") if self.m.output_bias else None
        return scope.project("ao", out, "Wo", bias if whole else None)

    def _attend(self, scope: Scope) -> None:
        """Write the attention of rows that stand in one state."""
        if scope.share.whole:
            self._turn_latent(scope)
        q = self._turn_query(scope)
        if scope.share.whole:
            self._keep_latent(scope)
        value = attending(
            scope,
            q=q,
            k=self._kept(scope.everywhere),
            v=scope.everywhere.state("Vl"),
            heads=self._heads(scope.share),
            groups=1,
            scale=self.m.scale,
        )
        scope.let("ol", value)

    def _query_factor(self, scope: Scope, x: Name) -> None:
        rank = self.m.q_lora_rank
        if rank is not None:
            first = scope.project("qx", x, "Wqa", self._bias("Bqa", rank))
            self._norm(scope, "qxn", first, "Qan")

    def _bias(self, base: str, width: int) -> Matrix | None:
        return uncut(base, 1, width, "float") if self.m.bias else None

    def _norm(self, scope: Scope, base: str, x: Name, weight: str) -> Name:
        own = self.m.norm_eps
        epsilon = scope.writer.epsilon if own is None else said_epsilon(own)
        return scope.let(base, say.RmsNorm(x, scope.weight(weight), None, epsilon))

    def _project_query(self, scope: Scope, x: Name) -> None:
        if self.m.q_lora_rank is None:
            scope.project("qr", x, "Wq")
        else:
            scope.project("qr", scope.everywhere.value("qxn"), "Wqb")

    def _cut_query(self, scope: Scope) -> None:
        """Part the queries; those that do not turn go over into the latent's space."""
        query, m = scope.value("qr"), self.m
        still = scope.let("qn", say.First(query, m.qk_nope, self._head))
        scope.let("qe", say.Last(query, m.qk_rope, self._head))
        scope.let("ql", say.Matmul(still, scope.weight("Wkb"), self._heads(scope.share)))

    def _turn_query(self, scope: Scope) -> Name:
        heads = self._heads(scope.share)
        turned = self._turned(scope, "qpp", "qe", heads)
        return scope.let("qa", say.Joined(scope.value("ql"), turned, heads))

    def _project_latent(self, scope: Scope, x: Name) -> None:
        m, width = self.m, self._latent
        both = scope.project("kva", x, "Wkva", self._bias("Bkva", width))
        latent = scope.let("kvl", say.First(both, m.kv_lora_rank, width))
        scope.let("kpe", say.Last(both, m.qk_rope, width))
        self._norm(scope, "kvn", latent, "Kan")

    def _turn_latent(self, scope: Scope) -> None:
        turned = self._turned(scope, "kpp", "kpe", 1)
        scope.let("kc", say.Joined(scope.value("kvn"), turned))

    def _turned(self, scope: Scope, base: str, of: str, heads: int) -> Name:
        """The part that turns; where nothing does, as it is."""
        rope, x = self.m.rope, scope.value(of)
        return x if rope is None else rotated(scope, base, x, rope, heads)

    def _keep_latent(self, scope: Scope) -> None:
        """Keep the latent rows; values are the part of them that does not turn."""
        if scope.rows.ctx is not None:
            keep(scope, "Kc", scope.value("kc"))
        values = say.First(self._kept(scope), self.m.kv_lora_rank, self._latent)
        scope.writer.let(scope.state("Vl"), values)

    def _kept(self, scope: Scope) -> Name:
        return scope.value("kc") if scope.rows.ctx is None else scope.state("Kc")
