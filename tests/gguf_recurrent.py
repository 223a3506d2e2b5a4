"""GGUF files of models with recurrent layers, as llama.cpp's converter writes them, class by class.

Qwen3NextModel; Qwen3_5TextModel and Qwen3_5MoeTextModel, which put value heads in another order;
KimiLinearModel. What is said here of tensors goes under `gguf_tensors`, the rest under
`gguf_metadata`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import numpy as np

Config = Mapping[str, Any]
Tensor = tuple[str, np.ndarray]
LAYER = re.compile(r"model\.layers\.(\d+)\.")
MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")
# What stands beside the layer for predicting several tokens.
MTP = {
    "mtp.fc.weight": gguf.MODEL_TENSOR.NEXTN_EH_PROJ,
    "mtp.pre_fc_norm_embedding.weight": gguf.MODEL_TENSOR.NEXTN_ENORM,
    "mtp.pre_fc_norm_hidden.weight": gguf.MODEL_TENSOR.NEXTN_HNORM,
    "mtp.norm.weight": gguf.MODEL_TENSOR.NEXTN_SHARED_HEAD_NORM,
}

# --- Tensors


def qwen3next(c: Config, name: str, array: np.ndarray) -> Iterator[Tensor]:
    if not name.endswith("in_proj_qkvz.weight"):
        yield _decay_and_conv(name, array)
        return
    number, groups, keys = LAYER.match(name), c["linear_num_key_heads"], c["linear_key_head_dim"]
    by_group = array.reshape(groups, -1, array.shape[-1])
    values = (by_group.shape[1] - 2 * keys) // 2
    cuts = np.cumsum([keys, keys, values])
    q, k, v, z = (part.reshape(-1, array.shape[-1]) for part in np.split(by_group, cuts, 1))
    yield f"blk.{number[1]}.attn_qkv.weight", np.concatenate([q, k, v])
    yield f"blk.{number[1]}.attn_gate.weight", z


def first_qwen3next(c: Config, name: str, array: np.ndarray) -> Iterator[Tensor]:
    """The first version of the class, whose files llama.cpp still reads."""
    if name.endswith("in_proj_qkvz.weight"):
        yield f"blk.{LAYER.match(name)[1]}.ssm_in.weight", array
    else:
        yield from qwen3next(c, name, array)


def _decay_and_conv(name: str, array: np.ndarray) -> Tensor:
    if name.endswith(".A_log"):
        return name, -np.exp(array)
    if name.endswith(".dt_bias"):
        return name.replace(".dt_bias", ".dt_proj.bias"), array
    return name, array.squeeze(1) if "conv1d" in name else array


def qwen35(c: Config, name: str, array: np.ndarray) -> Iterator[Tensor]:
    """Experts come in two tensors, and leave in three."""
    name = _later(c, name)
    number = LAYER.match(name)
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True):
            yield f"blk.{number[1]}.ffn_{part}_exps.weight", half
    elif name.endswith("experts.down_proj"):
        yield f"blk.{number[1]}.ffn_down_exps.weight", array
    else:
        name, array = _decay_and_conv(name, array)
        yield name, _reordered(c, name, array) if ".linear_attn." in name else array


def joined_qwen35(c: Config, name: str, array: np.ndarray) -> Iterator[Tensor]:
    """With the converter's option that leaves gates and ups in one tensor."""
    if name.endswith("experts.gate_up_proj"):
        yield f"blk.{LAYER.match(name)[1]}.ffn_gate_up_exps.weight", array
    else:
        yield from qwen35(c, name, array)


def _later(c: Config, name: str) -> str:
    """Layers for predicting several tokens are numbered after the last."""
    first, number = c["num_hidden_layers"], MTP_LAYER.match(name)
    if name in MTP:
        return gguf.TENSOR_NAMES[MTP[name]].format(bid=first) + ".weight"
    if number is None:
        return name
    return MTP_LAYER.sub(f"model.layers.{first + int(number[1])}.", name)


def _reordered(c: Config, name: str, array: np.ndarray) -> np.ndarray:
    """Value heads, which stand by key head: the first of each key head, then the second, ..."""
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    if name.endswith("out_proj.weight"):
        return _tiled(c, array.T).T
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return np.concatenate([array[: 2 * keys], _tiled(c, array[2 * keys :])])
    return array if name.endswith(".norm.weight") else _tiled(c, array)


