"""Makes small specs of every mixer and feed-forward, and the same numbers for their programs."""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from author.families.model import Model, Rotation
from author.kinds import KINDS, author
from author.names import Name
from author.program import Program, Role, changed, read_by, roles
from author.spec import (
    Attention,
    ChannelDelta,
    Dense,
    GatedDelta,
    Layer,
    LinearMixer,
    Mixer,
    Mla,
    ModelSpec,
    Moe,
    NormedResidual,
    Rope,
    SigmoidGating,
    SwigluOai,
    Temperature,
    Window,
    Xielu,
)
from author.spec import rotations as rotations_of
from author.statements import Let, Number, SetItem, Tensor
from tests import oracle
from tp.decoder import Decoder
from tp.interpret import interpret
from tp.launch import devices
from tp.lower import Lowered, lower, partition
from tp.operands import Operand
from tp.roll import roll
from tp.rolled import Rolled

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
MIXERS: dict[str, Mixer] = {
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
    "norm_of_all_heads": replace(PLAIN, qk_norm=True, qk_norm_whole=True),
    "norm_after_rope_clipped": replace(PLAIN, qk_norm=True, qk_norm_after_rope=True, clip=0.7),
    "latent_biased_no_rope": replace(LATENT, bias=True, output_bias=True, norm_eps=0.1, rope=None),
    "channel_delta": ChannelDelta(heads=3, head_dim=4, conv_taps=3, decay_rank=2, gate_rank=5),
    "linear_attention": LinearMixer(heads=4, head_dim=3, norm_eps=1e-4),
}

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
    "ungated_biased": Dense(dff=9, act="gelu_tanh", gated=False, bias=True, output_bias=True),
    "xielu": Dense(dff=9, act="silu", gated=False, xielu=Xielu(beta=0.5, cut=-1e-6)),
    "shared_biased": replace(
        MIXTURE, choice_bias=True, shared_experts=1, shared_dff=7, shared_bias=True
    ),
}

