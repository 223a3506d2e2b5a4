"""Which paths an operation has, best first, and which of them takes it on a platform."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jaxtyping import Array, Float, Int

from kernels import attention, delta, matmul, moe, reference
from kernels.arrays import Declined as Declined
from kernels.arrays import Integer, Matrix
from kernels.native.library import why_not
from kernels.native.packed import Packed, packed, packs
from kernels.q8 import Q8, AnyFloat32, dequantise

NATIVE = "native"


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """One way to compute an operation, on these platforms (None: on all).

    `call` raises `Declined` before any work if it does not take its arguments; `why_not` says why
    the path is not to be had here, if it is not.
    """

    name: str
    call: Callable[..., Any]
    platforms: tuple[str, ...] | None = None
    why_not: Callable[[], str | None] = lambda: None


def choose(
    operation: str,
    platform: str,
    wanted: str = "auto",
    *,
    example: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
) -> tuple[Path, Mapping[str, str]]:
    """The first path that takes the operation, and why each one before it declined.

    With an `example` (arguments and keywords, arrays or their shapes) a path is asked about
    them too; nothing is computed. A path that is wanted by name is taken or nothing is:
    raises Declined with all reasons. Raises ValueError for names that do not exist.
    """
    declined: dict[str, str] = {}
    for path in _asked(operation, wanted):
        why = _refusal(path, platform, example)
        if why is None:
            return path, declined
        declined[path.name] = why
    raise _none_takes(operation, platform, declined)


def call(
    operation: str, platform: str, wanted: str, /, *arguments: Any, **keywords: Any
) -> tuple[str, Any, Mapping[str, str]]:
    """The first path that takes the operation as it is called, what it gives, who declined.

    Raises as `choose` does, which it is but for asking and computing at once.
    """
    declined: dict[str, str] = {}
    for path in _asked(operation, wanted):
        why = _refusal(path, platform, None)
        try:
            if why is None:
                return path.name, path.call(*arguments, **keywords), declined
        except Declined as refusal:
            why = str(refusal)
        declined[path.name] = why
    raise _none_takes(operation, platform, declined)


def _asked(operation: str, wanted: str) -> list[Path]:
    paths = PATHS.get(operation)
    if paths is None:
        raise ValueError(f"no operation {operation!r}: there are {', '.join(sorted(PATHS))}")
    asked = [path for path in paths if wanted in ("auto", NATIVE, path.name)]
    if not asked:
        names = ", ".join(path.name for path in paths)
        raise ValueError(f"{operation} has no path {wanted!r}: there are auto, {names}")
    return asked


def _none_takes(operation: str, platform: str, declined: Mapping[str, str]) -> Declined:
    reasons = "; ".join(f"{name}: {why}" for name, why in declined.items())
    return Declined(f"{operation} on {platform}: {reasons}")


def _refusal(path: Path, platform: str, example: Any) -> str | None:
    if path.platforms is not None and platform not in path.platforms:
        return f"runs on {', '.join(path.platforms)}, not on {platform}"
    missing = path.why_not()
    if missing is not None or example is None:
        return missing
    arguments, keywords = example
    arrays = {word: value for word, value in keywords.items() if hasattr(value, "shape")}
    numbers = {word: value for word, value in keywords.items() if word not in arrays}
    try:
        jax.eval_shape(lambda a, b: path.call(*a, **b, **numbers), tuple(arguments), arrays)
    except Declined as why:
        return str(why)
    return None


def pack(
    q: Q8, platform: str, wanted: str = "auto", *, tiled: bool = True
) -> Q8 | Packed | AnyFloat32:
    """What a stored weight becomes on a device, for the path that will read it.

    On a CPU, tiles for the native path where there is one, the weight has them, and all that
    reads it takes them (`tiled`); float32 otherwise. Elsewhere it stays itself.

    XLA's CPU compiler turns a product of one row with int8 weights into a loop that reads them
    at 0.5 GB/s (49152 x 576: 60 ms); the same weights in float32 are read at 32 (3.6 ms).
    """
    match packing(q, platform, wanted, tiled=tiled):
        case "q8":
            return q
        case "tiles":
            return packed(q)
        case "floats":
            return dequantise(q)


def packing(
    q: Q8, platform: str, wanted: str = "auto", *, tiled: bool = True
) -> Literal["q8", "tiles", "floats"]:
    """What `pack` makes of a weight, of which the shape is enough."""
    if platform != "cpu":
        return "q8"
    native = wanted in ("auto", NATIVE) and why_not() is None
    return "tiles" if native and tiled and packs(q) else "floats"


# --- The reference on weights as they are stored


def _matmul(x: Matrix, w: matmul.Stored, *, heads: int | None = None) -> Matrix:
    stored = matmul.as_float(w)
    if heads is None:
        return reference.matmul(x, stored.T)
    n = stored.shape[1]
    by_head = stored.reshape(heads, -1, n).transpose(0, 2, 1)
    return reference.matmul(x, by_head.reshape(heads * n, -1), heads=heads)


def _embedding(tokens: Int[Array, "..."], w: matmul.Stored, first: Integer | None = None) -> Matrix:
    return reference.rows(tokens.reshape(1, -1), matmul.as_float(w), first=first)


def _moe(
    x: Matrix,
    router: matmul.Stored,
    gate: matmul.Stored,
    up: matmul.Stored,
    down: matmul.Stored,
    *biases: Float[Array, "..."] | None,
    **words: Any,
) -> Matrix:
    experts = [matmul.as_float(w) for w in (gate, up, down)]
    by_expert = matmul.as_float(router).T

    def one(row: Float[Array, " cols"]) -> Float[Array, " _"]:
        return reference.moe(row[None], by_expert, *experts, *biases, **words)[0]

    return jax.vmap(one)(x)


# --- The table


def _paths(fast: Callable[..., Any], plain: Callable[..., Any]) -> tuple[Path, ...]:
    return (Path(name="xla", call=fast), Path(name="reference", call=plain))


# XLA fuses these as well as anyone could, so their reference is their fast path.
_PLAIN = (
    reference.row,
    reference.embedding_row,
    reference.plus,
    reference.hadamard,
    reference.scaled,
    reference.capped,
    reference.clamped,
    reference.rms_norm,
    reference.layer_norm,
    reference.square_sum,
    reference.over_root,
    reference.l2_norm,
    reference.rope,
    reference.first,
    reference.last,
    reference.joined,
    reference.swiglu,
    reference.silu,
    reference.sigmoid,
    reference.gelu,
    reference.xielu,
    reference.argmax,
    reference.decay,
    reference.fold,
    reference.join,
    reference.set_row,
    reference.set_rows,
)

PATHS: Mapping[str, tuple[Path, ...]] = {
    **{plain.__name__: _paths(plain, plain) for plain in _PLAIN},
    "rows": _paths(matmul.embedding, _embedding),
    "embedding": _paths(matmul.embedding, _embedding),
    "matmul": _paths(matmul.matmul, _matmul),
    "attention": _paths(attention.attention, reference.attention),
    "causal_attention": _paths(attention.causal_attention, reference.causal_attention),
    "causal_conv": _paths(delta.causal_conv, reference.causal_conv),
    "gated_delta": _paths(delta.gated_delta, reference.gated_delta),
    "linear_attention": _paths(delta.linear_attention, reference.linear_attention),
    "moe": _paths(moe.moe, _moe),
}
