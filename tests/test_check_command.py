"""`anyfold check` as a person meets it: its table, its verdict, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from tests.test_cli import CHECKPOINTS, refusal
from tp import loader
from tp.check.widths import Check, Report
from tp.check_command import PROMPTS
from tp.cli import main

SMOLLM = str(CHECKPOINTS / "smollm2")
IDS = ["--ids", "3 8 1 30 5", "--ids", "9 9 2"]


def checked(capsys, *arguments):
    """The status, and the lines of the table."""
    status = main(["check", SMOLLM, *arguments])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def test_widths_that_say_the_same_are_within(capsys, tmp_path):
    file = tmp_path / "check.json"
    status, lines, err = checked(capsys, *IDS, "--chips", "2,3", "--json", str(file))
    assert status == 0
    assert lines[0] == "2 prompts of 3 to 5 tokens"
    rows = [line.split()[:4] for line in lines[2:-1]]
    assert rows[0] == ["1", "steps", "prefill", rows[0][3]]
    assert [row[:2] for row in rows[1:]] == [[n, w] for n in "23" for w in ("prefill", "steps")]
    assert all("8/8" in line for line in lines[2:-1])
    assert lines[-1] == "all within 0.001 of the logits' deviation"
    assert err.splitlines()[:2] == ["1 chip: loading", "1 chip: prefill"]
    numbers = json.loads(file.read_text())
    assert (numbers["holds"], numbers["bisected"], numbers["tolerance"]) == (True, [], 1e-3)
    assert numbers["prompts"] == [[3, 8, 1, 30, 5], [9, 9, 2]]
    assert [prompt["of"] for prompt in numbers["rows"][-1]["prompts"]] == [5, 3]


def test_a_slice_that_is_read_wrongly_is_named_and_the_status_is_1(capsys, monkeypatch):
    plain = loader.stored_ranges

    def faulty(operand, chip):
        outer, inner = plain(operand, chip)
        if str(operand.name) == "Wd1" and chip == 1:
            inner = [(start - 32, length, width) for start, length, width in inner]
        return outer, inner

    monkeypatch.setattr(loader, "stored_ranges", faulty)
    status, lines, err = checked(capsys, "--ids", "3 8 1", "--chips", "2", "--json", "-")
    assert status == 1
    found = json.loads("\n".join(lines))
    assert found["holds"] is False
    (bisected,) = found["bisected"]
    fault = bisected["fault"]
    assert (fault["of"], fault["name"], fault["chip"], fault["layer"]) == (
        "weights",
        "Wd1_c1",
        1,
        1,
    )
    assert "  layer 1, chip 1 of 2, position 1: the weights that are held" in err
    assert "    Let Wd1_c1 be a 56 by 72 tensor of Real." in err
    assert "    it is what stands 32 rows earlier in Wd1" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "4", "--ids", "1"], "--tokens is of the built-in prompts: leave out"),
        (["--tokens", "0"], "'0': wanted a number of tokens from 1"),
        (["--prompt", "hi"], "no tokenizer.json; a prompt of token ids (--ids) needs none"),
        (["--ids", "160"], "token ids 160 are not among the 160 of the model"),
        (["--ids", "1 2 3", "--ctx", "2"], "3 tokens do not fit a context of 2"),
        (["--tolerance", "-1"], "'-1': wanted a number from 0, as in 1e-3"),
        (["--tolerance", "nan"], "'nan': wanted a number from 0, as in 1e-3"),
        (["--chips", "0"], "'0': wanted chips from 1"),
        (["--chips", "9", "--ids", "1"], "9 simulated chips were asked for after JAX had started"),
        (["--json", "/no/such/place.json"], "/no/such/place.json: cannot be written"),
        (["--against", "torch"], "invalid choice: 'torch'"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_a_mistake_gets_one_line_and_status_2(arguments, said, capsys):
    err = refusal(capsys, "check", SMOLLM, *arguments)
    assert said in err
    assert "\n" not in err


def test_built_in_prompts_are_as_long_as_asked_for(tmp_path, monkeypatch):
    path = Path(shutil.copytree(SMOLLM, tmp_path / "model"))
    vocabulary = {letter: number for number, letter in enumerate(sorted(set("".join(PROMPTS))))}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=None))
    library.decoder = decoders.ByteLevel()
    library.save(str(path / "tokenizer.json"))
    seen = []
    empty = Report(rows=(), bisected=())
    monkeypatch.setattr(Check, "report", lambda self: seen.append(self) or empty)
    assert main(["check", str(path), "--tokens", "200", "--chips", "1"]) == 0
    (asked,) = seen
    spelled = [[vocabulary[letter] for letter in (text * 9)[:200]] for text in PROMPTS]
    assert asked.prompts == spelled
    assert asked.context == 256
