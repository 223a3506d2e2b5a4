"""Makes small specs of every mixer and feed-forward, and the same numbers for their programs."""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from author.kinds import author
from author.names import Name
from author.program import Program, Role, roles
from author.spec import (
    Attention,
    Dense,
    GatedDelta,
    Layer,
    Mla,
    ModelSpec,
    Moe,
    Rope,
    SigmoidGating,
    SwigluOai,
    Temperature,
    Window,
)
from author.statements import Tensor
from tests import oracle
from tp.interpret import interpret

CTX = 12
VOCAB = 37  # no width but 1 divides it

# --- Mixers, each with an option that none before it has

PLAIN = Attention(
    heads=4,
    kv_heads=2,
    head_dim=6,
    value_dim=6,
    rope=Rope(dims=6, theta=100.0),
    qk_norm=False,
    qk_norm_whole=False,
    qk_unit_norm=False,
    temperature=None,
    bias=False,
    output_bias=False,
    sinks=False,
    output_gate=False,
    fused_qkv=False,
    window=None,
    scale=6**-0.5,
    softcap=None,
)
LATENT = Mla(
    heads=3,
    q_lora_rank=10,
    kv_lora_rank=9,
    qk_nope=5,
    qk_rope=4,
    v_dim=7,
    scale=0.31,
    rope=Rope(dims=4, theta=100.0),
)
DELTA = GatedDelta(k_heads=2, v_heads=4, head_dim=5, conv_taps=3, gate="silu")
MIXERS: dict[str, Attention | GatedDelta | Mla] = {
    "attention": PLAIN,
    "one_kv_head": replace(PLAIN, heads=5, kv_heads=1),
    "nine_heads_in_three": replace(PLAIN, heads=9, kv_heads=3),
    "qk_norm": replace(PLAIN, qk_norm=True),
    "unit_norm_and_temperature": replace(
        PLAIN, qk_unit_norm=True, temperature=Temperature(floor=2.0, scale=0.5)
    ),
    "biases": replace(PLAIN, bias=True, output_bias=True),
    "sinks": replace(PLAIN, sinks=True, heads=6),
    "output_gate": replace(PLAIN, output_gate=True),
    "fused": replace(PLAIN, fused_qkv=True),
    "sliding_window": replace(PLAIN, window=Window(kind="sliding", n=3)),
    "chunked_window": replace(PLAIN, window=Window(kind="chunked", n=3)),
    "softcap_and_scale": replace(PLAIN, softcap=1.5, scale=0.9),
    "wide_values_no_rope": replace(PLAIN, value_dim=9, rope=None),
    "narrow_values_partial_rope": replace(PLAIN, value_dim=4, rope=Rope(dims=4, theta=50.0)),
    "gated_delta": DELTA,
    "gated_delta_sigmoid": replace(DELTA, gate="sigmoid", k_heads=3, v_heads=3),
    "latent": LATENT,
    "latent_no_q_lora": replace(LATENT, q_lora_rank=None, heads=5),
}
NORM_OF_ALL_HEADS = replace(PLAIN, qk_norm=True, qk_norm_whole=True)  # one device alone

# --- Feed-forwards

MIXTURE = Moe(
    experts=6,
    top_k=2,
    expert_dff=10,
    act="silu",
    gating="softmax_then_top_k",
    groups=None,
    norm_top_k=True,
    weights_scale=1.0,
    shared_experts=0,
    shared_dff=0,
    shared_gate=False,
    biases=False,
)
FEEDS: dict[str, Dense | Moe] = {
    "silu": Dense(dff=20, act="silu"),
    "gelu": Dense(dff=13, act="gelu_tanh"),
    "softmax": MIXTURE,
    "softmax_as_it_is": replace(MIXTURE, norm_top_k=False, weights_scale=2.5),
    "softmax_of_top_k": replace(MIXTURE, gating="softmax_of_top_k"),
    "sigmoid_of_inputs": replace(MIXTURE, gating="sigmoid_scaled_input", top_k=1),
    "sigmoid": replace(MIXTURE, gating=SigmoidGating(bias=False), norm_top_k=False),
    "sigmoid_biased_in_groups": replace(
        MIXTURE, gating=SigmoidGating(bias=True), groups=(3, 2), weights_scale=1.5
    ),
    "softmax_in_groups": replace(MIXTURE, groups=(2, 1), experts=4),
    "shared": replace(MIXTURE, shared_experts=1, shared_dff=7),
    "shared_gated": replace(MIXTURE, shared_experts=2, shared_dff=14, shared_gate=True),
    "biased_oai": replace(
        MIXTURE,
        biases=True,
        act=SwigluOai(alpha=1.7, limit=0.8),
        gating="softmax_of_top_k",
        expert_dff=3,
    ),
}


