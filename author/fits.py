"""What the rules of shapes share: how a form's operands are held against what fits."""

from collections.abc import Mapping
from typing import Never

from author import statements as say
from author.english import write
from author.forms import Form, slots
from author.names import Name, listed
from author.program import Complaint, ProgramError

Shape = tuple[int, int]  # rows, columns
Shapes = Mapping[Name, Shape]


def known(form: Form, shapes: Shapes) -> Shapes:
    """The shapes, once everything that a form names has one; a join asks for itself."""
    missing = [n for n in matrices(form) if n not in shapes and not isinstance(form, say.Join)]
    if missing:
        refuse(form, f"nothing gives {listed(missing)} a shape", "a statement before it", missing)
    return shapes


def matrices(form: Form) -> list[Name]:
    """The matrices that a form names."""
    values = [getattr(form, s.field) for s in slots(type(form)) if s.kind == "name"]
    return [v for v in values if v is not None]


def refuse(form: Form, found: str, wanted: str, names: list[Name] | None = None) -> Never:
    """Raise ProgramError about a form, and about all its matrices where no names are given."""
    about = tuple(matrices(form) if names is None else names)
    complaint = Complaint(where=write(form), found=found, wanted=f"wanted {wanted}", names=about)
    raise ProgramError((complaint,))


def want(form: Form, field: str, shapes: Shapes, shape: Shape) -> None:
    """Refuse unless the matrix of a field, where it has one, has this shape."""
    name = getattr(form, field)
    if name is not None and shapes[name] != shape:
        refuse(form, f"{field} {name} is {by(shapes[name])}", by(shape), [name])


def by(shape: Shape) -> str:
    """A shape in words."""
    return f"{shape[0]} by {shape[1]}"


def split(form: Form, name: Name, size: int, parts: int, called: str) -> int:
    """The size of each of `parts` equal parts."""
    if parts < 1 or size % parts != 0:
        refuse(form, f"{name} has {size} {called}", f"a multiple of {parts}", [name])
    return size // parts


def within(form: Form, called: str, first: Name | int, count: int, rows: int) -> None:
    """Refuse rows that reach outside a matrix, where the first of them is a number."""
    if isinstance(first, int) and not 1 <= first <= rows - count + 1:
        end = f" to {first + count - 1}" if count > 1 else ""
        refuse(form, f"{called} {first}{end}", f"{called}s from 1 to {rows}")
