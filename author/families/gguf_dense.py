"""What the metadata of GGUF files say of single architectures without mixtures."""

import math
from collections.abc import Callable, Mapping

from author.families.apertus import XIELU
from author.families.gguf_keys import FULL, SLIDING, Keys, one_window, scaling, windows
from author.families.gguf_metadata import Metadata
from author.families.rope import ORIGINAL
from author.names import Name

Constants = Mapping[Name, tuple[tuple[float, ...], ...]]


def mistral3(f: Metadata) -> Keys:
    """Ministral 3 where queries are scaled by position."""
    beta = f.get("attention.temperature_scale")
    if not beta:
        return {"model_type": "mistral"}
    found = scaling(f)
    length = f.get("rope.scaling.original_context_length", f.get("context_length"))
    return {"rope_scaling": {**(found or {}), "llama_4_scaling_beta": beta, ORIGINAL: length}}


def factors(f: Metadata) -> Keys:
    """Granite's factors; 0 is none."""
    return {
        "attention_bias": f.has("attn_q.bias"),
        "attention_multiplier": f.get("attention.scale", 0.0) or max(f.width, 1) ** -0.5,
        "embedding_multiplier": f.get("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": f.get("residual_scale", 0.0) or 1.0,
        "logits_scaling": f.get("logit_scale", 0.0) or 1.0,
    }


def gemma(period: int, largest: int, window: int | None) -> Callable[[Metadata], Keys]:
    """Gemma 2 and 3: the largest of either, by its layers, scales scores in its own way."""

    def found(f: Metadata) -> Keys:
        heads, d = f.count("attention.head_count"), f.count("embedding_length")
        return {
            "query_pre_attn_scalar": d / heads if f.layers == largest else f.width,
            "attn_logit_softcapping": f.get("attn_logit_softcapping"),
            "final_logit_softcapping": f.get("final_logit_softcapping"),
            **windows(f, period, window),
        }

    return found


def gemma3(f: Metadata) -> Keys:
    """Gemma 3: layers that slide turn by a base of their own."""
    local = f.get("rope.freq_base_swa", 10000.0)
    return {"rope_local_base_freq": local, **gemma(6, 62, None)(f)}


def phi3(f: Metadata) -> Keys:
    """Phi 3: where factors for long sequences take over."""
    return one_window(f) | {ORIGINAL: f.get("rope.scaling.original_context_length")}


def olmo2(f: Metadata) -> Keys:
    """OLMo 3 where layers slide; those that do are turned without scaling."""
    found = windows(f, 4)
    if SLIDING not in found["layer_types"]:
        return {}
    theta = f.get("rope.freq_base", 10000.0)
    full = scaling(f) or {"rope_type": "default"}
    plain = {"rope_type": "default", "rope_theta": f.get("rope.freq_base_swa", theta)}
    return found | {
        "model_type": "olmo3",
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {FULL: {**full, "rope_theta": theta}, SLIDING: plain},
    }


def cohere2(f: Metadata) -> Keys:
    """Command R7B and A: the norm's epsilon, the factor on logits, windows."""
    eps, scale = f.get("attention.layer_norm_epsilon", 1e-5), f.get("logit_scale")
    return {"layer_norm_eps": eps, "rms_norm_eps": None, "logit_scale": scale, **windows(f, 4)}


def xielu(f: Metadata) -> Constants:
    """What the metadata say of each layer's activation."""
    said = {key: f.each(f"xielu.{key}") for key in ("alpha_p", "alpha_n", "beta", "eps")}
    of = {key: v if isinstance(v, list) else [v] * f.layers for key, v in said.items()}
    if any(len(v) != f.layers or any(not isinstance(n, float) for n in v) for v in of.values()):
        f.complain(f"xielu.* wants a number of each of {f.layers} layers, found {said}")
        return {}
    for key, wanted in (("beta", XIELU.beta), ("eps", XIELU.cut)):
        if any(not math.isclose(v, wanted, rel_tol=2**-7) for v in of[key]):
            f.complain(f"xielu.{key} is {of[key]}, wanted {wanted}")
    return {
        Name(base, layer): ((max(v, 0.0) + math.log1p(math.exp(-abs(v))) + plus,),)
        for base, key, plus in (("Xp", "alpha_p", 0.0), ("Xn", "alpha_n", XIELU.beta))
        for layer, v in enumerate(of[key])
    }
