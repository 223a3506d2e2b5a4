"""Specs and what is asked of them: what is refused, in which words, and that nothing is missed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from author.kinds import KINDS, author, run_case
from author.refusals import check, check_tp
from author.spec import Rope, SpecError, Temperature, Window, spec_from_json, spec_to_json

GOLDENS = Path(__file__).parent / "goldens"


def spec_json(stem):
    return json.loads((GOLDENS / f"{stem}.json").read_text())["spec"]


def spec_of(stem):
    return spec_from_json(spec_json(stem))


def changed(spec, number, part, **fields):
    """The spec with fields of a layer's mixer or feed-forward changed."""
    layers = list(spec.layers)
    layers[number] = replace(
        layers[number], **{part: replace(getattr(layers[number], part), **fields)}
    )
    return replace(spec, layers=tuple(layers))


def problems(call, *args, **kwargs):
    with pytest.raises(SpecError) as caught:
        call(*args, **kwargs)
    return list(caught.value.problems)


# --- JSON


def test_everything_that_does_not_fit_is_named_at_once():
    spec = spec_json("llama_gqa")
    del spec["vocab"]
    spec["colour"] = "red"
    spec["layers"][0]["mixer"]["heads"] = "many"
    spec["layers"][0]["mixer"]["rope"] = {"dims": 4}
    spec["layers"][1]["ffn"] = {"kind": "sparse"}
    spec["layers"][1]["post_ffn_norm"] = 1
    known = "d, vocab, rms_eps, layers, final_logit_softcap, embedding_scale, hyper, ple, indexer"
    assert problems(spec_from_json, spec) == [
        "spec.vocab is missing",
        f"spec.colour is no field (there are {known})",
        "spec.layers[0].mixer.heads is 'many', wanted a count",
        "spec.layers[0].mixer.rope.theta is missing",
        "spec.layers[1].ffn is {'kind': 'sparse'}, wanted an object of kind 'dense' or an object"
        " of kind 'moe'",
        "spec.layers[1].post_ffn_norm is 1, wanted true or false",
    ]


@pytest.mark.parametrize(
    ("act", "wanted"),
    [
        ("gelu_erf", "'silu' or 'gelu_tanh' or 'gelu' or 'relu' or an object of kind 'swiglu_oai'"),
        (None, "'silu' or 'gelu_tanh' or 'gelu' or 'relu' or an object of kind 'swiglu_oai'"),
    ],
)
def test_a_variant_is_refused_with_those_that_there_are(act, wanted):
    spec = spec_json("llama_gqa")
    spec["layers"][0]["ffn"]["act"] = act
    assert problems(spec_from_json, spec) == [f"spec.layers[0].ffn.act is {act!r}, wanted {wanted}"]


def test_a_whole_number_may_stand_for_a_real():
    spec = spec_json("llama_gqa") | {"embedding_scale": 12}
    assert spec_to_json(spec_from_json(spec))["embedding_scale"] == 12.0


def test_what_is_no_number_is_refused():
    spec = spec_json("llama_gqa") | {"embedding_scale": float("inf"), "d": True}
    assert problems(spec_from_json, spec) == [
        "spec.d is True, wanted a count",
        "spec.embedding_scale is inf, wanted a number",
    ]


# --- What would be dropped or mixed up


def test_query_heads_are_a_multiple_of_kv_heads():
    spec = changed(spec_of("llama_gqa"), 0, "mixer", heads=9, kv_heads=2)
    assert problems(check, spec) == [
        "spec.layers[0].mixer.heads is 9, wanted a multiple of kv_heads, which is 2"
    ]


def test_value_heads_of_a_gated_delta_are_a_multiple_of_its_key_heads():
    spec = changed(spec_of("gated_delta_sigmoid_gate"), 0, "mixer", v_heads=5)
    assert problems(check, spec) == [
        "spec.layers[0].mixer.v_heads is 5, wanted a multiple of k_heads, which is 3"
    ]


def test_two_temperatures_over_one_width_are_refused():
    spec = spec_of("chunked_unit_norm_dense")
    warm = Temperature(floor=8192.0, scale=0.1)
    for number in range(2):
        spec = changed(spec, number, "mixer", temperature=replace(warm, scale=0.1 + number))
    half = spec.layers[0].mixer.head_dim // 2
    assert problems(check, spec) == [
        "spec.layers[1].mixer.temperature is unlike spec.layers[0].mixer.temperature,"
        f" wanted the same: both would be the table tcosc{half}"
    ]


