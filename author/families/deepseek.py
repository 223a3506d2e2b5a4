"""DeepSeek V2 and V3 (also Kimi K2, Moonlight): latent attention, mixtures after a few layers."""

from collections.abc import Mapping
from typing import Any

from author.families import parts
from author.families.config import Config
from author.families.mixtures import (
    TRAINING,
    Shapes,
    Stands,
    after_dense,
    experts,
    fed,
    groups,
    later_layers,
    layer_views,
    mixture,
    optional_count,
    shared,
)
from author.families.model import Model, View, half_split, of_each, part
from author.families.rope import given, kind_of, magnitude, numbered, rotation
from author.spec import Mla, Moe, Rope, SigmoidGating

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")

LATENT_EPSILON = 1e-6  # whatever the config says of other norms
NAMES = {
    "Wqa": "q_a_proj",
    "Qan": "q_a_layernorm",
    "Wqb": "q_b_proj",
    "Wq": "q_proj",
    "Wkva": "kv_a_proj_with_mqa",
    "Kan": "kv_a_layernorm",
    "Wkb": "kv_b_proj",
    "Wvb": "kv_b_proj",
    "Wo": "o_proj",
}


def read(keys: Mapping[str, Any], where: str, tensors: Shapes) -> Model:
    """The model that a config of these families describes; ConfigError with all that is wrong."""
    config = Config(keys, where)
    family = config.only("model_type", MODEL_TYPES)
    size = parts.sizes(config)
    turned = rotation(config, config.count("qk_rope_head_dim"))
    (rope,), rotations = numbered([turned])
    pairs = family == "deepseek_v2" or config.flag("rope_interleave", True)
    mixer = latent(config, size.heads, rope, _stretch(config))
    biased = family == "deepseek_v2" and config.flag("mlp_bias", False)
    if family == "deepseek_v2":
        moe = _routed(config, biased=biased)
    else:
        moe = scored(config, scale=2.5, runs=(8, 4))
    dense = parts.swiglu(config, bias=biased, output_bias=biased)
    layers, found = [], []
    for number, sparse in enumerate(after_dense(config, size.layers)):
        layers.append(parts.layer_of(mixer, moe if sparse else dense))
        own = mixture_stands(moe, number, tensors) if sparse else fed(dense)
        found.append(latent_stands(mixer, pairs=pairs) | own)
    skipped = later_layers(config, size.layers)
    config.done(TRAINING)
    return parts.model(family, size, layers, rotations, layer_views(found), skipped=skipped)


# --- Latent attention


def latent(config: Config, heads: int, rope: Rope | None, stretch: float) -> Mla:
    """Latent attention; `stretch` is a factor on its scale."""
    still, turns = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    config.only("qk_head_dim", (still + turns,), still + turns)
    config.only("num_key_value_heads", (heads,), heads)
    rank = config.get("q_lora_rank", None)
    bias = config.flag("attention_bias", False)
    return Mla(
        heads=heads,
        q_lora_rank=None if rank is None else config.count("q_lora_rank"),
        kv_lora_rank=config.count("kv_lora_rank"),
        qk_nope=still,
        qk_rope=turns,
        v_dim=config.count("v_head_dim"),
        scale=stretch * (still + turns) ** -0.5,
        rope=rope,
        bias=bias,
        output_bias=bias,
        norm_eps=LATENT_EPSILON,
    )


def _stretch(config: Config) -> float:
    """What a scaling of the rotation makes of the scale, besides what it does to the tables."""
    found = given(config)
    factor, all_dims = found.get("factor"), found.get("mscale_all_dim")
    if not isinstance(factor, int | float) or not isinstance(all_dims, int | float):
        return 1.0  # not given, or complained of where the rotation is read
    if kind_of(found) == "default" or all_dims == 0:
        return 1.0
    return magnitude(all_dims, factor) ** 2


