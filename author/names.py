"""The names of a program: what each part of a name says, and text to name and back."""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple


class Name(NamedTuple):
    """One name: `{base}{layer}[_s{sequence}][_c{chip}]{tail}`, all parts but the base optional.

    The tail marks a value derived from the one named before it (`ao0n` is `ao0` normed,
    `qr0_r` is `qr0` before its bias, `ao0_f1` a partial sum on the way to `ao0`).
    """

    base: str
    layer: int | None = None
    sequence: int | None = None
    chip: int | None = None
    tail: str = ""

    def __str__(self) -> str:
        text = self.base
        if self.layer is not None:
            text += str(self.layer)
        if self.sequence is not None:
            text += f"_s{self.sequence}"
        if self.chip is not None:
            text += f"_c{self.chip}"
        return text + self.tail

    @classmethod
    def of(cls, text: str) -> "Name":
        """Read a name; every word of letters, digits and `_` is one."""
        return _parse(text)


NUMBER = r"0|[1-9][0-9]{0,17}"

# Bases whose number is a width or a rotation, not a layer.
_TABLE = re.compile(r"(?:ones|t?cosc?|t?sinc?)[0-9]+")
_LAYERED = re.compile(
    r"(?P<base>[A-Za-z](?:[A-Za-z0-9]*?[A-Za-z])??(?:_[a-z]{2,})?)"
    rf"(?P<layer>{NUMBER})?(?:_s(?P<sequence>{NUMBER}))?(?:_c(?P<chip>{NUMBER}))?"
    r"(?P<tail>[a-z]|_[a-z][a-z]*(?:[0-9]+)?)?"
)


@lru_cache(maxsize=1 << 17)
def _parse(text: str) -> Name:
    match = _LAYERED.fullmatch(text)
    if match is None or _TABLE.fullmatch(text):
        return Name(text)
    layer, sequence, chip = (_number(match[k]) for k in ("layer", "sequence", "chip"))
    if layer is None and sequence is None and chip is None:
        return Name(text)
    return Name(match["base"], layer, sequence, chip, match["tail"] or "")


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def listed(names: Iterable[object]) -> str:
    """Names in a message, in order: `a, b and c`."""
    texts = [str(n) for n in names]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
