"""The metadata of a GGUF file of a Hugging Face config, as llama.cpp's converter writes them.

The keys come from the writer of the `gguf` library, what is said from convert_hf_to_gguf.py.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np

from tests import gguf_recurrent
from tests.gguf_recurrent import Config
from tests.gguf_tensors import rope, width

Writer = gguf.GGUFWriter
SOFTMAX, SIGMOID = gguf.ExpertGatingFuncType.SOFTMAX, gguf.ExpertGatingFuncType.SIGMOID


def describe(w: Writer, c: Config, tensors: Mapping[str, np.ndarray]) -> None:
    """Write what a config says; Apertus has tensors that become metadata."""
    _usual(w, c)
    SPECIAL.get(c["model_type"], lambda w, c: None)(w, c)
    if c["model_type"] == "apertus":
        _xielu(w, c, tensors)


# --- What every class writes (`TextModel.set_gguf_parameters`)


def _first(c: Config, *keys: str) -> Any:
    return next((c[key] for key in keys if c.get(key) is not None), None)


def _usual(w: Writer, c: Config) -> None:
    said = rope(c)
    full = said.get("full_attention", said)
    written: list[tuple[Callable[[Any], None], Any]] = [
        (w.add_block_count, c["num_hidden_layers"]),
        (w.add_context_length, _first(c, "max_position_embeddings", "model_max_length")),
        (w.add_embedding_length, c["hidden_size"]),
        (w.add_feed_forward_length, _first(c, "intermediate_size_mlp", "intermediate_size")),
        (w.add_head_count, c["num_attention_heads"]),
        (w.add_head_count_kv, c["num_key_value_heads"]),
        (w.add_rope_freq_base, full.get("rope_theta")),
        (w.add_layer_norm_rms_eps, c.get("rms_norm_eps")),
        (w.add_layer_norm_eps, c.get("layer_norm_eps")),
        (w.add_expert_count, _first(c, "num_local_experts", "num_experts")),
        (w.add_expert_used_count, _first(c, "num_experts_per_tok", "num_experts_per_token")),
        (w.add_expert_group_count, c.get("n_group")),
        (w.add_expert_group_used_count, c.get("topk_group")),
        (w.add_expert_gating_func, _gating(c)),
        (w.add_key_length, c.get("head_dim")),
        (w.add_value_length, c.get("head_dim")),
    ]
    for add, value in written:
        if value is not None:
            add(value)
    _scaling(w, full)


def _gating(c: Config) -> gguf.ExpertGatingFuncType | None:
    said = _first(c, "scoring_func", "moe_router_activation_func")
    return {"sigmoid": SIGMOID, "softmax": SOFTMAX}.get(said)


def _scaling(w: Writer, said: Mapping[str, Any]) -> None:
    match said.get("rope_type"):
        case "linear":
            w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            w.add_rope_scaling_factor(said["factor"])
        case "yarn":
            w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            w.add_rope_scaling_factor(said["factor"])
            w.add_rope_scaling_orig_ctx_len(said["original_max_position_embeddings"])
            if "attention_factor" in said:
                w.add_rope_scaling_yarn_attn_factor(said["attention_factor"])
            w.add_rope_scaling_yarn_beta_fast(said["beta_fast"])
            w.add_rope_scaling_yarn_beta_slow(said["beta_slow"])


# --- What single classes write


def _turned(w: Writer, c: Config) -> None:
    w.add_rope_dimension_count(width(c))


def _sized(w: Writer, c: Config) -> None:
    w.add_vocab_size(c["vocab_size"])
    _turned(w, c)


def _partial(w: Writer, c: Config) -> None:
    w.add_rope_dimension_count(int(width(c) * (rope(c)["partial_rotary_factor"] or 0.5)))


def _ministral3(w: Writer, c: Config) -> None:
    _sized(w, c)
    w.add_rope_scaling_yarn_log_mul(rope(c)["mscale_all_dim"])
    w.add_attn_temperature_scale(rope(c)["llama_4_scaling_beta"])


def _granite(w: Writer, c: Config) -> None:
    _sized(w, c)
    w.add_attention_scale(c["attention_multiplier"])
    w.add_embedding_scale(c["embedding_multiplier"])
    w.add_residual_scale(c["residual_multiplier"])
    w.add_logit_scale(c["logits_scaling"])


def _gemma2(w: Writer, c: Config) -> None:
    w.add_attn_logit_softcapping(c["attn_logit_softcapping"])
    w.add_final_logit_softcapping(c["final_logit_softcapping"])
    w.add_sliding_window(c["sliding_window"])


def _gemma3(w: Writer, c: Config) -> None:
    """The pattern is written where it is not the usual one."""
    w.add_sliding_window(c["sliding_window"])
    if c["sliding_window_pattern"] != 6:
        every = c["sliding_window_pattern"]
        w.add_sliding_window_pattern([(i + 1) % every != 0 for i in range(c["num_hidden_layers"])])


def _layer_types(w: Writer, c: Config) -> None:
    if c["sliding_window"] is None:
        return
    w.add_sliding_window(c["sliding_window"])
    w.add_sliding_window_pattern([kind == "sliding_attention" for kind in c["layer_types"]])


def _cohere2(w: Writer, c: Config) -> None:
    w.add_logit_scale(c["logit_scale"])
    w.add_sliding_window(c["sliding_window"])
    _sized(w, c)
    w.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _phi3(w: Writer, c: Config) -> None:
    old, new = c["original_max_position_embeddings"], c["max_position_embeddings"]
    w.add_rope_scaling_orig_ctx_len(old)
    _partial(w, c)
    w.add_sliding_window(c["sliding_window"] or 0)
    w.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(new / old) / math.log(old)))


def _hunyuan(w: Writer, c: Config) -> None:
    said, dims = rope(c), width(c)
    if said.get("rope_type") == "dynamic":
        w.add_rope_freq_base(said["rope_theta"] * said["alpha"] ** (dims / (dims - 2)))
        w.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        w.add_rope_scaling_factor(1)
        w.add_rope_scaling_orig_ctx_len(256 * 1024)


def _hunyuan_moe(w: Writer, c: Config) -> None:
    w.add_expert_shared_feed_forward_length(c["intermediate_size"])
    w.add_expert_feed_forward_length(c["intermediate_size"])
    w.add_expert_used_count(c["moe_topk"])
    w.add_expert_shared_count(1)


def _qwen_moe(w: Writer, c: Config) -> None:
    """The last key is one that llama.cpp does without, where the norm is the usual one."""
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in c:
        w.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    if c["model_type"] == "qwen3_moe" and not c["norm_topk_prob"]:
        w.add_expert_weights_norm(False)


def _scored(w: Writer, c: Config) -> None:
    w.add_expert_count(c["n_routed_experts"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_leading_dense_block_count(c["first_k_dense_replace"])
    w.add_expert_shared_count(c["n_shared_experts"])
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    w.add_expert_weights_norm(c["norm_topk_prob"])
    if "scoring_func" not in c:
        w.add_expert_gating_func(SIGMOID)
    if c["model_type"] == "glm4_moe":
        _partial(w, c)
        w.add_nextn_predict_layers(c["num_nextn_predict_layers"])


def _deepseek(w: Writer, c: Config) -> None:
    """Two magnitudes that differ have no keys; their ratio, which is a config's too, has one."""
    w.add_head_count_kv(1)
    _scored(w, c)
    w.add_vocab_size(c["vocab_size"])
    if c["q_lora_rank"] is not None:
        w.add_q_lora_rank(c["q_lora_rank"])
    rank, turned = c["kv_lora_rank"], c["qk_rope_head_dim"]
    w.add_kv_lora_rank(rank)
    w.add_key_length(rank + turned)
    w.add_value_length(rank)
    w.add_key_length_mla(c["qk_nope_head_dim"] + turned)
    w.add_value_length_mla(c["v_head_dim"])
    w.add_rope_dimension_count(turned)
    said = rope(c)
    if "mscale_all_dim" in said:
        w.add_rope_scaling_yarn_log_mul(0.1 * said["mscale_all_dim"])
        if said["mscale"] != said["mscale_all_dim"]:
            one, all_dims = (_magnitude(said, key) for key in ("mscale", "mscale_all_dim"))
            w.add_rope_scaling_yarn_attn_factor(one / all_dims)


