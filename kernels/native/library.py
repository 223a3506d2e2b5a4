"""Loads the compiled handler and hands it to XLA, or says why there are none."""

import ctypes
import os
from functools import cache
from pathlib import Path

import jax

HERE = Path(__file__).parent
HANDLER = "anyfold_chain"


def why_not(folder: Path = HERE) -> str | None:
    """Why the native path cannot be taken here; None where it can."""
    found = _opened(folder)
    return found if isinstance(found, str) else None


def levels() -> tuple[str, ...]:
    """The levels of instructions that this CPU has, best first; the best is in use."""
    return tuple(_library().anyfold_levels().decode().split())


def use_level(name: str) -> None:
    """Take a level for all that follows; for tests and measurements."""
    if not _library().anyfold_use_level(name.encode()):
        raise ValueError(f"no level {name!r} on this CPU: there are {', '.join(levels())}")


def use_threads(count: int) -> None:
    """How many threads work on one call, or on those of all chips; by default a core each."""
    _library().anyfold_set_threads(count)


def target() -> str:
    """The name by which XLA knows the handler, which the first call makes known."""
    _registered()
    return HANDLER


@cache
def _opened(folder: Path) -> ctypes.CDLL | str:
    path = folder / "handlers.so"
    if not path.exists():
        failed = folder / "failed.txt"
        reason = failed.read_text().strip() if failed.exists() else "they were not compiled"
        return f"no native kernels: {reason}; installing anyfold with a C++ compiler would do"
    try:
        library = ctypes.CDLL(str(path))
        library.anyfold_levels.restype = ctypes.c_char_p
        library.anyfold_use_level.restype = ctypes.c_bool
    except (OSError, AttributeError) as error:
        return f"no native kernels: {error}; installing anyfold again would do"
    return library


def _library() -> ctypes.CDLL:
    found = _opened(HERE)
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


@cache
def _registered() -> None:
    handler = jax.ffi.pycapsule(getattr(_library(), HANDLER))
    jax.ffi.register_ffi_target(HANDLER, handler, platform="cpu")
    use_threads(_cores())


def _cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
