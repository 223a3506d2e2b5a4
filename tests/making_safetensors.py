"""Makes tiny safetensors directories for tests, byte by byte: the library does not write bfloat16
from NumPy, and will not write a broken file."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tp.checkpoint import CheckpointError, open_checkpoint

FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def safetensors_bytes(header: Mapping[str, Any], data: bytes) -> bytes:
    """A file of this header and data, whether or not they agree."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def split_bytes(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a file."""
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def make_directory(path: Path, tensors: Mapping[str, tuple[np.ndarray, str]]) -> Path:
    """Write a directory with an empty config and one file of arrays, each with its dtype."""
    header, data = {}, b""
    for name, (array, dtype) in tensors.items():
        raw = array.astype(FLOATS.get(dtype, array.dtype)).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": offsets}
        data += raw
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(safetensors_bytes(header, data))
    (path / "config.json").write_text("{}")
    return path


def complaint(path: Path) -> str:
    """What is said of a checkpoint that cannot be opened."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return str(caught.value)
