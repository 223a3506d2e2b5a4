"""The command `anyfold`: run, chat, logits, author, read."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

DESCRIPTION = "Runs a language model on any number of devices."
MODEL = "`demo`, a Hugging Face directory, or a .gguf file"


class UsageError(ValueError):
    """A command line that asks for what cannot be."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 2 for a user's mistake, 130 when interrupted."""
    try:
        args = _parser().parse_args(arguments)
        args.command(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        say("anyfold: interrupted")
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough; say nothing at interpreter exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if not isinstance(error, _mistakes()):
            raise
        say(f"anyfold: {_message(error)}")
        return 2
    return 0


def say(text: str, end: str = "\n") -> None:
    """Tell the person at the terminal; standard output is for results."""
    print(text, end=end, file=sys.stderr, flush=True)


def _mistakes() -> tuple[type[Exception], ...]:
    """What a user can cause; anything else is our fault and keeps its traceback."""
    from author.english import TextError
    from author.families.config import ConfigError
    from author.program import ProgramError
    from author.spec import SpecError

    found: list[type[Exception]] = [UsageError, TextError, ConfigError, ProgramError, SpecError]
    if "tp.engine" in sys.modules:  # errors of the running model, if it was loaded at all
        from tp.checkpoint import CheckpointError
        from tp.decoder import ContextError
        from tp.launch import LaunchError
        from tp.source import SourceError
        from tp.tokens import TokenizerError

        found += [CheckpointError, ContextError, LaunchError, SourceError, TokenizerError]
    return (*found, OSError)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) if "^" in str(error) else "; ".join(str(error).split("\n"))


# --- The command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, and the status of every user's mistake."""
        say(f"{self.prog}: {message} (see {self.prog} --help)")
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="anyfold", description=DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _run_parser(commands)
    _chat_parser(commands)
    _logits_parser(commands)
    _author_parser(commands)
    _read_parser(commands)
    return parser


def _run_parser(commands: Any) -> None:
    run = commands.add_parser("run", help="continue a prompt", description="Continue a prompt.")
    run.set_defaults(command=_run)
    run.add_argument("model", metavar="MODEL", help=MODEL)
    run.add_argument("prompt", metavar="PROMPT", nargs="?", help="`-` or a pipe: standard input")
    _device_options(run)
    _sampling_options(run)
    run.add_argument("--chat", action="store_true", help="one turn, with the chat template")
    run.add_argument("--ids", type=_ids, metavar='"1 2 3"', help="a prompt of token ids")
    run.add_argument("--receipt", metavar="FILE", help="write what was read and held, as JSON")


def _chat_parser(commands: Any) -> None:
    chat = commands.add_parser(
        "chat", help="talk, turn by turn", description="A conversation that keeps its cache."
    )
    chat.set_defaults(command=_chat)
    chat.add_argument("model", metavar="MODEL", help=MODEL)
    _device_options(chat)
    _sampling_options(chat)


def _logits_parser(commands: Any) -> None:
    logits = commands.add_parser(
        "logits",
        help="write the logits of token ids",
        description="Write float32 logits [tokens, vocabulary] as `logits` in an .npz file.",
    )
    logits.set_defaults(command=_logits)
    logits.add_argument("model", metavar="MODEL", help=MODEL)
    logits.add_argument("--ids", type=_ids, required=True, metavar='"1 2 3"', help="token ids")
    logits.add_argument("--out", required=True, metavar="FILE.npz", help="where to write")
    logits.add_argument(
        "--by",
        choices=("prefill", "decode", "text"),
        default="prefill",
        help="chunks of the prompt, one token at a time, or the texts interpreted",
    )
    _device_options(logits)


