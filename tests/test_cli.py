"""The command as a person meets it: what it prints, what it refuses, and with which status."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tp.cli import main

CHECKPOINTS = Path(__file__).parent / "checkpoints"
GOLDENS = Path(__file__).parent / "goldens"
LLAMA = str(CHECKPOINTS / "llama")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says as it refuses; it must say it once, and print nothing else."""
    try:
        status = main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    return err.strip()


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A checkpoint of several shards, to break."""
    return Path(shutil.copytree(LLAMA, tmp_path / "llama"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "nowhere", "hi"], "nowhere: is not there; wanted a directory"),
        (["run", LLAMA, "hi"], "no tokenizer.json; a prompt of token ids (--ids) needs none"),
        (["run", LLAMA, "--ids", "1 x"], "wanted token ids, as in '1 2 3'"),
        (["run", LLAMA, "--ids", "1 2", "--chips", "0"], "'0': wanted a number of chips from 1"),
        (["run", LLAMA, "--ids", "1 2", "--chips", "two"], "'two': wanted a number of chips"),
        (["run", LLAMA, "--ids", "1 2", "--top-p", "2"], "top_p is 2.0; wanted more than 0"),
        (["run", LLAMA, "--ids", "1 2", "--temperature", "-1"], "temperature is -1.0"),
        (["run", LLAMA, "--ids", "1 2", "--ctx", "300"], "a context of 300 was asked for"),
        (["run", LLAMA, "--ids", "1 2", "--receipt", "/no/r.json"], "cannot be written"),
        (["run", LLAMA, "--ids", "170"], "token ids 170 are not among the 170 of the model"),
        (["run", LLAMA, "--ids", "1 2 3 4 5", "--ctx", "4"], "5 tokens do not fit a context of 4"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        ([], "required: COMMAND"),
        (["read", "/no/such/text"], "/no/such/text: No such file or directory"),
    ],
)
def test_a_mistake_gets_one_line_and_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    err = refusal(capsys, *arguments)
    assert said in err
    assert "\n" not in err
    assert err.startswith("anyfold")


def test_an_empty_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is empty" in refusal(capsys, "run", str(tmp_path), "--ids", "1")


def test_a_missing_shard_is_named(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (broken / "model-00002-of-00004.safetensors").unlink()
    assert "model-00002-of-00004.safetensors" in refusal(capsys, "run", str(broken), "--ids", "1")


def test_a_truncated_shard_is_named(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = broken / "model-00003-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1024])
    assert "model-00003-of-00004.safetensors" in refusal(capsys, "run", str(broken), "--ids", "1")


def test_an_unknown_family_is_named_with_those_known(
    broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "elman"}))
    err = refusal(capsys, "run", str(broken), "--ids", "1")
    assert "'elman'" in err
    assert "llama" in err


def test_a_typo_in_a_text_is_shown_with_a_caret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "typo.txt"
    text.write_text("## Main\nLet q be rope of x with cos C and sin across 4 heads.\n")
    lines = refusal(capsys, "read", str(text)).split("\n")
    assert lines[0].endswith("typo.txt:2:46: expected 'from' or 'across'")
    assert lines[1].index("4 heads") == lines[2].index("^")


def test_a_text_is_printed_as_it_was_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = json.loads((GOLDENS / "mqa.json").read_text())
    text = next(c["text"] for c in golden["cases"] if c["kind"] == "decode_step")
    (tmp_path / "step.txt").write_text(text)
    assert main(["read", str(tmp_path / "step.txt")]) == 0
    assert capsys.readouterr().out == text


def test_a_program_is_authored_in_the_golden_form(capsys: pytest.CaptureFixture[str]) -> None:
    golden = json.loads((GOLDENS / "mqa.json").read_text())
    case = next(c for c in golden["cases"] if c["args"].get("tp", 1) > 1 and "text" in c)
    arguments = json.dumps(case["args"])
    path = str(GOLDENS / "mqa.json")
    assert main(["author", path, case["kind"], "--args", arguments]) == 0
    assert json.loads(capsys.readouterr().out) == case


def test_a_case_that_is_refused_is_said_and_its_status_is_2(capsys) -> None:
    path = str(GOLDENS / "refused_ple.json")
    case = json.loads((GOLDENS / "refused_ple.json").read_text())["cases"][0]
    assert main(["author", path, case["kind"], "--args", json.dumps(case["args"])]) == 2
    found = capsys.readouterr()
    assert json.loads(found.out) == case
    assert case["error"] in found.err


def test_a_batch_of_cases_is_authored_a_line_a_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = json.loads((GOLDENS / "refused_ple.json").read_text())
    request = {"spec": golden["spec"], "cases": [*golden["cases"], {"kind": "no", "args": {}}]}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
    assert main(["author", "--batch"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == golden["cases"]
    assert "no kind 'no' of program" in json.loads(last)["error"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["decode_stepp"], "no kind 'decode_stepp' of program; there are forward,"),
        (["decode_step", "--args", '{"dir": "w"}'], "decode_step needs ctx"),
        (["decode_step", "--args", "{"], "--args: not JSON"),
        (["decode_step", "--args", "[]"], "--args: found [], wanted a JSON object"),
    ],
)
def test_what_cannot_be_authored_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, "author", str(GOLDENS / "mqa.json"), *arguments)


@pytest.mark.parametrize("by", ["prefill", "decode", "text"])
def test_logits_agree_with_transformers(by: str, tmp_path: Path) -> None:
    expected = np.load(CHECKPOINTS / "llama" / "expected.npz")
    ids = " ".join(map(str, expected["input_ids_0"]))
    out = tmp_path / "logits.npz"
    arguments = ["logits", LLAMA, "--ids", ids, "--chips", "3", "--by", by, "--out", str(out)]
    assert main(arguments) == 0
    logits, wanted = np.load(out)["logits"], expected["logits_0"]
    assert logits.dtype == np.float32
    assert np.abs(logits - wanted).max() < 1e-3 * wanted.std()


def test_a_model_without_a_tokenizer_answers_in_token_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = np.load(CHECKPOINTS / "llama" / "expected.npz")
    ids = " ".join(map(str, expected["input_ids_0"]))
    receipt = tmp_path / "receipt.json"
    arguments = ["run", LLAMA, "--ids", ids, "--chips", "2", "--max-tokens", "12"]
    assert main([*arguments, "--receipt", str(receipt)]) == 0
    out, err = capsys.readouterr()
    assert [int(word) for word in out.split()] == expected["greedy_0"].tolist()
    assert "2 simulated chips" in err
    assert "ended: length" in err
    chips = json.loads(receipt.read_text())["chips"]
    assert [chip["chip"] for chip in chips] == [0, 1]
    assert all(chip["bytes_read"] > 0 for chip in chips)
