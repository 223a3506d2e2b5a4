"""The architectures of GGUF files: the family of each, what it says and where it puts things."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from author.families import gguf_dense, gguf_mixtures, gguf_recurrent
from author.families.gguf_dense import Constants
from author.families.gguf_keys import Keys, biases, together, windows
from author.families.gguf_metadata import Metadata


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How files of an architecture differ from a family's safetensors.

    `keys` are those of the family's config besides the usual ones. `paired`: the rotary pairs of
    queries and keys, half-split there, stand side by side here. `names` are tensors that go by
    another name than is usual here. Of `whole` matrices each has a tensor of its own, where they
    are cut out of one there; of those `unsplit`, too, but turned as there. `constants` are
    matrices that the metadata hold. `in_order`: value heads of delta layers, which stand by key
    head there, stand here as the language wants them.
    """

    family: str
    keys: Callable[[Metadata], Keys] = lambda f: {}
    paired: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    unsplit: tuple[str, ...] = ()
    constants: Callable[[Metadata], Constants] = lambda f: {}
    in_order: bool = False


EXPERTS = ("Wg", "Wu", "Wd")
POST_ATTENTION = {"fn": "post_attention_norm.weight"}


ATTENTION_BIAS = biases("attention_bias")
ARCHITECTURES: Mapping[str, Architecture] = {
    "apertus": Architecture(family="apertus", keys=ATTENTION_BIAS, constants=gguf_dense.xielu),
    "cohere2": Architecture(family="cohere2", keys=gguf_dense.cohere2),
    "deepseek2": Architecture(family="deepseek_v2", keys=gguf_mixtures.deepseek2),
    "dots1": Architecture(family="dots1", keys=gguf_mixtures.sigmoids),
    "ernie4_5": Architecture(family="ernie4_5", keys=biases("use_bias")),
    "ernie4_5-moe": Architecture(family="ernie4_5_moe", keys=gguf_mixtures.ernie_moe),
    "exaone4": Architecture(family="exaone4", keys=lambda f: windows(f, 4)),
    "gemma": Architecture(family="gemma"),
    "gemma2": Architecture(family="gemma2", keys=gguf_dense.gemma(2, 46, 4096)),
    "gemma3": Architecture(family="gemma3_text", keys=gguf_dense.gemma3),
    "glm4": Architecture(family="glm4", keys=ATTENTION_BIAS),
    "glm4moe": Architecture(family="glm4_moe", keys=gguf_mixtures.glm4moe, names=POST_ATTENTION),
    "gpt-oss": Architecture(
        family="gpt_oss",
        keys=gguf_mixtures.gpt_oss,
        names=POST_ATTENTION,
        whole=EXPERTS,
        unsplit=("Bg", "Bu"),
    ),
    "granite": Architecture(
        family="granite", keys=together(gguf_dense.factors, biases("", "", "mlp_bias")), paired=True
    ),
    "granitemoe": Architecture(
        family="granitemoe", keys=gguf_mixtures.granitemoe, paired=True, whole=("Wg", "Wu")
    ),
    "hunyuan-dense": Architecture(family="hunyuan_v1_dense", keys=ATTENTION_BIAS),
    "hunyuan-moe": Architecture(family="hunyuan_v1_moe", keys=gguf_mixtures.hunyuan_moe),
    "kimi-linear": Architecture(family="kimi_linear", keys=gguf_recurrent.kimi_linear),
    "llama": Architecture(family="llama", keys=gguf_mixtures.llama, paired=True),
    "llama4": Architecture(family="llama4_text", keys=gguf_mixtures.llama4, whole=EXPERTS),
    "minimax-m2": Architecture(family="minimax_m2", keys=gguf_mixtures.minimax_m2),
    "mistral3": Architecture(family="ministral3", keys=gguf_dense.mistral3, paired=True),
    "olmo2": Architecture(family="olmo2", keys=gguf_dense.olmo2),
    "olmoe": Architecture(family="olmoe", keys=gguf_mixtures.olmoe),
    "phi3": Architecture(family="phi3", keys=gguf_dense.phi3),
    "qwen2": Architecture(family="qwen2"),
    "qwen2moe": Architecture(
        family="qwen2_moe", keys=together(gguf_mixtures.qwen_moe(norm=False), gguf_mixtures.shared)
    ),
    "qwen3": Architecture(family="qwen3", keys=ATTENTION_BIAS),
    "qwen3moe": Architecture(family="qwen3_moe", keys=gguf_mixtures.qwen_moe(norm=True)),
    "qwen3next": Architecture(
        family="qwen3_next", keys=gguf_recurrent.qwen3next, names=POST_ATTENTION
    ),
    "qwen35": Architecture(
        family="qwen3_5_text", keys=gguf_recurrent.qwen35, names=POST_ATTENTION, in_order=True
    ),
    "qwen35moe": Architecture(
        family="qwen3_5_moe_text",
        keys=gguf_recurrent.qwen35moe,
        names=POST_ATTENTION,
        in_order=True,
    ),
    "seed_oss": Architecture(
        family="seed_oss",
        keys=biases("attention_bias", "attention_out_bias", "mlp_bias"),
        names=POST_ATTENTION,
    ),
    "smollm3": Architecture(
        family="smollm3", keys=biases("attention_bias", "", "mlp_bias"), paired=True
    ),
}
