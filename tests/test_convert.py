"""A store loads as its source does, bit for bit; it is whole and as written, or it is refused."""

import errno
import hashlib
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models

from author.kinds import author
from tests.gguf_of import ARCHITECTURES, gguf_of
from tests.making_checkpoints import decoder, keys, tensors, write
from tests.making_gguf import make_gguf, normal
from tests.making_safetensors import split_bytes
from tp.checkpoint import CheckpointError, open_checkpoint
from tp.cli import main
from tp.engine import load
from tp.loader import read_table, read_whole
from tp.operands import operands
from tp.roll import roll
from tp.source import open_source
from tp.store import convert
from tp.store_shard import Output

FOLDER = Path(__file__).parent / "checkpoints"
MANIFEST = "anyfold-q8.json"
FAMILIES = sorted(p.name for p in FOLDER.iterdir() if (p / "expected.npz").exists())
SMALL = 20_000  # bytes a shard, so that a tiny model has several


def converted(path, out, **options):
    """A checkpoint as a store."""
    convert(open_source(str(path)), out, model=str(path), **options)
    return out


def matrices(source):
    """Every weight and table of a model, whole."""
    split = {"tp": 1, "align": 32, "vocabulary": True, "beyond": True}
    step = {"dir": "w", "ctx": 2, "tok": 0, "pos": 1}
    program = author(source.model.spec, "tp_decode_step", step | split)
    for name, operand in operands(roll(program)).items():
        if operand.role == "table":
            yield name, read_table(source.model, source.checkpoint, operand)
        elif operand.role == "weight" and not (source.model.tied and name.base == "Wout"):
            yield name, read_whole(source.model, source.checkpoint, operand)


def without_quantising(monkeypatch):
    def quantise(*_):
        raise AssertionError("quantised again")

    monkeypatch.setattr("tp.checkpoint.quantise", quantise)
    monkeypatch.setattr("tp.views.quantise", quantise)


# --- The same numbers


def assert_alike(path, out, monkeypatch):
    """A store has every matrix of its source, and quantises nothing to give it."""
    wanted = dict(matrices(open_source(str(path))))
    without_quantising(monkeypatch)
    source = open_source(str(out))
    found = dict(matrices(source))
    assert list(found) == list(wanted)
    for name, matrix in found.items():
        np.testing.assert_array_equal(matrix, wanted[name], err_msg=str(name))
    return source


@pytest.mark.parametrize("family", FAMILIES)
def test_a_store_has_the_matrices_of_its_source(family, tmp_path, monkeypatch):
    out = converted(FOLDER / family, tmp_path / "out", shard_size=SMALL)
    source = assert_alike(FOLDER / family, out, monkeypatch)
    assert source.model.spec == open_source(str(FOLDER / family)).model.spec


@pytest.mark.parametrize("family", sorted({*ARCHITECTURES} & {*FAMILIES}))
def test_a_store_of_a_gguf_has_the_matrices_of_its_source(family, tmp_path, monkeypatch):
    path = gguf_of(FOLDER / family, tmp_path / "model.gguf")
    source = assert_alike(path, converted(path, tmp_path / "out"), monkeypatch)
    text = "t5 t7 t9"
    assert source.spelling().encode(text) == open_source(str(path)).spelling().encode(text)


# Families of each kind, and together all widths.
WIDTHS = {"smollm2": range(1, 9), "gpt_oss": (3, 8), "deepseek_v2": (2, 5), "qwen3_next": (1, 4)}
BOTH = [(family, chips) for family, widths in WIDTHS.items() for chips in widths]


@pytest.mark.parametrize(("family", "chips"), BOTH)
def test_every_chip_holds_the_same_bits(family, chips, tmp_path, monkeypatch):
    out = converted(FOLDER / family, tmp_path / "out")
    wanted = decoder(FOLDER / family, chips, kernels="xla").weights
    without_quantising(monkeypatch)
    found = decoder(out, chips, kernels="xla").weights
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("chips", [1, 3])
def test_the_logits_are_the_same_bits(chips, tmp_path):
    ids = [5, 7, 11, 13, 17]
    path = FOLDER / "llama"
    wanted = load(str(path), chips=chips, context=16).logits(ids)
    found = load(str(converted(path, tmp_path / "out")), chips=chips, context=16).logits(ids)
    np.testing.assert_array_equal(found, wanted)


