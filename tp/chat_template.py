"""Turns chat messages into prompt text with the Jinja template a model was published with."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A template comes with a downloaded model, so what it may spend is bounded. Real ones
# loop over messages and tools, never over characters: these are far above their needs.
LOOP_LIMIT = 1_000_000
TEXT_LIMIT = 1 << 24
LONGEST_PROMPT = 4_000_000

BUDGET = "_budget"
TRY_COMPLETION = "use plain completion (without --chat), which needs no template"


@dataclass(kw_only=True, eq=False)
class TokenizerError(Exception):
    """Says where a tokenizer is wrong, what was found there, and what would do."""

    where: str
    found: str
    remedy: str

    def __str__(self) -> str:
        """Joins the three parts into one line."""
        return f"{self.where}: {self.found}; {self.remedy}"


@dataclass(kw_only=True, slots=True)
class Budget:
    """Counts down the loop turns of one rendering."""

    turns: int = field(default=LOOP_LIMIT)

    def spend(self) -> None:
        """Takes one turn, or raises `jinja2.TemplateError` when none is left."""
        self.turns -= 1
        if self.turns < 0:
            raise jinja2.TemplateError(f"it loops more than {LOOP_LIMIT} times")


def directory_templates(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Finds the chat templates of a directory; a file of its own wins over the settings."""
    given = settings.get("chat_template")
    named = given if isinstance(given, list) else [{"name": "default", "template": given}]
    templates = {
        entry["name"]: entry["template"]
        for entry in named
        if isinstance(entry, dict) and isinstance(entry.get("template"), str)
    }
    files = {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
    if (path / "chat_template.jinja").is_file():
        files["default"] = path / "chat_template.jinja"
    return templates | {name: read_text(file) for name, file in files.items()}


def read_text(file: Path) -> str:
    """Reads a template's file, or raises TokenizerError if it is not text."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            where=str(file), found=f"not UTF-8 ({error})", remedy="download the file again"
        ) from error


def gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Finds the chat templates of a GGUF file: one without a name, others with."""
    key = "tokenizer.chat_template"
    return {
        "default" if name == key else name.removeprefix(f"{key}."): str(value)
        for name, value in metadata.items()
        # `tokenizer.chat_templates` only lists the names.
        if name == key or name.startswith(f"{key}.")
    }


def choose(templates: Mapping[str, str], wanted: str, *, where: str) -> str:
    """Finds a chat template by name; the only one there is also serves as the default."""
    if wanted in templates:
        return wanted
    if len(templates) == 0:
        raise TokenizerError(
            where=where,
            found="the model has no chat template",
            remedy="completion works without --chat",
        )
    if wanted == "default" and len(templates) == 1:
        return next(iter(templates))
    raise TokenizerError(
        where=where,
        found=f"no chat template '{wanted}'",
        remedy=f"there are {', '.join(sorted(templates))}",
    )


def render(
    source: str, *, name: str, where: str, variables: Mapping[str, Any], messages: Sequence
) -> str:
    """Renders a chat template as the `transformers` library would (`apply_chat_template`).

    Raises TokenizerError, naming the template, when it does not parse, refuses the
    messages, fails, or spends more than the limits above.
    """
    place = f"{where}: chat template '{name}'"
    try:
        template = compiled(source)
    except Exception as error:
        raise TokenizerError(
            where=place, found=f"does not parse: {reason(error)}", remedy=TRY_COMPLETION
        ) from error
    try:
        return _bounded(template.generate({**variables, "messages": messages, BUDGET: Budget()}))
    # Templates are programs: whatever they raise is their mistake or the messages', never ours.
    except Exception as error:
        raise TokenizerError(
            where=place,
            found=f"does not render these messages: {reason(error)}",
            remedy=f"change the messages, or {TRY_COMPLETION}",
        ) from error


def _bounded(pieces: Iterable[str]) -> str:
    """The text of all pieces, given up where it grows past what anybody could mean."""
    text: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > LONGEST_PROMPT:
            raise ValueError(f"the text grows past {LONGEST_PROMPT:,} characters")
        text.append(piece)
    return "".join(text)


@lru_cache(maxsize=16)
def compiled(source: str) -> jinja2.Template:
    """Parses a template in a sandbox set up as in the `transformers` library."""
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.filters["within_loop_limit"] = within_loop_limit
    environment.filters["within_text_limit"] = within_text_limit
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


def reason(error: Exception) -> str:
    """Says what went wrong in a template, with the line where Jinja knows it."""
    line = getattr(error, "lineno", None)
    text = str(error) if str(error) != "" else type(error).__name__
    return text if line is None else f"{text} (line {line})"


def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Writes JSON as `json.dumps` does; Jinja's own filter escapes HTML, which prompts do not."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def raise_exception(message: str) -> None:
    """Lets a template refuse its messages."""
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    """Gives the present local time in the form a template asks for."""
    return datetime.now().strftime(form)


@jinja2.pass_context
def within_loop_limit(context: Context, items: Iterable) -> Iterator:
    """Iterates over what a template loops over, within the budget of the rendering."""
    # Not `context[BUDGET]`, which a template could set.
    budget = context.parent[BUDGET]
    for item in items:
        budget.spend()
        yield item


def within_text_limit(value: object) -> object:
    """Passes a value on unless it is longer than any prompt."""
    if isinstance(value, str | list | tuple) and len(value) > TEXT_LIMIT:
        raise jinja2.TemplateError(f"it builds a value of more than {TEXT_LIMIT} characters")
    return value


class Generation(jinja2.ext.Extension):
    """Reads `{% generation %}`, which marks what an assistant says, as its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Drops the marks: they matter to training only."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which loops, products and joined texts are bounded too."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes an operation whose result could be far larger than what it is given."""
        if operator == "**":
            raise jinja2.TemplateError("powers are not supported in a chat template")
        if operator == "*":
            refuse_large_product(left, right)
        return within_text_limit(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = filtered(loop.iter, "within_loop_limit")
        for parent in tree.find_all(nodes.Node):
            bound_joins(parent)
        tree.set_environment(self)
        return tree


def refuse_large_product(left: Any, right: Any) -> None:
    """Refuses to repeat a text or list beyond the limit before memory is spent on it."""
    for value, times in ((left, right), (right, left)):
        repeats = isinstance(value, str | list | tuple) and isinstance(times, int)
        if repeats and len(value) * times > TEXT_LIMIT:
            raise jinja2.TemplateError(f"it repeats a value to more than {TEXT_LIMIT} characters")


def bound_joins(parent: nodes.Node) -> None:
    """Wraps the `a ~ b` among the fields of a node: unlike `a + b`, Jinja cannot intercept it."""
    if isinstance(parent, nodes.Filter) and parent.name == "within_text_limit":
        return
    for key, value in parent.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(parent, key, filtered(value, "within_text_limit"))
        elif isinstance(value, list):
            setattr(parent, key, [bounded(item) for item in value])


def bounded(item: object) -> object:
    """Wraps a join that stands in a list of nodes."""
    return filtered(item, "within_text_limit") if isinstance(item, nodes.Concat) else item


def filtered(value: Any, name: str) -> nodes.Filter:
    """Sends an expression of a template through one of our filters."""
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)
