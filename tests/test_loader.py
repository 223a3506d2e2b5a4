"""Each device is given just its slices of a checkpoint, bit for bit, and no file is read twice."""

import json
from functools import cache
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from author.families.registry import from_config, from_gguf
from author.kinds import author
from kernels.q8 import Q8, dequantise, quantise
from tests.making_gguf import make_gguf
from tests.making_safetensors import make_directory, split_bytes
from tp.checkpoint import CheckpointError, open_checkpoint
from tp.decoder import Decoder
from tp.launch import devices
from tp.loader import check_tensors, load

FOLDER = Path(__file__).parent / "checkpoints"
CONTEXT = 16
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
FEEDS = {"Wg": "mlp.gate_proj", "Wu": "mlp.up_proj", "Wd": "mlp.down_proj"}
HEADS = {"Wq": "q_proj", "Wk": "k_proj", "Wv": "v_proj", "Wo": "o_proj"}


@cache
def tensors(family):
    """A checkpoint's tensors in float32, straight from the bytes of its files."""
    found = {}
    for path in sorted((FOLDER / family).glob("*.safetensors")):
        header, data = split_bytes(path.read_bytes())
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                flat = np.frombuffer(data[start:end], DTYPES[entry["dtype"]])
                found[name] = flat.astype(np.float32).reshape(entry["shape"])
    return found


def tensor_of(name):
    """What a matrix of the program is called in a checkpoint of the llama family."""
    if name.base in ("Emb", "Wout"):
        return {"Emb": "model.embed_tokens", "Wout": "lm_head"}[name.base] + ".weight"
    if name.base in FEEDS:
        return f"model.layers.{name.layer}.{FEEDS[name.base]}.weight"
    return f"model.layers.{name.layer}.self_attn.{HEADS[name.base]}.weight"


def whole(family, name):
    """A quantised matrix as the program has it, inputs by outputs but for the embedding."""
    found = tensors(family)
    tensor = found.get(tensor_of(name), found["model.embed_tokens.weight"])
    outputs_first = np.asarray(dequantise(quantise(tensor)))
    return outputs_first if name.base == "Emb" else outputs_first.T


def opened(path):
    checkpoint = open_checkpoint(path)
    return from_config(checkpoint.config, "config.json"), checkpoint


def loaded(model, checkpoint, chips):
    made = Decoder(model=model, devices=devices(chips), context=CONTEXT, kernels="xla")
    made.weights, receipt = load(
        model, made.operands, checkpoint, made.devices, kernels=made.kernels
    )
    return made, receipt


def manifest_of(model, chips):
    split = {"tp": chips, "align": 32, "vocabulary": True}
    args = {"dir": "w", "ctx": CONTEXT, "tok": 0, "pos": 1}
    return author(model.spec, "tp_decode_step", args | split).manifest


def on_chip(array, chip):
    """What one device holds of an array."""
    (shard,) = [s for s in array.addressable_shards if s.device == jax.devices()[chip]]
    return np.asarray(shard.data)


def float_on_chip(leaf, chip):
    """The float32 values of a weight on one device, quantised or not."""
    if not isinstance(leaf, Q8):
        return on_chip(leaf, chip)
    values, scales = on_chip(leaf.values, chip), on_chip(leaf.scales, chip)
    return np.asarray(dequantise(Q8(values=values, scales=scales, block=leaf.block)))


def slices_of(model, chips):
    """The placed weights of a program: chip, whole name and the rows or columns of each."""
    for placed in manifest_of(model, chips).placed:
        piece = placed.slice
        if piece is not None and piece.of.base.startswith(("W", "E")):
            taken = [i for start, n in piece.ranges for i in range(start, start + n)]
            yield placed.chip, piece.of, ("rows", "cols").index(piece.axis), taken