def _author_parser(commands: Any) -> None:
    author = commands.add_parser(
        "author",
        help="write a program from a spec",
        description="Print a program and its tables as JSON, in the form of the golden cases.",
    )
    author.set_defaults(command=_author)
    author.add_argument("spec", metavar="SPEC.json", nargs="?", help="a spec, or a golden file")
    author.add_argument("kind", metavar="KIND", nargs="?", help="the kind of program")
    author.add_argument("--args", default="{}", metavar="JSON", help="the arguments of the kind")
    author.add_argument(
        "--batch",
        action="store_true",
        help='read {"spec", "cases": [{"kind", "args"}]} on standard input, print a line a case',
    )


def _read_parser(commands: Any) -> None:
    read = commands.add_parser(
        "read",
        help="read and check a program's text",
        description="Read a program's text, check it, and print it as it was understood.",
    )
    read.set_defaults(command=_read)
    read.add_argument("text", metavar="TEXT", help="a file, or `-` for standard input")


def _device_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chips",
        type=_number("chips", least=1),
        metavar="N",
        help="how many devices (default: all accelerators, or 1); simulated on a CPU",
    )
    parser.add_argument(
        "--ctx",
        type=_number("tokens", least=1),
        metavar="N",
        help="how many tokens a sequence may have",
    )


def _sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=_number("tokens", least=0), metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    parser.add_argument("--top-k", type=_number("tokens", least=0), default=0, metavar="K")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--ignore-eos", action="store_true", help="run on past stop tokens")