def tiny_gguf(path, kind, tied=False):
    """A one-layer llama file of a type: its path, and its tensors."""
    shapes = {
        "token_embd": (101, 96),
        "output": (101, 96),
        "blk.0.attn_q": (192, 96),
        "blk.0.attn_k": (96, 96),
        "blk.0.attn_v": (96, 96),
        "blk.0.attn_output": (96, 192),
        "blk.0.ffn_gate": (160, 96),
        "blk.0.ffn_up": (160, 96),
        "blk.0.ffn_down": (96, 160),
    }
    if tied:
        del shapes["output"]
    made = {f"{n}.weight": (normal(*s, seed=i), kind) for i, (n, s) in enumerate(shapes.items())}
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        made[f"{name}.weight"] = (normal(96), "F32")
    said = {
        "llama.attention.head_count": 6,
        "llama.attention.head_count_kv": 3,
        "llama.attention.key_length": 32,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 96,
        "llama.feed_forward_length": 160,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["ab", *map(chr, range(97, 123)), *map(str, range(27, 101))],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_template": "{{ messages[0].content }}!",
    }
    return make_gguf(path, made, said), made


def q8_0_of(array, kind):
    """What the gguf library makes Q8_0 of a matrix of another type: its values and scales."""
    stored = gguf.quantize(array, gguf.GGMLQuantizationType[kind])
    floats = gguf.dequantize(stored, gguf.GGMLQuantizationType[kind])
    raw = gguf.quantize(floats, gguf.GGMLQuantizationType.Q8_0).reshape(len(array), -1, 34)
    values = raw[:, :, 2:].copy().view(np.int8).reshape(len(array), -1)
    return values, raw[:, :, :2].copy().view(np.float16)[:, :, 0]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_a_store_holds_q8_0_as_it_was_and_other_types_as_the_gguf_library_quantises(kind, tmp_path):
    path, made = tiny_gguf(tmp_path / "tiny.gguf", kind)
    out = converted(path, tmp_path / "out")
    held = load_file(out / "q8-00001-of-00001.safetensors")
    for name, tensor in {
        "Emb": "token_embd",
        "Wd0": "blk.0.ffn_down",
        "Wv0": "blk.0.attn_v",
    }.items():
        values, scales = q8_0_of(made[f"{tensor}.weight"][0], kind)
        np.testing.assert_array_equal(held[f"{name}.q8"], values)
        np.testing.assert_array_equal(held[f"{name}.scales"], scales)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_tied_embedding_is_stored_once(kind, tmp_path):
    path, made = tiny_gguf(tmp_path / "tiny.gguf", kind, tied=True)
    held = load_file(converted(path, tmp_path / "out") / "q8-00001-of-00001.safetensors")
    matrices = sum(array.size for array, _ in made.values() if array.ndim == 2)
    assert sum(a.nbytes for n, a in held.items() if n.endswith(".q8")) == matrices
    assert sum(a.nbytes for n, a in held.items() if n.endswith(".scales")) == matrices // 16


def test_floats_keep_their_type_and_their_bits(tmp_path):
    out = converted(FOLDER / "mistral", tmp_path / "out")
    header, data = split_bytes((out / "q8-00001-of-00001.safetensors").read_bytes())
    source, body = split_bytes((FOLDER / "mistral" / "model.safetensors").read_bytes())
    for name, tensor in {"an0": "layers.0.input_layernorm", "on": "norm"}.items():
        ours, theirs = header[name], source[f"model.{tensor}.weight"]
        assert (ours["dtype"], ours["shape"]) == ("BF16", theirs["shape"])
        assert data[slice(*ours["data_offsets"])] == body[slice(*theirs["data_offsets"])]


def test_shards_are_as_large_as_was_asked_for_and_hold_each_matrix_once(tmp_path):
    out = converted(FOLDER / "llama", tmp_path / "out", shard_size=SMALL)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 4
    held = [load_file(file) for file in files]
    names = [name for shard in held for name in shard]
    assert len(names) == len(set(names))
    for shard in held:
        bases = {name.split(".")[0] for name in shard}
        assert sum(array.nbytes for array in shard.values()) <= SMALL or len(bases) == 1
        assert {f"{b}.scales" for b in bases if f"{b}.q8" in shard} <= shard.keys()
    assert open_checkpoint(out).tensors.keys() == {name.split(".")[0] for name in names}


