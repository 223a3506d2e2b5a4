"""What a model is, as plain records, and their JSON; a field more or less is refused by its path."""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal


class SpecError(ValueError):
    """A spec, or what is asked of one, that cannot be: a line for everything found wrong."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


# --- The parts of a model; JSON tells variants apart by `KIND`.


@dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotation: how many of a head's dimensions turn, and its base."""

    dims: int
    theta: float


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """Queries scaled by position."""

    floor: float
    scale: float


@dataclass(frozen=True, kw_only=True)
class Window:
    """Which positions are attended: the last `n`, or those of one's own chunk of `n`."""

    kind: Literal["sliding", "chunked"]
    n: int


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention with query, key and value heads."""

    KIND: ClassVar[str] = "attention"
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rope: Rope | None
    qk_norm: bool
    qk_norm_whole: bool
    qk_unit_norm: bool
    temperature: Temperature | None
    bias: bool
    output_bias: bool
    sinks: bool
    output_gate: bool
    fused_qkv: bool
    window: Window | None
    scale: float
    softcap: float | None


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """The gated delta rule behind a causal convolution."""

    KIND: ClassVar[str] = "gated_delta"
    k_heads: int
    v_heads: int
    head_dim: int
    conv_taps: int
    gate: Literal["silu", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Mla:
    """Latent attention: keys and values of all heads from one latent row."""

    KIND: ClassVar[str] = "mla"
    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope: int
    qk_rope: int
    v_dim: int
    scale: float
    rope: Rope


@dataclass(frozen=True, kw_only=True)
class SwigluOai:
    """A clamped swiglu: slope `alpha`, clamped at `limit`."""

    KIND: ClassVar[str] = "swiglu_oai"
    alpha: float
    limit: float


Act = Literal["silu", "gelu_tanh", "gelu", "relu"] | SwigluOai


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A gated feed-forward of hidden width `dff`."""

    KIND: ClassVar[str] = "dense"
    dff: int
    act: Act


@dataclass(frozen=True, kw_only=True)
class SigmoidGating:
    """Experts scored one by one; `bias` is learned and only chooses."""

    KIND: ClassVar[str] = "sigmoid"
    bias: bool


Gating = (
    Literal["softmax_then_top_k", "softmax_of_top_k", "sigmoid_scaled_input"] | SigmoidGating
)


@dataclass(frozen=True, kw_only=True)
class Moe:
    """A mixture of experts; `groups` is (count, used)."""

    KIND: ClassVar[str] = "moe"
    experts: int
    top_k: int
    expert_dff: int
    act: Act
    gating: Gating
    groups: tuple[int, int] | None
    norm_top_k: bool
    weights_scale: float
    shared_experts: int
    shared_dff: int
    shared_gate: bool
    biases: bool


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A mixer and a feed-forward, and whether each is normed before its addition."""

    mixer: Attention | GatedDelta | Mla
    ffn: Dense | Moe
    post_mixer_norm: bool
    post_ffn_norm: bool


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """Hyper-connections, present or not."""


@dataclass(frozen=True, kw_only=True)
class Ple:
    """A per-layer embedding, present or not."""


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """The layers that attend sparsely."""

    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model: all that its programs are authored from."""

    d: int
    vocab: int
    rms_eps: float
    layers: tuple[Layer, ...]
    final_logit_softcap: float | None
    embedding_scale: float | None
    hyper: Hyper | None
    ple: Ple | None
    indexer: Indexer | None


def rotation_of(layer: Layer) -> Rope | None:
    """The rotation that a layer turns by."""
    return None if isinstance(layer.mixer, GatedDelta) else layer.mixer.rope


def rotations(spec: ModelSpec) -> tuple[Rope, ...]:
    """The distinct rotations, in order of first appearance; a table's number counts these."""
    turned = (rotation_of(layer) for layer in spec.layers)
    return tuple(dict.fromkeys(rope for rope in turned if rope is not None))


# --- JSON, from the annotations above


def spec_to_json(spec: ModelSpec) -> dict[str, Any]:
    """The spec as JSON, every field present."""
    return _written(spec)


def _written(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_written(v) for v in value]
    if not dataclasses.is_dataclass(value):
        return value
    kind = {"kind": value.KIND} if hasattr(value, "KIND") else {}
    return kind | {f.name: _written(getattr(value, f.name)) for f in dataclasses.fields(value)}


