"""The command `anyfold`: run, chat, logits, check, bench, convert, inspect, author, read."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from tp import (
    bench_command,
    check_command,
    commands,
    convert_command,
    inspect_command,
    launch_command,
)
from tp.commands import UsageError, say
from tp.gather import HostsError
from tp.hosts import OUR_FAULT
from tp.together import add_options, together

DESCRIPTION = "Runs a language model on any number of devices."
MODEL = "`demo`, a Hugging Face directory, a .gguf file, or what `convert` wrote"

# Mistakes of modules that some commands load: a module that is not loaded has made none.
RAISED = {
    "tp.stored": "CheckpointError",
    "tp.decoder": "ContextError",
    "tp.generation": "NumbersError",
    "tp.launch": "LaunchError",
    "tp.source": "SourceError",
    "tp.store_journal": "StoreError",
    "tp.tokens": "TokenizerError",
    "tp.bench.contender": "BenchError",
    "tp.check.transformers_model": "OtherError",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, or says what kept it (docs/LAUNCH.md has all)."""
    _mend_streams()
    try:
        args = _parsed(arguments)
        with together(args, _told) as args.hosts:
            status = args.command(args) or 0
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        status, why = _told(error)
        if status == OUR_FAULT:
            raise
        if why is None:
            # Whoever read our output has seen enough; say nothing at interpreter exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            say(f"anyfold: {why}")
        return status
    return status


def _told(error: BaseException) -> tuple[int, str | None]:
    """The exit status of an error, and what is said of it: a traceback where it is our fault."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, BrokenPipeError):
        return 0, None
    if isinstance(error, HostsError):
        return error.status, _message(error)
    if isinstance(error, _mistakes()):
        return 2, _message(error)
    return OUR_FAULT, "".join(traceback.format_exception(error))


def _mend_streams() -> None:
    """Closed streams read as empty and write to nobody; what cannot be spelled is replaced."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; a prompt may stand after options, which argparse does not see by itself."""
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    if rest and "prompt" in args and args.prompt is None and not rest[0].startswith("--"):
        args.prompt, *rest = rest
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def _mistakes() -> tuple[type[Exception], ...]:
    """What a user can cause; anything else is our fault and keeps its traceback."""
    from author.english import TextError
    from author.families.config import ConfigError
    from author.program import ProgramError
    from author.spec import SpecError

    found: list[type[Exception]] = [UsageError, TextError, ConfigError, ProgramError, SpecError]
    loaded = ((sys.modules.get(module), name) for module, name in RAISED.items())
    found += [getattr(module, name) for module, name in loaded if module is not None]
    return (*found, OSError, UnicodeError, MemoryError)


def _message(error: BaseException) -> str:
    """What is said of a mistake: one line, but for a text's, which shows the place."""
    from author.english import TextError

    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, UnicodeError):
        return f"not UTF-8 text: {error}"
    if isinstance(error, MemoryError):
        return f"not enough memory: {error or 'a smaller --ctx or more --chips may do'}"
    if isinstance(error, TextError):
        return str(error)
    line = "; ".join(str(error).splitlines())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


# --- The command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, and the status of every user's mistake."""
        say(f"{self.prog}: {message} (see {self.prog} --help)")
        raise SystemExit(2)


class _Version(argparse.Action):
    def __call__(self, *_: Any) -> NoReturn:
        """Looked up only when it is asked for."""
        from importlib.metadata import version

        print(f"anyfold {version('anyfold')}")
        raise SystemExit(0)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="anyfold", description=DESCRIPTION)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    _run_parser(subparsers)
    _chat_parser(subparsers)
    _logits_parser(subparsers)
    _check_parser(subparsers)
    _bench_parser(subparsers)
    convert_command.add_parser(subparsers)
    _inspect_parser(subparsers)
    launch_command.add_parser(subparsers)
    _author_parser(subparsers)
    _read_parser(subparsers)
    return parser


