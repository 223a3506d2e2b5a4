"""The metadata of a GGUF file being read: each key is handled, ignored by name, or refused."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from author.families.config import ConfigError

Shapes = Mapping[str, tuple[int, ...]]
Numbers = Callable[[str], Sequence[float]]

# Keys that say nothing about what a forward pass computes.
IGNORED = frozenset({
    "expert_group_scale", "rope.scaling.finetuned", "tensor_data_layout",
})  # fmt: skip


class Metadata:
    """Metadata under the architecture's prefix, and shapes of tensors; `done` refuses the rest.

    `numbers` reads a small tensor.
    """

    def __init__(
        self, keys: Mapping[str, Any], shapes: Shapes, where: str, numbers: Numbers | None
    ) -> None:
        self.prefix = f"{keys['general.architecture']}."
        self.keys = {
            key.removeprefix(self.prefix): value
            for key, value in keys.items()
            if key.startswith((self.prefix, "xielu."))
        }
        self.shapes = shapes
        self.where = where
        self.numbers: Numbers = numbers or (lambda name: ())
        self.read: set[str] = set()
        self.complaints: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; of a list that says one thing of each layer, that one thing."""
        self.read.add(key)
        value = self.keys.get(key, default)
        if not isinstance(value, list):
            return value
        if any(one != value[0] for one in value):
            self.complain(f"{self.prefix}{key} is {value!r}: layers that differ are not supported")
        return value[0] if value else default

    def each(self, key: str) -> Any:
        """The value of a key that may be a list, as it is."""
        self.read.add(key)
        return self.keys.get(key)

    def need(self, key: str) -> Any:
        """The value of a key; a complaint where it is absent."""
        value = self.get(key)
        if value is None:
            self.complain(f"{self.prefix}{key} is missing")
            return 1
        return value

    def number(self, key: str, default: Any = None) -> Any:
        """The number of a key, no less than 0; a complaint where it is absent without default."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            self.complain(f"{self.prefix}{key} is {value!r}, wanted a number")
            return 1
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """The whole number of a key, at least 1."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            wanted = "wanted a whole number of at least 1"
            self.complain(f"{self.prefix}{key} is {value!r}, {wanted}")
            return 1
        return value

    def only(self, key: str, allowed: Sequence[Any]) -> None:
        """Complain where a key is given and is none of these."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            supported = ", ".join(map(repr, allowed))
            self.complain(f"{self.prefix}{key} {value!r} is not supported ({supported} is)")

    def has(self, tensor: str, layer: int = 0) -> bool:
        """Whether a layer has a tensor."""
        return f"blk.{layer}.{tensor}" in self.shapes

    @property
    def layers(self) -> int:
        """How many layers there are, those for predicting several tokens aside."""
        layers = self.count("block_count") - self.later
        if layers < 1:
            self.complain(f"{self.prefix}nextn_predict_layers leaves {layers} layers")
        return max(layers, 1)

    @property
    def later(self) -> int:
        """How many layers for predicting several tokens come after the last."""
        return int(self.number("nextn_predict_layers", 0))

    @property
    def width(self) -> int:
        """How wide a head is."""
        if self.get("attention.key_length") is not None:
            return self.count("attention.key_length")
        return self.count("embedding_length") // self.count("attention.head_count")

    @property
    def turned(self) -> int:
        """How much of a head turns."""
        return self.count("rope.dimension_count", max(self.width, 1))

    def complain(self, complaint: str) -> None:
        """Keep a complaint for `done`."""
        if complaint not in self.complaints:
            self.complaints.append(complaint)

    def done(self) -> None:
        """Raise ConfigError with everything found wrong, unknown keys included."""
        unknown = sorted(set(self.keys) - self.read - IGNORED)
        for key in unknown:
            self.complain(f"nothing is known of {self.prefix}{key}")
        if self.complaints:
            raise ConfigError(self.where, self.complaints)