def _magnitude(said: Mapping[str, Any], key: str) -> float:
    return 0.1 * said[key] * math.log(said["factor"]) + 1


def _gpt_oss(w: Writer, c: Config) -> None:
    """The limit of the activation has a key, which is not written for the usual 7."""
    w.add_sliding_window(c["sliding_window"])
    w.add_expert_feed_forward_length(c["intermediate_size"])
    if c["swiglu_limit"] != 7:
        w.add_swiglu_clamp_exp([c["swiglu_limit"]] * c["num_hidden_layers"])


def _minimax_m2(w: Writer, c: Config) -> None:
    w.add_expert_gating_func(SIGMOID)
    w.add_expert_feed_forward_length(c["intermediate_size"])
    w.add_rope_dimension_count(c["rotary_dim"])


def _ernie_moe(w: Writer, c: Config) -> None:
    w.add_expert_count(c["moe_num_experts"])
    w.add_expert_used_count(c["moe_k"])
    w.add_interleave_moe_layer_step(c["moe_layer_interval"])
    w.add_leading_dense_block_count(c["moe_layer_start_index"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_expert_shared_count(c["moe_num_shared_experts"])
    shared = c["intermediate_size"] // c["num_key_value_heads"]
    w.add_expert_shared_feed_forward_length(shared)


def _llama4(w: Writer, c: Config) -> None:
    """Chunks and temperature have keys, which are not written for the usual ones."""
    _sized(w, c)
    w.add_interleave_moe_layer_step(c["interleave_moe_layer_step"])
    w.add_expert_feed_forward_length(c["intermediate_size"])
    if c["attention_chunk_size"] != 8192:
        w.add_sliding_window(c["attention_chunk_size"])
        w.add_attn_temperature_length(c["floor_scale"])
        w.add_attn_temperature_scale(c["attn_scale"])


def _qwen3_next(w: Writer, c: Config) -> None:
    _qwen_moe(w, c)
    gguf_recurrent.describe_delta(w, c)


def _qwen3_5_moe(w: Writer, c: Config) -> None:
    _qwen_moe(w, c)
    gguf_recurrent.describe_qwen35(w, c)


def _xielu(w: Writer, c: Config, tensors: Mapping[str, np.ndarray]) -> None:
    def numbers(key: str) -> list[float]:
        names = (f"model.layers.{n}.mlp.act_fn.{key}" for n in range(c["num_hidden_layers"]))
        return [float(tensors[name].ravel()[0]) for name in names]

    _sized(w, c)
    w.add_xielu_alpha_p(numbers("alpha_p"))
    w.add_xielu_alpha_n(numbers("alpha_n"))
    w.add_xielu_beta(numbers("beta"))
    w.add_xielu_eps(numbers("eps"))


SPECIAL: Mapping[str, Callable[[Writer, Config], None]] = {
    "cohere2": _cohere2,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "dots1": _scored,
    "ernie4_5_moe": _ernie_moe,
    "exaone4": _layer_types,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm4": _partial,
    "glm4_moe": _scored,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "granitemoe": _granite,
    "kimi_linear": gguf_recurrent.describe_kimi_linear,
    "hunyuan_v1_dense": _hunyuan,
    "hunyuan_v1_moe": _hunyuan_moe,
    "llama": _sized,
    "llama4_text": _llama4,
    "minimax_m2": _minimax_m2,
    "ministral3": _ministral3,
    "mistral": _sized,
    "mixtral": _sized,
    "olmo3": _layer_types,
    "phi3": _phi3,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": gguf_recurrent.describe_qwen35,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "smollm3": _sized,
}
