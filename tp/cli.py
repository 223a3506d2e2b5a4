"""The command `anyfold`: run, chat, logits, author, read."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from tp import commands
from tp.commands import UsageError, say

DESCRIPTION = "Runs a language model on any number of devices."
MODEL = "`demo`, a Hugging Face directory, or a .gguf file"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 2 for a user's mistake, 130 when interrupted."""
    _mend_streams()
    try:
        args = _parsed(arguments)
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
    if "tp.engine" in sys.modules:  # errors of the running model, if it was loaded at all
        from tp.checkpoint import CheckpointError
        from tp.decoder import ContextError
        from tp.launch import LaunchError
        from tp.source import SourceError
        from tp.tokens import TokenizerError

        found += [CheckpointError, ContextError, LaunchError, SourceError, TokenizerError]
    return (*found, OSError, UnicodeError, MemoryError)


def _message(error: Exception) -> str:
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


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="anyfold", description=DESCRIPTION)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    _run_parser(subparsers)
    _chat_parser(subparsers)
    _logits_parser(subparsers)
    _author_parser(subparsers)
    _read_parser(subparsers)
    return parser


def _run_parser(subparsers: Any) -> None:
    run = subparsers.add_parser("run", help="continue a prompt", description="Continue a prompt.")
    run.set_defaults(command=commands.run)
    run.add_argument("model", metavar="MODEL", help=MODEL)
    run.add_argument("prompt", metavar="PROMPT", nargs="?", help="`-` or a pipe: standard input")
    _device_options(run)
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


if __name__ == "__main__":
    raise SystemExit(main())
