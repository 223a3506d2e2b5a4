"""What the metadata of GGUF files say of single architectures with mixtures."""

from collections.abc import Callable

from author.families.gguf_dense import factors
from author.families.gguf_keys import (
    FULL,
    SIGMOID,
    Keys,
    biases,
    dense_layers,
    experts,
    scaling,
    scored,
    shared_width,
    wide_experts,
    windows,
)
from author.families.gguf_metadata import Metadata


def llama(f: Metadata) -> Keys:
    """Llama, or Mixtral where there are experts."""
    if not f.get("expert_count"):
        return biases("attention_bias", "", "mlp_bias")(f)
    f.get("expert_feed_forward_length")
    return {"model_type": "mixtral", **wide_experts(f, "num_local_experts")}


def granitemoe(f: Metadata) -> Keys:
    """Granite's factors, and experts."""
    f.only("expert_shared_feed_forward_length", (0,))
    return factors(f) | wide_experts(f, "num_local_experts")


def qwen_moe(*, norm: bool) -> Callable[[Metadata], Keys]:
    """Qwen's mixtures; `norm`: weights are divided by their sum where the file says nothing."""

    def found(f: Metadata) -> Keys:
        f.only("expert_weights_scale", (1.0, 0.0))
        return experts(f) | {
            "norm_topk_prob": f.get("expert_weights_norm", norm),
            "mlp_only_layers": dense_layers(f),
        }

    return found


def shared(f: Metadata) -> Keys:
    """How wide Qwen's shared expert is."""
    return {"shared_expert_intermediate_size": shared_width(f)}


def olmoe(f: Metadata) -> Keys:
    """OLMoE: weights are not divided by their sum, unless the file says so."""
    return wide_experts(f, "num_experts") | {
        "norm_topk_prob": f.get("expert_weights_norm", False),
        "clip_qkv": f.get("attention.clamp_kqv"),
    }


def gpt_oss(f: Metadata) -> Keys:
    """gpt-oss: every other layer slides; the ramp of YaRN does not end at whole pairs."""
    found = wide_experts(f, "num_local_experts") | windows(f, 2)
    scaled = scaling(f)
    if scaled is not None and scaled["rope_type"] == "yarn":
        found["rope_scaling"] = {**scaled, "truncate": False}
    return found | {"swiglu_limit": f.get("swiglu_clamp_exp", 7.0)}


def deepseek2(f: Metadata) -> Keys:
    """DeepSeek V3 where experts are scored by sigmoids, else V2."""
    third = f.get("expert_gating_func") == SIGMOID
    found = scored(f) | {
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        **latent(f),
        "norm_topk_prob": f.get("expert_weights_norm", False),
        "rope_scaling": scaling(f, both=True),
    }
    f.get("expert_shared_feed_forward_length")
    return found if third else found | _chosen(found)


def latent(f: Metadata) -> Keys:
    """The widths of latent attention: `_mla` are those of a head where others are the cache's."""
    turned, cut = f.turned, "attention.key_length_mla" in f.keys
    ends = "_mla" if cut else ""
    f.get("attention.value_length")  # that of all heads together, where they are cut
    return {
        "head_dim": turned,
        "q_lora_rank": f.get("attention.q_lora_rank"),
        "kv_lora_rank": f.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": f.count(f"attention.key_length{ends}") - turned,
        "v_head_dim": f.need(f"attention.value_length{ends}"),
    }


def _chosen(found: Keys) -> Keys:
    """How DeepSeek V2 chooses experts."""
    limited = found["n_group"] > 1
    return {"topk_method": "group_limited_greedy" if limited else "greedy"}


def sigmoids(f: Metadata) -> Keys:
    """dots.llm1: experts scored by sigmoids, after some dense layers."""
    f.only("expert_gating_func", (SIGMOID,))
    shared_width(f)
    return scored(f) | {
        "attention_bias": f.has("attn_q.bias"),
        "norm_topk_prob": f.get("expert_weights_norm", True),
    }


def glm4moe(f: Metadata) -> Keys:
    """GLM 4.5: the same, and norms of heads where there are any."""
    return {"use_qk_norm": f.has("attn_q_norm.weight"), **sigmoids(f)}


def minimax_m2(f: Metadata) -> Keys:
    """MiniMax M2: experts scored by sigmoids."""
    f.only("expert_gating_func", (SIGMOID,))
    return wide_experts(f, "num_local_experts")


def ernie_moe(f: Metadata) -> Keys:
    """ERNIE 4.5: as many shared experts as their width makes."""
    shared, width = shared_width(f), f.count("expert_feed_forward_length")
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


def hunyuan_moe(f: Metadata) -> Keys:
    """Hunyuan: one shared expert."""
    shared_width(f)
    f.only("expert_shared_count", (1,))
    used = f.need("expert_used_count")
    found = wide_experts(f, "num_experts")
    found.pop("num_experts_per_tok")
    return found | {"moe_topk": used, "attention_bias": f.has("attn_q.bias")}


def llama4(f: Metadata) -> Keys:
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
