"""Whole models in float64 NumPy: every position at once, no cache, no chips, no language.

Written from what the families compute, by the names of their tensors, for those that tests change.
Recurrent layers go token by token.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray
GEMMA = ("gemma", "gemma2")
NEXT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LATENT = ("deepseek_v2", "deepseek_v3")
HEAD_NORMS = ("qwen3", "qwen3_moe", *NEXT)
WHOLE_NORMS = ("olmo2", "olmoe", "minimax_m2")
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def forward(config: Mapping[str, Any], tensors: Mapping[str, Array], ids: list[int]) -> Array:
    """The logits at every position."""
    return _Model(config, tensors).logits(ids)


def sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class _Model:
    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        self.c = config
        self.t = {name: array.astype(np.float64) for name, array in tensors.items()}
        self.family = config["model_type"]
        self.eps = config["rms_norm_eps"]
        self.plus = 1.0 if self.family in (*GEMMA, *NEXT) else 0.0
        self.d = config["hidden_size"]
        self.heads = config["num_attention_heads"]

    def logits(self, ids: list[int]) -> Array:
        embedding = self.t["model.embed_tokens.weight"]
        x = embedding[ids]
        if self.family in GEMMA:
            x = x * math.sqrt(self.d)
        for i in range(self.c["num_hidden_layers"]):
            x = self.layer(x, f"model.layers.{i}.", i)
        x = self.norm(x, "model.norm")
        out = x @ (embedding if self.c["tie_word_embeddings"] else self.t["lm_head.weight"]).T
        cap = self.c.get("final_logit_softcapping")
        return out if cap is None else cap * np.tanh(out / cap)

    def layer(self, x: Array, p: str, i: int) -> Array:
        pre, post = p + "input_layernorm", p + "post_attention_layernorm"
        after = p + "post_feedforward_layernorm"
        if self.family == "olmo2":
            x = x + self.norm(self.mix(x, p, i), post)
            return x + self.norm(self.feed(x, p), after)
        if self.family == "gemma2":
            x = x + self.norm(self.mix(self.norm(x, pre), p, i), post)
            fed = self.feed(self.norm(x, p + "pre_feedforward_layernorm"), p)
            return x + self.norm(fed, after)
        x = x + self.mix(self.norm(x, pre), p, i)
        return x + self.feed(self.norm(x, post), p)

    def mix(self, x: Array, p: str, i: int) -> Array:
        if f"{p}linear_attn.A_log" in self.t:
            return self.delta(x, p + "linear_attn.")
        if self.family in LATENT:
            return self.latent(x, p + "self_attn.")
        return self.attention(x, p + "self_attn.", i)

    # --- Pieces

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.t[f"{name}.weight"].T + self.t.get(f"{name}.bias", 0.0)

    def norm(self, x: Array, name: str, *, plus: float | None = None, eps: float = 0) -> Array:
        weight = self.t[f"{name}.weight"] + (self.plus if plus is None else plus)
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + (eps or self.eps)) * weight

    def scaling(self) -> Mapping[str, Any]:
        return self.c.get("rope_parameters") or self.c.get("rope_scaling") or {}

    def turned(self, x: Array, *, pairs: bool = False) -> Array:
        """Rotated by position; x is [positions, heads, width]."""
        said, c = self.scaling(), self.c
        theta = said.get("rope_theta") or c["rope_theta"]
        partial = said.get("partial_rotary_factor") or c.get("partial_rotary_factor", 1.0)
        n = c.get("rotary_dim") or int(x.shape[-1] * partial)
        f = theta ** (-np.arange(0, n, 2) / n)
        a = 1.0
        if said.get("type", said.get("rope_type")) == "yarn":
            f, a = yarn(f, n, theta, said)
        angle = np.arange(len(x))[:, None, None] * f
        cos, sin = a * np.cos(angle), a * np.sin(angle)
        if pairs:
            u, v = x[..., 0:n:2], x[..., 1:n:2]
            out = np.stack([u * cos - v * sin, v * cos + u * sin], axis=-1).reshape(
                *x.shape[:-1], n
            )
        else:
            u, v = x[..., : n // 2], x[..., n // 2 : n]
            out = np.concatenate([u * cos - v * sin, v * cos + u * sin], axis=-1)
        return np.concatenate([out, x[..., n:]], axis=-1)

    def window(self, i: int) -> int | None:
        types, size = self.c.get("layer_types"), self.c.get("sliding_window")
        if types is not None:
            return size if types[i] == "sliding_attention" else None
        if self.family == "gemma2":
            return size if i % 2 == 0 else None
        return size if self.family in ("mistral", "mixtral") else None

    def attend(self, q: Array, k: Array, v: Array, scale: float, **more: Any) -> Array:
        """Causal attention over [positions, heads, width]; also capped, windowed, with sinks."""
        cap, window, sinks = (more.get(word) for word in ("cap", "window", "sinks"))
        k, v = (np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * scale
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        at = np.arange(len(q))
        hidden = at[None] > at[:, None]
        if window is not None:
            hidden |= at[None] <= at[:, None] - window
        scores = np.where(hidden, -np.inf, scores)
        if sinks is not None:
            beside = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
            scores = np.concatenate([scores, beside], axis=-1)
        weights = softmax(scores)[..., : len(q)]
        return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)

    def attention(self, x: Array, p: str, i: int) -> Array:
        n, kv = len(x), self.c.get("num_key_value_heads", self.heads)
        width = self.c.get("head_dim") or self.d // self.heads
        q, k, v = (self.linear(x, f"{p}{name}_proj") for name in "qkv")
        gate = None
        if self.family in NEXT:
            both = q.reshape(n, self.heads, 2, width)
            q, gate = both[:, :, 0], both[:, :, 1].reshape(n, -1)
        if self.family in WHOLE_NORMS:
            q, k = self.norm(q, p + "q_norm"), self.norm(k, p + "k_norm")
        q, k, v = q.reshape(n, self.heads, width), k.reshape(n, kv, width), v.reshape(n, kv, width)
        if self.family in HEAD_NORMS:
            q, k = self.norm(q, p + "q_norm"), self.norm(k, p + "k_norm")
        scale = self.c["query_pre_attn_scalar"] if self.family == "gemma2" else width
        out = self.attend(
            self.turned(q),
            self.turned(k),
            v,
            scale**-0.5,
            cap=self.c.get("attn_logit_softcapping"),
            window=self.window(i),
            sinks=self.t.get(p + "sinks"),
        )
        return self.linear(out if gate is None else out * sigmoid(gate), p + "o_proj")

    def latent(self, x: Array, p: str) -> Array:
        n, c, h = len(x), self.c, self.heads
        still, turns, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
        if c.get("q_lora_rank") is None:
            q = self.linear(x, p + "q_proj")
        else:
            low = self.norm(self.linear(x, p + "q_a_proj"), p + "q_a_layernorm", eps=1e-6)
            q = self.linear(low, p + "q_b_proj")
        q = q.reshape(n, h, still + turns)
        both = self.linear(x, p + "kv_a_proj_with_mqa")
        low = self.norm(both[:, :rank], p + "kv_a_layernorm", eps=1e-6)
        kv = self.linear(low, p + "kv_b_proj").reshape(n, h, -1)
        shared = np.repeat(self.turned(both[:, None, rank:], pairs=True), h, axis=1)
        q = np.concatenate([q[..., :still], self.turned(q[..., still:], pairs=True)], axis=-1)
        k = np.concatenate([kv[..., :still], shared], axis=-1)
        scale = (still + turns) ** -0.5
        said = self.scaling()
        if said.get("mscale_all_dim"):
            scale *= magnitude(said["mscale_all_dim"], said["factor"]) ** 2
        return self.linear(self.attend(q, k, kv[..., still:], scale), p + "o_proj")

    # --- Gated delta

    def delta(self, x: Array, p: str) -> Array:
        c, n = self.c, len(x)
        kh, vh, w = (c[f"linear_{k}"] for k in ("num_key_heads", "num_value_heads", "key_head_dim"))
        r = vh // kh
        if self.family == "qwen3_next":
            parts = self.linear(x, p + "in_proj_qkvz").reshape(n, kh, (2 + 2 * r) * w)
            q, k, v, z = np.split(parts, [w, 2 * w, (2 + r) * w], axis=-1)
            qkv = np.concatenate([a.reshape(n, -1) for a in (q, k, v)], axis=-1)
            b, a = np.split(self.linear(x, p + "in_proj_ba").reshape(n, kh, 2 * r), 2, axis=-1)
            b, a, z = (m.reshape(n, -1) for m in (b, a, z))
        else:
            qkv, z, b, a = (self.linear(x, f"{p}in_proj_{k}") for k in ("qkv", "z", "b", "a"))
        taps = self.t[p + "conv1d.weight"][:, 0]
        padded = np.concatenate([np.zeros((taps.shape[1] - 1, qkv.shape[1])), qkv])
        qkv = silu(sum(padded[i : i + n] * taps[:, i] for i in range(taps.shape[1])))
        q, k, v = np.split(qkv, [kh * w, 2 * kh * w], axis=-1)
        q, k = (np.repeat(m.reshape(n, kh, w), r, axis=1) for m in (q, k))
        q, k = (m / np.sqrt((m**2).sum(axis=-1, keepdims=True) + 1e-6) for m in (q, k))
        v = v.reshape(n, vh, -1)
        g = np.exp(-np.exp(self.t[p + "A_log"]) * np.logaddexp(0, a + self.t[p + "dt_bias"]))
        state, out = np.zeros((vh, w, v.shape[-1])), np.zeros_like(v)
        for at in range(n):
            state = g[at][:, None, None] * state
            e = sigmoid(b[at])[:, None] * (v[at] - np.einsum("hkv,hk->hv", state, k[at]))
            state = state + np.einsum("hk,hv->hkv", k[at], e)
            out[at] = np.einsum("hkv,hk->hv", state, q[at]) * w**-0.5
        out = self.norm(out, p + "norm", plus=0.0).reshape(n, -1)
        return self.linear(out * silu(z), p + "out_proj")

    # --- Feed-forwards

    def feed(self, x: Array, p: str) -> Array:
        if f"{p}mlp.router.weight" in self.t:
            return self.clamped(x, p + "mlp.")
        for mlp in (p + "mlp.", p + "block_sparse_moe."):
            if f"{mlp}gate.weight" in self.t:
                return self.mixture(x, mlp)
        return self.dense(x, p + "mlp.")

    def dense(self, x: Array, p: str) -> Array:
        act = gelu if self.family in GEMMA else silu
        gate = act(self.linear(x, p + "gate_proj"))
        return self.linear(gate * self.linear(x, p + "up_proj"), p + "down_proj")

    def expert(self, x: Array, p: str, e: int) -> Array:
        if f"{p}experts.gate_up_proj" in self.t:
            both = self.t[f"{p}experts.gate_up_proj"][e] @ x
            gate, up = np.split(both, 2)
            return self.t[f"{p}experts.down_proj"][e] @ (silu(gate) * up)
        names = MIXTRAL if "block_sparse" in p else {name: name for name in MIXTRAL}
        gate, up, down = (self.t[f"{p}experts.{e}.{name}.weight"] for name in names.values())
        return down @ (silu(gate @ x) * (up @ x))

    def chosen(self, r: Array, p: str) -> tuple[Array, Array]:
        """The experts of one token, and their weights."""
        c = self.c
        k = c["num_experts_per_tok"]
        if self.family == "minimax_m2":
            s = sigmoid(r)
            top = np.argsort(-(s + self.t[p + "e_score_correction_bias"]), kind="stable")[:k]
            return top, s[top] / s[top].sum()
        if self.family == "deepseek_v3":
            s = sigmoid(r)
            biased = s + self.t[p + "gate.e_score_correction_bias"]
            groups = biased.reshape(c["n_group"], -1)
            best = np.argsort(-np.sort(groups)[:, -2:].sum(axis=1), kind="stable")
            groups[best[c["topk_group"] :]] = -np.inf
            top = np.argsort(-groups.ravel(), kind="stable")[:k]
            total = s[top].sum() if c["norm_topk_prob"] else 1.0
            return top, s[top] / total * c["routed_scaling_factor"]
        s = softmax(r)
        top = np.argsort(-s, kind="stable")[:k]
        always = self.family in ("mixtral", "qwen3_5_moe_text")
        whole = always or c.get("norm_topk_prob", self.family == "qwen3_next")
        return top, s[top] / (s[top].sum() if whole else 1.0)

    def mixture(self, x: Array, p: str) -> Array:
        out = np.zeros_like(x)
        for at, r in enumerate(self.linear(x, p + "gate")):
            for e, weight in zip(*self.chosen(r, p), strict=True):
                out[at] += weight * self.expert(x[at], p, e)
        if f"{p}shared_experts.gate_proj.weight" in self.t:
            out += self.dense(x, p + "shared_experts.")
        if f"{p}shared_expert.gate_proj.weight" in self.t:
            gate = sigmoid(self.linear(x, p + "shared_expert_gate"))
            out += gate * self.dense(x, p + "shared_expert.")
        return out

    def clamped(self, x: Array, p: str) -> Array:
        """gpt-oss: biases everywhere, inputs first, gate and up in alternate columns."""
        out, limit = np.zeros_like(x), self.c["swiglu_limit"]
        named = {name: self.t[f"{p}experts.{name}"] for name in ("gate_up_proj", "down_proj")}
        biases = {name: self.t[f"{p}experts.{name}_bias"] for name in named}
        for at, r in enumerate(self.linear(x, p + "router")):
            top = np.argsort(-r, kind="stable")[: self.c["num_experts_per_tok"]]
            for e, weight in zip(top, softmax(r[top]), strict=True):
                both = x[at] @ named["gate_up_proj"][e] + biases["gate_up_proj"][e]
                gate = np.minimum(both[::2], limit)
                up = np.clip(both[1::2], -limit, limit)
                act = (up + 1) * gate * sigmoid(self.c["swiglu_alpha"] * gate)
                out[at] += weight * (act @ named["down_proj"][e] + biases["down_proj"][e])
        return out


def magnitude(t: float, factor: float) -> float:
    return 0.1 * t * math.log(factor) + 1 if factor > 1 else 1.0


def yarn(f: Array, n: int, theta: float, said: Mapping[str, Any]) -> tuple[Array, float]:
    """The frequencies of a stretched rotation, and the factor on its cosines and sines."""
    factor, length = said["factor"], said["original_max_position_embeddings"]
    ends = [
        n * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))
        for turns in (said.get("beta_fast", 32), said.get("beta_slow", 1))
    ]
    if said.get("truncate", True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], n - 1)
    ramp = np.clip((np.arange(n // 2) - low) / (high - low if high > low else 0.001), 0, 1)
    one, every = said.get("mscale"), said.get("mscale_all_dim")
    a = magnitude(one, factor) / magnitude(every, factor) if one and every else None
    a = magnitude(1.0, factor) if a is None else a
    return f / factor * ramp + f * (1 - ramp), said.get("attention_factor", a)
