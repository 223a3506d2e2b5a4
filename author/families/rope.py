"""Reads how positions are rotated, in the old layout of configs and in that of transformers 5."""

from typing import Any

from author.families.config import Config
from author.families.model import Rotation

# What each scaling needs, besides its name.
PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
ELSEWHERE = frozenset({"rope_type", "type", "rope_theta"})


def rotation(config: Config, dims: int, *, theta: float = 10000.0) -> Rotation:
    """The one rotation of a model; `theta` is the family's base where the config names none."""
    given = _given(config)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in PARAMETERS:
        supported = ", ".join(PARAMETERS)
        config.complain(f"rope_type {kind!r} is not supported ({supported} are)")
        return Rotation(dims=dims, theta=theta)
    wanted = PARAMETERS[kind]
    for key in wanted:
        if not isinstance(given.get(key), int | float):
            config.complain(f"rope_type {kind!r} wants a number {key}, found {given.get(key)!r}")
    unknown = sorted(k for k in given if k not in ELSEWHERE and k not in wanted)
    if unknown and kind != "default":
        config.complain(f"nothing is known of {', '.join(unknown)} of rope_type {kind!r}")
    return Rotation(
        dims=dims,
        theta=_theta(config, given, theta),
        scaling=kind,
        parameters={k: float(given.get(k, 1)) for k in wanted},
    )


def _given(config: Config) -> dict[str, Any]:
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


def _theta(config: Config, given: dict[str, Any], default: float) -> float:
    nested, top = given.get("rope_theta"), config.get("rope_theta", None)
    if nested is not None and top is not None and nested != top:
        config.complain(f"rope_theta is {top!r} at the top and {nested!r} among the parameters")
    theta = top if nested is None else nested
    if theta is None:
        return default
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        config.complain(f"rope_theta is {theta!r}, wanted a positive number")
        return default
    return float(theta)
