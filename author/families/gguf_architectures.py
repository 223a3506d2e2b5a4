"""The architectures of GGUF files: the family of each, what it says and where it puts things."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from author.families.apertus import XIELU
from author.families.gguf_keys import (
    FULL,
    SIGMOID,
    SLIDING,
    Keys,
    biases,
    dense_layers,
    experts,
    one_window,
    scaling,
    scored,
    shared_width,
    together,
    wide_experts,
    windows,
)
from author.families.gguf_metadata import Metadata
from author.families.rope import ORIGINAL
from author.names import Name

Constants = Mapping[Name, tuple[tuple[float, ...], ...]]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How files of an architecture differ from a family's safetensors.

    `keys` are those of the family's config besides the usual ones. `paired`: the rotary pairs of
    queries and keys, half-split there, stand side by side here. `names` are tensors that go by
    another name than is usual here. Of `whole` matrices each has a tensor of its own, where they
    are cut out of one there; of those `unsplit`, too, but turned as there. `constants` are
    matrices that the metadata hold.
    """

    family: str
    keys: Callable[[Metadata], Keys] = lambda f: {}
    paired: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    unsplit: tuple[str, ...] = ()
    constants: Callable[[Metadata], Constants] = lambda f: {}


EXPERTS = ("Wg", "Wu", "Wd")
POST_ATTENTION = {"fn": "post_attention_norm.weight"}


def _llama(f: Metadata) -> Keys:
    if not f.get("expert_count"):
        return biases("attention_bias", "", "mlp_bias")(f)
    f.get("expert_feed_forward_length")
    return {"model_type": "mixtral", **wide_experts(f, "num_local_experts")}


def _mistral3(f: Metadata) -> Keys:
    """Ministral 3 where queries are scaled by position."""
    beta = f.get("attention.temperature_scale")
    if not beta:
        return {"model_type": "mistral"}
    found = scaling(f)
    length = f.get("rope.scaling.original_context_length", f.get("context_length"))
    return {"rope_scaling": {**(found or {}), "llama_4_scaling_beta": beta, ORIGINAL: length}}


