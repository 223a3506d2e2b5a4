"""Reads the header of a GGUF file, and decodes the number formats that such files hold.

The `gguf` library's own reader makes several NumPy arrays for each entry of a tokenizer,
two seconds for a vocabulary of 49,152; this one takes some hundredths of a second. The
format is described in ggml/docs/gguf.md.
"""

import mmap
import re
import struct
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from jaxtyping import Float32, UInt8

from tp.stored import CheckpointError, Coding, TensorInfo

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MOST_DIMENSIONS = 8
_ELEMENTS_AT_ONCE = 1 << 17
_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_WHOLE_FILE = "wanted a whole GGUF file: fetch it again"
_MERGE = "join the parts into one file first: llama-gguf-split --merge"

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """What stands before the data: keys and their Python values, tensors by name."""

    keys: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GgufHeader:
    """Read and check a GGUF file's header; the data must all be there, but is not read.

    Raises CheckpointError for anything but a whole, unsplit, little-endian file of
    version 2 or 3.
    """
    named = _SPLIT_NAME.search(path.name)
    if named is not None and int(named[2]) > 1:
        raise _error(path, f"is part {int(named[1])} of {int(named[2])} of a split GGUF", _MERGE)
    if path.stat().st_size == 0:
        raise _error(path, "is empty", _WHOLE_FILE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Cursor(path, data).header()


def coding_of(dtype: str) -> Coding | None:
    """How a GGUF type is decoded (by the `gguf` library); None if there is no such type."""
    kind = gguf.GGMLQuantizationType.__members__.get(dtype)
    if kind is None:
        return None
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    return Coding(
        block=block,
        nbytes=nbytes,
        decode=lambda raw: _dequantise(raw, kind, block, nbytes),
    )


def _dequantise(
    raw: UInt8[np.ndarray, "rows bytes"], kind: gguf.GGMLQuantizationType, block: int, nbytes: int
) -> Float32[np.ndarray, "rows cols"]:
    # The library works through 16 rows at a time, which are few in a small model. Blocks
    # know nothing of rows, so they are handed to it in bites that suit a cache.
    blocks = np.ascontiguousarray(raw).reshape(raw.size // nbytes, nbytes)
    out = np.empty((len(blocks), block), np.float32)
    at_once = _ELEMENTS_AT_ONCE // block
    for at in range(0, len(blocks), at_once):
        bite = slice(at, at + at_once)
        out[bite] = gguf.dequantize(blocks[bite].reshape(-1), kind).reshape(-1, block)
    return out.reshape(raw.shape[0], raw.shape[1] // nbytes * block)


class _Cursor:
    """A place in a mapped file, moved on by what is read there."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def header(self) -> GgufHeader:
        self._check_start()
        tensor_count, key_count = self._number("<u8"), self._number("<u8")
        keys: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._text()
            if key in keys:
                raise _error(self.path, f"names the key {key} twice", _WHOLE_FILE)
            keys[key] = self._value(key)
        split = keys.get("split.count", 1)
        if split != 1:
            raise _error(self.path, f"is one of {split} parts of a split GGUF", _MERGE)
        tensors: dict[str, TensorInfo] = {}
        for _ in range(tensor_count):
            tensor = self._tensor()
            if tensor.name in tensors:
                raise _error(self.path, f"names the tensor {tensor.name} twice", _WHOLE_FILE)
            tensors[tensor.name] = tensor
        return GgufHeader(keys=keys, tensors=self._placed(tensors, self._alignment(keys)))

    def _check_start(self) -> None:
        magic = self._take(4)
        if magic != MAGIC:
            raise _error(self.path, f"begins with {magic!r}", "a GGUF file begins with b'GGUF'")
        version = self._number("<u4")
        if version & 0xFFFF == 0:
            raise _error(self.path, "is a big-endian GGUF", "convert it: gguf-convert-endian")
        if version not in VERSIONS:
            wanted = f"versions {' and '.join(map(str, VERSIONS))} are read: convert the model anew"
            raise _error(self.path, f"is a GGUF of version {version}", wanted)

    def _take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            found = f"ends at byte {len(self.data)}, within its header (byte {end} was to come)"
            raise _error(self.path, found, _WHOLE_FILE)
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def _number(self, dtype: str) -> int:
        kind = np.dtype(dtype)
        return int.from_bytes(self._take(kind.itemsize), "little")

    def _text(self) -> str:
        return self._texts(1)[0]

    def _texts(self, count: int) -> list[str]:
        # Tokenizers hold some hundred thousand of these: nothing is called in this loop
        # that need not be.
        data, size, at = self.data, len(self.data), self.at
        length_at = struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            end = at + 8
            if end <= size:
                end += length_at(data, at)[0]
            if end > size:
                self.at = at
                self._take(end - at)
            # Tokens may be pieces of UTF-8; this keeps unlike ones apart.
            texts.append(data[at + 8 : end].decode("utf-8", "surrogateescape"))
            at = end
        self.at = at
        return texts

    def _value(self, key: str) -> Any:
        kind = self._number("<u4")
        if kind != _ARRAY:
            return self._values(key, kind, 1)[0]
        kind, count = self._number("<u4"), self._number("<u8")
        return self._values(key, kind, count)

    def _values(self, key: str, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self._texts(count)
        if kind not in _SCALARS:
            wanted = "numbers, strings and flat arrays of them are read"
            raise _error(self.path, f"has the key {key} of type {kind}", wanted)
        dtype = _SCALARS[kind]
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()

    def _tensor(self) -> TensorInfo:
        """A tensor's entry, with its offset still counted from the start of the data."""
        name = self._text()
        dimensions = self._number("<u4")
        if dimensions > _MOST_DIMENSIONS:
            found = f"has {dimensions} dimensions in the header"
            raise _error(self.path, found, _WHOLE_FILE, tensor=name)
        shape = tuple(self._number("<u8") for _ in range(dimensions))[::-1]
        dtype = _dtype_name(self._number("<u4"))
        return TensorInfo(
            name=name,
            shape=shape,
            dtype=dtype,
            file=self.path,
            offset=self._number("<u8"),
            nbytes=self._bytes_of(name, shape, dtype),
        )

    def _bytes_of(self, name: str, shape: tuple[int, ...], dtype: str) -> int:
        coding = coding_of(dtype)
        if coding is None:
            return 0
        cols = shape[-1] if shape else 1
        if cols % coding.block != 0:
            found = f"is {list(shape)} in {dtype}"
            wanted = f"wanted rows of whole blocks of {coding.block}"
            raise _error(self.path, found, wanted, tensor=name)
        return prod(shape[:-1]) * coding.bytes_of(cols)

    def _alignment(self, keys: dict[str, Any]) -> int:
        alignment = keys.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) != 0:
            found = f"has general.alignment {alignment!r}"
            raise _error(self.path, found, "wanted a power of two")
        return alignment

    def _placed(self, tensors: dict[str, TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """The tensors with offsets in the file, none past its end, no two overlapping."""
        start = -(-self.at // alignment) * alignment
        placed = {
            name: replace(tensor, offset=start + tensor.offset) for name, tensor in tensors.items()
        }
        size = len(self.data)
        missing = [t.name for t in placed.values() if t.offset + t.nbytes > size]
        if missing:
            end = max(t.offset + t.nbytes for t in placed.values())
            found = f"ends at byte {size} of {end}, cutting off {', '.join(missing)}"
            raise _error(self.path, found, _WHOLE_FILE)
        ordered = sorted(placed.values(), key=lambda t: (t.offset, t.nbytes))
        for one, other in pairwise(ordered):
            if one.offset + one.nbytes > other.offset:
                found = f"has the bytes of {one.name} and {other.name} overlap"
                raise _error(self.path, found, _WHOLE_FILE)
        return placed


def _dtype_name(number: int) -> str:
    try:
        return gguf.GGMLQuantizationType(number).name
    except ValueError:
        return f"type {number}"


def _error(path: Path, found: str, wanted: str, tensor: str | None = None) -> CheckpointError:
    return CheckpointError(file=path.name, tensor=tensor, found=found, wanted=wanted)
