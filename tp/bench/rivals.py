"""Other programs to measure beside: which are here, and how each is started on a model."""

import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tp.bench.contender import Contender, start

# The packages that each needs in its Python.
RIVALS = {
    "llama.cpp": ("xllamacpp",),
    "transformers": ("torch", "transformers", "gguf"),
}
DTYPES = ("float32", "bfloat16")
_LACKING = (
    "import sys; from importlib.util import find_spec; "
    "print(*(name for name in sys.argv[1:] if find_spec(name) is None))"
)


@dataclass(frozen=True, kw_only=True)
class Common:
    """What all that are measured have in common: the model's file or directory, sizes, threads."""

    path: Path
    format: str
    vocabulary: int
    context: int
    threads: int
    cache: Path


def why_not(rival: str, python: str, model: str) -> str | None:
    """Why a rival in a Python cannot be measured on a model, and what would do; None if it can."""
    if rival == "llama.cpp" and Path(model).is_dir():
        return (
            f"{rival}: {model} is a directory, and {rival} reads .gguf files: measure one of those"
        )
    command = [python, "-c", _LACKING, *RIVALS[rival]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{rival}: {python}: {error.strerror}; wanted a Python"
    if done.returncode != 0:
        return f"{rival}: {python} is no Python"
    lacking = done.stdout.split()
    if not lacking:
        return None
    option = f"--{rival.split('.')[0]}-python"
    return (
        f"{rival}: {python} has no {', '.join(lacking)}; pip install {' '.join(lacking)}, or "
        f"{option} with another Python that has it, would do"
    )


def start_rival(rival: str, python: str, common: Common, stack: ExitStack) -> list[Contender]:
    """A rival's contenders, loaded, closed with the stack."""
    sizes = {"threads": common.threads, "vocabulary": common.vocabulary}
    if rival == "llama.cpp":
        model = _q8_file(common)
        started = [("llama.cpp", "llama_cpp", {"model": model, "context": common.context})]
    else:
        model = str(common.path) if common.format != "gguf" else _q8_file(common)
        started = [(f"{rival} {d}", "torch_model", {"model": model, "dtype": d}) for d in DTYPES]
    found: list[Contender] = []
    for name, module, argument in started:
        found.append(start(name, module, {**argument, **sizes}, python=python))
        stack.callback(found[-1].close)
    return found


def _q8_file(common: Common) -> str:
    """A GGUF file of the model as Q8_0: the weights that anyfold holds."""
    worker = start("Q8_0", "q8_file", {"model": str(common.path), "cache": str(common.cache)})
    worker.close()
    return worker.about["path"]