def latent_stands(m: Mla, *, pairs: bool) -> Stands:
    """Where latent attention stands; `pairs`: rotary pairs stand side by side."""
    tensors = {base: f"self_attn.{name}.weight" for base, name in NAMES.items()}
    query = "Wq" if m.q_lora_rank is None else "Wqb"
    kept = {query, "Wkva", "Kan", "Wo"} | (set() if m.q_lora_rank is None else {"Wqa", "Qan"})
    found: Stands = {base: tensors[base] for base in kept}
    if pairs:
        width, rank = m.qk_nope + m.qk_rope, m.kv_lora_rank
        queries = half_split(m.heads, width, m.qk_rope, first=m.qk_nope)
        latent = half_split(1, rank + m.qk_rope, m.qk_rope, first=rank)
        found[query] = View(tensor=tensors[query], rows=queries)
        found["Wkva"] = View(tensor=tensors["Wkva"], rows=latent)
    return found | _factors(m, tensors["Wkb"]) | _latent_biases(m, pairs=pairs)


def _factors(m: Mla, tensor: str) -> Stands:
    """Keys and values from the latent: of each head some rows of keys, then some of values.

    Scores sum over the rows of keys, which are summed over as columns here.
    """
    rows = m.qk_nope + m.v_dim
    values = of_each(m.heads, rows, (m.qk_nope, m.v_dim, 1))
    return {
        "Wkb": View(tensor=tensor, turned=rows, cols=part(0, m.qk_nope)),
        "Wvb": View(tensor=tensor, rows=values),
    }


def _latent_biases(m: Mla, *, pairs: bool) -> Stands:
    found: Stands = {}
    if m.output_bias:
        found["Bo"] = "self_attn.o_proj.bias"
    if not m.bias:
        return found
    order = half_split(1, m.kv_lora_rank + m.qk_rope, m.qk_rope, first=m.kv_lora_rank)
    tensor = f"self_attn.{NAMES['Wkva']}.bias"
    found["Bkva"] = View(tensor=tensor, rows=order) if pairs else tensor
    if m.q_lora_rank is not None:
        found["Bqa"] = f"self_attn.{NAMES['Wqa']}.bias"
    return found


# --- Mixtures


def _routed(config: Config, *, biased: bool) -> Moe:
    """The mixture of V2: the largest of a softmax, as they are, times a factor."""
    config.only("scoring_func", ("softmax",), "softmax")
    config.only("norm_topk_prob", (False,), False)
    limited = config.only("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    runs = groups(config)
    return _mixture(
        config,
        norm_top_k=False,
        groups=runs if limited == "group_limited_greedy" else None,
        shared_bias=biased,
    )


def scored(
    config: Config, *, norm_top_k: bool = True, scale: float = 1.0, runs: tuple[int, int] = (1, 1)
) -> Moe:
    """The mixture of V3: sigmoids chosen with a bias, within groups.

    They are divided by their sum plus 1e-20, which no sum in float32 notices. The arguments are
    what the family does where the config is silent.
    """
    config.only("scoring_func", ("sigmoid", "noaux_tc"), "sigmoid")
    config.only("topk_method", ("noaux_tc",), "noaux_tc")
    return _mixture(
        config,
        scale,
        gating=SigmoidGating(bias=True),
        norm_top_k=config.flag("norm_topk_prob", norm_top_k),
        groups=groups(config, usual=runs),
    )


def _mixture(config: Config, scale: float = 1.0, **fields: Any) -> Moe:
    width = config.count("moe_intermediate_size")
    beside = optional_count(config, "n_shared_experts")
    return mixture(
        config.count("n_routed_experts"),
        config.count("num_experts_per_tok"),
        width,
        weights_scale=config.real("routed_scaling_factor", scale),
        shared_experts=beside,
        shared_dff=beside * width,
        **fields,
    )


def mixture_stands(m: Moe, number: int, tensors: Shapes) -> Stands:
    """Where the mixture of a layer stands."""
    found: Stands = {"Wr": "mlp.gate.weight"} | experts("mlp.experts", m, number, tensors)
    if isinstance(m.gating, SigmoidGating):
        found["Bs"] = "mlp.gate.e_score_correction_bias"
    if m.shared_experts > 0:
        found |= shared("mlp.shared_experts", m)
    return found
