"""What processes compare before the first step: versions, program, manifest, weights."""

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from author.manifest import TpManifest, manifest_to_json
from kernels.native.library import why_not
from tp.checkpoint import Checkpoint
from tp.decoder import Decoder
from tp.stored import TensorInfo

ROOT = Path(__file__).parent.parent
PACKAGES = ("author", "kernels", "tp")
SAMPLED = 64  # tensors, and the bytes looked at in the middle of each


def facts(decoder: Decoder, checkpoint: Checkpoint) -> dict[str, str]:
    """What has to be the same in every process of a run."""
    program = decoder.authored("tp_decode_step", {"tok": 0, "pos": 1})
    manifest = manifest_to_json(program.manifest or TpManifest(chips=1))
    return {
        "anyfold": f"{_version('anyfold')} ({_code()})",
        "jax": f"{jax.__version__} with jaxlib {_version('jaxlib')}",
        "the platform": decoder.devices.platform,
        "the kernels": f"{decoder.kernels}, {'native' if why_not() is None else 'none native'}",
        "the caches": f"{decoder.context} rows of {decoder.cache}",
        "the program": _digest([program.text.encode()]),
        "the manifest": _digest([json.dumps(manifest).encode()]),
        "the weights": weights_identity(checkpoint),
    }


def weights_identity(checkpoint: Checkpoint) -> str:
    """A digest of what a checkpoint's tensors are, and of a few bytes out of some of them.

    The bytes tell a model from one that was trained on from it, not a file with a flaw.
    """
    tensors = [checkpoint.tensors[name] for name in sorted(checkpoint.tensors)]
    told = [f"{t.name} {t.dtype} {t.shape} {t.nbytes}\n".encode() for t in tensors]
    every = max(1, len(tensors) // SAMPLED)
    return _digest([*told, *map(_middle, tensors[::every])])


def _middle(tensor: TensorInfo) -> bytes:
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset + max(0, tensor.nbytes - SAMPLED) // 2)
        return file.read(min(SAMPLED, tensor.nbytes))


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]


@cache
def _code() -> str:
    """A digest of the Python that runs here: two checkouts of one version may differ."""
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    named = [(str(path.relative_to(ROOT)), path) for path in files]
    return _digest(part for name, path in named for part in (name.encode(), path.read_bytes()))[:8]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