def model(*layers: Layer, **changes: Any) -> ModelSpec:
    """A spec of these layers."""
    spec = ModelSpec(
        d=16,
        vocab=VOCAB,
        rms_eps=1e-3,
        layers=layers,
        final_logit_softcap=None,
        embedding_scale=None,
        hyper=None,
        ple=None,
        indexer=None,
    )
    return replace(spec, **changes)


def layer(mixer: str, feed: str = "silu", *, normed: bool = False) -> Layer:
    """A layer of a mixer and a feed-forward by name."""
    return Layer(mixer=MIXERS[mixer], ffn=FEEDS[feed], post_mixer_norm=normed, post_ffn_norm=normed)


def _pairs() -> dict[str, ModelSpec]:
    """Every mixer once, and every feed-forward, the layers in twos: unlike or alike in turn."""
    feeds = [*FEEDS, *FEEDS][: len(MIXERS)]
    specs = {}
    for number, (mixer, feed) in enumerate(zip(MIXERS, feeds, strict=True)):
        first = layer(mixer, feed, normed=number % 3 == 1)
        second = first if number % 2 else layer("attention", normed=True)
        capped = {"final_logit_softcap": 2.0} if number % 4 == 1 else {}
        scaled = {"embedding_scale": 4.0} if number % 4 == 2 else {}
        specs[f"{mixer}-{feed}"] = model(first, second, **capped, **scaled)
    return specs


SPECS = _pairs()


def random_spec(seed: int) -> ModelSpec:
    """A spec of random layers and sizes."""
    draw = np.random.default_rng(seed)
    mixers, feeds = list(MIXERS), list(FEEDS)

    def one() -> Layer:
        made = layer(str(draw.choice(mixers)), str(draw.choice(feeds)))
        mixer, ffn = made.mixer, made.ffn
        if isinstance(mixer, Attention) and mixer.temperature is None:
            groups = int(draw.integers(1, 5))
            heads = groups * int(draw.integers(1, 4))
            norm = bool(draw.integers(2)) and not mixer.qk_norm_whole
            mixer = replace(mixer, heads=heads, kv_heads=groups, qk_norm=norm)
            mixer = replace(mixer, bias=bool(draw.integers(2)), sinks=bool(draw.integers(2)))
        if isinstance(mixer, GatedDelta):
            keys = int(draw.integers(1, 4))
            mixer = replace(mixer, k_heads=keys, v_heads=keys * int(draw.integers(1, 4)))
        if isinstance(ffn, Dense):
            ffn = replace(ffn, dff=int(draw.integers(1, 30)))
        else:
            ffn = replace(ffn, expert_dff=int(draw.integers(1, 14)))
        norms = draw.integers(2, size=2)
        return Layer(
            mixer=mixer, ffn=ffn, post_mixer_norm=bool(norms[0]), post_ffn_norm=bool(norms[1])
        )

    repeats = int(draw.integers(1, 3))
    return model(
        *([one()] * repeats),
        one(),
        d=int(draw.integers(5, 20)),
        vocab=int(draw.integers(9, 50)),
        final_logit_softcap=None if draw.integers(2) else 3.0,
        embedding_scale=None if draw.integers(2) else 1.7,
    )


# --- Programs

ARGS: dict[str, Any] = {
    "dir": "w",
    "ctx": CTX,
    "tok": 7,
    "pos": 5,
    "toks": [1, 6, 3],
    "pos0": 2,
    "seqs": [[5, 4], [6, 1], [2, 7]],
    "l": 0,
    "poss": [2, 3, 4],
    "rows": "per_sequence",
    "chunk": 3,
    "bsz": 3,
}


