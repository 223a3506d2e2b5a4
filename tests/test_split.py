"""A split in numbers: against counts by hand, the headers of files, whole texts, and real loads."""

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from author.manifest import TpManifest
from author.names import Name
from author.spec import Layer, ModelSpec, Window
from kernels.native.library import why_not
from tests.tiny import SPECS, random_spec
from tp import loader
from tp.authored import step_of
from tp.costs import Cost
from tp.decoder import Decoder
from tp.launch import devices
from tp.matrices import Matrix
from tp.outline import Outline, open_outline
from tp.source import open_source
from tp.split import Split, split_of

CHECKPOINTS = Path(__file__).parent / "checkpoints"
DENSE, MIXED, LATENT, RECURRENT = "llama", "mixtral", "deepseek_v3", "qwen3_next"
MODELS = (DENSE, MIXED, LATENT, RECURRENT)
WIDTHS = range(1, 9)
CONTEXT = 40


@cache
def outline(name: str) -> Outline:
    return open_outline(str(CHECKPOINTS / name))


@cache
def split(name: str, chips: int, context: int = CONTEXT) -> Split:
    found = outline(name)
    return split_of(found.spec, chips, context=context, tied=found.tied, tables=found.tables)


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a checkpoint's tensors, as the library reads its headers."""
    found = {}
    for file in (CHECKPOINTS / name).glob("*.safetensors"):
        with safe_open(file, framework="np") as opened:
            found |= {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    return found


def q8(outputs: int, inputs: int) -> int:
    """A byte a weight, two for every 32 of them begun."""
    return outputs * (inputs + 2 * -(-inputs // 32))


# --- Whole models, from the headers of their files


@pytest.mark.parametrize("name", [DENSE, MIXED])
def test_the_weights_of_one_chip_are_those_of_the_file(name: str) -> None:
    found = shapes(name)
    expected = sum(4 * s[0] if len(s) == 1 else q8(*s) for s in found.values())
    assert split(name, 1).given.weight_bytes == expected
    assert split(name, 1).weights == sum(int(np.prod(s)) for s in found.values())


def test_latent_weights_are_those_of_the_file_their_two_factors_turned() -> None:
    # kv_b_proj has keys and values of a head one below the other; what is kept of keys sums over
    # their width. The choosing bias and the norms are floats.
    found, mla = shapes(LATENT), outline(LATENT).spec.layers[0].mixer
    expected = 0
    for tensor, shape in found.items():
        if tensor.endswith("kv_b_proj.weight"):
            expected += q8(mla.heads * mla.kv_lora_rank, mla.qk_nope)
            expected += q8(mla.heads * mla.v_dim, mla.kv_lora_rank)
        else:
            expected += 4 * shape[0] if len(shape) == 1 else q8(*shape)
    assert split(LATENT, 1).given.weight_bytes == expected


def test_the_weights_of_a_recurrent_model_are_those_of_the_file() -> None:
    assert split(RECURRENT, 1).weights == sum(int(np.prod(s)) for s in shapes(RECURRENT).values())


# --- By hand: `llama` has 4 query heads on 2 of keys, 16 wide, 80 columns and 170 tokens, 2 layers
# of width 64. Columns and tokens are cut at multiples of 32.

QUERY_HEADS = {
    1: [4], 2: [2, 2], 3: [1, 1, 2], 4: [1] * 4, 5: [0, 1, 1, 1, 1], 6: [0, 1, 1] * 2,
    7: [0, 1, 0, 1, 0, 1, 1], 8: [0, 1] * 4,
}  # fmt: skip
COLUMNS = {
    1: [80], 2: [32, 48], 3: [32, 32, 16], 4: [0, 32, 32, 16], 5: [0, 32, 0, 32, 16],
    6: [0, 32, 0, 32, 0, 16], 7: [0, 0, 32, 0, 32, 0, 16], 8: [0, 0, 32, 0, 0, 32, 0, 16],
}  # fmt: skip
TOKENS = {
    1: [170], 2: [96, 74], 3: [64, 64, 42], 4: [32, 64, 32, 42], 5: [32, 32, 32, 32, 42],
    6: [32, 32, 32, 32, 32, 10], 7: [0, 32, 32, 32, 32, 32, 10], 8: [0, 32, 32, 32, 0, 32, 32, 10],
}  # fmt: skip


@pytest.mark.parametrize("chips", WIDTHS)
def test_every_chip_has_the_heads_columns_and_tokens_counted_by_hand(chips: int) -> None:
    found = split(DENSE, chips)
    for count, expected in (
        ("query_heads", QUERY_HEADS),
        ("ffn_columns", COLUMNS),
        ("vocabulary", TOKENS),
    ):
        assert [chip.counts[count] for chip in found.chips] == expected[chips]
        assert found.given.counts[count] == max(expected[chips])


def dense_bytes(heads: int, groups: int, columns: int, tokens: int, block: int) -> int:
    """The weights of a chip of `llama`; `block` is that of its output projection."""
    attention = q8(16 * heads, 64) + 2 * q8(16 * groups, 64)
    output = 64 * (16 * heads + 2 * -(-16 * heads // block))
    feed_forward = 2 * q8(columns, 64) + q8(64, columns)
    return 2 * (attention + output + feed_forward + 2 * 4 * 64) + 2 * q8(tokens, 64) + 4 * 64


@pytest.mark.parametrize("chips", WIDTHS)
def test_every_chip_holds_the_bytes_counted_by_hand(chips: int) -> None:
    found = split(DENSE, chips)
    heads = QUERY_HEADS[chips]
    groups = [2] if chips == 1 else [min(h, 1) for h in heads]
    block = 32 if chips < 3 else 16  # a chip's heads may end inside a block of 32
    each = list(zip(heads, groups, COLUMNS[chips], TOKENS[chips], strict=True))
    assert [c.weight_bytes for c in found.chips] == [dense_bytes(*one, block) for one in each]
    most = map(max, zip(*each, strict=True))
    assert found.given.weight_bytes == dense_bytes(*most, block)
    assert [c.cache_bytes_per_token for c in found.chips] == [2 * 2 * 16 * g * 4 for g in groups]


def test_a_token_reads_all_weights_but_one_row_of_the_embedding() -> None:
    given = split(DENSE, 1).given
    table_rows = 2 * 2 * (8 + 8) * 4  # cosines and sines of 8 pairs, for queries and for keys
    caches = 2 * CONTEXT * 2 * 32 * 4
    expected = given.weight_bytes - q8(170, 64) + q8(1, 64) + table_rows + caches
    assert given.cost.reads == expected


def test_a_token_takes_the_operations_counted_by_hand() -> None:
    products = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 80
    attended = CONTEXT * (64 + 64)
    beside = 4 * 64 + 64 + 32 + 80  # two norms and two sums, turned queries and keys, a swiglu
    layer = 2 * (products + attended) + beside
    assert split(DENSE, 1).given.cost.operations == 2 * layer + 64 + 2 * 64 * 170 + 170


def test_a_token_reads_the_experts_that_it_chooses() -> None:
    found = split(MIXED, 1)
    moe = outline(MIXED).spec.layers[0].ffn
    experts = 2 * moe.experts * (2 * q8(moe.expert_dff, 64) + q8(64, moe.expert_dff))
    caches = found.given.cache_bytes
    rows = 2 * 2 * sum(m.whole[1] for m in found.matrices if m.role == "table") * 4
    unread = experts * (moe.experts - moe.top_k) // moe.experts + q8(outline(MIXED).spec.vocab, 64)
    expected = found.given.weight_bytes - unread + q8(1, 64) + caches + rows
    assert found.given.cost.reads == expected


def test_a_window_bounds_what_is_read_of_a_cache() -> None:
    spec = outline(DENSE).spec
    narrow = replace(spec, layers=tuple(map(_windowed, spec.layers)))
    whole = split_of(spec, 1, context=CONTEXT).given.cost.reads
    assert whole - split_of(narrow, 1, context=CONTEXT).given.cost.reads == 2 * 33 * 2 * 32 * 4


def _windowed(layer: Layer) -> Layer:
    return replace(layer, mixer=replace(layer.mixer, window=Window(kind="sliding", n=7)))


# --- Against whole texts and their manifests


def whole_manifest(spec: ModelSpec, chips: int) -> TpManifest:
    found = step_of(spec, chips=chips, context=CONTEXT).manifest
    assert found is not None
    return found


def unlike(spec: ModelSpec) -> ModelSpec:
    """The same model, but no two of its layers are alike."""
    layers = enumerate(spec.layers)
    return replace(
        spec, layers=tuple(replace(layer, residual_scale=2 + i / 8) for i, layer in layers)
    )


def alike(spec: ModelSpec) -> ModelSpec:
    return replace(spec, layers=tuple(replace(layer, residual_scale=2.0) for layer in spec.layers))


@pytest.mark.parametrize("chips", [1, 3, 8])
@pytest.mark.parametrize("name", MODELS)
def test_layers_alike_count_as_if_each_were_written_out(name: str, chips: int) -> None:
    spec = outline(name).spec
    spec = replace(spec, layers=(*spec.layers, *spec.layers))
    once = split_of(alike(spec), chips, context=CONTEXT)
    each = split_of(unlike(spec), chips, context=CONTEXT)
    assert len(each.kinds) == len(spec.layers) > len(once.kinds)
    assert (once.chips, once.given) == (each.chips, each.given)
    assert _met(once) == _met(each)


def _met(found: Split) -> Counter[tuple[str, str, int]]:
    met: Counter[tuple[str, str, int]] = Counter()
    for c in found.collectives:
        met[c.kind, c.name, c.bytes] += c.count
    return met


@pytest.mark.parametrize("name", sorted(SPECS))
def test_ranges_are_those_of_the_manifest(name: str) -> None:
    spec = SPECS[name]
    for chips in (2, 5):
        found, manifest = split_of(spec, chips, context=CONTEXT), whole_manifest(spec, chips)
        for matrix in found.matrices:
            layer = None if matrix.kind is None else found.kinds[matrix.kind].layers[-1]
            for chip in range(chips):
                piece = manifest.slice_of(Name(matrix.name, layer, None, chip))
                wanted = () if piece is None else piece.ranges
                assert _written_out(matrix, chip) == [r for r in wanted if r[1] > 0]


def _written_out(matrix: Matrix, chip: int) -> list[tuple[int, int]]:
    """The ranges of every block, one after another."""
    extent = matrix.whole[0 if matrix.axis == "rows" else 1] // matrix.blocks
    starts = (block * extent for block in range(matrix.blocks))
    return [(at + start, length) for at in starts for start, length in matrix.ranges[chip]]


@pytest.mark.parametrize("name", MODELS)
def test_a_step_meets_as_often_as_its_manifest_says(name: str) -> None:
    found, manifest = split(name, 3), whole_manifest(outline(name).spec, 3)
    counted: Counter[str] = Counter()
    for collective in found.collectives:
        counted[collective.kind] += collective.count
    assert counted == Counter(c.kind for c in manifest.collectives)


def test_folds_and_joins_have_the_bytes_counted_by_hand() -> None:
    x, ao, dn, logits = split(DENSE, 3).collectives
    assert [c.name for c in (x, ao, dn, logits)] == ["x", "ao", "dn", "logits"]
    assert [(c.count, c.bytes, c.sent) for c in (x, ao, dn)] == [
        (1, 256, 341), (2, 256, 341), (2, 256, 341),
    ]  # fmt: skip
    assert (logits.kind, logits.bytes, logits.sent) == ("join", 4 * 64, 2 * 4 * 64)


# --- What holds of every split


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chips", WIDTHS)
def test_segments_add_up_and_no_chip_has_more_than_it_is_given(name: str, chips: int) -> None:
    found = split(name, chips)
    for at, chip in enumerate(found.chips):
        total = sum((s.chips[at].times(s.collective.count) for s in found.segments), start=Cost())
        assert total == chip.cost
        assert chip.bytes <= found.given.bytes
        assert chip.cost.reads <= found.given.cost.reads
        assert chip.cost.operations <= found.given.cost.operations
    assert sum(c.weight_bytes for c in found.chips) >= split(name, 1).given.weight_bytes


@pytest.mark.parametrize("seed", range(12))
def test_random_models_have_splits_whose_chips_are_given_what_they_have(seed: int) -> None:
    for chips in (2, 5):
        found = split_of(random_spec(seed), chips, context=CONTEXT)
        assert all(chip.cost.reads <= found.given.cost.reads for chip in found.chips)
        for matrix in found.matrices:
            pairs = [(held, matrix.given) for held in matrix.held]
            assert all(rows <= most and cols <= wide for (rows, cols), (most, wide) in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_the_longest_context_fits_and_one_token_more_does_not(name: str) -> None:
    memory = split(name, 3).given.bytes + 12345
    longest = split(name, 3).longest(memory)
    assert split(name, 3, longest).given.bytes <= memory < split(name, 3, longest + 1).given.bytes
    assert split(name, 3).longest(split(name, 3).given.weight_bytes - 1) == 0


def test_numbers_of_half_the_size_halve_the_caches_and_nothing_else() -> None:
    whole, half = (
        split_of(outline(RECURRENT).spec, 3, context=CONTEXT, cache_bytes=b).given for b in (4, 2)
    )
    assert whole.cache_bytes == 2 * half.cache_bytes > 0
    assert (whole.state_bytes, whole.weight_bytes) == (half.state_bytes, half.weight_bytes)


# --- Against real loads


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chips", [1, 3, 8])
@pytest.mark.parametrize("packed", [False, True], ids=["q8", "cpu"])
def test_a_load_holds_as_many_bytes(
    name: str, chips: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed:
        monkeypatch.setattr(loader, "pack", lambda q, *_, **__: q)
    source = open_source(str(CHECKPOINTS / name))
    decoder = Decoder(model=source.model, devices=devices(chips), context=CONTEXT)
    _, receipt = loader.load(source.model, decoder.operands, source.checkpoint, decoder.devices)
    found = split(name, chips)
    native = why_not() is None
    weights = found.cpu_bytes(native=native) if packed else found.given.weight_bytes
    assert {held.bytes_held for held in receipt.chips} == {weights + found.given.table_bytes}