def _number(what: str, *, least: int) -> Any:
    def read(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: wanted a number of {what} from {least}")
        return int(text)

    return read


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(w.isdigit() for w in words):
        raise argparse.ArgumentTypeError(f"{text!r}: wanted token ids, as in '1 2 3'")
    return [int(w) for w in words]


# --- Running


def _run(args: argparse.Namespace) -> None:
    from tp import show
    from tp.engine import check_fits
    from tp.source import open_source

    sampling = _sampling(args)
    source = open_source(args.model)
    ids = _prompt_ids(args, source)
    check_fits(source.model, ids, args.ctx)
    if args.receipt is not None:
        _check_writable(Path(args.receipt))
    engine = _loaded(source, args)
    say(show.title(engine))
    conversation = engine.chat()
    options = {"max_tokens": args.max_tokens, "sampling": sampling}
    if source.tokenizer is None:
        _print_pieces(f"{token} " for token in conversation.tokens(ids, **options))
    else:
        _print_pieces(conversation.reply(ids, ignore_eos=args.ignore_eos, **options))
    say(show.holdings(engine))
    say(show.speed(conversation.counts))
    if args.receipt is not None:
        receipt = show.receipt_json(engine)
        Path(args.receipt).write_text(json.dumps(receipt, indent=2) + "\n")


def _prompt_ids(args: argparse.Namespace, source: Any) -> list[int]:
    """The tokens of the prompt, which a model without a tokenizer takes as --ids alone."""
    if args.ids is not None:
        return args.ids
    prompt = _prompt(args)
    tokenizer = source.spelling()
    if args.chat:
        return tokenizer.encode_chat([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt, special=True)


def _check_writable(path: Path) -> None:
    """Say no before the work is done, not after."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{path}: cannot be written")


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.prompt != "-":
        return args.prompt
    if args.prompt is None and sys.stdin.isatty():
        raise UsageError("no prompt: give one after the model, or through a pipe")
    return sys.stdin.read()


def _chat(args: argparse.Namespace) -> None:
    from tp import show
    from tp.decoder import ContextError
    from tp.source import open_source

    sampling = _sampling(args)
    source = open_source(args.model)
    source.spelling()
    engine = _loaded(source, args)
    say(show.title(engine))
    conversation = engine.chat()
    options = {"max_tokens": args.max_tokens, "sampling": sampling, "ignore_eos": args.ignore_eos}
    while (text := _next_turn()) is not None:
        try:
            _print_pieces(conversation.say(text, **options))
        except ContextError as full:
            say(f"anyfold: {full}")
            return
        say(show.speed(conversation.counts))


def _next_turn() -> str | None:
    """What the user types next; None at the end. Empty lines are asked for again."""
    while True:
        if sys.stdin.isatty():
            say("> ", end="")
        line = sys.stdin.readline()
        if line == "":
            return None
        if line.strip():
            return line.rstrip("\n")


def _print_pieces(pieces: Any) -> None:
    last = "\n"
    for piece in pieces:
        print(piece, end="", flush=True)
        last = piece
    if not last.endswith("\n"):
        print(flush=True)


def _sampling(args: argparse.Namespace) -> Any:
    from tp.sample import Sampling

    try:
        return Sampling(
            temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def _loaded(source: Any, args: argparse.Namespace) -> Any:
    from tp.engine import load_source

    _keep_compiled()
    progress = _Progress()
    try:
        return load_source(source, chips=args.chips, context=args.ctx, progress=progress)
    finally:
        progress.clear()


def _keep_compiled() -> None:
    """Compiled programs are kept between runs, unless the user keeps them elsewhere."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "anyfold" / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


class _Progress:
    """One line that is written over as weights arrive; nothing where nobody looks."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()

    def __call__(self, what: str, done: int, of: int) -> None:
        if self.shown:
            say(f"\rloading {done}/{of} {what:<12}", end="")

    def clear(self) -> None:
        if self.shown:
            say("\r" + " " * 40 + "\r", end="")


def _logits(args: argparse.Namespace) -> None:
    import numpy as np

    from tp.engine import check_fits
    from tp.source import open_source

    out = Path(args.out)
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such directory for --out")
    _check_writable(out)
    source = open_source(args.model)
    context = check_fits(source.model, args.ids, args.ctx)
    if args.by == "text":
        from tp.literal import literal_logits

        logits = literal_logits(source, args.ids, chips=args.chips or 1, context=context)
    else:
        engine = _loaded(source, args)
        by = engine.logits if args.by == "prefill" else engine.logits_by_steps
        logits = by(args.ids)
    np.savez(out, logits=logits)
    say(f"wrote {logits.shape[0]} x {logits.shape[1]} logits to {out}")


# --- Texts


def _author(args: argparse.Namespace) -> None:
    from author.kinds import check_request, run_case

    if args.batch:
        _author_batch()
        return
    if args.spec is None or args.kind is None:
        raise UsageError("author wants SPEC.json and KIND, or --batch")
    spec = _spec(_json(Path(args.spec).read_text(), args.spec), args.spec)
    arguments = _json(args.args, "--args")
    if not isinstance(arguments, dict):
        raise UsageError(f"--args: found {arguments!r}, wanted a JSON object")
    check_request(args.kind, arguments)
    print(json.dumps(run_case(spec, args.kind, arguments)))


def _author_batch() -> None:
    from author.kinds import run_case

    request = _json(sys.stdin.read(), "standard input")
    if not isinstance(request, dict) or not isinstance(request.get("cases"), list):
        raise UsageError('standard input: wanted {"spec": ..., "cases": [{"kind", "args"}]}')
    spec = _spec(request, "standard input")
    for number, case in enumerate(request["cases"]):
        if not isinstance(case, dict) or not isinstance(case.get("kind"), str):
            raise UsageError(f"standard input: case {number} is {case!r}, wanted kind and args")
        print(json.dumps(run_case(spec, case["kind"], case.get("args", {}))), flush=True)


def _spec(found: Any, where: str) -> Any:
    """A spec from its JSON, alone or under `spec` as in a golden file."""
    from author.spec import SpecError, spec_from_json

    inner = found["spec"] if isinstance(found, dict) and "spec" in found else found
    try:
        return spec_from_json(inner)
    except SpecError as error:
        raise UsageError(f"{where}: {'; '.join(error.problems)}") from None


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON: {error}") from None


def _read(args: argparse.Namespace) -> None:
    from author.checks import check_program
    from author.english import read_program
    from author.program import Program

    inside = args.text == "-"
    text = sys.stdin.read() if inside else Path(args.text).read_text()
    name = "standard input" if inside else args.text
    program = Program(statements=read_program(text, file=name))
    check_program(program)
    print(program.text, end="")


if __name__ == "__main__":
    raise SystemExit(main())
