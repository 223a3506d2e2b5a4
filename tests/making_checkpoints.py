"""Makes checkpoints out of those in `tests/checkpoints`: other tensors, other keys; and runs them.

Matrices drawn here survive being quantised, as those of the checkpoints do: a scale that float16
has times whole numbers, 127 the largest in every run of eight along rows and along columns.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.making_safetensors import FLOATS, make_directory, split_bytes
from tp.decoder import Decoder
from tp.launch import devices
from tp.loader import load
from tp.source import open_source

FOLDER = Path(__file__).parent / "checkpoints"
CONTEXT = 48
Tensors = dict[str, np.ndarray]
Keys = dict[str, Any]


# --- What is there


@cache
def _stored(family: str) -> dict[str, tuple[np.ndarray, str]]:
    found = {}
    for path in sorted((FOLDER / family).glob("*.safetensors")):
        header, data = split_bytes(path.read_bytes())
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                flat = np.frombuffer(data[start:end], FLOATS[entry["dtype"]])
                found[name] = (flat.astype(np.float32).reshape(entry["shape"]), entry["dtype"])
    return found


def tensors(family: str) -> Tensors:
    """The tensors of a checkpoint, in float32."""
    return {name: array for name, (array, _) in _stored(family).items()}


def keys(family: str, **changes: Any) -> Keys:
    """The config of a checkpoint with some keys changed; None takes one out."""
    found = json.loads((FOLDER / family / "config.json").read_text()) | changes
    return {key: value for key, value in found.items() if value is not None}


def expected(family: str, prompt: int) -> tuple[list[int], np.ndarray]:
    """A prompt, and the logits of transformers."""
    with np.load(FOLDER / family / "expected.npz") as file:
        return file[f"input_ids_{prompt}"].tolist(), file[f"logits_{prompt}"]


# --- What is made of it


def write(path: Path, config: Keys, made: Tensors, dtype: str = "F32") -> Path:
    """A directory of these tensors, all of one type."""
    make_directory(path, {name: (array, dtype) for name, array in made.items()})
    (path / "config.json").write_text(json.dumps(config))
    return path


def kept_layers(made: Tensors, *layers: int) -> Tensors:
    """The tensors without all layers but these, which are numbered anew."""
    found = {}
    for name, array in made.items():
        at = re.match(r"model\.layers\.(\d+)\.", name)
        if at is None:
            found[name] = array
        elif int(at[1]) in layers:
            number = layers.index(int(at[1]))
            found[f"model.layers.{number}.{name[at.end() :]}"] = array
    return found


def matrix(random: np.random.Generator, *shape: int, gain: float = 1.0) -> np.ndarray:
    """Numbers of about `gain` over the root of the inputs, which come last; see above."""
    n = random.integers(-127, 128, shape)
    n[..., ::8, :] = random.choice([-127, 127], n[..., ::8, :].shape)
    n[..., :, ::8] = random.choice([-127, 127], n[..., :, ::8].shape)
    scale = np.float16(gain / (80 * np.sqrt(shape[-1])))
    return (n * np.float32(scale)).astype(np.float32)


def redrawn(made: Tensors, seed: int, **shapes: tuple[int, ...]) -> Tensors:
    """The tensors with those of other shapes whose names hold a word; `__` stands for a dot."""
    random = np.random.default_rng(seed)
    found = dict(made)
    for name in made:
        shape = next((s for word, s in shapes.items() if word.replace("__", ".") in name), None)
        if shape is not None:
            plain = len(shape) == 1 or "conv1d" in name
            found[name] = random.normal(size=shape) if plain else matrix(random, *shape)
    return {name: array.astype(np.float32) for name, array in found.items()}


def scaled(made: Tensors, **factors: float) -> Tensors:
    """The tensors whose names hold a word times a factor, a power of two for matrices."""
    found = dict(made)
    for word, factor in factors.items():
        names = [name for name in found if word.replace("__", ".") in name]
        assert names, word
        found |= {name: found[name] * np.float32(factor) for name in names}
    return found


# --- What comes of it


@cache
def _shared(spec: Any, chips: int, context: int, kernels: str) -> list[Decoder]:
    return []


def decoder(path: Path, chips: int, context: int = CONTEXT, *, kernels: str = "auto") -> Decoder:
    """A checkpoint on its chips; what is compiled is shared by all of one spec."""
    source = open_source(str(path))
    made = Decoder(
        model=source.model,
        devices=devices(chips),
        context=context,
        chunks=(min(context, 32),),
        kernels=kernels,
    )
    before = _shared(source.model.spec, chips, context, kernels)
    if before:
        made._steps = before[0]._steps
        made.__dict__["decode"] = before[0].decode
    else:
        before.append(made)
    made.weights, _ = load(
        source.model, made.operands, source.checkpoint, made.devices, kernels=kernels
    )
    return made


def weights(path: Path, chips: int) -> dict[str, Any]:
    """What the chips hold of a checkpoint, whole arrays of all chips, in float32."""
    return decoder(path, chips, kernels="xla").weights


def logits(path: Path, chips: int, ids: list[int]) -> np.ndarray:
    """The logits at every position, read as a prompt."""
    return decoder(path, chips).score(ids)


def ids(vocabulary: int, length: int, seed: int = 0) -> list[int]:
    """A sequence of token ids."""
    return np.random.default_rng(seed).integers(0, vocabulary, length).tolist()


def close(found: Any, wanted: np.ndarray, limit: float = 1e-4) -> None:
    """Within a part of how far logits differ from one another."""
    assert np.isfinite(wanted).all()
    error = np.abs(np.asarray(found, np.float64) - wanted).max() / wanted.std()
    assert error < limit, f"{error:.1e} of the deviation"


def apart(found: Any, other: Any, least: float = 0.02) -> None:
    """Unlike by more than any rounding."""
    assert np.abs(np.asarray(found) - np.asarray(other)).max() > least * np.std(other)
