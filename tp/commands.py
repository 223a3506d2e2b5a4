"""What each command does: run, chat, logits, author, read."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CLEAR = "/clear"
LEAVE = ("/exit", "/quit", "/bye")  # as llama.cpp and others have it
MANY = 64  # chips: simulated ones share a CPU, and each is loaded and compiled for


class UsageError(ValueError):
    """A command line that asks for what cannot be."""


def say(text: str, end: str = "\n") -> None:
    """Tell the person at the terminal; standard output is for results."""
    print(text, end=end, file=sys.stderr, flush=True)


# --- Running


def run(args: argparse.Namespace) -> None:
    """Continue a prompt: the continuation on standard output, all else beside it."""
    from tp import show
    from tp.engine import check_fits
    from tp.source import open_source

    sampling, hosts = _sampling(args), args.hosts
    source = open_source(args.model)
    ids = hosts.from_first("the prompt", lambda: _prompt_ids(args, source))
    check_fits(source.model, ids, args.ctx)
    if args.receipt is not None and hosts.first:
        check_writable(Path(args.receipt))
    engine = _loaded(source, args)
    say(show.title(engine))
    conversation = engine.chat()
    options = {"max_tokens": args.max_tokens, "sampling": sampling}
    if source.tokenizer is None:
        pieces = (f"{token} " for token in conversation.tokens(ids, **options))
    else:
        pieces = conversation.reply(ids, ignore_eos=args.ignore_eos, **options)
    _print_pieces(_reported(pieces, conversation, hosts))
    say(show.holdings(engine))
    say(show.speed(conversation.counts))
    if args.receipt is not None:
        _write_receipt(Path(args.receipt), engine, hosts)


def _reported(pieces: Any, conversation: Any, hosts: Any) -> Any:
    """The pieces of a reply, with word to the other processes of how far it is."""
    hosts.report("reading the prompt")
    for piece in pieces:
        hosts.report(f"token {conversation.counts.tokens}")
        yield piece


def _write_receipt(path: Path, engine: Any, hosts: Any) -> None:
    """What all processes read and held, in one file, by the first."""
    from tp import show

    processes = hosts.exchange("the receipt", show.process_json(engine))
    if hosts.first:
        receipt = show.receipt_json(engine, processes)
        path.write_text(json.dumps(receipt, indent=2) + "\n")


def _prompt_ids(args: argparse.Namespace, source: Any) -> list[int]:
    """The tokens of the prompt, which a model without a tokenizer takes as --ids alone."""
    if args.ids is not None and (args.prompt is not None or args.chat):
        raise UsageError("--ids is a whole prompt: leave out PROMPT and --chat")
    if args.ids is not None:
        return args.ids
    prompt = _prompt(args)
    tokenizer = source.spelling()
    if args.chat:
        return tokenizer.encode_chat([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt, special=True)


def check_writable(path: Path) -> None:
    """Say no before the work is done, not after."""
    fresh = not path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    if fresh:
        path.unlink()


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.prompt != "-":
        return args.prompt
    if args.prompt is None and sys.stdin.isatty():
        raise UsageError("no prompt: give one after the model, or through a pipe")
    return sys.stdin.read()


def chat(args: argparse.Namespace) -> int:
    """Talk, turn by turn, until the input ends; 2 where a turn did not fit the context."""
    from tp import show
    from tp.decoder import ContextError
    from tp.source import open_source

    sampling, hosts = _sampling(args), args.hosts
    source = open_source(args.model)
    source.spelling()
    engine = _loaded(source, args)
    say(show.title(engine))
    conversation = engine.chat()
    options = {"max_tokens": args.max_tokens, "sampling": sampling, "ignore_eos": args.ignore_eos}
    if sys.stdin.isatty():
        say("Ctrl-C ends a reply, /clear begins anew, /exit or Ctrl-D ends")
    status = 0
    while (text := hosts.from_first("a turn", _next_turn)) is not None:
        if text.strip() == CLEAR:
            conversation = engine.chat()
            continue
        pieces = _reported(conversation.say(text, **options), conversation, hosts)
        try:
            _print_pieces(pieces)
        except ContextError as full:
            say(f"anyfold: {full}; {CLEAR} begins anew")
            status = 2
            continue
        except KeyboardInterrupt:
            if hosts.processes > 1 or not sys.stdin.isatty():
                raise
            with _uninterrupted():
                pieces.close()
            say("\nanyfold: ended; this turn is forgotten")
            continue
        say(show.speed(conversation.counts))
    return status


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C does nothing meanwhile."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _next_turn() -> str | None:
    """What the user types next; None at the end. Empty lines are asked for again.

    A Ctrl-C may have been meant for a reply that had just ended: two of them end it.
    """
    interrupted = False
    while True:
        if sys.stdin.isatty():
            say("> ", end="")
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            if interrupted or not sys.stdin.isatty():
                raise
            interrupted = True
            say("\nCtrl-C again, /exit or Ctrl-D ends")
            continue
        if line == "" or line.strip() in LEAVE:
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
    if (args.chips or 0) > MANY:
        say(f"loading for {args.chips} chips; where they are simulated this takes minutes")
    progress = _Progress()
    try:
        return load_source(
            source,
            chips=args.chips,
            context=args.ctx,
            kernels=args.kernels,
            cache=args.cache,
            progress=progress,
            hosts=args.hosts,
        )
    finally:
        progress.clear()


def _keep_compiled() -> None:
    """Compiled programs are kept between runs, unless the user keeps them elsewhere."""
    import jax

    if jax.config.values.get("jax_compilation_cache_dir") is None:
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


def logits(args: argparse.Namespace) -> None:
    """Write the logits of token ids to a file."""
    import numpy as np

    from tp.engine import check_fits
    from tp.source import open_source

    out = Path(args.out)
    if args.by == "text" and args.hosts.processes > 1:
        raise UsageError("--by text interprets the texts of all chips in one process")
    if args.hosts.first:
        _check_out(out)
    source = open_source(args.model)
    context = check_fits(source.model, args.ids, args.ctx)
    if args.by == "text":
        from tp.literal import literal_logits

        logits = literal_logits(source, args.ids, chips=args.chips or 1, context=context)
    else:
        engine = _loaded(source, args)
        by = engine.logits if args.by == "prefill" else engine.logits_by_steps
        logits = by(args.ids)
    if args.hosts.first:
        with out.open("wb") as file:  # a name of ours to choose, .npz or not
            np.savez(file, logits=logits)
    say(f"wrote {logits.shape[0]} x {logits.shape[1]} logits to {out}")


def _check_out(out: Path) -> None:
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such directory for --out")
    check_writable(out)


# --- Texts


def author(args: argparse.Namespace) -> None:
    """Print a program in the golden form, or a batch of them."""
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
    if args.text or args.chip is not None:
        print(_text(spec, args.kind, arguments, args.chip), end="")
        return
    case = run_case(spec, args.kind, arguments)
    print(json.dumps(case))
    if "error" in case:
        raise UsageError(case["error"])


def _text(spec: Any, kind: str, arguments: dict[str, Any], chip: int | None) -> str:
    """A program as it is read, the joint text or one chip's; refusals are refusals here."""
    from author.chips import chip_program
    from author.kinds import CHECKS, author

    if kind in CHECKS:
        raise UsageError(f"{kind} has no text: it says whether there would be one")
    program = author(spec, kind, arguments)
    return program.text if chip is None else chip_program(program, chip).text


def _author_batch() -> None:
    from author.kinds import run_case

    request = _json(sys.stdin.read(), "standard input")
    if not isinstance(request, dict) or not isinstance(request.get("cases"), list):
        raise UsageError('standard input: wanted {"spec": ..., "cases": [{"kind", "args"}]}')
    spec = _spec(request, "standard input")
    for number, case in enumerate(request["cases"]):
        if not isinstance(case, dict) or not isinstance(case.get("kind"), str):
            raise UsageError(f"standard input: case {number} is {case!r}, wanted kind and args")
        args = case.get("args", {})
        if not isinstance(args, dict):
            said = {**case, "error": f"args is {args!r}, wanted an object"}
        else:
            said = run_case(spec, case["kind"], args)
        print(json.dumps(said), flush=True)


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
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {error}") from None


def read(args: argparse.Namespace) -> None:
    """Print a program's text as it was understood, if it is one."""
    from author.checks import check_program
    from author.english import read_program
    from author.program import Program

    inside = args.text == "-"
    text = sys.stdin.read() if inside else Path(args.text).read_text()
    name = "standard input" if inside else args.text
    program = Program(statements=read_program(text, file=name))
    check_program(program)
    print(program.text, end="")