def written(spec: ModelSpec, kind: str, **args: Any) -> Program:
    """A program of a spec; arguments that are not given are usual ones."""
    from author.kinds import KINDS

    usual = {n: ARGS[n] for n in KINDS[kind].needed if n in ARGS}
    split = {"beyond": True} if kind.startswith("tp_") else {}
    return author(spec, kind, usual | split | args)


# --- Numbers

# Tables for more rows than any context here has; the table of a position alone is the first row.
_ROWS = 64
# Norms, biases, sinks and rates: large, all different.
_WIDE = {"Al": 0.7, "Dt": 1.0, "Sk": 3.0, "Bs": 3.0, "Br": 2.0}


@cache
def _drawn(name: Name, shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng([zlib.crc32(str(name).encode()), *shape]).standard_normal(shape)


def weight(name: Name, shape: tuple[int, int]) -> np.ndarray:
    """The same float64 numbers for the same name and shape."""
    drawn = _drawn(name, shape)
    if not name.base.startswith(("W", "E")):
        return drawn * _WIDE.get(name.base, 1.0)
    inputs = shape[1] if name.base == "Emb" else shape[0]
    # Experts stand one below the other, so the rows of theirs do not count the inputs.
    return drawn * 1.2 / np.sqrt(inputs if name.base not in ("Wg", "Wu", "Wd") else shape[1])


def table(name: Name, shape: tuple[int, int]) -> np.ndarray:
    """A host table: ones, or rows that all differ and that a context of any length shares."""
    if name.base.startswith("ones"):
        return np.ones(shape)
    plain = name.base.replace("cosc", "cos").replace("sinc", "sin")
    angle = _drawn(Name(plain.replace("sin", "cos")), (_ROWS, shape[1]))
    turned = np.sin(angle) if "sin" in plain else np.cos(angle)
    factor = 1 + 0.1 * np.arange(_ROWS)[:, None] if plain.startswith("t") else 1.0
    turned = np.zeros_like(turned) if plain.startswith("tsin") else turned
    turned = np.ones_like(turned) if plain.startswith("tcos") else turned
    return (factor * turned)[: shape[0]]


def wholes(program: Program) -> dict[Name, tuple[tuple[int, int], Role]]:
    """The shape and the role of every whole matrix that a program declares, buffers left out."""
    role = roles(program)
    found: dict[Name, tuple[tuple[int, int], Role]] = {}
    for tensor in program.statements:
        if not isinstance(tensor, Tensor) or role[tensor.name] == "buffer":
            continue
        piece = None if program.manifest is None else program.manifest.slice_of(tensor.name)
        if piece is not None:
            found[piece.of] = piece.of_shape, role[tensor.name]
        elif tensor.name.chip is None:
            found[tensor.name] = (tensor.rows, tensor.cols), role[tensor.name]
    return found


def weights(program: Program) -> dict[Name, np.ndarray]:
    """Weights and tables of a program, by whole matrix."""
    make = {"weight": weight, "table": table}
    return {
        name: make[role](name, shape)
        for name, (shape, role) in wholes(program).items()
        if role in make
    }


def states(program: Program) -> dict[Name, np.ndarray]:
    """Caches and states that are full of something, and the input rows, by whole matrix."""
    return {
        name: _drawn(name, shape) / 2
        for name, (shape, role) in wholes(program).items()
        if role in ("cache", "state", "input")
    }


def outcome(
    program: Program, before: Mapping[Name, Any] | None = None, meanings: Any = oracle
) -> dict[Name, Any]:
    """Every name after a step, its weights the usual ones; what `before` lacks is zeros."""
    return interpret(program, weights(program) | dict(before or {}), meanings=meanings)


def kept(program: Program, env: Mapping[Name, Any]) -> dict[Name, Any]:
    """The caches and states after a step."""
    role = roles(program)
    names: Iterable[Name] = (n for n, r in role.items() if r in ("cache", "state"))
    return {name: env[name] for name in names if name in env}