def test_no_more_is_in_memory_than_some_bands(tmp_path):
    random = np.random.default_rng(0)
    made = tensors("llama") | {"lm_head.weight": random.normal(size=(170_000, 64))}
    made["model.embed_tokens.weight"] = made["lm_head.weight"]
    path = write(tmp_path / "large", keys("llama", vocab_size=170_000), made)
    del made
    source = open_source(str(path))
    tracemalloc.start()
    try:
        convert(source, tmp_path / "out", model="large")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Its largest tensor has 44 MB, 12 in q8; a band has 4 MB as floats.
    assert peak < 40e6


# --- As a person meets it


def said(capsys, *arguments):
    """What the command says, and its status."""
    try:
        status = main([str(a) for a in arguments])
    except SystemExit as stopped:
        status = stopped.code
    out, err = capsys.readouterr()
    assert out == ""
    return status, err.strip()


def test_a_converted_model_runs_like_any_other(tmp_path, capsys):
    path, out = tiny_gguf(tmp_path / "tiny.gguf", "Q4_1")[0], tmp_path / "out"
    status, text = said(capsys, "convert", path, out, "--shard-size", "20KB")
    # 129.5 kB of int8, scales and norms, and the headers of eight files.
    assert (status, text) == (0, f"wrote 8 shards, 131.4 kB to {out}")
    found = []
    for model in (path, out):
        assert main(["run", str(model), "abc", "--chat", "--chips", "2", "--max-tokens", "5"]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] != ""
    status, text = said(capsys, "convert", path, out, "--shard-size", "20KB")
    assert (status, text) == (0, f"{out}: was whole already: 8 shards, 131.4 kB")


def test_a_directory_keeps_its_tokenizer_and_chat_templates(tmp_path):
    path = Path(shutil.copytree(FOLDER / "smollm2", tmp_path / "model"))
    library = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    library.decoder = decoders.ByteLevel()
    library.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}b")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "twice.jinja").write_text("abab")
    spelling = open_source(str(converted(path, tmp_path / "out"))).spelling()
    messages = [{"role": "user", "content": "a"}]
    assert spelling.encode("ab") == [2]
    assert 1 in spelling.stop_ids
    assert spelling.chat_prompt(messages) == "ab"
    assert spelling.chat_prompt(messages, template="twice") == "abab"


@pytest.mark.parametrize("size", ["1X", "0", "-5", "1.5GB", ""])
def test_a_strange_shard_size_is_refused(size, tmp_path, capsys):
    status, text = said(capsys, "convert", FOLDER / "llama", tmp_path / "out", "--shard-size", size)
    assert status == 2
    assert f"{size!r}: wanted a size, as in 1GB or 500MB" in text or "expected one" in text


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([FOLDER / "llama"], "convert wants MODEL and OUT, or --verify OUT"),
        ([], "convert wants MODEL and OUT, or --verify OUT"),
        (["x", "--verify", "y"], "--verify re-reads a store: leave out MODEL and OUT"),
        (["nowhere", "y"], "nowhere: is not there"),
        (["--verify", "nowhere"], "nowhere: is no q8 store"),
        (["--verify", FOLDER / "llama"], "llama: is no q8 store"),
    ],
)
def test_a_mistake_gets_one_line(arguments, wanted, capsys):
    status, text = said(capsys, "convert", *arguments)
    assert status == 2
    assert wanted in text
    assert "\n" not in text


def test_a_place_that_holds_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    model = FOLDER / "llama"
    for place, why in {
        "file": "exists and is no directory; name a new one",
        "full": "exists and is no q8 store; it holds notes.txt: name a new directory",
        "file/out": "cannot be written (Not a directory)",
    }.items():
        status, text = said(capsys, "convert", model, tmp_path / place)
        assert status == 2
        assert f"{tmp_path / place}: {why}" in text
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "full", "notes.txt"]


