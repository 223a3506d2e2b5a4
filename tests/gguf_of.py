"""Writes a Hugging Face checkpoint as a GGUF file, with the `gguf` library's writer.

The conventions are those of llama.cpp's convert_hf_to_gguf.py, class by class.
"""

import json
from pathlib import Path
from typing import Any

import gguf

from tests.gguf_metadata import Writer, describe
from tests.gguf_tensors import converted
from tp.checkpoint import open_checkpoint

Kind = gguf.GGMLQuantizationType

# The architecture that the converter chooses for a model_type.
ARCHITECTURES = {
    "apertus": "apertus",
    "cohere2": "cohere2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "dots1": "dots1",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone4": "exaone4",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "kimi_linear": "kimi-linear",
    "llama": "llama",
    "llama4_text": "llama4",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
}
# In float32 whatever the rest is.
KEPT = (
    *(".bias", "ffn_gate_inp.weight", "ssm_conv1d.weight"),
    *(f"ssm_conv1d_{part}.weight" for part in "qkv"),
)


def gguf_of(checkpoint: Path, path: Path, **changes: Any) -> Path:
    """Write a checkpoint as GGUF, Q8_0 where rows are whole blocks; `changes` are to its config."""
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    stored = open_checkpoint(checkpoint)
    tensors = {t.name: stored.read(t.name).reshape(t.shape) for t in stored.tensors.values()}
    arch = ARCHITECTURES[config["model_type"]]
    writer = Writer(path, arch)
    describe(writer, config, tensors)
    _vocabulary(writer, config["vocab_size"])
    for name, array in converted(arch, config, tensors).items():
        blocks = array.ndim > 1 and array.shape[-1] % 32 == 0 and not name.endswith(KEPT)
        kind = Kind.Q8_0 if blocks else Kind.F32
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _vocabulary(w: Writer, size: int) -> None:
    """One that means nothing; no token ends a text that a checkpoint's reference goes through."""
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list(["<unk>", "<s>", "</s>", *(f"▁t{n}" for n in range(3, size))])
    w.add_token_scores([0.0] * 3 + [-float(n) for n in range(3, size)])
    control, plain = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    w.add_token_types([gguf.TokenType.UNKNOWN, control, control] + [plain] * (size - 3))