def _run_parser(subparsers: Any) -> None:
    run = subparsers.add_parser("run", help="continue a prompt", description="Continue a prompt.")
    run.set_defaults(command=commands.run)
    run.add_argument("model", metavar="MODEL", help=MODEL)
    run.add_argument("prompt", metavar="PROMPT", nargs="?", help="`-` or a pipe: standard input")
    _device_options(run)
    _kernel_options(run)
    add_options(run)
    _sampling_options(run)
    run.add_argument("--chat", action="store_true", help="one turn, with the chat template")
    run.add_argument("--ids", type=_ids, metavar='"1 2 3"', help="a prompt of token ids")
    run.add_argument("--receipt", metavar="FILE", help="write what was read and held, as JSON")


def _chat_parser(subparsers: Any) -> None:
    chat = subparsers.add_parser(
        "chat", help="talk, turn by turn", description="A conversation that keeps its cache."
    )
    chat.set_defaults(command=commands.chat)
    chat.add_argument("model", metavar="MODEL", help=MODEL)
    _device_options(chat)
    _kernel_options(chat)
    add_options(chat)
    _sampling_options(chat)


def _logits_parser(subparsers: Any) -> None:
    logits = subparsers.add_parser(
        "logits",
        help="write the logits of token ids",
        description="Write float32 logits [tokens, vocabulary] as `logits` in an .npz file.",
    )
    logits.set_defaults(command=commands.logits)
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
    _kernel_options(logits)
    add_options(logits)


def _check_parser(subparsers: Any) -> None:
    check = check_command.add_parser(subparsers)
    check.add_argument("model", metavar="MODEL", help=MODEL)
    _context_option(check)
    add_options(check)
    check.add_argument(
        "--ids", type=_ids, action="append", metavar='"1 2 3"', help="a prompt of token ids"
    )
    tokens = _number("tokens", least=1)
    check.add_argument(
        "--tokens", type=tokens, metavar="N", help="how long built-in prompts are (default: 24)"
    )


def _bench_parser(subparsers: Any) -> None:
    bench = subparsers.add_parser(
        "bench",
        help="measure speed and memory",
        description="Measure a model at several widths, beside other programs where those are "
        "installed, in turns: medians of reading a prompt, making tokens, the first token of a "
        "command, and peak memory.",
    )
    bench.set_defaults(command=bench_command.bench)
    bench.add_argument("model", metavar="MODEL", help=MODEL)
    bench.add_argument(
        "--chips", type=inspect_command.widths, default=(1,), metavar="N", help="1, 1-3 or 1,2,5"
    )
    _context_option(bench)
    tokens, times = _number("tokens", least=1), _number("repeats", least=1)
    bench.add_argument(
        "--prompt-tokens", type=tokens, default=512, metavar="N", help="read (default: 512)"
    )
    bench.add_argument(
        "--tokens", type=tokens, default=64, metavar="N", help="made after a prompt (default: 64)"
    )
    bench.add_argument("--repeats", type=times, default=5, metavar="N", help="turns (default: 5)")
    bench.add_argument("--batch", type=_number("sequences", least=2), metavar="N")
    bench.add_argument("--position", type=tokens, metavar="P", help="make tokens there as well")
    bench.add_argument(
        "--threads", type=_number("threads", least=1), metavar="N", help="cores (default: all)"
    )
    bench.add_argument("--cold", action="store_true", help="first token, nothing compiled, too")
    bench.add_argument("--check", action="store_true", help="logits against float32 too")
    bench.add_argument(
        "--against",
        type=bench_command.rivals,
        default=[],
        metavar="NAME,NAME",
        help="llama.cpp, transformers",
    )
    for rival in ("llama", "transformers"):
        bench.add_argument(
            f"--{rival}-python", metavar="PYTHON", help="a Python that has it (default: this one)"
        )
    bench.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _inspect_parser(subparsers: Any) -> None:
    inspect = subparsers.add_parser(
        "inspect",
        help="show how a model is split",
        description=(
            "Show who holds, reads and computes what; no weights are read and no device is used. "
            "A stage is printed as text or JSON, to be piped and read back."
        ),
    )
    inspect.set_defaults(command=inspect_command.inspect, stage=None)
    inspect.add_argument("model", metavar="MODEL", help=f"{MODEL}, a config.json, a spec's JSON")
    inspect.add_argument(
        "--chips",
        type=inspect_command.widths,
        metavar="N",
        help="how many: 3, or 1-8 or 1,2,5 to compare (default: 1-8; of a stage, 1)",
    )
    inspect.add_argument(
        "--ctx", type=_number("tokens", least=1), metavar="N", help="tokens in the caches"
    )
    inspect.add_argument(
        "--memory", type=inspect_command.size, metavar="24GiB", help="what a chip has: does it fit?"
    )
    inspect.add_argument("--cache", choices=("f32", "f16"), default="f32", help="numbers of caches")
    inspect.add_argument("--json", action="store_true", help="all numbers")
    inspect.add_argument("--html", metavar="FILE", help="draw the split as a page, too")
    stages = inspect.add_mutually_exclusive_group()
    for stage, what in inspect_command.STAGES.items():
        stages.add_argument(
            f"--{stage}", dest="stage", action="store_const", const=stage, help=what
        )
    inspect.add_argument(
        "--layer", type=_number("layers", least=0), metavar="L", help="one layer of a stage"
    )
    inspect.add_argument(
        "--chip", type=_number("chips", least=0), metavar="C", help="one chip's text or manifest"
    )


