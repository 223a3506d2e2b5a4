"""The page of a split: its texts, its numbers, that it needs nothing else, and its errors."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

import pytest

from author.chips import chip_programs
from author.spec import ModelSpec
from tests import tiny
from tests.browser import chromium
from tp.cli import main
from tp.outline import Outline
from tp.picture.text import Part, parts_of
from tp.roll import roll
from tp.stages import Asked

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "tests" / "checkpoints" / "smollm2" / "config.json"
VOID = {"meta", "link", "br", "hr", "img", "input"}


# --- The text of every chip, from lines with holes


def filled(text: str, chip: int, copy: int) -> str:
    """A line with its holes filled, as the module says what they are."""

    def value(hole: re.Match[str]) -> str:
        inside = hole[1]
        if inside == "c":
            return str(chip)
        if "/" in inside:
            return inside.split("/")[chip]
        step, start = re.fullmatch(r"(?:(\d+)\*)?l(?:\+(\d+))?", inside).groups()  # type: ignore[union-attr]
        return str(int(step or 1) * copy + int(start or 0))

    return re.sub(r"\{([^}]*)\}", value, text)


def put_together(parts: Sequence[Part], chip: int) -> str:
    """The program of a chip: what stands before the layers, the layers in order, what follows."""
    runs = [(part, layer, copy) for part in parts for copy, layer in enumerate(part.layers)]
    layered = [at for at, part in enumerate(parts) if part.layers]
    ordered = [(part, 0) for part in parts[: layered[0]]]
    ordered += [(part, copy) for part, _, copy in sorted(runs, key=lambda run: run[1])]
    ordered += [(part, 0) for part in parts[layered[-1] + 1 :]]
    lines = [
        filled(line.text, chip, copy)
        for part, copy in ordered
        for line in part.lines
        if (line.chips is None or chip in line.chips) and not (line.once and copy > 0)
    ]
    return "".join(f"{line}\n" for line in ("## Main", *lines))


def folded(spec: ModelSpec, chips: int) -> None:
    outline = Outline(name="tiny", family="tiny", spec=spec)
    joint = Asked(outline=outline, chips=chips, context=12).joint
    parts = parts_of(roll(joint), chips)
    for chip, program in enumerate(chip_programs(joint)):
        assert put_together(parts, chip) == program.text, f"chip {chip} of {chips}"


@pytest.mark.parametrize("name", tiny.SPECS)
@pytest.mark.parametrize("chips", [1, 3, 7])
def test_the_text_of_every_chip_comes_out_of_the_folded_one(name: str, chips: int) -> None:
    folded(tiny.SPECS[name], chips)


@pytest.mark.parametrize("seed", range(6))
def test_the_text_of_random_models_comes_out_too(seed: int) -> None:
    folded(tiny.random_spec(seed), 5)


def test_layers_that_take_turns_are_parts_of_their_own() -> None:
    near, far = (tiny.layer(mixer) for mixer in ("sliding_window", "attention"))
    spec = tiny.model(*[near, far] * 4)
    folded(spec, 3)
    outline = Outline(name="tiny", family="tiny", spec=spec)
    parts = parts_of(roll(Asked(outline=outline, chips=3, context=12).joint), 3)
    assert [part.layers for part in parts if part.layers] == [(0,), (1, 3, 5), (2, 4, 6), (7,)]


def test_a_line_names_its_matrices_without_a_chip() -> None:
    outline = Outline(name="tiny", family="tiny", spec=tiny.SPECS["attention-silu"])
    parts = parts_of(roll(Asked(outline=outline, chips=2, context=12).joint), 2)
    (line,) = (
        n for p in parts for n in p.lines if n.text == "Let qr0_c{c} be xn0 matmul Wq0_c{c}."
    )
    assert line.names == ("qr0", "xn0", "Wq0")


# --- The page


class Page(HTMLParser):
    """A page as a parser sees it: scripts, title, attributes; what is opened must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.inside: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
            self.inside.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if self.open:
            self.inside[self.open[-1]][-1] += data


def drawn(model: Path | str, chips: int, file: Path) -> str:
    assert main(["inspect", str(model), "--chips", str(chips), "--json", "--html", str(file)]) == 0
    return file.read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return drawn(CONFIG, 5, tmp_path_factory.mktemp("page") / "page.html")


