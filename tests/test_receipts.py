"""A load reads the slices of its chips and little else, whatever they stand in, and says so."""

import json
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from threading import Barrier, Thread

import numpy as np
import pytest

from author.kinds import author
from tests.gguf_of import gguf_of
from tests.making_checkpoints import kept_layers, keys, matrix, tensors, write
from tests.making_safetensors import FLOATS, safetensors_bytes
from tp.checkpoint import open_checkpoint
from tp.cli import main
from tp.decoder import Decoder
from tp.launch import devices
from tp.loader import load
from tp.receipt import Books, Held, Receipt
from tp.source import open_source
from tp.store import convert

ROOT = Path(__file__).parent.parent
HEADS, GROUPS, HEAD, D, DFF, VOCAB, LAYERS = 9, 3, 32, 288, 416, 1000, 2
CONFIG = {
    "hidden_size": D,
    "intermediate_size": DFF,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "rope_scaling": None,
}
# Bytes a number: bfloat16; a scale and 32 values; values and scales apart.
BYTES = {"safetensors": 2, "gguf": 34 / 32, "store": 34 / 32}


@cache
def made(folder):
    """One model three times over: in three shards, as a GGUF in Q8_0, as a store."""
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (VOCAB, D), "lm_head": (VOCAB, D)}
    for layer in range(LAYERS):
        of = f"model.layers.{layer}."
        shapes |= {
            f"{of}self_attn.q_proj": (HEADS * HEAD, D),
            f"{of}self_attn.k_proj": (GROUPS * HEAD, D),
            f"{of}self_attn.v_proj": (GROUPS * HEAD, D),
            f"{of}self_attn.o_proj": (D, HEADS * HEAD),
            f"{of}mlp.gate_proj": (DFF, D),
            f"{of}mlp.up_proj": (DFF, D),
            f"{of}mlp.down_proj": (D, DFF),
        }
    tensors = {f"{name}.weight": matrix(random, *shape) for name, shape in shapes.items()}
    norms = [
        f"model.layers.{n}.{w}_layernorm"
        for n in range(LAYERS)
        for w in ("input", "post_attention")
    ]
    tensors |= {f"{name}.weight": np.ones(D, np.float32) for name in (*norms, "model.norm")}
    path = in_shards(folder / "model", keys("llama", **CONFIG), tensors)
    convert(open_source(str(path)), folder / "store", model="model")
    gguf = gguf_of(path, folder / "model.gguf")
    return {"safetensors": path, "gguf": gguf, "store": folder / "store"}


def in_shards(path, config, tensors):
    """A directory of three files in bfloat16, and their index."""
    path.mkdir()
    weight_map = {}
    for number in range(3):
        header, data = {}, b""
        name = f"model-{number + 1:05}-of-00003.safetensors"
        for tensor in sorted(tensors)[number::3]:
            raw = tensors[tensor].astype(FLOATS["BF16"]).tobytes()
            offsets = [len(data), len(data) + len(raw)]
            shape = tensors[tensor].shape
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
            data += raw
            weight_map[tensor] = name
        (path / name).write_bytes(safetensors_bytes(header, data))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("made")


def slices(spec, chips):
    """How many numbers of the matrices each chip has, by the manifest alone."""
    step = {"dir": "w", "ctx": 16, "tok": 0, "pos": 1}
    split = {"tp": chips, "align": 32, "vocabulary": True}
    manifest = author(spec, "tp_decode_step", step | split).manifest
    found = [0] * chips
    for placed in manifest.placed:
        piece = placed.slice
        if piece is not None and piece.of.base[0] in "WE":
            rows, cols = piece.of_shape
            along = sum(length for _, length in piece.ranges)
            found[placed.chip] += along * (cols if piece.axis == "rows" else rows)
    return found


def receipt_of(path, chips):
    source = open_source(str(path))
    made = Decoder(model=source.model, devices=devices(chips), context=16, kernels="xla")
    _, receipt = load(source.model, made.operands, source.checkpoint, made.devices, kernels="xla")
    return source, receipt