@pytest.mark.parametrize("quantised", [False, True], ids=["float", "q8"])
@pytest.mark.parametrize("chips", [2, 3, 5, 7])
@pytest.mark.parametrize("family", ["llama", "smollm2", "mistral", "qwen3"])
def test_each_device_holds_its_slices_and_zeros(family, chips, quantised, monkeypatch):
    if quantised:  # as an accelerator has them
        monkeypatch.setattr("tp.loader.pack", lambda q, *_, **__: q)
    model, checkpoint = opened(FOLDER / family)
    made, _ = loaded(model, checkpoint, chips)
    seen = {}
    for chip, name, axis, taken in slices_of(model, chips):
        matrix = whole(family, name)
        held = float_on_chip(made.weights[str(name)], chip)
        held = held if name.base == "Emb" else held.T
        if name.base == "Wout" and model.tied:
            assert made.weights["Wout"] is made.weights["Emb"]
        along = np.moveaxis(held, axis, 0)
        np.testing.assert_array_equal(along[: len(taken)], np.moveaxis(matrix, axis, 0)[taken])
        assert not along[len(taken) :].any()
        seen.setdefault(name, np.zeros(matrix.shape[axis], int))[taken] += 1
    # Together they hold all of it; keys and values more than once where chips share a group.
    assert len(seen) == 2 + 7 * len(model.spec.layers)
    for name, times in seen.items():
        assert times.min() >= 1
        assert times.max() == 1 or name.base in ("Wk", "Wv")


def test_a_cut_inside_a_block_repeats_its_scales(monkeypatch):
    monkeypatch.setattr("tp.loader.pack", lambda q, *_, **__: q)
    model, checkpoint = opened(FOLDER / "mistral")
    made, _ = loaded(model, checkpoint, 4)
    # Heads of 24 are cut at 24, 48 and 72: the finest block that holds is 8.
    assert made.weights["Wo0"].block == 8
    assert made.weights["Wq0"].block == 32


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_vectors_and_tables_are_whole_on_every_device(family):
    model, checkpoint = opened(FOLDER / family)
    made, _ = loaded(model, checkpoint, 3)
    norm = tensors(family)["model.norm.weight"][None]
    half = model.spec.layers[0].mixer.head_dim // 2
    for chip in range(3):
        np.testing.assert_array_equal(on_chip(made.weights["on"], chip), norm)
        cos, sin = (on_chip(made.weights[name], chip) for name in ("cosc0", "sinc0"))
        assert cos.shape == sin.shape == (CONTEXT, half)
        np.testing.assert_array_equal(cos[0], np.ones(half))
        np.testing.assert_allclose(cos**2 + sin**2, 1, atol=1e-6)


# --- Bytes


@pytest.mark.parametrize("chips", [1, 2, 3, 5])
@pytest.mark.parametrize(("family", "width"), [("llama", 4), ("mistral", 2)])
def test_a_receipt_counts_what_each_chip_read(family, width, chips):
    model, checkpoint = opened(FOLDER / family)
    _, receipt = loaded(model, checkpoint, chips)
    found = tensors(family)
    wanted = [0] * chips
    for chip, name, axis, taken in slices_of(model, chips):
        rows, cols = found[tensor_of(name)].shape
        if (name.base == "Emb") == (axis == 0):  # rows of the tensor: outputs
            wanted[chip] += len(taken) * cols * width
        elif taken:  # blocks of its columns
            first, last = taken[0] // 32 * 32, min(cols, -(-(taken[-1] + 1) // 32) * 32)
            wanted[chip] += (last - first) * rows * width
    assert [held.bytes_read for held in receipt.chips] == wanted
    norms = sum(t.size for t in found.values() if t.ndim == 1) * width
    assert receipt.shared_bytes_read == norms
    assert receipt.bytes_read == checkpoint.bytes_read


def test_a_receipt_counts_what_each_chip_holds():
    model, checkpoint = opened(FOLDER / "smollm2")
    made, receipt = loaded(model, checkpoint, 4)
    leaves = [made.weights[key] for key in made.weights if key != "Wout"]
    for chip, held in enumerate(receipt.chips):
        assert held.bytes_held == sum(on_chip(leaf, chip).nbytes for leaf in leaves)
        assert 0 <= held.bytes_padding < held.bytes_held
    # Three groups of three heads on four chips: two chips share a group.
    assert len({held.bytes_held for held in receipt.chips}) == 1
    assert len({held.bytes_padding for held in receipt.chips}) > 1


