"""What a family makes of a config: the spec, its rotations, and where each matrix is found."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from author.names import Name
from author.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """How a rotary table is computed: its base, and the scaling of its frequencies.

    `scaling` is `default`, `linear` or `llama3`, with the parameters of that type; `divisors`
    names a tensor that divides each frequency instead (GGUF's `rope_freqs`).
    """

    dims: int
    theta: float
    scaling: str = "default"
    parameters: Mapping[str, float] = field(default_factory=dict)
    divisors: str | None = None


@dataclass(frozen=True, kw_only=True)
class View:
    """Where the rows of a matrix, outputs first, stand in a checkpoint.

    `rows` is a part of the tensor's rows, `(start, length)`. `paired` is a head width whose
    rotary pairs stand side by side in the tensor and are to be put half-split.
    """

    tensor: str
    rows: tuple[int, int] | None = None
    paired: int | None = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model ready to be authored and loaded; a matrix is the views of it, one after another.

    `tied` says that the head is the embedding. `skipped` gives the reason for each tensor, or
    suffix of one, that is not used. `context` is how long a sequence the model was made for.
    """

    family: str
    spec: ModelSpec
    rotations: tuple[Rotation, ...]
    views: Mapping[Name, tuple[View, ...]]
    tied: bool
    context: int
    skipped: Mapping[str, str] = field(default_factory=dict)