@pytest.mark.parametrize("chips", range(1, 9))
@pytest.mark.parametrize("kind", BYTES)
def test_no_more_is_read_than_the_slices_of_the_chips(kind, chips, folder):
    source, receipt = receipt_of(made(folder)[kind], chips)
    for chip, numbers in enumerate(slices(source.model.spec, chips)):
        wanted = numbers * BYTES[kind]
        assert wanted <= receipt.chips[chip].bytes_read <= 1.05 * wanted
    # Norms are read once for all of them.
    assert receipt.shared_bytes_read == (2 * LAYERS + 1) * D * (4 if kind == "gguf" else 2)
    assert source.checkpoint.bytes_read == receipt.bytes_read


@pytest.mark.parametrize("kind", BYTES)
def test_the_sum_over_chips_is_the_file_but_for_what_two_chips_share(kind, folder):
    source, receipt = receipt_of(made(folder)[kind], 3)
    weights = sum(
        tensor.nbytes
        for table in (source.checkpoint.tensors, source.checkpoint.scales)
        for tensor in table.values()
    )
    assert receipt.bytes_read == weights
    _, receipt = receipt_of(made(folder)[kind], 5)
    # Three groups on five chips: two of them are read twice, keys and values of each layer.
    assert receipt.bytes_read == weights + 2 * LAYERS * 2 * HEAD * D * BYTES[kind]


def test_a_receipt_has_every_number_of_each_device(tmp_path, capsys):
    path, file = tmp_path / "model", tmp_path / "receipt.json"
    write(path, keys("llama"), tensors("llama"))
    assert main(["run", str(path), "--ids", "1 2", "--chips", "3", "--max-tokens", "2",
                 "--receipt", str(file)]) == 0  # fmt: skip
    capsys.readouterr()
    said = json.loads(file.read_text())
    assert [chip["chip"] for chip in said["chips"]] == [0, 1, 2]
    for chip in said["chips"]:
        assert chip["bytes_read"] > 0
        assert 0 <= chip["bytes_padding"] < chip["bytes_held"]
        assert said["seconds"] >= chip["seconds"] > 0
    total = sum(chip["bytes_read"] for chip in said["chips"]) + said["bytes_read_for_all"]
    assert said["bytes_read"] == total
    # This process has jax in it, and not all the memory of a large machine.
    assert 50e6 < said["peak_host_bytes"] <= said["peak_host_bytes_of_run"] < 1e11


def test_the_seconds_of_a_chip_are_counted_once_however_many_threads_work_for_it(folder):
    checkpoint = open_checkpoint(made(folder)["gguf"])
    books = Books(Receipt(chips=[Held(), Held()]), checkpoint)

    together = Barrier(4)

    def work():
        with books.work_for(1):
            together.wait()
            time.sleep(0.1)

    started = time.perf_counter()
    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.1 <= books.receipt.chips[1].seconds <= time.perf_counter() - started
    assert books.receipt.chips[0].seconds == 0


# --- Memory

LOAD = """
import sys
from tp.decoder import Decoder
from tp.launch import devices
from tp.loader import load
from tp.receipt import peak_host_bytes
from tp.source import open_source

source = open_source(sys.argv[1])
decoder = Decoder(model=source.model, devices=devices(2), context=16)
operands, before = decoder.operands, peak_host_bytes()
weights, receipt = load(source.model, operands, source.checkpoint, decoder.devices)
held = sum(chip.bytes_held for chip in receipt.chips)
print(held, receipt.peak_host_bytes - before)
"""


def test_a_load_takes_little_more_memory_than_what_is_held_after_it(tmp_path):
    # On a CPU experts are kept in floats: 4 of them, of 3 matrices of 15 MB each.
    d, dff = 64, 60_000
    made = kept_layers(tensors("mixtral"), 0)
    config = keys("mixtral", intermediate_size=dff, num_hidden_layers=1)
    numbers = np.random.default_rng(0).normal(size=1 << 16).astype(np.float32)
    for name, array in made.items():
        if ".experts." in name:
            made[name] = np.resize(numbers, (dff, d) if array.shape[1] == d else (d, dff))
    path = write(tmp_path / "model", config, made, "BF16")
    command = [sys.executable, "-c", LOAD, str(path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    held, taken = map(int, run.stdout.split())
    assert held > 4 * 4 * 3 * d * dff
    assert taken < 1.3 * held + 60e6
