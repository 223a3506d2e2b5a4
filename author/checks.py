"""What makes a program and its manifest sound, one function a rule."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from author import statements as say
from author.english import write
from author.forms import Form, Statement, slots
from author.manifest import TpCollective, TpManifest, TpSlice
from author.names import Name, listed
from author.program import Complaint, Program, ProgramError, bound, changed, read_by
from author.shapes import Shape, check_set, shape_of

Complaints = Iterator[Complaint]


def check_program(program: Program) -> None:
    """Raise ProgramError with everything that does not hold in a program and its manifest."""
    rules = RULES if program.manifest is None else RULES + MANIFEST_RULES
    complaints = tuple(complaint for rule in rules for complaint in rule(program))
    if complaints:
        raise ProgramError(complaints)


def _lines(program: Program) -> Iterator[tuple[int, Statement]]:
    """Statements with the lines that they stand in; the heading is line 1."""
    return enumerate(program.statements, start=2)


def _complaint(
    line: int, statement: Statement, names: Iterable[Name], found: str, wanted: str
) -> Complaint:
    where = f"line {line}: {write(statement)}."
    return Complaint(where=where, names=tuple(names), found=found, wanted=wanted)


# --- Rules of the text


def names_read_back(program: Program) -> Complaints:
    """A base that ends in a digit would run into the layer, and be read as another name."""
    seen: set[Name] = set()
    for line, statement in _lines(program):
        for name in {*_targets(statement), *read_by(statement)} - seen:
            seen.add(name)
            if Name.of(str(name)) != name:
                found = f"{name} reads back as {Name.of(str(name))!r}"
                yield _complaint(line, statement, [name], found, f"wanted {name!r}")


def names_are_bound(program: Program) -> Complaints:
    """A name is bound once, and before it is read or written into."""
    lines: dict[Name, int] = {}
    for line, statement in _lines(program):
        used = dict.fromkeys((*read_by(statement), *changed(statement)))
        for name in [n for n in used if n not in lines]:
            wanted = "wanted a statement before it that does"
            yield _complaint(line, statement, [name], f"nothing binds {name}", wanted)
        name = bound(statement)
        if name is None:
            continue
        if name in lines:
            found = f"line {lines[name]} binds {name} already"
            yield _complaint(line, statement, [name], found, "wanted another name")
        else:
            lines[name] = line


def changes_are_declared(program: Program) -> Complaints:
    """Only a matrix that the program declares is changed in place."""
    bindings = _bindings(program)
    for line, statement in _lines(program):
        wanted = say.Tokens if isinstance(statement, say.SetItem) else say.Tensor
        for name in changed(statement):
            binding = bindings.get(name)
            if binding is not None and not isinstance(binding, wanted):
                found = f"{name} is changed in place, but bound by '{write(binding)}'"
                wish = f"wanted 'Let {name} be a … tensor of {_element(wanted)}'"
                yield _complaint(line, statement, [name], found, wish)


def items_fit(program: Program) -> Complaints:
    """Items count from 1 to as many as there are token ids."""
    cols = {s.name: s.cols for s in program.statements if isinstance(s, say.Tokens)}
    for line, statement in _lines(program):
        match statement:
            case say.SetItem(item, name) if name in cols and not 1 <= item <= cols[name]:
                wanted = f"wanted items from 1 to {cols[name]}"
                yield _complaint(line, statement, [name], f"{name} has no item {item}", wanted)


def _element(declaration: type[Statement]) -> str:
    return "Int" if declaration is say.Tokens else "Real"


def kinds_fit(program: Program) -> Complaints:
    """Numbers, token ids and matrices each stand only where the form wants them."""
    kinds = {name: _kind(binding) for name, binding in _bindings(program).items()}
    for line, statement in _lines(program):
        form: Form = statement.value if isinstance(statement, say.Let) else statement
        written = isinstance(form, say.Tensor | say.Tokens | say.Number | say.SetItem)
        for slot in () if written else slots(type(form)):
            name = getattr(form, slot.field)
            if slot.kind not in ("name", "scalar") or name not in kinds:
                continue
            wanted = "a number" if slot.kind == "scalar" else "a matrix"
            if isinstance(form, say.Rows) and slot.field == "tokens":
                wanted = "token ids"
            if kinds[name] != wanted:
                found = f"{slot.field} {name} is {kinds[name]}"
                yield _complaint(line, statement, [name], found, f"wanted {wanted}")


def _kind(binding: Statement) -> str:
    match binding:
        case say.Number() | say.Let(value=say.Argmax()):
            return "a number"
        case say.Tokens():
            return "token ids"
        case _:
            return "a matrix"


def shapes_fit(program: Program) -> Complaints:
    """Operands fit; what reads a value that does not fit is not complained of again."""
    shapes: dict[Name, Shape] = {}
    for line, statement in _lines(program):
        try:
            _add_shape(statement, shapes)
        except ProgramError as error:
            where = f"line {line}: {write(statement)}."
            yield from (replace(c, where=where) for c in error.complaints)


def _add_shape(statement: Statement, shapes: dict[Name, Shape]) -> None:
    match statement:
        case say.Tensor(name, rows, cols):
            shapes[name] = rows, cols
        case say.Tokens(name, cols):
            shapes[name] = 1, cols
        case say.SetRow() | say.SetRows():
            if all(n in shapes for n in (statement.name, statement.x)):
                check_set(statement, shapes)
        case say.Let(name, value):
            # How wide the partials of other chips are, one chip's text does not say.
            unknown = isinstance(value, say.Join) and value.chips != 1
            if not unknown and all(n in shapes for n in _matrices(statement)):
                shapes[name] = shape_of(value, shapes)


def _matrices(statement: say.Let) -> Iterator[Name]:
    for slot in slots(type(statement.value)):
        value = getattr(statement.value, slot.field)
        if slot.kind == "name" and value is not None:
            yield value


def _bindings(program: Program) -> dict[Name, Statement]:
    named = ((bound(s), s) for s in program.statements)
    return {name: statement for name, statement in named if name is not None}


def _targets(statement: Statement) -> tuple[Name, ...]:
    """What a statement binds or changes."""
    name = bound(statement)
    return changed(statement) if name is None else (name, *changed(statement))


# --- Rules of the manifest


def placed_names_exist(program: Program) -> Complaints:
    """A placed name is bound in the text, listed once, and on the chip that it says."""
    manifest, bindings = _manifest(program), _bindings(program)
    for name, times in Counter(p.name for p in manifest.placed).items():
        if times > 1:
            yield _of_manifest([name], f"{name} is placed {times} times", "wanted one chip")
        if name not in bindings:
            yield _of_manifest([name], f"{name} is placed, but not bound", "wanted a statement")
    for name, chip in ((p.name, p.chip) for p in manifest.placed):
        if not 0 <= chip < manifest.chips:
            wanted = f"wanted chips from 0 to {manifest.chips - 1}"
            yield _of_manifest([name], f"{name} is placed on chip {chip}", wanted)
        elif name.chip not in (None, chip):
            found = f"{name} is placed on chip {chip}"
            yield _of_manifest([name], found, f"wanted chip {name.chip}, as it says")


def slices_are_declared(program: Program) -> Complaints:
    """A slice is declared in its shape, and its ranges lie in the whole and apart."""
    bindings = _bindings(program)
    for name, piece in _slices(program):
        match bindings.get(name):
            case None:  # of which placed_names_exist complains
                pass
            case say.Tensor(_, rows, cols) if (rows, cols) == piece.shape:
                pass
            case binding:
                rows, cols = piece.shape
                found = f"{name} is a slice of {piece.of}, but bound by '{write(binding)}'"
                wanted = f"wanted a {rows} by {cols} tensor"
                yield _of_manifest([name], found, wanted)
        for found in _bad_ranges(piece):
            wanted = f"wanted ranges apart, within the {_extent(piece)} {piece.axis} of {piece.of}"
            yield _of_manifest([name], f"{name} has {found}", wanted)


def _bad_ranges(piece: TpSlice) -> Iterator[str]:
    taken: set[int] = set()
    for start, length in piece.ranges:
        span = range(start, start + length)
        if start < 0 or length < 0 or start + length > _extent(piece):
            yield f"the range {[start, length]}"
        elif not taken.isdisjoint(span):
            yield f"the range {[start, length]} over another"
        taken.update(span)


def _extent(piece: TpSlice) -> int:
    return piece.of_shape[0] if piece.axis == "rows" else piece.of_shape[1]


def slices_cover_the_whole(program: Program) -> Complaints:
    """Each row or column is on one chip; only what keys are compared from may be on several."""
    copied = _key_side(program)
    by_whole: dict[Name, dict[Name, TpSlice]] = defaultdict(dict)
    for name, piece in _slices(program):
        by_whole[piece.of][name] = piece
    for whole, pieces in by_whole.items():
        (first, *others) = pieces.values()
        if any((p.of_shape, p.axis) != (first.of_shape, first.axis) for p in others):
            found = f"{listed(pieces)} disagree on the shape or the axis of {whole}"
            yield _of_manifest(pieces, found, "wanted one of each")
        elif not _is_of_one_chip(program):
            times = Counter(
                i for p in pieces.values() for start, n in p.ranges for i in range(start, start + n)
            )
            span = range(_extent(first))
            missing = [i for i in span if times[i] == 0]
            if missing:
                found = f"{first.axis} {_spans(missing)} of {whole} are on no chip"
                yield _of_manifest(pieces, found, "wanted each on one")
            doubled = [i for i in span if times[i] > 1]
            if doubled and not copied.issuperset(pieces):
                found = f"{first.axis} {_spans(doubled)} of {whole} are on several chips"
                yield _of_manifest(pieces, found, "wanted each on one")


def _spans(numbers: list[int]) -> str:
    """Numbers from 0, in order, as runs: `0-3, 8`."""
    ends = [i for i, n in enumerate(numbers) if i + 1 == len(numbers) or numbers[i + 1] != n + 1]
    starts = [0, *(e + 1 for e in ends[:-1])]
    runs = ((numbers[s], numbers[e]) for s, e in zip(starts, ends, strict=True))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _key_side(program: Program) -> set[Name]:
    """The placed names that keys and values of attention, queries and keys of a delta come from.

    Their heads may be on every chip that has a query or value head to read them: each copy is read
    on its own chip, and none of them is summed.
    """
    manifest = _manifest(program)
    made_from: dict[Name, set[Name]] = defaultdict(set)
    todo: list[Name] = []
    for statement in program.statements:
        for target in _targets(statement):
            made_from[target].update(read_by(statement))
        match statement:
            case say.Let(value=say.Attention(k=k, v=v) | say.CausalAttention(k=k, v=v)):
                todo += [k, v]
            case say.Let(value=say.GatedDelta(q=q, k=k)):
                todo += [q, k]
    found: set[Name] = set()
    while todo:
        name = todo.pop()
        if name not in found and manifest.chip_of(name) is not None:
            found.add(name)
            todo += made_from[name]
    return found


def collectives_are_spelled_out(program: Program) -> Complaints:
    """A collective has a partial a chip, and its steps put them together in chip order."""
    manifest, bindings, alone = _manifest(program), _bindings(program), _is_of_one_chip(program)
    for c in manifest.collectives:
        chips = [manifest.chip_of(p) for p in c.partials]
        known = [i for i, chip in enumerate(chips) if chip is not None or not alone]
        if len(chips) != manifest.chips or any(chips[i] != i for i in known):
            found = f"{c.out} has the partials {listed(c.partials)}"
            wanted = f"wanted one on each of {manifest.chips} chips, in order"
            yield _of_manifest([c.out, *c.partials], found, wanted)
            continue
        if len(c.steps) != len(c.partials) - 1 or (c.steps and c.steps[-1] != c.out):
            found = f"{c.out} has the steps {listed(c.steps or ['none'])}"
            wanted = f"wanted {len(c.partials) - 1}, the last of them {c.out}"
            yield _of_manifest([c.out], found, wanted)
            continue
        own = c.partials[known[0] if known else 0]
        alone_or_one = alone or manifest.chips == 1
        for let in [collected(c, own, manifest.chips)] if alone_or_one else _spelled(c):
            if bindings.get(let.name) != let:
                binding = bindings.get(let.name)
                said = "is not bound" if binding is None else f"is bound by '{write(binding)}'"
                wanted = f"wanted '{write(let)}'"
                yield _of_manifest([c.out, let.name], f"{let.name} {said}", wanted)


def collectives_are_listed(program: Program) -> Complaints:
    """A fold or a join in the text is one of the manifest's."""
    outs = {c.out for c in _manifest(program).collectives}
    for line, statement in _lines(program):
        match statement:
            case say.Let(name, say.Fold() | say.Join()) if name not in outs:
                found = f"the manifest has no collective {name}"
                yield _complaint(line, statement, [name], found, "wanted one")


