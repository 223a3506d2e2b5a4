"""A model without its weights: what a config, a spec, or the headers of a checkpoint say of it."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from author.families.model import Model
from author.families.registry import from_config, from_gguf
from author.spec import GatedDelta, ModelSpec, Moe, SpecError, spec_from_json, spec_to_json
from tp.checkpoint import open_checkpoint
from tp.source import DEMO, SourceError, demo_path

INSIDE = "-"  # standard input
CONTEXT = 2048  # tokens of a context unless asked for more, as a running model has it
MOST_PARTS = 1 << 16  # experts, or value heads of a key head: each has a range of its own on a chip

_WANTED = (
    "wanted `demo`, a directory with config.json, a config.json, a .gguf file, or a spec's JSON"
)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What a split depends on: a model's spec, and what stands beside it.

    `tied` says that the head is the embedding; `context` is how many tokens the model was made
    for, if anything says so; `tables` how many sets of rotary tables it has (two where long
    sequences turn by others); `file_bytes` the bytes of its tensors, where their headers were read.
    """

    name: str
    family: str
    spec: ModelSpec
    tied: bool = False
    context: int | None = None
    tables: int = 1
    file_bytes: int | None = None


def open_outline(name: str) -> Outline:
    """The outline of what a user named: of a checkpoint the headers are read and nothing else.

    Raises SourceError, CheckpointError, ConfigError or SpecError with the reason.
    """
    if name == INSIDE:
        return _of_json(sys.stdin.read(), "standard input")
    path = demo_path() if name == DEMO else _path(name)
    if not path.exists():
        raise SourceError(f"{name}: is not there; {_WANTED}")
    config = path / "config.json"
    if path.is_dir() and config.is_file() and not _has_weights(path):
        return _of_json(config.read_text(), path.resolve().name)
    if path.is_file() and path.suffix == ".json":
        return _of_json(path.read_text(), path.name)
    return _of_checkpoint(path)


def outline_json(outline: Outline) -> dict[str, Any]:
    """An outline as JSON, which `open_outline` reads, and whatever reads a golden's spec."""
    return {
        "family": outline.family,
        "tied": outline.tied,
        "context": outline.context,
        "tables": outline.tables,
        "spec": spec_to_json(outline.spec),
    }


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise SourceError(f"{name}: {error}; {_WANTED}") from None


def _has_weights(path: Path) -> bool:
    return any(entry.suffix == ".safetensors" for entry in path.iterdir())


# --- Each way to say what a model is


def _of_checkpoint(path: Path) -> Outline:
    checkpoint = open_checkpoint(path)
    if checkpoint.format == "gguf":
        model = from_gguf(
            checkpoint.config,
            checkpoint.described,
            path.name,
            lambda tensor: checkpoint.read(tensor).ravel().tolist(),
        )
    else:
        model = from_config(checkpoint.config, "config.json", BARE)
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    return _of_model(model, path.resolve().name, stored)


def _of_model(model: Model, name: str, file_bytes: int | None = None) -> Outline:
    return _checked(
        Outline(
            name=name,
            family=model.family,
            spec=model.spec,
            tied=model.tied,
            context=model.context,
            tables=1 if model.short_length is None else 2,
            file_bytes=file_bytes,
        )
    )


def _of_json(text: str, name: str) -> Outline:
    try:
        obj = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name}: not JSON: {error}; {_WANTED}") from None
    if not isinstance(obj, dict):
        raise SourceError(f"{name}: found a JSON {type(obj).__name__}; {_WANTED}")
    if "model_type" in obj or "text_config" in obj:
        return _of_model(from_config(obj, name, BARE), name)
    if "spec" not in obj and not {"d", "vocab", "layers"} <= set(obj):
        raise SourceError(f"{name}: found neither a model_type nor a spec; {_WANTED}")
    return _checked(_of_spec(obj, name))


def _of_spec(obj: Mapping[str, Any], name: str) -> Outline:
    """An outline of a spec alone, or under `spec` beside what `outline_json` writes."""
    try:
        spec = spec_from_json(obj.get("spec", obj))
    except SpecError as error:
        raise SourceError(f"{name}: {'; '.join(error.problems)}") from None
    beside = obj if "spec" in obj else {}
    tied, context, tables = (beside.get(key) for key in ("tied", "context", "tables"))
    wrong = [
        *([] if tied is None or isinstance(tied, bool) else [f"tied is {tied!r}"]),
        *([] if context is None or _is_count(context) else [f"context is {context!r}"]),
        *([] if tables in (None, 1, 2) else [f"tables is {tables!r}, wanted 1 or 2"]),
    ]
    if wrong:
        raise SourceError(f"{name}: {'; '.join(wrong)}")
    return Outline(
        name=name,
        family=str(beside.get("family", "a spec")),
        spec=spec,
        tied=bool(tied),
        context=context,
        tables=tables or 1,
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _checked(outline: Outline) -> Outline:
    """The outline, unless a split of it could not be written down."""
    for number, layer in enumerate(outline.spec.layers):
        parts = layer.ffn.experts if isinstance(layer.ffn, Moe) else 0
        if isinstance(layer.mixer, GatedDelta) and layer.mixer.k_heads > 0:
            parts = max(parts, layer.mixer.v_heads // layer.mixer.k_heads)
        if parts > MOST_PARTS:
            raise SourceError(
                f"{outline.name}: layer {number} has {parts:,} experts, or value heads of a key "
                f"head; wanted at most {MOST_PARTS:,}"
            )
    return outline


class _Bare(Mapping[str, tuple[int, ...]]):
    """The tensors of a config, whose shapes nobody needs to know what the model is.

    Experts count as stored in two tensors a layer, as transformers saves them now: a view for
    each of a thousand experts in each of a hundred layers would take a second.
    """

    def __contains__(self, name: object) -> bool:
        return str(name).endswith(".gate_up_proj")

    def __getitem__(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True  # it is not the lack of an answer


BARE = _Bare()
