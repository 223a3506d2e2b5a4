"""Families of dense models: their logits against references, and what they make of configs."""

import json
from pathlib import Path

import numpy as np
import pytest

from author.families.config import ConfigError
from author.families.model import View, half_split
from author.families.registry import from_config
from author.kinds import author
from author.names import Name
from author.spec import Attention, Dense, Temperature, Window
from tests.making_safetensors import make_directory
from tp.engine import load
from tp.loader import load_tables
from tp.operands import operands
from tp.roll import roll
from tp.source import open_source

CHECKPOINTS = Path(__file__).parent / "checkpoints"
FAMILIES = (
    *("llama", "smollm2", "mistral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2"),
    *("gemma3_text", "olmo2", "olmo3", "phi3", "granite", "smollm3", "glm4", "ernie4_5"),
    *("exaone4", "hunyuan_v1_dense", "seed_oss", "apertus", "cohere2"),
)
# Every width with about as many families, and no family at all of them.
CASES = [(family, (1, 2, 3, 5)[i % 4]) for i, family in enumerate(FAMILIES)]


@pytest.mark.parametrize(("family", "chips"), CASES)
def test_a_family_computes_its_reference_logits(family, chips):
    if not (CHECKPOINTS / family).is_dir():
        pytest.skip(f"tests/checkpoints/{family} is not there")
    wanted = np.load(CHECKPOINTS / family / "expected.npz")
    engine = load(str(CHECKPOINTS / family), chips=chips)
    for prompt in (0, 1):
        ids, logits = wanted[f"input_ids_{prompt}"].tolist(), wanted[f"logits_{prompt}"]
        turn(engine, len(ids))
        error = np.abs(engine.logits(ids) - logits).max() / logits.std()
        assert error < 1e-4, f"{error:.1e} of the deviation of prompt {prompt}"


def turn(engine, tokens):
    """Put the tables in place that a sequence of this length wants."""
    decoder, model = engine.decoder, engine.source.model
    if model.short_length is not None:
        decoder.weights |= load_tables(
            model,
            decoder.operands,
            engine.source.checkpoint,
            decoder.devices,
            long=tokens > model.short_length,
        )


# --- Configs

BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


def read(family, where="config.json", **keys):
    return from_config({**BASE, "model_type": family, **keys}, where)


def refusal(family, **keys):
    with pytest.raises(ConfigError) as caught:
        read(family, **keys)
    return str(caught.value)


BIASED = {"attention_bias": True}
BOTH = {"attention_bias": True, "mlp_bias": True}
VARIANTS = {
    "llama": [{}, BIASED, BOTH],
    "mistral": [{}, {"sliding_window": 8}],
    "ministral3": [{}],
    "qwen2": [{}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}],
    "qwen3": [{}, BIASED],
    "gemma": [{}, BIASED],
    "gemma2": [{"attn_logit_softcapping": 3.0}, BIASED],
    "gemma3_text": [{}, BIASED],
    "olmo2": [{}, BIASED],
    "olmo3": [{}, BIASED],
    "phi3": [{}],
    "granite": [{}, BOTH],
    "smollm3": [{}, BOTH],
    "glm4": [{}, BIASED],
    "ernie4_5": [{}, {"use_bias": True}],
    "exaone4": [{}, {"sliding_window": 4}],
    "hunyuan_v1_dense": [{}, BIASED],
    "seed_oss": [{}, {**BOTH, "attention_out_bias": True}],
    "apertus": [{}, BIASED],
    "cohere2": [{}, BIASED],
}


@pytest.mark.parametrize(
    ("family", "keys"), [(family, keys) for family, given in VARIANTS.items() for keys in given]
)
def test_every_weight_of_a_program_has_a_view_and_no_other_has(family, keys):
    model = read(family, **keys)
    split = {"tp": 2, "align": 32, "vocabulary": True, "beyond": True}
    step = {"dir": "weights", "ctx": 8, "tok": 0, "pos": 1}
    program = author(model.spec, "tp_decode_step", {**step, **split})
    wanted = {o.name for o in operands(roll(program)).values() if o.role == "weight"}
    assert set(model.views) == wanted - ({Name("Wout")} if model.tied else set())