def _factors(f: Metadata) -> Keys:
    """Granite's factors; 0 is none."""
    return {
        "attention_bias": f.has("attn_q.bias"),
        "attention_multiplier": f.get("attention.scale", 0.0) or f.width**-0.5,
        "embedding_multiplier": f.get("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": f.get("residual_scale", 0.0) or 1.0,
        "logits_scaling": f.get("logit_scale", 0.0) or 1.0,
    }


def _granitemoe(f: Metadata) -> Keys:
    f.only("expert_shared_feed_forward_length", (0,))
    return _factors(f) | wide_experts(f, "num_local_experts")


def _gemma(period: int, largest: int, window: int | None) -> Callable[[Metadata], Keys]:
    """Gemma 2 and 3: the largest of either, by its layers, scales scores in its own way."""

    def found(f: Metadata) -> Keys:
        heads, d = f.need("attention.head_count"), f.need("embedding_length")
        return {
            "query_pre_attn_scalar": d / heads if f.layers == largest else f.width,
            "attn_logit_softcapping": f.get("attn_logit_softcapping"),
            "final_logit_softcapping": f.get("final_logit_softcapping"),
            **windows(f, period, window),
        }

    return found


def _gemma3(f: Metadata) -> Keys:
    local = f.get("rope.freq_base_swa", 10000.0)
    return {"rope_local_base_freq": local, **_gemma(6, 62, None)(f)}


def _phi3(f: Metadata) -> Keys:
    return one_window(f) | {ORIGINAL: f.get("rope.scaling.original_context_length")}


def _olmo2(f: Metadata) -> Keys:
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


def _cohere2(f: Metadata) -> Keys:
    eps, scale = f.get("attention.layer_norm_epsilon", 1e-5), f.get("logit_scale")
    return {"layer_norm_eps": eps, "rms_norm_eps": None, "logit_scale": scale, **windows(f, 4)}


def _qwen_moe(*, norm: bool) -> Callable[[Metadata], Keys]:
    """Qwen's mixtures; `norm`: weights are divided by their sum where the file says nothing."""

    def found(f: Metadata) -> Keys:
        f.only("expert_weights_scale", (1.0, 0.0))
        return experts(f) | {
            "norm_topk_prob": f.get("expert_weights_norm", norm),
            "mlp_only_layers": dense_layers(f),
        }

    return found


def _shared(f: Metadata) -> Keys:
    return {"shared_expert_intermediate_size": shared_width(f)}


def _olmoe(f: Metadata) -> Keys:
    return wide_experts(f, "num_experts") | {
        "norm_topk_prob": f.get("expert_weights_norm", False),
        "clip_qkv": f.get("attention.clamp_kqv"),
    }


def _gpt_oss(f: Metadata) -> Keys:
    found = wide_experts(f, "num_local_experts") | windows(f, 2)
    scaled = scaling(f)
    if scaled is not None and scaled["rope_type"] == "yarn":
        found["rope_scaling"] = {**scaled, "truncate": False}
    return found | {"swiglu_limit": f.get("swiglu_clamp_exp", 7.0)}


def _deepseek2(f: Metadata) -> Keys:
    """DeepSeek V3 where experts are scored by sigmoids, else V2."""
    third = f.get("expert_gating_func") == SIGMOID
    turned, cut = f.turned, "attention.key_length_mla" in f.keys
    ends = "_mla" if cut else ""
    f.get("attention.value_length")  # that of all heads together, where they are cut
    found = scored(f) | {
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        "num_key_value_heads": f.need("attention.head_count"),
        "head_dim": turned,
        "q_lora_rank": f.get("attention.q_lora_rank"),
        "kv_lora_rank": f.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": f.need(f"attention.key_length{ends}") - turned,
        "v_head_dim": f.need(f"attention.value_length{ends}"),
        "norm_topk_prob": f.get("expert_weights_norm", False),
        "rope_scaling": scaling(f, both=True),
    }
    f.get("expert_shared_feed_forward_length")
    return found if third else found | _chosen(found)


def _chosen(found: Keys) -> Keys:
    """How DeepSeek V2 chooses experts."""
    limited = found["n_group"] > 1
    return {"topk_method": "group_limited_greedy" if limited else "greedy"}


def _sigmoid(f: Metadata) -> Keys:
    f.only("expert_gating_func", (SIGMOID,))
    shared_width(f)
    return scored(f) | {
        "attention_bias": f.has("attn_q.bias"),
        "norm_topk_prob": f.get("expert_weights_norm", True),
    }


def _glm4moe(f: Metadata) -> Keys:
    return {"use_qk_norm": f.has("attn_q_norm.weight"), **_sigmoid(f)}


def _minimax_m2(f: Metadata) -> Keys:
    f.only("expert_gating_func", (SIGMOID,))
    return wide_experts(f, "num_local_experts")


def _ernie_moe(f: Metadata) -> Keys:
    shared, width = shared_width(f), f.need("expert_feed_forward_length")
    f.only("expert_gating_func", (1,))
    f.get("expert_shared_count")
    return {
        "head_dim": f.width,
        "moe_num_experts": f.need("expert_count"),
        "moe_k": f.need("expert_used_count"),
        "moe_intermediate_size": width,
        "moe_num_shared_experts": shared // width,
        "moe_layer_start_index": f.get("leading_dense_block_count", 0),
        "moe_layer_interval": f.get("interleave_moe_layer_step", 1),
        "use_bias": f.has("attn_q.bias"),
    }


def _hunyuan_moe(f: Metadata) -> Keys:
    shared_width(f)
    f.only("expert_shared_count", (1,))
    used = f.need("expert_used_count")
    found = wide_experts(f, "num_experts")
    found.pop("num_experts_per_tok")
    return found | {"moe_topk": used, "attention_bias": f.has("attn_q.bias")}


def _llama4(f: Metadata) -> Keys:
    """Chunks and what comes with them, unless the file says that there is no window."""
    window = f.get("attention.sliding_window", 8192)
    shared_width(f)
    f.get("attention.sliding_window_pattern")
    dense = f.get("feed_forward_length")
    found = {
        "intermediate_size_mlp": dense,
        "attention_chunk_size": window or 8192,
        "no_rope_layer_interval": 4,
        "interleave_moe_layer_step": f.get("interleave_moe_layer_step", 1),
        "attn_scale": f.get("attention.temperature_scale", 0.1),
        "floor_scale": f.get("attention.temperature_length", 8192),
        "use_qk_norm": f.get("expert_count") != 128,
        **wide_experts(f, "num_local_experts"),
    }
    if not window:
        found |= {"no_rope_layers": [1] * f.layers, "layer_types": [FULL] * f.layers}
    return found


def _qwen3next(f: Metadata) -> Keys:
    values = f.need("ssm.time_step_rank")
    return _qwen_moe(norm=True)(f) | {
        "linear_conv_kernel_dim": f.need("ssm.conv_kernel"),
        "linear_key_head_dim": f.need("ssm.state_size"),
        "linear_num_key_heads": f.need("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": f.need("ssm.inner_size") // max(values, 1),
        "full_attention_interval": f.get("full_attention_interval", 4),
        **_shared(f),
    }


def _xielu(f: Metadata) -> Constants:
    """What the metadata say of each layer's activation."""
    said = {key: f.each(f"xielu.{key}") for key in ("alpha_p", "alpha_n", "beta", "eps")}
    of = {key: v if isinstance(v, list) else [v] * f.layers for key, v in said.items()}
    if any(len(v) != f.layers or None in v for v in of.values()):
        f.complain(f"xielu.* wants a number of each of {f.layers} layers, found {said}")
        return {}
    for key, wanted in (("beta", XIELU.beta), ("eps", XIELU.cut)):
        if any(not math.isclose(v, wanted, rel_tol=2**-7) for v in of[key]):
            f.complain(f"xielu.{key} is {of[key]}, wanted {wanted}")
    return {
        Name(base, layer): ((math.log1p(math.exp(v)) + plus,),)
        for base, key, plus in (("Xp", "alpha_p", 0.0), ("Xn", "alpha_n", XIELU.beta))
        for layer, v in enumerate(of[key])
    }


ATTENTION_BIAS = biases("attention_bias")
ARCHITECTURES: Mapping[str, Architecture] = {
    "apertus": Architecture(family="apertus", keys=ATTENTION_BIAS, constants=_xielu),
    "cohere2": Architecture(family="cohere2", keys=_cohere2),
    "deepseek2": Architecture(family="deepseek_v2", keys=_deepseek2),
    "dots1": Architecture(family="dots1", keys=_sigmoid),
    "ernie4_5": Architecture(family="ernie4_5", keys=biases("use_bias")),
    "ernie4_5-moe": Architecture(family="ernie4_5_moe", keys=_ernie_moe),
    "exaone4": Architecture(family="exaone4", keys=lambda f: windows(f, 4)),
    "gemma": Architecture(family="gemma"),
    "gemma2": Architecture(family="gemma2", keys=_gemma(2, 46, 4096)),
    "gemma3": Architecture(family="gemma3_text", keys=_gemma3),
    "glm4": Architecture(family="glm4", keys=ATTENTION_BIAS),
    "glm4moe": Architecture(family="glm4_moe", keys=_glm4moe, names=POST_ATTENTION),
    "gpt-oss": Architecture(
        family="gpt_oss", keys=_gpt_oss, names=POST_ATTENTION, whole=EXPERTS, unsplit=("Bg", "Bu")
    ),
    "granite": Architecture(
        family="granite", keys=together(_factors, biases("", "", "mlp_bias")), paired=True
    ),
    "granitemoe": Architecture(
        family="granitemoe", keys=_granitemoe, paired=True, whole=("Wg", "Wu")
    ),
    "hunyuan-dense": Architecture(family="hunyuan_v1_dense", keys=ATTENTION_BIAS),
    "hunyuan-moe": Architecture(family="hunyuan_v1_moe", keys=_hunyuan_moe),
    "llama": Architecture(family="llama", keys=_llama, paired=True),
    "llama4": Architecture(family="llama4_text", keys=_llama4, whole=EXPERTS),
    "minimax-m2": Architecture(family="minimax_m2", keys=_minimax_m2),
    "mistral3": Architecture(family="ministral3", keys=_mistral3, paired=True),
    "olmo2": Architecture(family="olmo2", keys=_olmo2),
    "olmoe": Architecture(family="olmoe", keys=_olmoe),
    "phi3": Architecture(family="phi3", keys=_phi3),
    "qwen2": Architecture(family="qwen2"),
    "qwen2moe": Architecture(family="qwen2_moe", keys=together(_qwen_moe(norm=False), _shared)),
    "qwen3": Architecture(family="qwen3", keys=ATTENTION_BIAS),
    "qwen3moe": Architecture(family="qwen3_moe", keys=_qwen_moe(norm=True)),
    "qwen3next": Architecture(family="qwen3_next", keys=_qwen3next, names=POST_ATTENTION),
    "seed_oss": Architecture(
        family="seed_oss",
        keys=biases("attention_bias", "attention_out_bias", "mlp_bias"),
        names=POST_ATTENTION,
    ),
    "smollm3": Architecture(
        family="smollm3", keys=biases("attention_bias", "", "mlp_bias"), paired=True
    ),
}
