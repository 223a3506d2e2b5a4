"""What a check of devices found, a row a finding, and the page that keeps it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernels.matmul import PIECE

# Each part: its name, what it is about, and what its columns are.
PARTS = {
    "logits": (
        "Tiny checkpoints against transformers: the largest difference of a logit over the "
        "deviation of the reference's logits, by three ways, and the greedy tokens that agree. "
        "It holds below 1e-3 with every token.",
        ("family", "chips", "prefill", "decode", "batch", "greedy"),
    ),
    "products": (
        "Compiled programs of models whose weights stay int8: float arrays as large as a whole "
        f"weight (or expert) that they leave in memory. It holds with none of over {PIECE:,} "
        "numbers, which are made in pieces.",
        ("model", "chips", "program", "too large", "largest", "temporary", "compiled in"),
    ),
    "speed": (
        "Tokens a second, and the bytes that a token must read (weights as int8) times that, "
        "over what a sum over a large array reads on one device, times the chips.",
        ("model", "chips", "decode", "prefill", "read, GB/s", "share of memory's speed"),
    ),
    "memory": (
        "The most that each device had in use, as it tells, beside what the load gave it and its "
        "caches. It holds within 1.2 times that and 256 MB.",
        ("model", "chips", "chip", "held", "caches", "peak", "times"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row of a part; `holds` is None where there is nothing to hold it to.

    `problem` says what is wrong, or what was raised.
    """

    part: str
    cells: tuple[str, ...]
    holds: bool | None
    problem: str = ""

    @property
    def line(self) -> str:
        """The row for a terminal, with its columns named."""
        _, heading = PARTS[self.part]
        named = [f"{name} {cell}" for name, cell in zip(heading[2:], self.cells[2:], strict=False)]
        where = " on ".join(self.cells[:2])
        verdict = {True: "holds", False: "FAILS", None: "measured"}[self.holds]
        said = ", ".join(named) if not self.problem else self.problem
        return f"{self.part}: {where}: {said}: {verdict}"


def page(findings: Sequence[Finding], skipped: Sequence[str], *, by: str, complete: bool) -> str:
    """All of it as Markdown; `by` says where, with what and how long."""
    judged = [f for f in findings if f.holds is not None]
    bad = [f for f in judged if not f.holds]
    lines = ["# On devices", "", f"Written by `scripts/device_check` {by}.", ""]
    if not complete:
        lines += ["**It did not come to its end: this is what it had found.**", ""]
    lines += [f"{len(judged) - len(bad)} of {len(judged)} findings hold.", ""]
    lines += [f"- **{finding.line}**" for finding in bad] + [""] * bool(bad)
    if skipped:
        lines += [f"Skipped, for lack of time: {'; '.join(skipped)}.", ""]
    for part, (about, heading) in PARTS.items():
        rows = [f for f in findings if f.part == part]
        if rows:
            lines += [f"## {part.capitalize()}", "", about, "", *_table(heading, rows), ""]
    return "\n".join(lines)


def _table(heading: Sequence[str], rows: Sequence[Finding]) -> Iterator[str]:
    yield f"| {' | '.join(heading)} |"
    yield "|---" * len(heading) + "|"
    for row in rows:
        cells = [*row.cells, *[""] * (len(heading) - len(row.cells))]
        marked = [f"**{cell}**" if cell and row.holds is False else cell for cell in cells]
        yield f"| {' | '.join(marked)} |"