def _spelled(c: TpCollective) -> Iterator[say.Let]:
    """The steps of a collective as the joint text should have them."""
    whole = c.partials[0]
    for step, partial in zip(c.steps, c.partials[1:], strict=True):
        both = say.Plus(whole, partial) if c.kind == "fold" else say.Joined(whole, partial)
        yield say.Let(step, both)
        whole = step


def collected(c: TpCollective, partial: Name, chips: int) -> say.Let:
    """What one chip's text says in place of the steps of a collective."""
    value = say.Fold(partial, chips) if c.kind == "fold" else say.Join(partial, chips)
    return say.Let(c.out, value)


def chips_meet_in_collectives(program: Program) -> Complaints:
    """A statement has one chip's names at most, and none is the source of a replicated one."""
    manifest = _manifest(program)
    steps = {s for c in manifest.collectives for s in (*c.steps, c.out)}
    inner = steps - {c.out for c in manifest.collectives}
    for line, statement in _lines(program):
        if bound(statement) in steps:
            continue
        targets, read = _targets(statement), read_by(statement)
        on = {n: chip for n in (*targets, *read) if (chip := manifest.chip_of(n)) is not None}
        placed, chips = list(on), sorted(set(on.values()))
        replicated = [n for n in targets if manifest.chip_of(n) is None]
        halfway = [n for n in read if n in inner]
        if len(chips) > 1:
            found = f"{listed(placed)} are on chips {listed(chips)}"
            yield _complaint(line, statement, placed, found, "wanted one chip, or a collective")
        elif placed and replicated:
            found = f"{listed(replicated)} is on every chip, {listed(placed)} on chip {chips[0]}"
            yield _complaint(line, statement, placed, found, "wanted one chip, or a collective")
        if halfway:
            found = f"{listed(halfway)} is a step of a collective"
            yield _complaint(line, statement, halfway, found, "wanted what comes out of it")


def _manifest(program: Program) -> TpManifest:
    assert program.manifest is not None
    return program.manifest


def _slices(program: Program) -> Iterator[tuple[Name, TpSlice]]:
    for placed in _manifest(program).placed:
        if placed.slice is not None:
            yield placed.name, placed.slice


def _is_of_one_chip(program: Program) -> bool:
    """Whether the text is one chip's of several: it folds and joins rather than spelling it out."""
    values = (s.value for s in program.statements if isinstance(s, say.Let))
    return any(isinstance(v, say.Fold | say.Join) and v.chips > 1 for v in values)


def _of_manifest(names: Iterable[Name], found: str, wanted: str) -> Complaint:
    return Complaint(where="manifest", names=tuple(names), found=found, wanted=wanted)


Rule = Callable[[Program], Complaints]

RULES: tuple[Rule, ...] = (
    names_read_back,
    names_are_bound,
    changes_are_declared,
    items_fit,
    kinds_fit,
    shapes_fit,
)
MANIFEST_RULES: tuple[Rule, ...] = (
    placed_names_exist,
    slices_are_declared,
    slices_cover_the_whole,
    collectives_are_spelled_out,
    collectives_are_listed,
    chips_meet_in_collectives,
)
