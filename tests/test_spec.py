"""Specs and what is asked of them: what is refused, in which words, and that nothing is missed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from author.kinds import KINDS, author, run_case
from author.refusals import check, check_tp
from author.spec import (
    ChannelDelta,
    LinearMixer,
    NormedResidual,
    Rope,
    SigmoidGating,
    SpecError,
    Temperature,
    Window,
    Xielu,
    rotations,
    spec_from_json,
    spec_to_json,
)

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
    known = (
        "d, vocab, rms_eps, layers, final_logit_softcap, embedding_scale, hyper, ple, indexer,"
        " norm, logit_scale, head_bias"
    )
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


def test_a_field_that_is_as_its_default_is_left_out():
    spec = changed(spec_of("llama_gqa"), 0, "ffn", bias=True)
    first, second = (spec_to_json(spec)["layers"][number]["ffn"] for number in range(2))
    assert (first.pop("bias"), first) == (True, second)
    assert spec_from_json(spec_to_json(spec)) == spec


def test_rotations_that_differ_in_variant_alone_are_two():
    spec = spec_of("llama_gqa")
    rope = spec.layers[0].mixer.rope
    spec = changed(spec, 1, "mixer", rope=replace(rope, variant=1))
    assert rotations(spec) == (rope, replace(rope, variant=1))


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


@pytest.mark.parametrize("another", [{"scale": 0.2}, {"floor": 4096.0}, {"offset": 0}])
def test_two_temperatures_over_one_width_are_refused(another):
    spec = spec_of("chunked_unit_norm_dense")
    warm = Temperature(floor=8192.0, scale=0.1)
    for number in range(2):
        spec = changed(spec, number, "mixer", temperature=warm)
    check(spec)
    spec = changed(spec, 1, "mixer", temperature=replace(warm, **another))
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
        ({"qk_norm_after_rope": True}, "qk_norm_after_rope is true, wanted qk_norm beside it"),
        (
            {"qk_norm": True, "qk_norm_whole": True, "qk_norm_after_rope": True},
            "qk_norm_after_rope is true, wanted qk_norm_whole false",
        ),
        ({"clip": 0.0}, "clip is 0.0, wanted a positive number"),
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
        ({"shared_bias": True}, "shared_bias is true, wanted shared_experts for it to be added in"),
        (
            {"choice_bias": True, "gating": SigmoidGating(bias=True)},
            "choice_bias is true, wanted the gating 'softmax_then_top_k'",
        ),
    ],
)
def test_a_mixture_that_would_come_out_wrong_is_refused(fields, wanted):
    (found,) = problems(check, changed(spec_of("moe_softmax"), 0, "ffn", **fields))
    assert found.startswith(f"spec.layers[0].ffn.{wanted}")


@pytest.mark.parametrize(
    ("mixer", "wanted"),
    [
        (
            ChannelDelta(heads=0, head_dim=4, conv_taps=4, decay_rank=0, gate_rank=4),
            ["heads is 0, wanted at least 1", "decay_rank is 0, wanted at least 1"],
        ),
        (
            LinearMixer(heads=2, head_dim=0, norm_eps=0.0),
            ["head_dim is 0, wanted at least 1", "norm_eps is 0.0, wanted a positive number"],
        ),
    ],
    ids=["channel_delta", "linear_attention"],
)
def test_a_mixer_of_another_kind_that_would_come_out_wrong_is_refused(mixer, wanted):
    spec = spec_of("llama_gqa")
    spec = replace(spec, layers=(replace(spec.layers[0], mixer=mixer), *spec.layers[1:]))
    assert problems(check, spec) == [f"spec.layers[0].mixer.{one}" for one in wanted]


@pytest.mark.parametrize(
    ("part", "fields", "wanted"),
    [
        ("latent_attention_q_lora", {"norm_eps": -1.0}, "norm_eps is -1.0, wanted a positive"),
        ("gated_delta_dense", {"unit_eps": 0.0}, "unit_eps is 0.0, wanted a positive number"),
    ],
)
def test_an_epsilon_that_is_not_positive_is_refused(part, fields, wanted):
    (found,) = problems(check, changed(spec_of(part), 0, "mixer", **fields))
    assert found.startswith(f"spec.layers[0].mixer.{wanted}")


def test_a_xielu_beside_a_gate_is_refused():
    xielu = Xielu(beta=0.5, cut=float("nan"))
    spec = changed(spec_of("llama_gqa"), 0, "ffn", xielu=xielu)
    assert problems(check, spec) == [
        "spec.layers[0].ffn.xielu.cut is nan, wanted a finite number",
        "spec.layers[0].ffn.xielu is set, wanted gated false: it stands in place of a gate",
    ]


def test_a_feed_forward_without_a_gate_has_an_activation_that_there_is():
    spec = changed(spec_of("llama_gqa"), 0, "ffn", gated=False, act="relu")
    (found,) = problems(check, spec)
    assert found == "the language cannot write an activation other than SiLU or GeLU yet"
    check(changed(spec, 0, "ffn", xielu=Xielu(beta=0.5, cut=-1e-6)))


def test_ways_of_adding_to_the_stream_that_exclude_each_other_are_refused():
    spec = spec_of("llama_gqa")
    normed = NormedResidual(mixer_alpha=1.0, mixer_beta=float("inf"), ffn_alpha=1.0, ffn_beta=1.0)
    odd = replace(
        spec.layers[0], pre_norm=False, parallel=True, residual_scale=0.2, normed_residual=normed
    )
    at = "spec.layers[0].normed_residual"
    assert problems(check, replace(spec, layers=(odd, spec.layers[1]))) == [
        "spec.layers[0].parallel is true, wanted pre_norm beside it: both blocks read what it"
        " norms",
        f"{at}.mixer_beta is inf, wanted a finite number",
        f"{at} is set, wanted pre_norm beside it: the stream goes on from what it norms",
        f"{at} is set, wanted parallel false: each block has a norm of its own",
        f"{at} is set, wanted no residual_scale: it has factors of its own",
    ]


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
        "qk_norm_whole",
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
