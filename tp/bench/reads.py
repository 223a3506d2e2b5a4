"""How many bytes a decoding step cannot but read: the weights, and the cache up to a position."""

from collections.abc import Mapping

from author.families.model import Model
from author.spec import Attention, ModelSpec, Moe
from kernels.q8 import BLOCK
from tp.operands import Operand


def weight_bytes(model: Model, operands: Mapping[str, Operand]) -> int:
    """The bytes of all weights as Q8_0, the small ones as float32; tied ones once."""
    return sum(
        _nbytes(operand)
        for key, operand in operands.items()
        if operand.role == "weight" and not (model.tied and key == "Wout")
    )


def step_bytes(
    model: Model, operands: Mapping[str, Operand], position: int, *, item_bytes: int
) -> int:
    """The bytes that one token at a position reads, its weights as Q8_0.

    Every weight once, of the embedding one row, of a mixture the chosen experts; the keys and
    values of all positions that are seen, `item_bytes` a number; recurrent states.
    """
    return sum(
        _read(model.spec, operand, position, item_bytes=item_bytes) for operand in operands.values()
    )


def _read(spec: ModelSpec, operand: Operand, position: int, *, item_bytes: int) -> int:
    rows, cols = operand.whole
    match operand.role:
        case "weight" if operand.name.base == "Emb":
            return _nbytes(operand) // rows
        case "weight":
            return int(_nbytes(operand) * _chosen(spec, operand))
        case "cache":
            return _seen(spec, operand, position) * cols * item_bytes
        case "state":
            return rows * cols * 4
        case _:
            return 0


def _nbytes(operand: Operand) -> int:
    rows, cols = operand.whole
    return rows * cols * (BLOCK + 2) // BLOCK if operand.quantised else rows * cols * 4


def _chosen(spec: ModelSpec, operand: Operand) -> float:
    """The share of a matrix that a token reads: of experts, those that are chosen."""
    layer = operand.name.layer
    ffn = None if layer is None else spec.layers[layer].ffn
    of_experts = operand.experts and operand.name.base != "Wr"
    return ffn.top_k / ffn.experts if isinstance(ffn, Moe) and of_experts else 1.0


def _seen(spec: ModelSpec, operand: Operand, position: int) -> int:
    """The positions of a cache that a token at a position looks at."""
    mixer = None if operand.name.layer is None else spec.layers[operand.name.layer].mixer
    window = mixer.window if isinstance(mixer, Attention) else None
    if window is None:
        return position
    return min(position, window.n) if window.kind == "sliding" else (position - 1) % window.n + 1
