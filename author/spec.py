"""What a model is, as plain records, and their JSON; what does not fit is refused by its path."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from author.records import read_record, written_record


class SpecError(ValueError):
    """A spec, or what is asked of one, that cannot be: a line for everything found wrong."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


# --- The parts of a model; JSON tells variants apart by `KIND`.


@dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotation: how many of a head's dimensions turn, and its base."""

    dims: int
    theta: float
    variant: int = 0  # tells apart rotations that differ in how their frequencies are scaled


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """Queries scaled by `1 + scale * ln(1 + floor((p + offset) / floor))`, p counted from 0."""

    floor: float
    scale: float
    offset: int = 1


@dataclass(frozen=True, kw_only=True)
class Window:
    """Which positions are attended: the last `n`, or those of one's own chunk of `n`."""

    kind: Literal["sliding", "chunked"]
    n: int


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention with query, key and value heads."""

    KIND: ClassVar[str] = "attention"
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rope: Rope | None
    qk_norm: bool
    qk_norm_whole: bool
    qk_unit_norm: bool
    temperature: Temperature | None
    bias: bool
    output_bias: bool
    sinks: bool
    output_gate: bool
    fused_qkv: bool
    window: Window | None
    scale: float
    softcap: float | None
    qk_norm_after_rope: bool = False  # the weighted norm comes after the rotation
    clip: float | None = None  # queries, keys (normed) and values are clamped to +- this


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """The gated delta rule behind a causal convolution."""

    KIND: ClassVar[str] = "gated_delta"
    k_heads: int
    v_heads: int
    head_dim: int
    conv_taps: int
    gate: Literal["silu", "sigmoid"]
    unit_eps: float | None = None  # epsilon of unit queries and keys, where it is not the model's


@dataclass(frozen=True, kw_only=True)
class Mla:
    """Latent attention: keys and values of all heads from one latent row."""

    KIND: ClassVar[str] = "mla"
    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope: int
    qk_rope: int
    v_dim: int
    scale: float
    rope: Rope | None
    bias: bool = False  # on the down projections of queries and latent
    output_bias: bool = False
    norm_eps: float | None = None  # epsilon of the two inner norms, where it is not the model's


@dataclass(frozen=True, kw_only=True)
class ChannelDelta:
    """The gated delta rule with a decay for each key channel (Kimi delta attention).

    Decay and output gate come from projections in two factors.
    """

    KIND: ClassVar[str] = "channel_delta"
    heads: int
    head_dim: int
    conv_taps: int
    decay_rank: int
    gate_rank: int


@dataclass(frozen=True, kw_only=True)
class LinearMixer:
    """Linear attention with a fixed decay a head, normed over the whole row and gated by a sigmoid.

    Queries, keys and values pass a SiLU.
    """

    KIND: ClassVar[str] = "linear_attention"
    heads: int
    head_dim: int
    norm_eps: float


Mixer = Attention | GatedDelta | Mla | ChannelDelta | LinearMixer


@dataclass(frozen=True, kw_only=True)
class SwigluOai:
    """A clamped swiglu: slope `alpha`, clamped at `limit`."""

    KIND: ClassVar[str] = "swiglu_oai"
    alpha: float
    limit: float


Act = Literal["silu", "gelu_tanh", "gelu", "relu"] | SwigluOai


@dataclass(frozen=True, kw_only=True)
class Xielu:
    """The numbers of a xIELU that are not learnt."""

    beta: float
    cut: float


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A gated feed-forward of hidden width `dff`."""

    KIND: ClassVar[str] = "dense"
    dff: int
    act: Act
    gated: bool = True
    bias: bool = False  # on gate and up
    output_bias: bool = False
    xielu: Xielu | None = None  # instead of `act`, ungated


@dataclass(frozen=True, kw_only=True)
class SigmoidGating:
    """Experts scored one by one; `bias` is learned and only chooses."""

    KIND: ClassVar[str] = "sigmoid"
    bias: bool


Gating = Literal["softmax_then_top_k", "softmax_of_top_k", "sigmoid_scaled_input"] | SigmoidGating


@dataclass(frozen=True, kw_only=True)
class Moe:
    """A mixture of experts; `groups` is (count, used)."""

    KIND: ClassVar[str] = "moe"
    experts: int
    top_k: int
    expert_dff: int
    act: Act
    gating: Gating
    groups: tuple[int, int] | None
    norm_top_k: bool
    weights_scale: float
    shared_experts: int
    shared_dff: int
    shared_gate: bool
    biases: bool
    choice_bias: bool = False  # a learned bias that only chooses, with a softmax gating
    shared_bias: bool = False  # on gate, up and down of the shared experts


@dataclass(frozen=True, kw_only=True)
class NormedResidual:
    """The stream goes on from the normed input: `alpha * h + beta * f(h)`, h the norm of it."""

    mixer_alpha: float
    mixer_beta: float
    ffn_alpha: float
    ffn_beta: float


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A mixer and a feed-forward, and whether each is normed before its addition."""

    mixer: Mixer
    ffn: Dense | Moe
    post_mixer_norm: bool
    post_ffn_norm: bool
    pre_norm: bool = True  # mixer and feed-forward read the stream through a norm
    parallel: bool = False  # both read one normed input, and are added together
    residual_scale: float | None = None  # factor on what each of the two adds
    normed_residual: NormedResidual | None = None


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """Hyper-connections, present or not."""


@dataclass(frozen=True, kw_only=True)
class Ple:
    """A per-layer embedding, present or not."""


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """The layers that attend sparsely."""

    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model: all that its programs are authored from."""

    d: int
    vocab: int
    rms_eps: float
    layers: tuple[Layer, ...]
    final_logit_softcap: float | None
    embedding_scale: float | None
    hyper: Hyper | None
    ple: Ple | None
    indexer: Indexer | None
    norm: Literal["rms", "layer"] = "rms"  # of the stream: before blocks, after them, at the end
    logit_scale: float | None = None  # factor on the logits, before the cap
    head_bias: bool = False


def rotation_of(layer: Layer) -> Rope | None:
    """The rotation that a layer turns by."""
    return layer.mixer.rope if isinstance(layer.mixer, Attention | Mla) else None


def rotations(spec: ModelSpec) -> tuple[Rope, ...]:
    """The distinct rotations, in order of first appearance; a table's number counts these."""
    turned = (rotation_of(layer) for layer in spec.layers)
    return tuple(dict.fromkeys(rope for rope in turned if rope is not None))


# --- JSON


def spec_to_json(spec: ModelSpec) -> dict[str, Any]:
    """The spec as JSON, every field present but those that are as their defaults say."""
    return written_record(spec)


def spec_from_json(obj: object) -> ModelSpec:
    """The spec that `spec_to_json` wrote; all offending fields are named at once."""
    spec, problems = read_record(ModelSpec, obj, "spec")
    if problems:
        raise SpecError(*problems)
    return spec