def spec_from_json(obj: object) -> ModelSpec:
    """The spec that `spec_to_json` wrote; all offending fields are named at once."""
    reader = _Reader()
    spec = reader.value(ModelSpec, obj, "spec")
    if reader.problems:
        raise SpecError(*reader.problems)
    return spec


class _Reader:
    """Reads JSON by type; what does not fit is noted, and read as None."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def wrong(self, path: str, found: object, wanted: str) -> None:
        self.problems.append(f"{path} is {_shown(found)}, wanted {wanted}")

    def value(self, hint: Any, obj: Any, path: str) -> Any:
        origin = typing.get_origin(hint)
        if origin in (types.UnionType, typing.Union):
            return self.union(typing.get_args(hint), obj, path)
        if origin is tuple:
            return self.items(typing.get_args(hint), obj, path)
        if dataclasses.is_dataclass(hint):
            return self.record(hint, obj, path)
        return self.plain(hint, obj, path)

    def union(self, options: tuple[Any, ...], obj: Any, path: str) -> Any:
        """The option that fits: null, the record of that kind, or the one that is left."""
        if obj is None and types.NoneType in options:
            return None
        records = [o for o in options if dataclasses.is_dataclass(o)]
        others = [o for o in options if o not in records and o is not types.NoneType]
        if len(records) + len(others) == 1:
            return self.value((records + others)[0], obj, path)
        for record in records:
            if isinstance(obj, Mapping) and obj.get("kind") == record.KIND:
                return self.record(record, obj, path)
        if others and isinstance(obj, str) and obj in typing.get_args(others[0]):
            return obj
        words = [repr(w) for o in others for w in typing.get_args(o)]
        kinds = [f"an object of kind {r.KIND!r}" for r in records]
        self.wrong(path, obj, " or ".join(words + kinds))
        return None

    def items(self, hints: tuple[Any, ...], obj: Any, path: str) -> Any:
        if not isinstance(obj, list):
            return self.wrong(path, obj, "a list")
        if hints[-1] is Ellipsis:
            hints = (hints[0],) * len(obj)
        if len(hints) != len(obj):
            return self.wrong(path, obj, f"a list of {len(hints)}")
        pairs = zip(hints, obj, strict=True)
        return tuple(self.value(h, v, f"{path}[{i}]") for i, (h, v) in enumerate(pairs))

    def record(self, cls: Any, obj: Any, path: str) -> Any:
        if not isinstance(obj, Mapping):
            return self.wrong(path, obj, "an object")
        hints = {f.name: typing.get_type_hints(cls)[f.name] for f in dataclasses.fields(cls)}
        known = {*hints, "kind"} if hasattr(cls, "KIND") else {*hints}
        before = len(self.problems)
        self.problems += [f"{path}.{name} is missing" for name in hints if name not in obj]
        self.problems += [
            f"{path}.{name} is no field (there are {', '.join(hints)})"
            for name in obj
            if name not in known
        ]
        fields = {n: self.value(h, obj[n], f"{path}.{n}") for n, h in hints.items() if n in obj}
        return cls(**fields) if len(self.problems) == before else None

    def plain(self, hint: Any, obj: Any, path: str) -> Any:
        if typing.get_origin(hint) is Literal:
            words = typing.get_args(hint)
            return obj if obj in words else self.wrong(path, obj, " or ".join(map(repr, words)))
        wanted, fits = _PLAIN[hint]
        if not fits(obj):
            return self.wrong(path, obj, wanted)
        return hint(obj)


def _is_count(obj: object) -> bool:
    return isinstance(obj, int) and not isinstance(obj, bool) and obj >= 0


def _is_real(obj: object) -> bool:
    return _is_count(obj) or isinstance(obj, int | float) and not isinstance(obj, bool)


_PLAIN: dict[Any, tuple[str, Callable[[object], bool]]] = {
    bool: ("true or false", lambda obj: isinstance(obj, bool)),
    int: ("a count", _is_count),
    float: ("a number", lambda obj: _is_real(obj) and math.isfinite(obj)),  # type: ignore[arg-type]
}


def _shown(obj: object) -> str:
    text = repr(obj)
    return text if len(text) <= 60 else f"{text[:57]}..."
