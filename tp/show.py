"""What people are shown: who holds what, how fast it went, receipts as JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from author.share import Share, attention_heads, delta_heads, run_of
from author.spec import Attention, Dense, GatedDelta, Layer
from kernels.q8 import BLOCK
from tp.columns import amount, table
from tp.engine import Counts, Engine
from tp.receipt import peak_host_bytes
from tp.step import shapes


def title(engine: Engine) -> str:
    """The model and its chips in a line."""
    devices, spec = engine.decoder.devices, engine.source.model.spec
    kind = "simulated " if devices.simulated else ""
    chips = f"{devices.chips} {kind}chip{'s' if devices.chips > 1 else ''}"
    processes = f" of {devices.processes} processes" if devices.processes > 1 else ""
    name = engine.source.path.name
    where = f"{chips}{processes} ({devices.platform})"
    return f"{name}: {len(spec.layers)} layers of width {spec.d} on {where}"


def holdings(engine: Engine) -> str:
    """What each chip holds, a row a chip; what differs from layer to layer is a range."""
    decoder = engine.decoder
    heading = ("chip", *COLUMNS, "weights", "padding", "cache")
    rows: list[Sequence[str]] = [heading]
    for chip in range(decoder.devices.chips):
        held = engine.receipt.chips[chip]
        share = Share(chip=chip, chips=decoder.devices.chips, align=BLOCK)
        rows.append(
            (
                str(chip),
                *_cells(engine, share),
                amount(held.bytes_held),
                amount(held.bytes_padding),
                amount(_cache_bytes(engine)),
            )
        )
    return table(_without_empty(rows))


COLUMNS = ("query heads", "kv heads", "ffn columns", "vocabulary")


def _cells(engine: Engine, share: Share) -> Iterator[str]:
    spec = engine.source.model.spec
    heads = [_heads(layer, share) for layer in spec.layers]
    yield _range(h[0] for h in heads)
    yield _range(h[1] for h in heads)
    yield _range(_columns(layer, share) for layer in spec.layers)
    yield f"{share.run(spec.vocab)[1]:,}"


def _heads(layer: Layer, share: Share) -> tuple[int, int]:
    match layer.mixer:
        case Attention() as a:
            (_, queries), (_, groups) = attention_heads(a, share)
            return queries, groups
        case GatedDelta() as g:
            (_, keys), values = delta_heads(g, share)
            return sum(count for _, count in values), keys
        case other:
            return run_of(other.heads, share.chips, share.chip or 0)[1], 0


def _columns(layer: Layer, share: Share) -> int:
    width = layer.ffn.dff if isinstance(layer.ffn, Dense) else layer.ffn.expert_dff
    return share.run(width)[1]


def _range(values: Iterator[int]) -> str:
    found = sorted(set(values))
    return f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,}-{found[-1]:,}"


def _without_empty(rows: list[Sequence[str]]) -> list[list[str]]:
    """The table without columns that are zero for every chip."""
    kept = [0, *(i for i in range(1, len(rows[0])) if _says_something(rows, i))]
    return [[row[i] for i in kept] for row in rows]


def _says_something(rows: list[Sequence[str]], column: int) -> bool:
    return any(row[column] not in ("0", "0 B") for row in rows[1:])


def _cache_bytes(engine: Engine) -> int:
    """The caches and states of one chip, at the full context."""
    decoder = engine.decoder
    made = shapes(decoder.decode.states, decoder.devices.mesh, decoder.cache)
    return sum(
        o.local[0] * o.local[1] * made[key].dtype.itemsize
        for key, o in decoder.decode.states.items()
    )


def speed(counts: Counts) -> str:
    """How fast a generation went, and why it ended."""
    read = _rate(counts.prompt_tokens, counts.prompt_seconds)
    made = _rate(counts.tokens, counts.seconds)
    compiled = counts.compile_seconds
    first = f"compiled in {compiled:.1f} s; " if compiled > 0.1 else ""
    return f"{first}read {read}, made {made}; ended: {counts.reason}"


def _rate(tokens: int, seconds: float) -> str:
    a_second = f" ({tokens / seconds:.1f} a second)" if seconds > 0 else ""
    return f"{tokens} token{'' if tokens == 1 else 's'} in {seconds:.2f} s{a_second}"


def process_json(engine: Engine) -> dict[str, Any]:
    """What one process read, bytes and seconds; what all chips hold alike, each process reads."""
    receipt, devices = engine.receipt, engine.decoder.devices
    chips = [chip for chip, _ in devices.here]
    return {
        "chips": chips,
        "seconds": receipt.seconds,
        "peak_host_bytes": receipt.peak_host_bytes,
        "peak_host_bytes_of_run": peak_host_bytes(),
        "bytes_read": receipt.shared_bytes_read + sum(receipt.chips[c].bytes_read for c in chips),
        "bytes_read_for_all": receipt.shared_bytes_read,
    }


def receipt_json(engine: Engine, processes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The receipt of a load, bytes and seconds: of the first process, all chips, and all read."""
    receipt = engine.receipt
    return {
        "model": str(engine.source.path),
        "platform": engine.decoder.devices.platform,
        "seconds": receipt.seconds,
        "peak_host_bytes": receipt.peak_host_bytes,
        "peak_host_bytes_of_run": processes[0]["peak_host_bytes_of_run"],
        "bytes_read": sum(process["bytes_read"] for process in processes),
        "bytes_read_for_all": receipt.shared_bytes_read,
        "chips": [
            {
                "chip": chip,
                "bytes_read": held.bytes_read,
                "bytes_held": held.bytes_held,
                "bytes_padding": held.bytes_padding,
                "seconds": held.seconds,
            }
            for chip, held in enumerate(receipt.chips)
        ],
        "processes": list(processes),
        "skipped": receipt.skipped,
    }
