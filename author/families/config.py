"""Reads a config so that no key goes unnoticed: each is handled, ignored by name, or refused."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

MISSING = object()

# Keys that say nothing about what a forward pass computes.
IGNORED = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures",
    "attention_dropout", "attn_implementation", "auto_map", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "dtype", "embd_pdrop", "eod_token_id", "eos_token_id",
    "finetuning_task", "hidden_dropout", "id2label", "initializer_range", "is_decoder",
    "is_encoder_decoder", "is_llama_config", "label2id", "max_length", "model_max_length",
    "model_type", "output_attentions", "output_hidden_states", "output_router_logits",
    "pad_token_id", "pretraining_tp", "problem_type", "resid_pdrop", "residual_dropout",
    "return_dict", "rope_interleaved", "router_aux_loss_coef", "router_jitter_noise",
    "sep_token_id", "task_specific_params", "tie_encoder_decoder", "tokenizer_class",
    "torch_dtype", "torchscript", "transformers.js_config", "transformers_version",
    "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
})  # fmt: skip

REMEDIES = {
    "quantization_config": "these weights are stored quantised: a copy in bf16, or a GGUF, would do"
}


# Sizes that nothing has: past these a mistake would only be noticed when memory is spent.
LARGEST = 1 << 40
MOST = {"num_hidden_layers": 10_000}


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

    def same(self, keys: Sequence[str], default: Any = MISSING) -> Any:
        """The value that goes by several keys; a complaint where two of them differ."""
        given = {key: self.get(key, None) for key in keys}
        given = {key: value for key, value in given.items() if value is not None}
        if not given:
            return self.get(keys[0], default)
        (first, value), *others = given.items()
        for key, other in others:
            if other != value:
                self.complain(f"{first} is {value!r} and {key} is {other!r}: they say the same")
        return value

    def count(self, key: str, default: Any = MISSING, *, also: Sequence[str] = ()) -> int:
        """A whole number of at least one; `also` are other keys that say the same."""
        value = self.same((key, *also), default)
        if value is None:
            return 1  # complained of already, or an optional default: never used
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.complain(f"{key} is {value!r}, wanted a whole number of at least 1")
            return 1
        if value > MOST.get(key, LARGEST):
            self.complain(f"{key} is {value}, wanted at most {MOST.get(key, LARGEST)}")
            return 1
        return value

    def real(self, key: str, default: Any = MISSING, *, also: Sequence[str] = ()) -> float:
        """A number; `also` are other keys that say the same."""
        value = self.same((key, *also), default)
        if value is None:
            return 1.0
        if not is_number(value):
            self.complain(f"{key} is {value!r}, wanted a number")
            return 1.0
        return float(value)

    def optional(self, key: str) -> float | None:
        """A number, or none where the key is absent or null."""
        return None if self.get(key, None) is None else self.real(key)

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

    def each(self, key: str, layers: int, known: Sequence[Any]) -> tuple[Any, ...] | None:
        """A value a layer, each out of those known; none where the key is absent or null."""
        values = self.get(key, None)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) != layers or _strange(values, known):
            wanted = ", ".join(map(str, known))
            self.complain(f"{key} wants {layers} of {wanted}, found {values!r}")
            return (known[0],) * layers
        return tuple(values)

    def complain(self, complaint: str) -> None:
        """Keep a complaint for `done`."""
        self.complaints.append(complaint)

    def done(self, ignored: Sequence[str] = ()) -> None:
        """Raise ConfigError with everything found wrong, unknown keys included."""
        known = self.read | IGNORED | set(ignored)
        unknown = sorted(k for k in self.keys if k not in known and self.keys[k] is not None)
        if unknown:
            self.complain(f"nothing is known of {', '.join(unknown)}")
        for key in set(unknown) & set(REMEDIES):
            self.complain(REMEDIES[key])
        if self.complaints:
            raise ConfigError(self.where, self.complaints)


def is_number(value: object) -> bool:
    """Whether a value is a finite number: JSON as Python reads it has others, and true is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _strange(values: Sequence[Any], known: Sequence[Any]) -> bool:
    return any(value not in known for value in values)
