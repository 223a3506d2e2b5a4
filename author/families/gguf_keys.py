"""What the metadata of a GGUF file says, as the Hugging Face config of the same family says it."""

from collections.abc import Callable, Mapping
from typing import Any

from author.families.gguf_metadata import Metadata
from author.families.rope import ORIGINAL, magnitude

FULL, SLIDING = "full_attention", "sliding_attention"
SIGMOID = 2  # of the ways in which experts are scored; 1 is a softmax

Keys = dict[str, Any]


def usual(f: Metadata) -> Keys:
    """What every architecture says."""
    heads = f.need("attention.head_count")
    embedding = f.shapes.get("token_embd.weight") or (0,)
    f.only("attention.causal", (True,))
    return {
        "hidden_size": f.need("embedding_length"),
        "num_hidden_layers": f.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(f, heads),
        "head_dim": f.width,
        "intermediate_size": f.get("feed_forward_length"),
        "max_position_embeddings": f.get("context_length", 2048),
        "rms_norm_eps": f.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": f.get("rope.freq_base", 10000.0),
        "rotary_dim": f.turned,
        "rope_scaling": scaling(f),
        "vocab_size": f.get("vocab_size", embedding[0]),
        "tie_word_embeddings": "output.weight" not in f.shapes,
    }


def _kv_heads(f: Metadata, heads: int) -> Any:
    """How many heads keys have; of latent attention it is told what the cache has, not this."""
    if "attention.kv_lora_rank" not in f.keys:
        return f.get("attention.head_count_kv", heads)
    f.each("attention.head_count_kv")
    return heads


def scaling(f: Metadata, *, both: bool = False) -> Keys | None:
    """How frequencies are scaled; `both`: YaRN's two magnitudes are the same, a tenth written."""
    factor, original = (
        f.number("rope.scaling.factor", 0),
        f.get("rope.scaling.original_context_length"),
    )
    added = f.number("rope.scaling.attn_factor", 1.0)
    kind = f.get("rope.scaling.type", "linear" if factor else "none")
    yarn = _yarn(f, factor, added, both=both)
    if "rope_factors_long.weight" in f.shapes:
        return {
            "rope_type": "longrope",
            "short_factor": list(f.numbers("rope_factors_short.weight")),
            "long_factor": list(f.numbers("rope_factors_long.weight")),
            ORIGINAL: original,
            "attention_factor": added,
        }
    match kind:
        case "yarn":
            return {"rope_type": kind, "factor": factor, ORIGINAL: original, **yarn}
        case "linear":
            return {"rope_type": kind, "factor": factor}
        case "none" | "longrope":
            return None
    f.complain(f"{f.prefix}rope.scaling.type {kind!r} is not supported (none, linear, yarn are)")
    return None


def _yarn(f: Metadata, factor: Any, added: float, *, both: bool) -> Keys:
    """YaRN's own keys; none of them given, they are its release's."""
    f.only("rope.scaling.yarn_ext_factor", (1.0,))
    said, log = (
        f.get("rope.scaling.yarn_attn_factor"),
        f.number("rope.scaling.yarn_log_multiplier", 0),
    )
    found = {
        "beta_fast": f.get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": f.get("rope.scaling.yarn_beta_slow", 1.0),
    }
    if log:
        all_dims = log * 10 if both else log
        found |= {"mscale": all_dims if both else 1.0, "mscale_all_dim": all_dims}
    if said is not None:
        found["attention_factor"] = said
    elif not log and added != 1 and factor:
        found["attention_factor"] = added * magnitude(1.0, factor)
    return found


# --- Windows


def windows(f: Metadata, period: int, default: int | None = None) -> Keys:
    """Which layers slide: as the file says, or all but every `period`-th."""
    window = f.get("attention.sliding_window", default)
    pattern = f.each("attention.sliding_window_pattern")
    if not window:
        return {"layer_types": [FULL] * f.layers}
    if not isinstance(pattern, list):
        every = f.count("attention.sliding_window_pattern", period)
        pattern = [layer % every < every - 1 for layer in range(f.layers)]
    types = [SLIDING if slides else FULL for slides in pattern]
    return {"layer_types": types[: f.layers], "sliding_window": window}


def one_window(f: Metadata) -> Keys:
    """Every layer slides, or none does."""
    return {"sliding_window": f.get("attention.sliding_window") or None}


# --- Biases


def biases(*keys: str) -> Callable[[Metadata], Keys]:
    """Whether attention, its output and feed-forwards have biases: as the first layer does."""
    tensors = ("attn_q.bias", "attn_output.bias", "ffn_up.bias")

    def found(f: Metadata) -> Keys:
        pairs = zip(keys, tensors, strict=False)
        return {key: f.has(tensor) for key, tensor in pairs if key}

    return found


# --- Mixtures


def experts(f: Metadata, count: str = "num_experts", used: str = "num_experts_per_tok") -> Keys:
    """How many experts there are and are used, and how wide they are."""
    width = f.get("feed_forward_length")
    said = f.count("expert_count")
    routers = (f.shapes.get(f"blk.{n}.ffn_gate_inp.weight") for n in range(f.layers))
    rows = next((shape[0] for shape in routers if shape), said)
    if rows != said:
        f.complain(f"{f.prefix}expert_count is {said}, and routers choose among {rows}")
    return {
        count: said,
        used: f.need("expert_used_count"),
        "moe_intermediate_size": f.get("expert_feed_forward_length", width),
    }


def wide_experts(f: Metadata, count: str) -> Keys:
    """The same of families that call the width of experts that of feed-forwards."""
    found = experts(f, count)
    return found | {"intermediate_size": found.pop("moe_intermediate_size")}


def dense_layers(f: Metadata) -> list[int]:
    """The layers that have no router."""
    return [n for n in range(f.layers) if not f.has("ffn_gate_inp.weight", n)]


def scored(f: Metadata) -> Keys:
    """DeepSeek's mixtures: some dense layers, shared experts, groups, weights scaled."""
    return {
        **experts(f, "n_routed_experts"),
        "first_k_dense_replace": f.get("leading_dense_block_count", 0),
        "n_shared_experts": f.get("expert_shared_count", 0),
        "n_group": f.number("expert_group_count", 0) or 1,
        "topk_group": f.get("expert_group_used_count", 0) or 1,
        "routed_scaling_factor": f.get("expert_weights_scale", 0.0) or 1.0,
        "num_nextn_predict_layers": f.later,
    }


def shared_width(f: Metadata, tensor: str = "ffn_up_shexp.weight") -> int:
    """How wide the shared expert is, by the first that there is."""
    f.get("expert_shared_feed_forward_length")  # some converters write another number
    found = (f.shapes.get(f"blk.{n}.{tensor}") for n in range(f.layers))
    return next((shape[0] for shape in found if shape), 0)


def together(*readers: Callable[[Metadata], Mapping[str, Any]]) -> Callable[[Metadata], Keys]:
    """What several readers find."""

    def found(f: Metadata) -> Keys:
        return {key: value for read in readers for key, value in read(f).items()}

    return found