# --- Checkpoints that are not what the config says


def edited(tmp_path, **changes):
    """The llama checkpoint with tensors changed; None leaves one out."""
    made = {name: (array, "F32") for name, array in tensors("llama").items()}
    for name, array in changes.items():
        made[name] = (array, "F32")
    kept = {name: pair for name, pair in made.items() if pair[0] is not None}
    path = make_directory(tmp_path / "model", kept)
    config = (FOLDER / "llama" / "config.json").read_text()
    (path / "config.json").write_text(config)
    return path


def complaints(path):
    model, checkpoint = opened(path)
    made = Decoder(model=model, devices=devices(3), context=CONTEXT)
    with pytest.raises(CheckpointError) as caught:
        load(model, made.operands, checkpoint, made.devices)
    assert checkpoint.bytes_read == 0
    return caught.value.found.split("; ")


def test_every_tensor_that_is_missing_strange_or_misshapen_is_named(tmp_path):
    path = edited(
        tmp_path,
        **{
            "model.layers.1.mlp.up_proj.weight": None,
            "model.layers.0.input_layernorm.weight": np.ones(65, np.float32),
            "model.layers.0.self_attn.k_proj.weight": np.ones((33, 64), np.float32),
            "model.layers.0.self_attn.q_proj.weight": np.ones((64, 63), np.float32),
            "lm_head.weight": np.ones(64, np.float32),
            "model.layers.2.mlp.up_proj.weight": np.ones((80, 64), np.float32),
        },
    )
    assert sorted(complaints(path)) == [
        "lm_head.weight is [64], wanted [170, 64]",
        "model.layers.0.input_layernorm.weight is [65], wanted [64]",
        "model.layers.0.self_attn.k_proj.weight is [33, 64], wanted [32, 64]",
        "model.layers.0.self_attn.q_proj.weight is [64, 63], wanted [64, 64]",
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.layers.2.mlp.up_proj.weight belongs to nothing that a llama model computes",
    ]


