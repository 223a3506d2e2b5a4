"""The tables that the host computes: rotary cosines and sines, temperatures, rows of ones."""

import math
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from author.families.model import Rotation
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
) -> np.ndarray:
    """The float32 table of a name; a cached one has a row a position, the other that of `position`.

    `divisors` are the values of the tensor that the rotation names, if it names one.
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
    angles = positions[:, None] * frequencies(rotations[number], divisors)[None]
    turned = np.cos(angles) if parsed["kind"] == "cos" else np.sin(angles)
    return turned.astype(np.float32)


def frequencies(
    rotation: Rotation, divisors: Float64[np.ndarray, " half"] | None = None
) -> Float64[np.ndarray, " half"]:
    """Radians a position of each rotary pair."""
    plain = rotation.theta ** (-np.arange(0, rotation.dims, 2, dtype=np.float64) / rotation.dims)
    if divisors is not None:
        return plain / divisors
    match rotation.scaling:
        case "linear":
            return plain / rotation.parameters["factor"]
        case "llama3":
            return _llama3(plain, **rotation.parameters)
        case _:
            return plain


def _llama3(
    plain: Float64[np.ndarray, " half"],
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Float64[np.ndarray, " half"]:
    """Long waves stretched, short ones kept, a ramp between (Llama 3.1's release)."""
    turns = original_max_position_embeddings * plain / (2 * math.pi)
    ramp = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = np.clip(ramp, 0, 1)
    return (1 - kept) * plain / factor + kept * plain


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
    steps = np.floor((positions + 1) / temperature.floor)
    return 1 + temperature.scale * np.log1p(steps)


def _temperature_table(kind: str, factor: np.ndarray, cols: int) -> np.ndarray:
    """A rotation by no angle, stretched: cosines are the factor, sines are zero."""
    column = factor if kind == "tcos" else np.zeros_like(factor)
    return np.repeat(column[:, None], cols, axis=1).astype(np.float32)