# What a layer, and a model, may do otherwise with the stream.
STREAMS: dict[str, dict[str, Any]] = {
    "parallel": {"parallel": True, "residual_scale": 0.6},
    "normed_afterwards": {"pre_norm": False, "post_mixer_norm": True, "post_ffn_norm": True},
    "normed_residual": {
        "normed_residual": NormedResidual(
            mixer_alpha=1.5, mixer_beta=0.7, ffn_alpha=1.2, ffn_beta=0.4
        )
    },
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
    feeds = ([*FEEDS] * 2)[: len(MIXERS)]
    specs = {}
    for number, (mixer, feed) in enumerate(zip(MIXERS, feeds, strict=True)):
        first = layer(mixer, feed, normed=number % 3 == 1)
        second = first if number % 2 else layer("attention", normed=True)
        capped = {"final_logit_softcap": 2.0} if number % 4 == 1 else {}
        scaled = {"embedding_scale": 4.0} if number % 4 == 2 else {}
        specs[f"{mixer}-{feed}"] = model(first, second, **capped, **scaled)
    for number, (name, fields) in enumerate(STREAMS.items()):
        streamed = replace(layer("biases", "shared_gated"), **fields)
        ends = {"norm": "layer", "logit_scale": 0.4, "head_bias": True} if number == 0 else {}
        specs[name] = model(streamed, streamed, **ends)
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
            norm = bool(draw.integers(2)) or mixer.qk_norm
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


# --- On a mesh


@dataclass(frozen=True)
class Lowering:
    """A lowered program with its numbers in place: what a step is given, and what it gives."""

    program: Program
    lowered: Lowered
    mesh: Mesh

    @property
    def outputs(self) -> dict[str, tuple[Name, ...]]:
        """What the step is for, and all logits, by the key that a step has it under."""
        read = {n for s in self.program.statements for n in (*read_by(s), *changed(s))}
        made = (s.name for s in self.program.statements if isinstance(s, Let))
        found: dict[str, tuple[Name, ...]] = {}
        for name in made:
            if name.chip is None and (name not in read or name.base in ("logits", "blogits")):
                key = str(name if name.sequence is None else name._replace(sequence="{s}"))
                found[key] = (*found.get(key, ()), name)
        return found

    def inputs(self) -> dict[str, Any]:
        """The run-time integers that the text happens to be written for."""
        found: dict[str, list[int]] = {}
        for statement in self.program.statements:
            match statement:
                case Number(name, value):
                    found.setdefault(name.base, []).append(value)
                case SetItem(token=token):
                    found.setdefault("toks", []).append(token)
        made = {k: jnp.asarray(v if len(v) > 1 else v[0], jnp.int32) for k, v in found.items()}
        return made | ({"toks": jnp.asarray([found["toks"]], jnp.int32)} if "toks" in found else {})

    def weights(self, padding: float = 0.0) -> dict[str, Any]:
        """Weights, tables and inputs; `padding` stands beside the columns of the head."""
        given = weights(self.program) | states(self.program)
        return {
            key: placed(
                operand,
                given[operand.name],
                self.mesh,
                padding if operand.name.base == "Wout" else 0.0,
            )
            for key, operand in self.lowered.weights.items()
        }

    def states(self, before: Mapping[Name, Any]) -> dict[str, Any]:
        """The states as arrays, from whole matrices by name."""
        made = {}
        for key, operand in self.lowered.states.items():
            names = _copies(operand)
            one = [before[name] for name in names]
            made[key] = placed(operand, one[0] if operand.sequences is None else one, self.mesh)
        return made

    def wholes(self, after: Mapping[str, Any]) -> dict[Name, np.ndarray]:
        """Whole matrices by name, from states as arrays."""
        found = {}
        for key, operand in self.lowered.states.items():
            array = np.asarray(after[key])
            parts = [array] if operand.sequences is None else list(array)
            for name, part in zip(_copies(operand), parts, strict=True):
                found[name] = gathered(operand, part)
        return found


def lowering(program: Program, *, rolled: Rolled | None = None, kernels: str = "auto") -> Lowering:
    """A program lowered for the simulated chips; `rolled` where it is not the program's own."""
    chips = 1 if program.manifest is None else program.manifest.chips
    lowered = lower(rolled or roll(program), platform="cpu", kernels=kernels)
    mesh = Mesh(np.array(jax.devices()[:chips]), ("chip",))
    return Lowering(program=program, lowered=lowered, mesh=mesh)


def _copies(operand: Operand) -> list[Name]:
    """A state's name; where each sequence has its own, the name of each."""
    if operand.sequences is None:
        return [operand.name]
    return [operand.name._replace(sequence=s) for s in range(operand.sequences)]


def placed(operand: Operand, whole: Any, mesh: Mesh, padding: float = 0.0) -> jax.Array:
    """A whole matrix, or one for each sequence, as chips hold it: stored order, padded."""
    if operand.sequences is not None:
        alone = replace(operand, sequences=None)
        array = np.stack([_stored_slices(alone, one, mesh.size, padding) for one in whole])
    else:
        array = _stored_slices(operand, whole, mesh.size, padding)
    return jax.device_put(array, NamedSharding(mesh, partition(operand)))


def _stored_slices(operand: Operand, whole: np.ndarray, chips: int, padding: float) -> np.ndarray:
    whole = np.asarray(whole, np.float32)
    if operand.layout is None:
        return _stored(operand, whole)
    axis = ("rows", "cols").index(operand.layout.axis)
    slices = [_stored(operand, _padded(operand, whole, c, axis, padding)) for c in range(chips)]
    return np.concatenate(slices, axis=1 - axis if operand.stored == "turned" else axis)


def _padded(
    operand: Operand, whole: np.ndarray, chip: int, axis: int, padding: float
) -> np.ndarray:
    pieces = []
    for start, length, width in _pieces(operand, chip):
        piece = np.take(whole, range(start, start + length), axis=axis)
        more = [(0, 0), (0, 0)]
        more[axis] = (0, width - length)
        pieces.append(np.pad(piece, more, constant_values=padding))
    return np.concatenate(pieces, axis=axis)


def _pieces(operand: Operand, chip: int) -> Iterable[tuple[int, int, int]]:
    """The start and length of each range of a chip, and what it is padded to."""
    assert operand.layout is not None
    ranges = operand.layout.ranges[chip]
    lacking = ((0, 0),) * (len(operand.layout.widths) - len(ranges))
    for (start, length), width in zip((*ranges, *lacking), operand.layout.widths, strict=True):
        yield start, length, width


def _stored(operand: Operand, matrix: np.ndarray) -> np.ndarray:
    match operand.stored:
        case "turned":
            return matrix.T
        case "heads":
            width = operand.whole[0] // operand.heads
            by_head = matrix.reshape(-1, width, matrix.shape[1]).swapaxes(1, 2)
            return by_head.reshape(-1, width)
        case _:
            return matrix


def gathered(operand: Operand, array: np.ndarray) -> np.ndarray:
    """The whole matrix of a state, from all chips' padded slices."""
    if operand.layout is None:
        return array
    axis = ("rows", "cols").index(operand.layout.axis)
    out = np.zeros(operand.whole, np.float32)
    at = 0
    for chip in range(len(operand.layout.ranges)):
        for start, length, width in _pieces(operand, chip):
            to, taken = [slice(None)] * 2, [slice(None)] * 2
            to[axis], taken[axis] = slice(start, start + length), slice(at, at + length)
            out[tuple(to)] = array[tuple(taken)]
            at += width
    return out


def decoder(
    spec: ModelSpec,
    chips: int,
    *,
    context: int = CTX,
    chunks: tuple[int, ...] = (4,),
    padding: float = 0.0,
) -> Decoder:
    """A decoder of a spec, with the usual numbers for its weights and tables."""
    rotations = tuple(Rotation(dims=r.dims, theta=r.theta) for r in rotations_of(spec))
    described = Model(
        family="tiny", spec=spec, rotations=rotations, views={}, tied=False, context=context
    )
    made = Decoder(model=described, devices=devices(chips), context=context, chunks=chunks)
    for key, operand in made.operands.items():
        make = {"weight": weight, "table": table}[operand.role]
        value = make(operand.name, operand.whole)
        beside = padding if operand.name.base == "Wout" else 0.0
        made.weights[key] = placed(operand, value, made.devices.mesh, beside)
    return made
