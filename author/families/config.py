"""Reads a config so that no key goes unnoticed: each is handled, ignored by name, or refused."""

from collections.abc import Mapping, Sequence
from typing import Any

MISSING = object()

# Keys that say nothing about what a forward pass computes.
IGNORED = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype",
    "eos_token_id", "hidden_dropout", "initializer_range", "is_llama_config", "model_type",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp",
    "return_dict", "rope_interleaved", "torch_dtype", "transformers.js_config",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache",
})  # fmt: skip


class ConfigError(ValueError):
    """A config that we cannot follow: which key of which file, what it says, what would do."""

    def __init__(self, where: str, complaints: Sequence[str]) -> None:
        super().__init__(f"{where}: {'; '.join(complaints)}")


class Config:
    """A config being read; `done` refuses what nobody asked for."""

    def __init__(self, keys: Mapping[str, Any], where: str) -> None:
        self.keys = keys
        self.where = where
        self.read: set[str] = set()
        self.complaints: list[str] = []

    def get(self, key: str, default: Any = MISSING) -> Any:
        """The value of a key; an absent or null one is its default, or a complaint without."""
        self.read.add(key)
        value = self.keys.get(key)
        if value is not None:
            return value
        if default is MISSING:
            self.complain(f"{key} is missing")
            return None
        return default

    def count(self, key: str, default: Any = MISSING) -> int:
        """A whole number of at least one."""
        value = self.get(key, default)
        if value is None:
            return 1  # complained of already, or an optional default: never used
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.complain(f"{key} is {value!r}, wanted a whole number of at least 1")
            return 1
        return value

    def real(self, key: str, default: Any = MISSING) -> float:
        """A number."""
        value = self.get(key, default)
        if value is None:
            return 1.0
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.complain(f"{key} is {value!r}, wanted a number")
            return 1.0
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.complain(f"{key} is {value!r}, wanted true or false")
        return bool(value)

    def only(self, key: str, allowed: Sequence[Any], default: Any = MISSING) -> Any:
        """A value out of those that are supported."""
        value = self.get(key, default)
        if value not in allowed:
            supported = ", ".join(map(repr, allowed))
            self.complain(f"{key} {value!r} is not supported ({supported} is)")
        return value

    def complain(self, complaint: str) -> None:
        """Keep a complaint for `done`."""
        self.complaints.append(complaint)

    def done(self, ignored: Sequence[str] = ()) -> None:
        """Raise ConfigError with everything found wrong, unknown keys included."""
        known = self.read | IGNORED | set(ignored)
        unknown = sorted(k for k in self.keys if k not in known and self.keys[k] is not None)
        if unknown:
            self.complain(f"nothing is known of {', '.join(unknown)}")
        if self.complaints:
            raise ConfigError(self.where, self.complaints)