def _author_parser(subparsers: Any) -> None:
    author = subparsers.add_parser(
        "author",
        help="write a program from a spec",
        description="Print a program and its tables as JSON, in the form of the golden cases.",
    )
    author.set_defaults(command=commands.author)
    author.add_argument("spec", metavar="SPEC.json", nargs="?", help="a spec, or a golden file")
    author.add_argument("kind", metavar="KIND", nargs="?", help="the kind of program")
    author.add_argument("--args", default="{}", metavar="JSON", help="the arguments of the kind")
    author.add_argument("--text", action="store_true", help="print the program's text alone")
    author.add_argument(
        "--chip", type=_number("chips", least=0), metavar="C", help="the text of one chip, from 0"
    )
    author.add_argument(
        "--batch",
        action="store_true",
        help='read {"spec", "cases": [{"kind", "args"}]} on standard input, print a line a case',
    )


def _read_parser(subparsers: Any) -> None:
    read = subparsers.add_parser(
        "read",
        help="read and check a program's text",
        description="Read a program's text, check it, and print it as it was understood.",
    )
    read.set_defaults(command=commands.read)
    read.add_argument("text", metavar="TEXT", help="a file, or `-` for standard input")


def _device_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chips",
        type=_number("chips", least=1),
        metavar="N",
        help="how many devices (default: all accelerators, or 1); simulated on a CPU",
    )
    _context_option(parser)


def _context_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ctx",
        type=_number("tokens", least=1),
        metavar="N",
        help="how many tokens a sequence may have (default: 2048, or what the model was made for)",
    )


def _kernel_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kernels",
        choices=("auto", "native", "xla", "reference"),
        default="auto",
        help="what computes the statements: the fastest that can, or only these",
    )
    parser.add_argument(
        "--cache", choices=("f32", "f16"), default="f32", help="numbers of caches (default: f32)"
    )


def _sampling_options(parser: argparse.ArgumentParser) -> None:
    number = _number("tokens", least=0)
    parser.add_argument(
        "--max-tokens", type=number, metavar="N", help="at most (default: till the context is full)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default: 0, the likeliest"
    )
    parser.add_argument("--top-k", type=number, default=0, metavar="K", help="default: 0, all")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default: 1, all")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of draws (default: 0)")
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


if __name__ == "__main__":
    raise SystemExit(main())
