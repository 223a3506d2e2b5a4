"""Reads how positions are rotated, in the old layout of configs and in that of transformers 5."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from author.families.config import Config, is_number
from author.families.model import Linear, Llama3, LongRope, Rotation, Scaling, Yarn
from author.spec import Rope

# Keys beside those of a scaling. What is said of images makes no difference for text.
ELSEWHERE = frozenset({
    "finetuned", "mrope_interleaved", "mrope_section", "partial_rotary_factor", "rope_theta",
    "rope_type", "type",
})  # fmt: skip
MSCALES = ("mscale", "mscale_all_dim")
ORIGINAL = "original_max_position_embeddings"

# What each scaling may say, besides its name.
KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("alpha", "factor", "beta_fast", "beta_slow", *MSCALES),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": (
        *("factor", ORIGINAL, "beta_fast", "beta_slow", "truncate", "attention_factor"),
        *MSCALES,
    ),
    "longrope": ("short_factor", "long_factor", ORIGINAL, "factor", "attention_factor"),
}
OTHER_NAMES = {"su": "longrope", "mrope": "default"}


def rotation(
    config: Config,
    width: int,
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
    default: Mapping[str, Any] | None = None,
    beside: Sequence[str] = (),
) -> Rotation:
    """The one rotation of a model whose heads are `width` wide.

    `theta` and `partial` (the part of a head that turns) are the family's where the config names
    none, and `default` its scaling where the config has neither layout's key. `beside` are
    parameters that the family reads itself, from `given`.
    """
    found = given(config)
    if not found and default is not None and config.get("rope_theta", None) is None:
        found = dict(default)
    return _rotation(config, found, width, theta=theta, partial=partial, beside=beside)


def rotations_by_type(
    config: Config, width: int, thetas: Mapping[str, float]
) -> dict[str, Rotation] | None:
    """The rotation of each layer type, where the config tells them apart; none where it does not.

    `thetas` are the types and the family's base for each.
    """
    new = config.get("rope_parameters", None)
    if not isinstance(new, dict) or not any(isinstance(v, dict) for v in new.values()):
        return None
    if set(new) != set(thetas) or not all(isinstance(v, dict) for v in new.values()):
        config.complain(f"rope_parameters names {', '.join(new)}, wanted {', '.join(thetas)}")
        return {kind: Rotation(dims=width, theta=theta) for kind, theta in thetas.items()}
    for old in ("rope_scaling", "rope_theta"):
        if config.get(old, None) is not None:
            config.complain(f"{old} is given beside rope_parameters by layer type")
    found = {}
    for kind, theta in thetas.items():
        # Here transformers does not read `truncate`.
        parameters = {k: v for k, v in new[kind].items() if v is not None and k != "truncate"}
        found[kind] = _rotation(config, parameters, width, theta=theta, top=False)
    return found


def numbered(
    turned: Sequence[Rotation | None],
) -> tuple[tuple[Rope | None, ...], tuple[Rotation, ...]]:
    """What each layer's mixer says of its rotation, and the rotations in the order of the tables.

    Rotations of one width and base are told apart by their variant.
    """
    distinct = tuple(dict.fromkeys(r for r in turned if r is not None))
    ropes: dict[Rotation, Rope] = {}
    for found in distinct:
        alike = sum((r.dims, r.theta) == (found.dims, found.theta) for r in ropes)
        ropes[found] = Rope(dims=found.dims, theta=found.theta, variant=alike)
    return tuple(None if r is None else ropes[r] for r in turned), distinct


def given(config: Config) -> dict[str, Any]:
    """What either layout says of the rotation, null keys left out."""
    new, old = config.get("rope_parameters", None), config.get("rope_scaling", None)
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            config.complain(f"{key} is {value!r}, wanted an object")
            return {}
    merged = {**(old or {}), **(new or {})}
    for key, value in (old or {}).items():
        if key in (new or {}) and new[key] != value:
            config.complain(f"rope_scaling and rope_parameters differ in {key}")
    return {k: v for k, v in merged.items() if v is not None}


def kind_of(parameters: Mapping[str, Any]) -> str:
    """The name of a scaling."""
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    return OTHER_NAMES.get(kind, kind)


def magnitude(t: float, factor: float) -> float:
    """YaRN's factor on cosines and sines, and on latent attention's scale."""
    return 1.0 if factor <= 1 else 0.1 * t * math.log(factor) + 1.0


# --- One rotation


def _rotation(
    config: Config,
    found: dict[str, Any],
    width: int,
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
    beside: Sequence[str] = (),
    top: bool = True,
) -> Rotation:
    kind = kind_of(found)
    dims = _dims(config, found, width, partial)
    base = _number(config, found, "rope_theta", theta, top=top)
    if kind not in KEYS:
        config.complain(f"rope_type {kind!r} is not supported ({', '.join(KEYS)} are)")
        return Rotation(dims=dims, theta=base)
    unknown = sorted(set(found) - ELSEWHERE - {*KEYS[kind], *beside})
    if unknown:
        config.complain(f"nothing is known of {', '.join(unknown)} of rope_type {kind!r}")
    read = _Parameters(config, kind, found, dims)
    if kind == "dynamic":
        alpha = read.number("alpha")
        return Rotation(dims=dims, theta=base * alpha ** (dims / max(dims - 2, 1)))
    return Rotation(
        dims=dims, theta=base, scaling=READ[kind](read), attention=_attention(read, found)
    )


def _dims(config: Config, found: Mapping[str, Any], width: int, partial: float) -> int:
    factor = _number(config, found, "partial_rotary_factor", partial, top=True)
    dims = int(width * factor)
    named = config.get("rotary_dim", None)
    if named is not None:
        said = {*found, *(k for k, v in config.keys.items() if v is not None)}
        if "partial_rotary_factor" in said and named != dims:
            config.complain(f"rotary_dim is {named} and partial_rotary_factor makes it {dims}")
        dims = config.count("rotary_dim")
    if dims < 2 or dims % 2 != 0 or dims > width:
        config.complain(f"{dims} of {width} entries of a head turn, wanted an even number")
        return width
    return dims


def _number(
    config: Config, found: Mapping[str, Any], key: str, default: float, *, top: bool
) -> float:
    """A positive number that stands among the parameters or at the top, and not twice unlike."""
    inside, outside = found.get(key), config.get(key, None) if top else None
    if inside is not None and outside is not None and inside != outside:
        config.complain(f"{key} is {outside!r} at the top and {inside!r} among the parameters")
    value = outside if inside is None else inside
    if value is None:
        return default
    if not is_number(value) or value <= 0:
        config.complain(f"{key} is {value!r}, wanted a positive number")
        return default
    return float(value)


class _Parameters:
    """The parameters of a scaling, being read."""

    def __init__(self, config: Config, kind: str, found: Mapping[str, Any], dims: int) -> None:
        self.config = config
        self.kind = kind
        self.found = found
        self.dims = dims

    def number(self, key: str, default: float | None = None, least: float = 1e-9) -> float:
        value = self.found.get(key, default)
        if not is_number(value) or value < least:
            self.config.complain(f"rope_type {self.kind!r} wants a number {key}, found {value!r}")
            return 1.0
        return float(value)

    def factors(self, key: str) -> tuple[float, ...]:
        values, wanted = self.found.get(key), self.dims // 2
        if isinstance(values, list) and len(values) == wanted and all(map(_is_factor, values)):
            return tuple(map(float, values))
        said = f"rope_type {self.kind!r} wants {wanted} numbers {key}, found {values!r}"
        self.config.complain(said)
        return (1.0,) * wanted

    def context(self) -> float:
        return float(self.config.count("max_position_embeddings", 2048))

    def original(self) -> float:
        """The length that was trained for; some families keep it at the top of the config."""
        return _number(self.config, self.found, ORIGINAL, self.context(), top=True)


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and is_number(value) and value > 0


def _yarn(read: _Parameters) -> Scaling:
    truncate = read.found.get("truncate", True)
    if not isinstance(truncate, bool):
        read.config.complain(f"truncate is {truncate!r}, wanted true or false")
    return Yarn(
        factor=read.number("factor"),
        original=read.original(),
        beta_fast=read.number("beta_fast", 32.0),
        beta_slow=read.number("beta_slow", 1.0),
        truncate=bool(truncate),
    )


def _llama3(read: _Parameters) -> Scaling:
    return Llama3(
        factor=read.number("factor"),
        low=read.number("low_freq_factor"),
        high=read.number("high_freq_factor"),
        original=read.number(ORIGINAL),
    )


def _longrope(read: _Parameters) -> Scaling:
    return LongRope(
        short=read.factors("short_factor"),
        long=read.factors("long_factor"),
        original=int(read.original()),
    )


READ: Mapping[str, Callable[[_Parameters], Scaling | None]] = {
    "default": lambda read: None,
    "linear": lambda read: Linear(factor=read.number("factor")),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _attention(read: _Parameters, found: Mapping[str, Any]) -> float:
    """The factor on cosines and sines."""
    if read.kind not in ("yarn", "longrope"):
        return 1.0
    if "attention_factor" in found:
        return read.number("attention_factor")
    if read.kind == "longrope":
        factor = read.number("factor", read.context() / read.original())
        original = max(read.original(), 2.0)
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factor = read.number("factor")
    one, all_dims = (read.number(key, 0.0, least=0.0) for key in MSCALES)
    if one and all_dims:
        return magnitude(one, factor) / magnitude(all_dims, factor)
    return magnitude(1.0, factor)