def windows(family, **keys):
    """The windows of the layers, and which of the layers turn."""
    layers = read(family, **keys).spec.layers
    mixers = [layer.mixer for layer in layers]
    assert all(isinstance(m, Attention) for m in mixers)
    sizes = "".join("-" if m.window is None else str(m.window.n) for m in mixers)
    return sizes, "".join("-" if m.rope is None else "r" for m in mixers)


FOUR = {"sliding_window": 4}
TYPED = {"layer_types": ["full_attention", "sliding_attention"] * 2}
WINDOWS = {
    "mistral": [(FOUR, "4444", "rrrr"), ({}, "----", "rrrr"), (FOUR | TYPED, "-4-4", "rrrr")],
    "phi3": [(FOUR, "4444", "rrrr"), ({"sliding_window": 0}, "----", "rrrr")],
    "qwen2": [
        (FOUR | {"use_sliding_window": True, "max_window_layers": 3}, "---4", "rrrr"),
        (FOUR | {"use_sliding_window": False, "max_window_layers": 0}, "----", "rrrr"),
        (FOUR | TYPED, "-4-4", "rrrr"),
    ],
    "gemma2": [(FOUR, "4-4-", "rrrr")],
    "gemma3_text": [(FOUR | {"sliding_window_pattern": 3}, "44-4", "rrrr")],
    "olmo3": [(FOUR, "444-", "rrrr")],
    "smollm3": [
        (FOUR | {"no_rope_layers": [1, 0, 1, 1]}, "----", "r-rr"),
        (FOUR | {"use_sliding_window": True}, "---4", "rrr-"),
    ],
    "exaone4": [
        (FOUR, "444-", "rrr-"),
        (FOUR | {"sliding_window_pattern": "LG"}, "4-4-", "r-r-"),
        ({}, "----", "rrrr"),
    ],
    "cohere2": [(FOUR, "444-", "rrr-"), (FOUR | TYPED, "-4-4", "-r-r")],
}


@pytest.mark.parametrize(
    ("family", "keys", "sizes", "turning"),
    [(family, *case) for family, cases in WINDOWS.items() for case in cases],
)
def test_which_layers_slide_and_which_turn(family, keys, sizes, turning):
    assert windows(family, **keys) == (sizes, turning)


def test_a_window_is_a_window():
    assert read("mistral", **FOUR).spec.layers[0].mixer.window == Window(kind="sliding", n=4)


@pytest.mark.parametrize(
    ("keys", "width"),
    [({"head_dim": 24}, 24), ({"head_dim": None}, 8), ({}, 8), ({"hidden_size": 38}, 9)],
)
def test_the_width_of_a_head_is_given_or_derived(keys, width):
    keys = {**keys, **({"partial_rotary_factor": 0.9} if width == 9 else {})}
    assert read("llama", **keys).spec.layers[0].mixer.head_dim == width


def test_ministral_tempers_its_queries_from_position_0():
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    keys = {"rope_parameters": {**scaling, "rope_theta": 1e4, "llama_4_scaling_beta": 0.3}}
    mixer = read("ministral3", **keys).spec.layers[0].mixer
    assert mixer.temperature == Temperature(floor=16.0, scale=0.3, offset=0)


def test_factors_reach_the_spec():
    granite = read(
        "granite",
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        residual_multiplier=0.22,
        attention_multiplier=0.0625,
    ).spec
    assert (granite.embedding_scale, granite.logit_scale) == (12.0, 0.125)
    assert granite.layers[0].residual_scale == 0.22
    assert granite.layers[0].mixer.scale == 0.0625
    gemma = read("gemma2", query_pre_attn_scalar=16, final_logit_softcapping=30.0).spec
    assert (gemma.embedding_scale, gemma.final_logit_softcap) == (32**0.5, 30.0)
    assert (gemma.layers[0].mixer.scale, gemma.layers[0].mixer.softcap) == (0.25, None)