def _tiled(c: Config, array: np.ndarray) -> np.ndarray:
    groups = c["linear_num_key_heads"]
    heads = array.reshape(groups, c["linear_num_value_heads"] // groups, -1)
    return heads.swapaxes(0, 1).reshape(array.shape)


def kimi_linear(c: Config, name: str, array: np.ndarray) -> Iterator[Tensor]:
    """Convolutions keep an axis of 1 and get another; decays have as many as they had."""
    mixed = re.search(r"layers\.(\d+)\.block_sparse_moe\.experts\.(w\d)\.weight", name)
    if mixed is not None:
        part = {"w1": "gate", "w2": "down", "w3": "up"}[mixed[2]]
        yield f"blk.{mixed[1]}.ffn_{part}_exps.weight", array
    elif "_conv1d" in name:
        yield name, array.reshape(1, len(array), 1, -1)
    else:
        yield from keys_and_values(c, *_decay_and_conv(name, array))


def other_kimi_linear(c: Config, name: str, array: np.ndarray) -> Iterator[Tensor]:
    """Keys and values together, as some files have them; axes as llama-quantize leaves them."""
    if name.endswith("kv_b_proj.weight"):
        yield name, array
        return
    for new, found in kimi_linear(c, name, array):
        while found.shape[0] == 1:
            found = found[0]
        yield new, found


def keys_and_values(c: Config, name: str, array: np.ndarray) -> Iterator[Tensor]:
    """Latent attention (DeepSeek's, too): keys apart from values, and turned."""
    if not name.endswith("kv_b_proj.weight"):
        yield name, array
        return
    both = array.reshape(c["num_attention_heads"], -1, array.shape[-1])
    cut = c["qk_nope_head_dim"]
    yield name.replace("kv_b_proj", "k_b_proj"), both[:, :cut].swapaxes(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), both[:, cut:]


# --- Metadata


def describe_delta(w: gguf.GGUFWriter, c: Config) -> None:
    """The sizes of delta layers, after what is said of experts if there are any."""
    w.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
    w.add_ssm_state_size(c["linear_key_head_dim"])
    w.add_ssm_group_count(c["linear_num_key_heads"])
    w.add_ssm_time_step_rank(c["linear_num_value_heads"])
    w.add_ssm_inner_size(c["linear_value_head_dim"] * c["linear_num_value_heads"])
    w.add_full_attention_interval(c.get("full_attention_interval", 4))
    w.add_rope_dimension_count(int(c["head_dim"] * c.get("partial_rotary_factor", 0.25)))


def describe_qwen35(w: gguf.GGUFWriter, c: Config) -> None:
    """Newer versions can name the recurrent layers: here where no period does."""
    describe_delta(w, c)
    later = c.get("mtp_num_hidden_layers", 0)
    w.add_block_count(c["num_hidden_layers"] + later)
    if later > 0:
        w.add_nextn_predict_layers(later)
    w.add_rope_dimension_sections([11, 11, 10, 0])
    recurrent = [kind == "linear_attention" for kind in c["layer_types"]]
    if recurrent != [(n + 1) % 4 != 0 for n in range(len(recurrent))]:
        w.add_array(f"{w.arch}.attention.recurrent_layers", recurrent + [False] * later)


def describe_kimi_linear(w: gguf.GGUFWriter, c: Config) -> None:
    """Latent attention is described as its cache is: one head, as wide as all that is kept."""
    own = c["linear_attn_config"]
    full = [n + 1 in own["full_attn_layers"] for n in range(c["num_hidden_layers"])]
    w.add_vocab_size(c["vocab_size"])
    w.add_head_count_kv([int(attends) for attends in full])
    w.add_ssm_conv_kernel(own["short_conv_kernel_size"])
    w.add_kda_head_dim(own["head_dim"])
    if c["q_lora_rank"] is not None:
        w.add_q_lora_rank(c["q_lora_rank"])
    rank, turned = c["kv_lora_rank"], c["qk_rope_head_dim"]
    w.add_kv_lora_rank(rank)
    w.add_rope_dimension_count(turned)
    w.add_key_length(rank + turned)
    w.add_key_length_mla(c["qk_nope_head_dim"] + turned)
    w.add_value_length_mla(c["v_head_dim"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_expert_shared_count(c["num_shared_experts"])
    w.add_leading_dense_block_count(c["first_k_dense_replace"])
    w.add_expert_weights_scale(c["routed_scaling_factor"])
