"""Writes one shard of a q8 store, band after band of its matrices, from where it was left on."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from kernels.q8 import Q8
from tp.checkpoint import Checkpoint
from tp.store_file import Q8_DTYPE, hashed
from tp.store_journal import Stamp, settle, writing
from tp.store_plan import Matrix, Shard
from tp.views import read_floats, read_q8

_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
# Bands are converted by so many threads, and so many are made before they are written.
_THREADS, _WAITING = 2, 4

Band = tuple[Matrix, int, int]  # the matrix, its first output of the band, and how many


def write_shard(
    shard: Shard,
    checkpoint: Checkpoint,
    file: Path,
    *,
    begun: Stamp | None,
    mark: int,
    marked: Callable[[Stamp], None],
    progress: Callable[[str, int], None],
) -> Stamp:
    """Write a shard and wait until it is on disk; its length and digest.

    `begun` says how much of the file is known to be right, which is kept if it still is. Whenever
    `mark` bytes more are on disk, `marked` is told how far that is. Raises StoreError where the
    file cannot be written.
    """
    kept, digest, at = _kept(shard, file, begun)
    with writing(file), file.open("r+b" if at > 0 else "wb") as stream:
        stream.truncate(at)
        stream.seek(at)
        output = Output(stream=stream, digest=digest, at=at)
        if at == 0:
            output.write(shard.header)
        safe = output.at
        for matrix in _written(checkpoint, shard.matrices[kept:], output):
            progress(matrix.name, output.at)
            if output.at - safe >= mark:
                marked(output.settled())
                safe = output.at
        return output.settled()


def _kept(shard: Shard, file: Path, begun: Stamp | None) -> tuple[int, Any, int]:
    """How many matrices of a shard a file holds, the digest so far, and where they end."""
    ends = [len(shard.header)]
    for matrix in shard.matrices:
        ends.append(ends[-1] + matrix.nbytes)
    if begun is not None and begun.bytes in ends and file.exists():
        digest = hashed(file, begun.bytes)
        if digest.hexdigest() == begun.sha256:
            return ends.index(begun.bytes), digest, begun.bytes
    return 0, hashlib.sha256(), 0


@dataclass(kw_only=True)
class Output:
    """A file being written, with the digest of what is in it."""

    stream: BinaryIO
    digest: Any
    at: int

    def write(self, data: bytes | np.ndarray) -> None:
        """Add bytes, or those of an array."""
        raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else _bytes_of(data)
        self.stream.write(raw.data)
        self.digest.update(raw.data)
        self.at += raw.size

    def settled(self) -> Stamp:
        """What is in it, once it is on disk."""
        self.stream.flush()
        settle(self.stream.fileno())
        return Stamp(bytes=self.at, sha256=self.digest.hexdigest())


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _written(
    checkpoint: Checkpoint, matrices: Sequence[Matrix], output: Output
) -> Iterator[Matrix]:
    """Write matrices; each as soon as it is written."""
    bands = ((matrix, *band) for matrix in matrices for band in matrix.bands)
    scales: list[np.ndarray] = []
    for (matrix, first, count), found in _ahead(checkpoint, bands):
        if isinstance(found, Q8):
            output.write(found.values)
            scales.append(found.scales)
        else:
            output.write(found)
        if first + count == matrix.outputs:
            if scales:
                output.write(np.concatenate(scales))
            scales = []
            yield matrix


def _ahead(checkpoint: Checkpoint, bands: Iterable[Band]) -> Iterator[tuple[Band, Q8 | np.ndarray]]:
    """Bands converted, in their order, some of them before they are asked for."""
    waiting: deque[tuple[Band, Future[Q8 | np.ndarray]]] = deque()
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        for band in bands:
            waiting.append((band, pool.submit(_converted, checkpoint, band)))
            if len(waiting) == _WAITING:
                first, found = waiting.popleft()
                yield first, found.result()
        while waiting:
            first, found = waiting.popleft()
            yield first, found.result()


def _converted(checkpoint: Checkpoint, band: Band) -> Q8 | np.ndarray:
    """Some outputs of a matrix, as a load would have them."""
    matrix, first, count = band
    if matrix.dtype == Q8_DTYPE:
        return read_q8(checkpoint, matrix.views, first, count, None)
    floats = read_floats(checkpoint, matrix.views, first, count, 0, matrix.inputs)
    return floats.astype(_FLOATS[matrix.dtype])
