"""The tables that the host computes: rotary cosines and sines, temperatures, rows of ones."""

import math
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from author.families.model import Linear, Llama3, LongRope, Rotation, Yarn
from author.names import Name
from author.spec import Attention, ModelSpec

_TABLE = re.compile(r"(?P<kind>t?cos|t?sin|ones)(?P<cached>c)?(?P<number>[0-9]+)")


def host_table(
    name: Name,
    shape: tuple[int, int],
    *,
    spec: ModelSpec,
    rotations: Sequence[Rotation],
    divisors: Float64[np.ndarray, " half"] | None = None,
    position: int = 1,
    long: bool = False,
) -> np.ndarray:
    """The float32 table of a name; a cached one has a row a position, the other that of `position`.

    `divisors` are the values of the tensor that the rotation names, if it names one; `long` says
    that the sequence outgrows what a rotation with factors for that was first trained for.
    """
    parsed = _TABLE.fullmatch(name.base)
    assert parsed is not None, name
    rows, cols = shape
    number = int(parsed["number"])
    if parsed["kind"] == "ones":
        return np.ones(shape, np.float32)
    positions = np.arange(rows) if parsed["cached"] else np.array([position - 1])
    if parsed["kind"].startswith("t"):
        factor = _temperature(spec, number, positions)
        return _temperature_table(parsed["kind"], factor, cols)
    rotation = rotations[number]
    angles = positions[:, None] * frequencies(rotation, divisors, long=long)[None]
    turned = np.cos(angles) if parsed["kind"] == "cos" else np.sin(angles)
    return (rotation.attention * turned).astype(np.float32)


def frequencies(
    rotation: Rotation,
    divisors: Float64[np.ndarray, " half"] | None = None,
    *,
    long: bool = False,
) -> Float64[np.ndarray, " half"]:
    """Radians a position of each rotary pair."""
    plain = rotation.theta ** (-np.arange(0, rotation.dims, 2, dtype=np.float64) / rotation.dims)
    if divisors is not None:
        return plain / divisors
    match rotation.scaling:
        case None:
            return plain
        case Linear(factor=factor):
            return plain / factor
        case Llama3() as scaling:
            return _llama3(plain, scaling)
        case Yarn() as scaling:
            return _yarn(plain, scaling, rotation.theta)
        case LongRope() as scaling:
            return plain / np.array(scaling.long if long else scaling.short)


def _llama3(plain: Float64[np.ndarray, " half"], s: Llama3) -> Float64[np.ndarray, " half"]:
    """Long waves stretched, short ones kept, a ramp between (Llama 3.1's release)."""
    turns = s.original * plain / (2 * math.pi)
    kept = np.clip((turns - s.low) / (s.high - s.low), 0, 1)
    return (1 - kept) * plain / s.factor + kept * plain


def _yarn(
    plain: Float64[np.ndarray, " half"], s: Yarn, theta: float
) -> Float64[np.ndarray, " half"]:
    """Pairs that turn often are kept, those that hardly do are stretched (YaRN's release)."""
    dims = 2 * len(plain)

    def pair(turns: float) -> float:
        """Which pair turns so often over the length that was trained for."""
        return dims * math.log(s.original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = pair(s.beta_fast), pair(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    stretched = np.clip((np.arange(dims // 2) - low) / (high - low), 0, 1)
    return stretched * plain / s.factor + (1 - stretched) * plain


def _temperature(spec: ModelSpec, half: int, positions: np.ndarray) -> np.ndarray:
    """The factor on the queries at each position, counted from 0 (Llama 4's release)."""
    found = {
        layer.mixer.temperature
        for layer in spec.layers
        if isinstance(layer.mixer, Attention)
        and layer.mixer.temperature is not None
        and layer.mixer.head_dim // 2 == half
    }
    (temperature,) = found
    steps = np.floor((positions + temperature.offset) / temperature.floor)
    return 1 + temperature.scale * np.log1p(steps)


def _temperature_table(kind: str, factor: np.ndarray, cols: int) -> np.ndarray:
    """A rotation by no angle, stretched: cosines are the factor, sines are zero."""
    column = factor if kind == "tcos" else np.zeros_like(factor)
    return np.repeat(column[:, None], cols, axis=1).astype(np.float32)
