"""Every kind of program by name: a spec, a kind and arguments in, a program or a refusal out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from author import programs
from author.names import listed
from author.parallel import Split
from author.program import Program, program_to_json
from author.refusals import check, check_tp
from author.spec import ModelSpec, SpecError


@dataclass(frozen=True, kw_only=True)
class Argument:
    """What an argument may be, and the keyword that it goes by in the code."""

    wanted: str
    fits: Callable[[Any], bool]
    keyword: str | None = None


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _some(value: Any) -> bool:
    return _count(value) and value > 0


def _counts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_count, value))


def _pairs(value: Any) -> bool:
    fits = isinstance(value, list | tuple) and len(value) > 0
    return fits and all(_counts(pair) and len(pair) == 2 for pair in value)


def _some_counts(value: Any) -> bool:
    return _counts(value) and len(value) > 0


_FLAG = Argument(wanted="true or false", fits=lambda value: isinstance(value, bool))
_SOME = Argument(wanted="a number from 1", fits=_some)

ARGUMENTS = {
    "dir": Argument(
        wanted="the folder of the weights",
        fits=lambda value: isinstance(value, str) and value != "",
        keyword="folder",
    ),
    "l": Argument(wanted="a layer, from 0", fits=_count, keyword="number"),
    "ctx": _SOME,
    "tok": Argument(wanted="a token id, from 0", fits=_count),
    "pos": Argument(wanted="a position, from 1", fits=_some),
    # A chunk at 0 does not fit its context, and is refused as such.
    "pos0": Argument(wanted="a position, from 1", fits=_count),
    "toks": Argument(wanted="a list of token ids", fits=_counts),
    "poss": Argument(wanted="a list of positions, one at least", fits=_some_counts),
    "seqs": Argument(wanted="a list of [token id, position], one at least", fits=_pairs),
    "chunk": _SOME,
    "bsz": _SOME,
    "rows": Argument(
        wanted='"per_sequence" or "shared"', fits=lambda value: value in ("per_sequence", "shared")
    ),
    # A width of 0 is refused as such.
    "tp": Argument(wanted="a number of chips", fits=_count, keyword="chips"),
    "align": _SOME,
    "vocabulary": _FLAG,
    "beyond": _FLAG,
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a kind is authored, and the arguments that it must and may have."""

    write: Callable[..., Any]
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()


_ONE_DEVICE = {
    "forward": (programs.forward, "dir"),
    "decode_step": (programs.decode_step, "dir ctx tok pos"),
    "prefill": (programs.prefill, "dir ctx toks pos0"),
    "prefill_logits": (programs.prefill_logits, "dir ctx toks pos0"),
    "decode_batch": (programs.decode_batch, "dir ctx seqs"),
    "layer": (programs.layer, "l dir"),
    "decode_layer": (programs.decode_layer, "l dir ctx pos"),
    "stacked_layer": (programs.stacked_layer, "l dir ctx poss rows"),
    "head": (programs.head, "dir"),
    "decode_head": (programs.decode_head, "dir"),
    "decode_embed": (programs.decode_embed, "dir tok"),
    "decode_batch_embed": (programs.decode_batch_embed, "dir toks"),
    "prefill_head": (programs.prefill_head, "dir chunk"),
    "prefill_logits_head": (programs.prefill_logits_head, "dir chunk"),
    "decode_batch_head": (programs.decode_batch_head, "dir bsz"),
}
_SPLIT = ("align", "vocabulary", "beyond")


def _split_kind(write: Callable[..., Program], needed: tuple[str, ...]) -> Kind:
    """The kind over several chips; `rows` has a default there, as the goldens leave it out."""
    optional = tuple(a for a in needed if a == "rows")
    needed = tuple(a for a in needed if a != "rows")
    return Kind(write=write, needed=(*needed, "tp"), optional=(*optional, *_SPLIT))


def _kinds() -> Mapping[str, Kind]:
    one = {name: (write, tuple(words.split())) for name, (write, words) in _ONE_DEVICE.items()}
    whole = {name: Kind(write=write, needed=needed) for name, (write, needed) in one.items()}
    split = {f"tp_{name}": _split_kind(write, needed) for name, (write, needed) in one.items()}
    return whole | split


KINDS = _kinds()
CHECKS = {
    "check": Kind(write=check, needed=()),
    "check_tp": Kind(write=check_tp, needed=("tp",), optional=("beyond",)),
}


def author(spec: ModelSpec, kind: str, args: Mapping[str, Any]) -> Program:
    """The program of a kind; a spec, a kind or arguments that cannot be are refused."""
    if kind not in KINDS:
        known = f"there are {listed(KINDS)}, and the checks {listed(CHECKS)}"
        raise SpecError(f"no kind {kind!r} of program; {known}")
    found = KINDS[kind]
    fields = _checked(kind, args, found)
    if "tp" in found.needed:
        chosen = {name: fields.pop(name) for name in _SPLIT if name in fields}
        fields["split"] = Split(chips=fields.pop("chips"), **chosen)
    return found.write(spec, **fields)


def check_request(kind: str, args: Mapping[str, Any]) -> None:
    """Refuse a kind that there is not, or arguments that it does not take."""
    found = {**KINDS, **CHECKS}.get(kind)
    if found is None:
        known = f"there are {listed(KINDS)}, and the checks {listed(CHECKS)}"
        raise SpecError(f"no kind {kind!r} of program; {known}")
    _checked(kind, args, found)


def run_case(spec: ModelSpec, kind: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """A case in the golden form: what was asked, and the program, `ok`, or the refusal."""
    try:
        return case_to_json(kind, args, _outcome(spec, kind, args))
    except SpecError as refusal:
        return case_to_json(kind, args, refusal)


def _outcome(spec: ModelSpec, kind: str, args: Mapping[str, Any]) -> Program | None:
    """The program of a kind; None for a check that passes."""
    if kind not in CHECKS:
        return author(spec, kind, args)
    CHECKS[kind].write(spec, **_checked(kind, args, CHECKS[kind]))
    return None


def case_to_json(
    kind: str, args: Mapping[str, Any], outcome: Program | SpecError | None
) -> dict[str, Any]:
    """The golden form of a case; its outcome is None for a check that passes."""
    case = {"kind": kind, "args": dict(args)}
    match outcome:
        case Program():
            return case | program_to_json(outcome)
        case SpecError():
            return case | {"error": str(outcome)}
        case _:
            return case | {"ok": True}


def _checked(kind: str, args: Mapping[str, Any], found: Kind) -> dict[str, Any]:
    """The arguments by keyword, lists as tuples; all that is wrong with them is listed."""
    known = (*found.needed, *found.optional)
    missing = (name for name in found.needed if name not in args)
    problems = [f"{kind} needs {name}, {ARGUMENTS[name].wanted}" for name in missing]
    for name, value in args.items():
        if name not in known:
            problems.append(f"{kind} has no argument {name}; it has {', '.join(known) or 'none'}")
        elif not ARGUMENTS[name].fits(value):
            problems.append(f"{name} is {value!r}, wanted {ARGUMENTS[name].wanted}")
    if problems:
        raise SpecError(*problems)
    return {ARGUMENTS[n].keyword or n: _frozen(v) for n, v in args.items()}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
