"""Programs as models run them: how every one is split, and how long its caches are."""

from typing import Any

from author.kinds import author
from author.program import Program
from author.spec import ModelSpec
from kernels.q8 import BLOCK


def authored(spec: ModelSpec, kind: str, *, chips: int, context: int, **read: Any) -> Program:
    """A program of a model, cut at the blocks of its scales, its vocabulary too.

    `read` are the tokens and positions of the kind. A text of two rows has to fit the caches.
    """
    split = {"tp": chips, "align": BLOCK, "vocabulary": True, "beyond": True}
    return author(spec, kind, {"dir": "weights", "ctx": max(context, 2), **split, **read})


def step_of(spec: ModelSpec, *, chips: int, context: int) -> Program:
    """A step of one token, whichever: for what does not depend on which."""
    return authored(spec, "tp_decode_step", chips=chips, context=context, tok=0, pos=1)