@pytest.mark.parametrize("chips", [1, 2, 5, 64])
def test_the_numbers_in_a_page_are_those_of_json(
    chips: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Page(drawn(CONFIG, chips, tmp_path / "page.html"))
    printed, said = capsys.readouterr()
    data, _ = found.inside["script"]
    assert json.loads(data)["facts"] == json.loads(printed)
    assert re.fullmatch(r"wrote \S+page\.html, \d+ kB\n", said)


def test_a_page_is_well_formed(page: str) -> None:
    found = Page(page)
    assert found.open == []
    ids = [value for name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'get\("([\w-]+)"\)', found.inside["script"][1]))
    assert wanted <= set(ids)


def test_a_page_needs_nothing_else(page: str) -> None:
    assert re.findall(r"https?:|@import|url\((?!#)|\bimport\b|\bfetch\b|XMLHttp", page) == []
    found = Page(page)
    assert [v for name, v in found.attributes if name in ("src", "srcset")] == []
    assert [v for name, v in found.attributes if name == "href"] == ["data:,"]
    assert any("default-src 'none'" in (v or "") for _, v in found.attributes)


@pytest.mark.parametrize(
    "name",
    [
        'a "b" & <i>c.json',
        "<!-- <script> <title> -->.json",
        "{{data}} {{script}}.json",
        "it's \N{SNOWMAN}\N{LINE SEPARATOR} \\u003c.json",
    ],
)
def test_any_name_of_a_model_is_only_a_name(name: str, tmp_path: Path) -> None:
    model = tmp_path / name
    model.write_bytes(CONFIG.read_bytes())
    found = Page(drawn(model, 2, tmp_path / "page of it.html"))
    assert found.open == []
    assert found.inside["title"] == found.inside["h1"] == [f"{name} on 2 chips"]
    data, _ = found.inside["script"]
    assert json.loads(data)["facts"]["model"]["name"] == name


def test_the_end_of_a_script_inside_json_ends_nothing(tmp_path: Path) -> None:
    spec = json.loads((ROOT / "tests" / "goldens" / "llama_gqa.json").read_text())["spec"]
    model = tmp_path / "spec.json"
    model.write_text(json.dumps({"family": "</script><script>alert(1)//", "spec": spec}))
    found = Page(drawn(model, 2, tmp_path / "page.html"))
    assert len(found.inside["script"]) == 2
    assert json.loads(found.inside["script"][0])["facts"]["model"]["family"].startswith("</script>")


def test_a_name_that_is_no_unicode_still_has_a_page(tmp_path: Path) -> None:
    model = tmp_path / "caf\udce9.json"
    model.write_bytes(CONFIG.read_bytes())
    found = Page(drawn(model, 2, tmp_path / "page.html"))
    assert found.inside["h1"] == ["caf?.json on 2 chips"]


def test_a_page_of_many_like_layers_is_small(tmp_path: Path) -> None:
    config = json.loads(CONFIG.read_text())
    deep = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps({**config, **deep, "hidden_size": 576}))
    page = drawn(tmp_path / "config.json", 64, tmp_path / "page.html")
    data = json.loads(Page(page).inside["script"][0])
    assert len(page) < 200_000
    assert sorted(n for part in data["parts"] for n in part["layers"]) == list(range(30))


def test_what_a_page_is_made_of_is_shipped() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = declared["package-data"]["tp.picture"]
    files = [p.name for p in (ROOT / "tp" / "picture").iterdir() if p.suffix not in (".py", ".pyc")]
    kept = {"page.html", "page.css", "page.js", "text.js", "matrices.js", "charts.js", "layers.js"}
    assert kept == set(files) - {"__pycache__"}
    assert [name for name in kept if not any(fnmatch(name, p) for p in patterns)] == []


# --- Mistakes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--chips", "2", "--html", "/no/such/page.html"], "/no/such/page.html: cannot be written"),
        (["--chips", "2", "--html", str(ROOT)], "cannot be written: Is a directory"),
        (["--chips", "2,3", "--html", "p.html"], "--html draws one width"),
        (["--html", "p.html"], "--html draws one width: wanted it in --chips, as in --chips 5"),
        (["--chips", "257", "--html", "p.html"], "--html draws up to 256 chips, found 257"),
        (["--chips", "2", "--text", "--html", "p.html"], "leave out --text"),
    ],
)
def test_a_page_that_cannot_be_is_refused_before_the_work(
    options: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "no/such/model", *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert list(tmp_path.iterdir()) == []


# --- In a browser


@pytest.mark.skipif(chromium() is None, reason="no Chromium here: apt-get install chromium")
def test_what_a_browser_shows_is_what_the_numbers_say() -> None:
    command = [sys.executable, "scripts/check_picture", "--chips", "2,5"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    assert ran.stdout.count(" 0 differences\n") == 2