def test_a_store_of_another_model_is_left_alone(tmp_path, capsys):
    out = converted(FOLDER / "llama", tmp_path / "out")
    before = digests(out)
    status, text = said(capsys, "convert", FOLDER / "smollm2", out)
    assert (status, "is a q8 store of another model than" in text) == (2, True)
    status, text = said(capsys, "convert", out, tmp_path / "again")
    assert (status, "is a q8 store already; give the model it came from" in text) == (2, True)
    assert digests(out) == before


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(
    tmp_path, capsys, monkeypatch
):
    free = shutil.disk_usage(tmp_path)._replace(free=50_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    status, text = said(capsys, "convert", FOLDER / "llama", tmp_path / "out")
    assert status == 2
    assert "bytes are to be written and 50,000 are free; make room" in text
    assert list((tmp_path / "out").iterdir()) == []


def test_a_disk_that_fills_up_is_named_and_the_conversion_goes_on_afterwards(
    tmp_path, capsys, monkeypatch
):
    wanted = digests(converted(FOLDER / "llama", tmp_path / "wanted", shard_size=SMALL))
    out, write = tmp_path / "out", Output.write
    room = iter(range(40))

    def full(self, data):
        if next(room, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    monkeypatch.setattr(Output, "write", full)
    arguments = ("convert", FOLDER / "llama", out, "--shard-size", SMALL)
    status, text = said(capsys, *arguments)
    assert status == 2
    assert "cannot be written (No space left on device); mend that and run convert again" in text
    assert "never finished" in said(capsys, "run", out, "--ids", "1")[1]
    room = iter(range(1000))
    status, text = said(capsys, *arguments)
    assert status == 0
    assert "goes on after" in text
    assert digests(out) == wanted


# --- Verifying


def digests(path):
    """The sha256 of every file of a directory."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_the_manifest_has_the_digest_of_every_file_and_of_the_source(tmp_path, capsys):
    out = converted(FOLDER / "llama", tmp_path / "out", shard_size=SMALL)
    manifest = json.loads((out / MANIFEST).read_text())
    found = digests(out)
    del found[MANIFEST]
    assert {name: said["sha256"] for name, said in manifest["files"].items()} == found
    source = digests(FOLDER / "llama")
    del source["expected.npz"]
    assert {n: said["sha256"] for n, said in manifest["source"]["files"].items()} == source
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(source.items()))
    assert manifest["source"]["sha256"] == hashlib.sha256(lines.encode()).hexdigest()
    status, text = said(capsys, "convert", "--verify", out)
    assert status == 0
    assert f"{out}: all {len(found)} files, " in text


@pytest.mark.parametrize("name", ["q8-00002-of-00005.safetensors", "config.json"])
def test_a_byte_that_changed_is_found(name, tmp_path, capsys):
    out = converted(FOLDER / "llama", tmp_path / "out", shard_size=SMALL)
    raw = bytearray((out / name).read_bytes())
    raw[-2] ^= 1
    (out / name).write_bytes(raw)
    status, text = said(capsys, "convert", "--verify", out)
    assert status == 2
    assert f"{out}: {name} is not as it was written: another sha256; remove it and" in text


def test_a_store_with_files_missing_or_cut_short_is_refused_with_all_of_them(tmp_path, capsys):
    out = converted(FOLDER / "llama", tmp_path / "out", shard_size=SMALL)
    first, second = sorted(out.glob("*.safetensors"))[:2]
    size = first.stat().st_size
    first.write_bytes(first.read_bytes()[:-8])
    second.unlink()
    again = ["convert", FOLDER / "llama", out]
    for arguments in (["run", out, "--ids", "1"], ["convert", "--verify", out], again):
        status, text = said(capsys, *arguments)
        assert status == 2
        assert f"{first.name} has {size - 8} bytes, and had {size}; " in text
        assert f"{second.name} is missing; " in text


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"version": 2}, "is 'anyfold q8 store' of version 2; wanted"),
        ({"files": None}, "lacks some entries"),
        ({"files": {"a": 1}}, "lacks some entries"),
        ({"source": {"format": "npz"}}, "lacks some entries"),
    ],
)
def test_a_manifest_that_is_not_ours_is_refused(change, wanted, tmp_path):
    out = converted(FOLDER / "llama", tmp_path / "out")
    manifest = json.loads((out / MANIFEST).read_text())
    (out / MANIFEST).write_text(json.dumps(manifest | change))
    with pytest.raises(CheckpointError, match=wanted):
        open_checkpoint(out)
