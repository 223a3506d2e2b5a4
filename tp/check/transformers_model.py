"""The same model in Hugging Face transformers: its logits, and what goes into each layer."""

import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from author.blocks import layer_input
from author.names import Name
from author.writer import Rows
from tp.check.float_copy import size_of, write_copy
from tp.check.shown import Shown, pieces
from tp.columns import amount
from tp.decoder import Decoder
from tp.operands import Operand
from tp.source import Source

PACKAGES = ("torch", "transformers")


class OtherError(ValueError):
    """Another program that cannot be compared with: why, and what would do."""


@dataclass(frozen=True, kw_only=True)
class Transformers:
    """What transformers made of some prompts: logits, and the stream into each layer."""

    name: str
    logits: Sequence[np.ndarray]
    streams: Sequence[Sequence[np.ndarray]]
    prompts: Sequence[Sequence[int]]

    def first_layer(self, decoder: Decoder, prompt: int, limit: float) -> int | None:
        """The first layer whose input differs from that of one chip; None where none does."""
        ids = self.prompts[prompt]
        for layer, found in enumerate(_streams(decoder, ids)):
            wanted = self.streams[prompt][layer]
            if not np.abs(found - wanted).max() <= limit * np.sqrt(np.mean(np.square(wanted))):
                return layer
        return None


def check_there(source: Source) -> None:
    """Raise OtherError, before any work, where transformers cannot be had for a model."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        wanted = " ".join(PACKAGES)
        found = f"this Python has no {' and no '.join(missing)}"
        raise OtherError(f"{found}; pip install {wanted} would do")
    if source.checkpoint.is_store:
        raise OtherError(
            f"{source.path}: transformers does not read a q8 store; the model that it was "
            "converted from would do"
        )
    needed, free = size_of(source.checkpoint), shutil.disk_usage(tempfile.gettempdir()).free
    if needed > free:
        raise OtherError(
            f"{tempfile.gettempdir()} has {amount(free)} free, and a float32 copy for transformers "
            f"takes {amount(needed)}: another TMPDIR would do"
        )


def run_transformers(
    source: Source,
    operands: Mapping[Name, Operand],
    prompts: Sequence[Sequence[int]],
    *,
    said: Callable[[str], None] = lambda text: None,
) -> Transformers:
    """Run transformers in this process, in float32, on the values that anyfold holds.

    Raises OtherError where it refuses the model.
    """
    with tempfile.TemporaryDirectory(prefix="anyfold-") as folder:
        said("transformers: writing what anyfold holds, in float32")
        copy = write_copy(source, operands, Path(folder))
        said("transformers: loading")
        model = _loaded(copy)
    said("transformers: running")
    made = [_run(model, ids) for ids in prompts]
    version = importlib.import_module("transformers").__version__
    return Transformers(
        name=f"transformers {version}",
        logits=[logits for logits, _ in made],
        streams=[streams for _, streams in made],
        prompts=prompts,
    )


def _loaded(copy: Path) -> Any:
    transformers, torch = (importlib.import_module(name) for name in PACKAGES[::-1])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    where = {"gguf_file": copy.name} if copy.is_file() else {}
    try:
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            copy.parent if copy.is_file() else copy,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
            **where,
        )
    except Exception as error:
        raise OtherError(f"transformers does not load this model: {error}") from error
    lacking = sorted({*told["missing_keys"], *told["mismatched_keys"]})
    if lacking:
        raise OtherError(f"transformers does not find {', '.join(map(str, lacking))}")
    return model.eval()


def _run(model: Any, ids: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits `[rows, vocabulary]`, and the stream into each layer."""
    torch = importlib.import_module("torch")
    with torch.inference_mode():
        made = model(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
    # The last of the hidden states has been through the last norm.
    streams = [state[0].numpy() for state in made.hidden_states[:-1]]
    return made.logits[0].float().numpy(), streams


def _streams(decoder: Decoder, ids: Sequence[int]) -> list[np.ndarray]:
    """What goes into each layer at every position, on the first chip."""
    layers = len(decoder.model.spec.layers)
    names = [layer_input(Rows(count=2, stacked="shared"), layer) for layer in range(layers)]
    shown = Shown(decoder=decoder, names={str(name) for name in names})
    states, rows = decoder.fresh(), [[] for _ in names]
    for piece in pieces(ids, "prefill", decoder.chunks):
        step = shown.step(piece, states, len(ids))
        states = step.states
        for name, found in zip(names, rows, strict=True):
            found.append(step.value(name, 0))
    return [np.concatenate(found) for found in rows]
