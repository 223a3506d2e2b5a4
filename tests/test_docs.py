"""The documents say what is so: every form, every path, and programs that are really authored."""

import json
import re
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from author import statements
from author.checks import check_program
from author.english import read_program, write_program
from author.forms import EXPRESSIONS, STATEMENTS, Part
from author.manifest import manifest_from_json, manifest_to_json
from author.program import Program
from tests.test_layout import ORDER

ROOT = Path(__file__).parent.parent
FORM = re.compile(r"^\*\*`(.+)`\*\*$", re.MULTILINE)  # how the language page introduces one
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "docs/LANGUAGE.md", "docs/LAUNCH.md"]

PARTS = [c for c in vars(statements).values() if isinstance(c, type) and issubclass(c, Part)]
PARTS.remove(Part)


def document(name):
    return (ROOT / name).read_text()


def blocks(name, language):
    """The fenced blocks of a document that are in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", document(name), re.MULTILINE | re.DOTALL)


def words(template):
    """A template with a hole for every field, however the field is called."""
    return re.sub(r"\{\w+\}|[A-Z][A-Z]+|\b[A-Z]\b", "{}", template).strip()


def without_flags(template):
    return re.sub(r"\{!\w+\}", "", template)


# --- The language page


def test_the_language_page_has_every_form_and_no_other():
    forms = [*STATEMENTS, *EXPRESSIONS, *PARTS]
    declared = Counter(words(without_flags(form.TEMPLATE)) for form in forms)
    described = Counter(map(words, FORM.findall(document("docs/LANGUAGE.md"))))
    assert (declared - described, described - declared) == (Counter(), Counter())


@pytest.mark.parametrize("text", blocks("docs/LANGUAGE.md", "text"))
def test_a_program_of_the_language_page_is_sound(text):
    read = read_program(text)
    check_program(Program(statements=read))
    assert write_program(read) == text


@pytest.mark.parametrize("text", blocks("docs/LANGUAGE.md", "json"))
def test_a_manifest_of_the_language_page_reads_and_writes_back(text):
    assert manifest_to_json(manifest_from_json(json.loads(text))) == json.loads(text)


# --- The README


def authored():
    """What the README's Python for authoring leaves and prints."""
    (code,) = (b for b in blocks("README.md", "python") if "author.kinds" in b)
    printed, names = StringIO(), {}
    with redirect_stdout(printed):
        exec(code, names)
    return names["program"], printed.getvalue()


def test_the_program_of_the_readme_is_what_its_python_prints(monkeypatch):
    monkeypatch.chdir(ROOT)
    _, printed = authored()
    (shown,) = blocks("README.md", "text")
    assert printed.startswith(shown)
    assert write_program(read_program(shown)) == shown


def test_the_manifest_of_the_readme_is_part_of_the_authored_one(monkeypatch):
    monkeypatch.chdir(ROOT)
    whole = manifest_to_json(authored()[0].manifest)
    (excerpt,) = map(json.loads, blocks("README.md", "json"))
    assert excerpt["chips"] == whole["chips"]
    assert all(p in whole["placed"] for p in excerpt["placed"])
    assert all(c in whole["collectives"] for c in excerpt["collectives"])


@pytest.mark.parametrize("package", ORDER)
def test_the_readme_has_the_reading_order(package):
    found = re.search(rf"^\*\*{package}\*\*.*?\n\n(.*?)\n\n", document("README.md"), re.M | re.S)
    assert found is not None
    wanted = [
        m
        for m in ORDER[package]
        if ROOT.joinpath(package, *m.split(".")).with_suffix(".py").exists()
    ]
    assert re.findall(r"`([\w.]+)`", found[1]) == wanted


# --- All of them


def paths(name):
    """What a document names that looks like a path of the project."""
    spans = re.findall(
        r"`([\w.]{2,}/[\w./]*)`|\]\(([\w./]+)\)|^    ([\w./]+/\w+)$", document(name), re.M
    )
    return sorted({path for span in spans for path in span if path})


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_path_that_a_document_names_exists(name):
    assert [path for path in paths(name) if not (ROOT / path).exists()] == []


def test_the_readme_names_the_commands():
    assert {"scripts/demo", "scripts/test", ".ci/run"} <= set(paths("README.md"))