def test_buffers_that_follow_from_the_config_are_skipped_with_the_reason(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    model, checkpoint = opened(edited(tmp_path, **{name: np.ones(8, np.float32)}))
    made, receipt = loaded(model, checkpoint, 2)
    assert list(receipt.skipped) == [name]
    assert "follows from" in receipt.skipped[name]
    assert check_tensors(model, made.operands, checkpoint) == receipt.skipped


def test_a_head_of_its_own_beside_a_tied_embedding_is_skipped(tmp_path):
    path = edited(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model, checkpoint = opened(path)
    made, receipt = loaded(model, checkpoint, 2)
    assert list(receipt.skipped) == ["lm_head.weight"]
    assert made.weights["Wout"] is made.weights["Emb"]


# --- GGUF

WIDE = {"heads": 6, "groups": 3, "head": 32, "d": 96, "dff": 160, "vocab": 101}


def gguf_model(tmp_path):
    """A one-layer llama file whose heads are a block each: its model, and its blocks by tensor."""
    random = np.random.default_rng(0)
    d, dff, vocab = WIDE["d"], WIDE["dff"], WIDE["vocab"]
    queries, keys = WIDE["heads"] * WIDE["head"], WIDE["groups"] * WIDE["head"]
    shapes = {
        "token_embd": (vocab, d),
        "output": (vocab, d),
        "blk.0.attn_q": (queries, d),
        "blk.0.attn_k": (keys, d),
        "blk.0.attn_v": (keys, d),
        "blk.0.attn_output": (d, queries),
        "blk.0.ffn_gate": (dff, d),
        "blk.0.ffn_up": (dff, d),
        "blk.0.ffn_down": (d, dff),
    }
    made = {f"{n}.weight": (random.normal(size=s), "Q8_0") for n, s in shapes.items()}
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        made[f"{name}.weight"] = (random.normal(size=d), "F32")
    made = {name: (array.astype(np.float32), k) for name, (array, k) in made.items()}
    keys_of = {
        "llama.attention.head_count": WIDE["heads"],
        "llama.attention.head_count_kv": WIDE["groups"],
        "llama.attention.key_length": WIDE["head"],
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": d,
        "llama.feed_forward_length": dff,
        "llama.rope.freq_base": 10000.0,
    }
    path = make_gguf(tmp_path / "tiny.gguf", made, keys_of)
    checkpoint = open_checkpoint(path)
    tensor_shapes = {t.name: t.shape for t in checkpoint.tensors.values()}
    blocks = {name: blocks_of(array) for name, (array, kind) in made.items() if kind == "Q8_0"}
    return from_gguf(checkpoint.config, tensor_shapes, path.name), checkpoint, blocks


def blocks_of(array):
    """Values and scales of Q8_0, from the bytes that the library makes: a scale, then 32 values."""
    raw = gguf.quantize(array, gguf.GGMLQuantizationType.Q8_0).reshape(len(array), -1, 34)
    values = raw[:, :, 2:].copy().view(np.int8).reshape(len(array), -1)
    return values, raw[:, :, :2].copy().view(np.float16)[:, :, 0]


GGUF = {"Emb": "token_embd", "Wout": "output"}
GGUF |= {"Wq": "blk.0.attn_q", "Wk": "blk.0.attn_k", "Wv": "blk.0.attn_v"}
GGUF |= {"Wo": "blk.0.attn_output", "Wg": "blk.0.ffn_gate", "Wu": "blk.0.ffn_up"}
GGUF |= {"Wd": "blk.0.ffn_down"}


def from_pairs(rows, width):
    """Rows of heads whose rotary pairs stand side by side, put half-split."""
    order = [h + i for h in range(0, len(rows), width) for i in range(width)]
    halves = [
        h + (2 * i if i < width // 2 else 2 * i - width + 1)
        for h in range(0, len(rows), width)
        for i in range(width)
    ]
    assert sorted(halves) == order
    return rows[halves]


@pytest.mark.parametrize("chips", [1, 2, 3, 4])
def test_blocks_of_a_gguf_come_as_they_are(chips, tmp_path, monkeypatch):
    monkeypatch.setattr("tp.loader.pack", lambda q, *_, **__: q)
    model, checkpoint, blocks = gguf_model(tmp_path)
    made, _ = loaded(model, checkpoint, chips)
    for chip, name, axis, taken in slices_of(model, chips):
        held = made.weights[str(name)]
        assert held.block == 32
        values, scales = blocks[f"{GGUF[name.base]}.weight"]
        if name.base in ("Wq", "Wk"):
            values, scales = (from_pairs(part, WIDE["head"]) for part in (values, scales))
        if (name.base == "Emb") == (axis == 0):
            values, scales = values[taken], scales[taken]
        else:
            values, scales = values[:, taken], scales[:, [i // 32 for i in taken[::32]]]
        rows, cols = values.shape
        np.testing.assert_array_equal(on_chip(held.values, chip)[:rows, :cols], values)
        np.testing.assert_array_equal(on_chip(held.scales, chip)[:rows, : scales.shape[1]], scales)


def test_quantised_weights_step_like_their_float32_values(tmp_path, monkeypatch):
    model, checkpoint, _ = gguf_model(tmp_path)
    plain, _ = loaded(model, checkpoint, 1)
    monkeypatch.setattr("tp.loader.pack", lambda q, *_, **__: q)
    packed, _ = loaded(model, checkpoint, 4)
    assert isinstance(packed.weights["Wo0"], Q8)
    wanted, _ = plain.step(plain.fresh(), 100, 1)
    found, _ = packed.step(packed.fresh(), 100, 1)
    assert wanted.shape == (1, WIDE["vocab"])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * float(jnp.std(wanted)))
