"""What single statements read and compute, counted by hand."""

import pytest

from author.english import read_program
from author.names import Name
from author.statements import Let
from tp.costs import Cost, Stored, Walk

DECLARED = {
    "x": (1, 6),
    "y": (1, 4),
    "W": (6, 4),
    "B": (6, 5),  # two blocks of 3 by 5
    "K": (9, 4),
    "V": (9, 4),
    "C": (3, 6),
    "S": (6, 3),
    "one": (1, 3),
    "two": (1, 2),
    "cos": (9, 1),
    "R": (6, 5),
    "G": (35, 6),  # five experts of 7 columns
    "D": (30, 7),
}


def cost(expression: str, visible: int = 9) -> Cost:
    """The cost of one expression, where every matrix is read in bytes as many as it has numbers."""
    declared = (f"Let {n} be a {r} by {c} tensor of Real.\n" for n, (r, c) in DECLARED.items())
    text = f"## Main\n{''.join(declared)}Let pos be 9.\nLet out be {expression}.\n"
    stored = {Name.of(n): Stored.of(r * c, r) for n, (r, c) in DECLARED.items() if n not in "xy"}
    walk = Walk(chip=0, declared={}, stored=stored, visible=visible, joined=0)
    costs = {type(s): walk.cost(s) for s in read_program(text)}
    return costs[Let]


@pytest.mark.parametrize(
    ("expression", "reads", "operations"),
    [
        ("x matmul W", 24, 2 * 24),
        ("x matmul B across 2 heads", 30, 2 * 30),
        ("row pos of K", 4, 0),
        ("rmsnorm of x with weight one across 2 heads", 3, 6),
        ("x plus x", 0, 6),
        ("the first 1 of every 2 of K", 0, 0),
        ("rope of x with cos cos and sin cos from position pos across 3 heads", 1, 6),
        # Scores of 2 heads of 2 over the positions, and as many products with the values.
        ("attention of y over K and V with 2 heads 2 groups up to pos", 72, 2 * 9 * (4 + 4)),
        (
            "attention of y over K and V with 2 heads 2 groups up to pos within the last 4",
            2 * 4 * 4,
            2 * 4 * (4 + 4),
        ),
        ("causal conv of x with weight C state C over 3 taps", 18, 2 * 18),
        # For each of 6 by 3 numbers of a state: decay 1, error 2, outer product 2, output 2.
        (
            "gated delta of x over x and x with gate x beta two decay two state S norm one"
            " with 2 heads 2 groups",
            18 + 3 + 2,
            7 * 18,
        ),
        ("linear attention of x over x and x decay two state S with 2 heads", 18 + 2, 5 * 18),
        # The router, and of three matrices of five experts two experts.
        (
            "moe of x with router R gate G up G down D choosing 2 of 5",
            30 + (210 + 210) * 2 // 5,
            2 * (30 + 3 * 2 * 6 * 7),
        ),
        ("argmax of x", 0, 6),
    ],
)
def test_an_expression_costs_what_is_counted_by_hand(
    expression: str, reads: int, operations: int
) -> None:
    assert cost(expression) == Cost(reads=reads, operations=operations)


def test_a_step_reads_of_a_cache_the_positions_that_there_are() -> None:
    text = "attention of y over K and V with 2 heads 2 groups up to pos within the last 4"
    assert cost(text, visible=3) == Cost(reads=2 * 3 * 4, operations=2 * 3 * (4 + 4))