def test_zeros_are_listed_in_full():
    spec = changed(spec_of("llama_gqa"), 0, "mixer", kv_heads=0, value_dim=0)
    spec = changed(spec, 1, "ffn", dff=0)
    spec = replace(spec, vocab=0)
    assert problems(check, spec) == [
        "spec.vocab is 0, wanted at least 1",
        "spec.layers[0].mixer.kv_heads is 0, wanted at least 1",
        "spec.layers[0].mixer.value_dim is 0, wanted at least 1",
        "spec.layers[1].ffn.dff is 0, wanted at least 1",
    ]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"rope": Rope(dims=3, theta=1e4)}, "rope.dims is 3, wanted an even number from 2 to"),
        ({"rope": Rope(dims=512, theta=1e4)}, "rope.dims is 512, wanted an even number from 2 to"),
        ({"window": Window(kind="sliding", n=0)}, "window.n is 0, wanted at least 1"),
        ({"qk_norm_whole": True}, "qk_norm_whole is true, wanted qk_norm beside it"),
    ],
)
def test_an_attention_that_would_come_out_wrong_is_refused(fields, wanted):
    (found,) = problems(check, changed(spec_of("llama_gqa"), 0, "mixer", **fields))
    assert found.startswith(f"spec.layers[0].mixer.{wanted}")


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"top_k": 99}, "top_k is 99, wanted at most experts, which is"),
        ({"shared_gate": True}, "shared_gate is true, wanted shared_experts for it to gate"),
        ({"shared_experts": 1, "shared_dff": 0}, "shared_dff is 0, wanted at least 1"),
    ],
)
def test_a_mixture_that_would_come_out_wrong_is_refused(fields, wanted):
    (found,) = problems(check, changed(spec_of("moe_softmax"), 0, "ffn", **fields))
    assert found.startswith(f"spec.layers[0].ffn.{wanted}")


def test_what_the_language_lacks_is_told_first_and_alone():
    spec = replace(spec_of("llama_gqa"), rms_eps=0.0, vocab=0)
    assert problems(check, spec) == [
        "the language cannot write an RMSNorm epsilon that is not a positive number yet"
    ]


@pytest.mark.parametrize(
    "stem",
    [
        "biases",
        "sinks_and_biased_experts",
        "latent_attention_q_lora",
        "moe_softmax",
        "tight_groups",
    ],
)
def test_what_the_goldens_refuse_to_split_may_be_split_beyond_them(stem):
    assert len(problems(check_tp, spec_of(stem), 2)) == 1
    check_tp(spec_of(stem), 2, beyond=True)


# --- What is asked


def test_an_unknown_kind_is_refused_with_those_that_there_are():
    (found,) = problems(author, spec_of("llama_gqa"), "encode", {})
    assert found.startswith("no kind 'encode' of program; there are forward, decode_step,")
    assert found.endswith("and the checks check and check_tp")


def test_all_that_is_wrong_with_the_arguments_is_listed():
    args = {"dir": "w", "ctx": 0, "toks": [1, "2"], "rows": "shared"}
    assert problems(author, spec_of("llama_gqa"), "prefill", args) == [
        "prefill needs pos0, a position, from 1",
        "ctx is 0, wanted a number from 1",
        "toks is [1, '2'], wanted a list of token ids",
        "prefill has no argument rows; it has dir, ctx, toks, pos0",
    ]


@pytest.mark.parametrize(
    ("kind", "args", "wanted"),
    [
        ("layer", {"l": 2, "dir": "w"}, "l is 2, wanted a layer from 0 to 1"),
        (
            "decode_step",
            {"dir": "w", "ctx": 8, "tok": 999, "pos": 1},
            "no token 999, wanted ids from 0 to ",
        ),
        (
            "decode_step",
            {"dir": "w", "ctx": 8, "tok": 1, "pos": 9},
            "pos is 9, wanted a position from 1 to 8",
        ),
        (
            "stacked_layer",
            {"l": 0, "dir": "w", "ctx": 8, "poss": [7, 8, 9], "rows": "shared"},
            "a chunk of 3 tokens from position 7 fits a context of 8",
        ),
        ("decode_batch_embed", {"dir": "w", "toks": []}, "a step of no rows, wanted one at least"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(kind, args, wanted):
    case = run_case(spec_of("llama_gqa"), kind, args)
    assert case.keys() == {"kind", "args", "error"}
    assert case["error"].startswith(wanted)


def test_every_kind_on_one_device_has_its_kind_over_chips():
    one = [kind for kind in KINDS if not kind.startswith("tp_")]
    assert {f"tp_{kind}" for kind in one} == KINDS.keys() - set(one)