def test_old_gemma_means_the_tanh_form_by_gelu():
    for keys in ({"hidden_act": "gelu"}, {"hidden_activation": "gelu_pytorch_tanh"}):
        ffn = read("gemma", **keys).spec.layers[0].ffn
        assert isinstance(ffn, Dense)
        assert ffn.act == "gelu_tanh"


def test_gemma_norms_by_one_more_and_glm_puts_its_pairs_half_split():
    gemma, glm = read("gemma3_text"), read("glm4")
    for base, layer in (("on", None), ("an", 0), ("pfn", 3), ("Qn", 1)):
        assert gemma.views[Name(base, layer)][0].plus == 1.0
    assert glm.views[Name("Wk", 1)] == (
        View(tensor="model.layers.1.self_attn.k_proj.weight", rows=half_split(2, 8, 4)),
    )


REFUSED = {
    "a key nobody knows": ("llama", {"attention_sparsity": 2}, "nothing is known of attention_sp"),
    "all at once": ("llama", {"vocab_size": None, "head_dim": 0}, "vocab_size is missing; "),
    "stored quantised": ("qwen3", {"quantization_config": {}}, "a copy in bf16, or a GGUF"),
    "an activation": ("qwen2", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    "too few types": ("qwen3", {"layer_types": ["full_attention"]}, "layer_types wants 4 of"),
    "no window": ("qwen3", TYPED, "layers slide and sliding_window is not given"),
    "two patterns": ("cohere2", {"sliding_window_pattern": 4, "layer_switch": 3}, "say the same"),
    "both ways": ("gemma3_text", {"use_bidirectional_attention": True}, "True is not supported"),
    "no number": ("granite", {"logits_scaling": "8"}, "logits_scaling is '8', wanted a number"),
    "shared keys": ("hunyuan_v1_dense", {"use_cla": True}, "use_cla True is not supported"),
    "gpt2": ("gpt2", {}, "it would need learnt positions"),
    "starcoder2": ("starcoder2", {}, "it would need layer norms with biases"),
    "falcon_h1": ("falcon_h1", {}, "a state space model beside the attention"),
    "mamba2": ("mamba2", {}, "a state space model in place of attention"),
    "another": ("rwkv", {}, "model_type 'rwkv' is of no family we know (there are apertus, "),
}


@pytest.mark.parametrize(("family", "keys", "said"), REFUSED.values(), ids=REFUSED)
def test_a_config_that_we_cannot_follow_is_refused(family, keys, said):
    assert said in refusal(family, **keys)


# --- Multimodal packages

PREFIXES = {
    "outside": ("language_model.model.", "language_model.lm_head.weight", "vision_tower.x"),
    "inside": ("model.language_model.", "lm_head.weight", "model.vision_tower.x"),
}


@pytest.mark.parametrize(("prefix", "head", "other"), PREFIXES.values(), ids=PREFIXES)
def test_of_a_package_the_text_model_is_read(tmp_path, prefix, head, other):
    bare = read("mistral")
    names = {v.tensor for views in bare.views.values() for v in views}
    inside = {n: n.replace("model.", prefix) if n.startswith("model.") else head for n in names}
    tensors = {name: (np.zeros((2, 2), np.float32), "F32") for name in (*inside.values(), other)}
    config = {
        "model_type": "mistral3",
        "vision_config": {"hidden_size": 8},
        "image_token_index": 10,
        "text_config": {**BASE, "model_type": "mistral"},
    }
    path = make_directory(tmp_path / "c", tensors)
    (path / "config.json").write_text(json.dumps(config))
    model = open_source(str(path)).model
    assert model.spec == bare.spec
    for name, views in bare.views.items():
        assert [v.tensor for v in model.views[name]] == [inside[v.tensor] for v in views]
    assert model.skipped[other] == "of the parts of mistral3 that are not its text model"


def test_a_package_hands_down_that_its_head_is_tied_and_is_refused_what_nobody_knows():
    text = {**BASE, "model_type": "mistral"}
    package = {"model_type": "mistral3", "text_config": text, "tie_word_embeddings": True}
    assert from_config(package, "config.json").tied
    with pytest.raises(ConfigError, match="nothing is known of tilt beside text_config"):
        from_config({**package, "tilt": 1}, "config.json")
