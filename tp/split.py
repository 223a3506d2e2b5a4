"""What a model becomes on so many chips, in numbers: who holds, reads and computes how much.

All of it follows from the program of a decode step and its manifest, authored for one layer of
each kind: layers that are alike are split alike. Nothing here prints, and nothing starts a device.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from author.names import Name
from author.program import Program
from author.refusals import check_tp
from author.share import Share, attention_heads, delta_heads, lone_heads
from author.spec import Attention, Dense, GatedDelta, Layer, ModelSpec, SpecError
from kernels.q8 import BLOCK
from tp.authored import step_of
from tp.costs import Cost
from tp.matrices import FLOAT, Matrix, matrix_of, uses
from tp.operands import operands
from tp.roll import roll
from tp.rolled import Rolled
from tp.segments import Collective, Segment, Steps
from tp.unroll import unroll_layers

HEADS = ("query_heads", "kv_heads", "value_heads", "key_heads")
COLUMNS = ("ffn_columns", "expert_columns", "shared_columns")
COUNTS = (*HEADS, *COLUMNS, "vocabulary")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Layers that are alike, by their numbers, and what each chip has of one of them.

    Of attention the query heads and their key/value heads; of recurrent layers the value heads and
    their key heads; the columns of a feed-forward, of every expert, and of the shared experts. A
    layer has 0 of what it lacks.
    """

    layers: tuple[int, ...]
    mixer: str
    feed_forward: str
    query_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    value_heads: tuple[int, ...]
    key_heads: tuple[int, ...]
    ffn_columns: tuple[int, ...]
    expert_columns: tuple[int, ...]
    shared_columns: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The bytes that a chip holds, and those that it reads and the operations it does for a token.

    The token is the last of a full context. Caches grow a token by `cache_bytes_per_token` to
    `cache_bytes`, rotary tables by `table_bytes_per_token`, within `table_bytes`; the states of
    recurrent layers do not grow. `counts` has a number for each of COUNTS: heads and columns in the
    layer where it has most of them, and the words of the vocabulary.
    """

    counts: Mapping[str, int]
    weight_bytes: int
    cache_bytes_per_token: int
    cache_bytes: int
    state_bytes: int
    table_bytes_per_token: int
    table_bytes: int
    cost: Cost

    @property
    def bytes(self) -> int:
        """All that it holds."""
        return self.weight_bytes + self.cache_bytes + self.state_bytes + self.table_bytes

    @property
    def bytes_per_token(self) -> int:
        """What a longer context takes for each token."""
        return self.cache_bytes_per_token + self.table_bytes_per_token


@dataclass(frozen=True, kw_only=True)
class Split:
    """A model on its chips: what each really holds, and what all of them are given alike."""

    chips: tuple[Holding, ...]
    given: Holding
    context: int
    kinds: tuple[Kind, ...]
    matrices: tuple[Matrix, ...]
    segments: tuple[Segment, ...]

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The folds and joins of a step, those of like layers once."""
        return tuple(s.collective for s in self.segments)

    @property
    def balance(self) -> float:
        """What the chip that reads most reads over the mean, by what they really hold."""
        reads = [chip.cost.reads for chip in self.chips]
        return max(reads) * len(reads) / max(sum(reads), 1)

    @property
    def weights(self) -> int:
        """How many numbers all weights are, each once."""
        return sum(m.count * m.whole[0] * m.whole[1] for m in self.matrices if m.is_weight)

    def cpu_bytes(self, *, native: bool) -> int:
        """The weights that a chip is given on a CPU, with native kernels or without."""
        return sum(m.count * m.cpu_bytes(native=native) for m in self.matrices if m.is_weight)

    def longest(self, memory: int) -> int:
        """The longest context whose caches fit beside the weights into so many bytes a chip.

        Values on their way are not counted. It is 0 where the weights do not fit, and may be
        longer than what the model was made for.
        """
        given = self.given
        left = memory - (given.bytes - given.bytes_per_token * self.context)
        if given.bytes_per_token == 0:
            return self.context if left >= 0 else 0
        return max(0, left // given.bytes_per_token)


def split_of(
    spec: ModelSpec,
    chips: int,
    *,
    context: int,
    tied: bool = False,
    cache_bytes: int = FLOAT,
    tables: int = 1,
) -> Split:
    """The split of a model over so many chips, with caches for `context` tokens.

    `cache_bytes` is the size of a number in a cache; `tables` how many sets of rotary tables the
    model has. Raises SpecError for a spec that no program can be authored from.
    """
    context = max(context, 2)  # as the decoder has it, whose texts are authored for two rows
    numbers = _alike(spec.layers)
    rolled = roll(_program(spec, tuple(numbers), chips, context))
    layers = [tuple(at) for at in numbers.values()]
    matrices = _matrices(rolled, layers, chips=chips, tied=tied, cache_bytes=cache_bytes)
    segments = Steps(
        items=unroll_layers(rolled),
        matrices=matrices,
        layers=[len(at) for at in layers],
        chips=chips,
        visible=context,
        joined=spec.vocab,
    ).segments()
    shares = [Share(chip=chip, chips=chips, align=BLOCK) for chip in range(chips)]
    kinds = tuple(_kind(layer, at, shares) for layer, at in numbers.items())
    counts = {name: _most(getattr(kind, name) for kind in kinds) for name in (*HEADS, *COLUMNS)}
    counts["vocabulary"] = [share.run(spec.vocab)[1] for share in shares]
    held = (
        _holding(
            {name: each[chip] for name, each in counts.items()},
            [(m, m.held_bytes[chip]) for m in matrices],
            [(s, s.chips[chip]) for s in segments],
            context=context,
            tables=tables,
        )
        for chip in range(chips)
    )
    return Split(
        chips=tuple(held),
        given=_holding(
            {name: max(each) for name, each in counts.items()},
            [(m, m.given_bytes) for m in matrices],
            [(s, s.given) for s in segments],
            context=context,
            tables=tables,
        ),
        context=context,
        kinds=kinds,
        matrices=matrices,
        segments=segments,
    )


def _alike(layers: Sequence[Layer]) -> dict[Layer, list[int]]:
    """Each distinct layer, and the numbers of those that are like it."""
    found: dict[Layer, list[int]] = {}
    for number, layer in enumerate(layers):
        found.setdefault(layer, []).append(number)
    return found


def _program(spec: ModelSpec, kinds: tuple[Layer, ...], chips: int, context: int) -> Program:
    """A decode step of one layer of each kind; refusals name the layers of the whole model."""
    try:
        return step_of(replace(spec, layers=kinds), chips=chips, context=context)
    except SpecError:
        check_tp(spec, chips, beyond=True)
        raise


def _matrices(
    rolled: Rolled,
    layers: Sequence[tuple[int, ...]],
    *,
    chips: int,
    tied: bool,
    cache_bytes: int,
) -> tuple[Matrix, ...]:
    """The matrices of a program that has one layer for each of these groups of layers."""
    last = max(map(max, layers))
    used_by = uses(unroll_layers(rolled), [first for first, *_ in layers], last)
    return tuple(
        matrix_of(
            operand,
            chips=chips,
            count=1 if name.layer is None else len(layers[name.layer]),
            shared="Emb" if tied and name == Name("Wout") else None,
            cache_bytes=cache_bytes,
            used_by=used_by.get(name, ()),
        )
        for name, operand in operands(rolled).items()
        if operand.role != "input"
    )


# --- What chips have of a layer


def _kind(layer: Layer, numbers: Sequence[int], shares: Sequence[Share]) -> Kind:
    heads = [_heads(layer, share) for share in shares]
    columns = [_columns(layer, share) for share in shares]
    return Kind(
        layers=tuple(numbers),
        mixer=layer.mixer.KIND,
        feed_forward=layer.ffn.KIND,
        **{name: tuple(h[at] for h in heads) for at, name in enumerate(HEADS)},
        **{name: tuple(c[at] for c in columns) for at, name in enumerate(COLUMNS)},
    )


def _heads(layer: Layer, share: Share) -> tuple[int, int, int, int]:
    """Query, key/value, value and key heads."""
    match layer.mixer:
        case Attention() as a:
            (_, queries), (_, groups) = attention_heads(a, share)
            return queries, groups, 0, 0
        case GatedDelta() as g:
            (_, keys), values = delta_heads(g, share)
            return 0, 0, sum(count for _, count in values), keys
        case other:
            count = lone_heads(other.heads, share)[1]
            # One latent serves all heads; elsewhere each has keys and values of its own.
            return (count, 0, 0, 0) if other.KIND == "mla" else (0, 0, count, count)


def _columns(layer: Layer, share: Share) -> tuple[int, int, int]:
    """Columns of a feed-forward, of every expert, of the shared experts."""
    if isinstance(layer.ffn, Dense):
        return share.run(layer.ffn.dff)[1], 0, 0
    beside = layer.ffn.shared_dff if layer.ffn.shared_experts > 0 else 0
    return 0, share.run(layer.ffn.expert_dff)[1], share.run(beside)[1]


# --- What chips have in all


def _most(layers: Iterable[Sequence[int]]) -> list[int]:
    """What each chip has in the layer where it has most."""
    return list(map(max, zip(*layers, strict=True)))


def _holding(
    counts: Mapping[str, int],
    matrices: Sequence[tuple[Matrix, int]],
    segments: Iterable[tuple[Segment, Cost]],
    *,
    context: int,
    tables: int,
) -> Holding:
    """A chip, from the bytes that it has of each matrix and the cost of its segments."""

    def total(role: str, rows: int | None = None) -> int:
        return sum(
            m.count * size
            for m, size in matrices
            if m.role == role and m.shared is None and rows in (None, m.whole[0])
        )

    cost = sum((c.times(s.collective.count) for s, c in segments), start=Cost())
    caches = total("cache")
    return Holding(
        counts=counts,
        weight_bytes=total("weight"),
        cache_bytes_per_token=caches // context,
        cache_bytes=caches,
        state_bytes=total("state"),
        table_bytes_per_token=tables * total("table", context) // context,
        table_bytes=tables * total("table"),
        cost=cost,
    )
