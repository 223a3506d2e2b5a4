"""What no program can be authored from: the specs that the language cannot write, or would bend."""

import math
from collections.abc import Iterator

from author.spec import (
    Attention,
    ChannelDelta,
    Dense,
    GatedDelta,
    Layer,
    LinearMixer,
    Mixer,
    Mla,
    ModelSpec,
    Moe,
    Rope,
    SpecError,
    SwigluOai,
)


def check(spec: ModelSpec) -> None:
    """Refuse a spec that no program can be authored from.

    What the language lacks comes first and alone, as the golden messages have it; what would
    come out wrong is listed in full.
    """
    for refusal in _unwritable(spec):
        raise _not_yet(refusal)
    problems = tuple(_unsound(spec))
    if problems:
        raise SpecError(*problems)


def check_tp(spec: ModelSpec, chips: int, *, beyond: bool = False) -> None:
    """Refuse a spec that cannot be split over so many chips.

    `beyond` allows what the goldens refuse and this package splits all the same.
    """
    check(spec)
    if chips == 0:
        raise _not_yet("a tensor-parallel width of zero chips")
    for layer in spec.layers:
        for refusal in _unsplittable(layer, beyond):
            raise _not_yet(refusal)


def _not_yet(what: str) -> SpecError:
    return SpecError(f"the language cannot write {what} yet")


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


# --- What the language lacks, in the order in which it is looked for


def _unwritable(spec: ModelSpec) -> Iterator[str]:
    cap = spec.final_logit_softcap
    if not _positive(spec.rms_eps):
        yield "an RMSNorm epsilon that is not a positive number"
    if cap is not None and not _positive(cap):
        yield "a final logit softcap that is not a positive number"
    if spec.hyper is not None:
        yield "hyper-connections in place of the norms"
    if spec.ple is not None:
        yield "a per-layer n-gram embedding"
    if spec.indexer is not None and spec.indexer.layers:
        yield "a sparse selection of the attended positions (QSA)"
    for layer in spec.layers:
        if isinstance(layer.mixer, Attention):
            yield from _unwritable_attention(layer.mixer)
        if isinstance(layer.ffn, Moe):
            yield from _unwritable_mixture(layer.ffn)
        elif layer.ffn.xielu is None and layer.ffn.act not in ("silu", "gelu_tanh"):
            yield f"{'a gated' if layer.ffn.gated else 'an'} activation other than SiLU or GeLU"


def _unwritable_attention(a: Attention) -> Iterator[str]:
    if a.output_gate and (a.fused_qkv or a.value_dim != a.head_dim):
        yield "an output gate on a fused projection or over values unlike the keys in width"
    if a.softcap is not None and not _positive(a.softcap):
        yield "an attention softcap that is not a positive number"
    if a.temperature is not None and a.head_dim % 2 != 0:
        yield "an attention temperature over an odd head width"


def _unwritable_mixture(m: Moe) -> Iterator[str]:
    if m.act != "silu" and not isinstance(m.act, SwigluOai):
        yield "an expert mixture other than top-k experts gated by a SwiGLU"
    if not (math.isfinite(m.weights_scale) and m.weights_scale >= 0):
        yield "a routed scale that is not a positive number"
    if m.shared_experts > 0 and m.act != "silu":
        yield "shared experts gated other than by a SwiGLU"
    if m.groups is not None and m.gating == "softmax_of_top_k":
        yield "a group limit over a softmax of the kept logits"
    if m.groups is not None and not _groups_fit(m, *m.groups):
        yield "a group limit that does not split the experts evenly or keeps fewer than it chooses"


def _groups_fit(m: Moe, count: int, used: int) -> bool:
    if count == 0 or m.experts % count != 0 or not 1 <= used <= count:
        return False
    return used * (m.experts // count) >= m.top_k


def _unsplittable(layer: Layer, beyond: bool) -> Iterator[str]:
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        if (mixer.bias or mixer.output_bias or mixer.sinks) and not beyond:
            yield "a tensor-parallel attention with biases or sinks"
        if mixer.qk_norm_whole and not beyond:
            yield "a tensor-parallel QK norm across every head"
    if isinstance(mixer, Mla) and not beyond:
        yield "a tensor-parallel latent attention"
    if isinstance(layer.ffn, Moe) and not beyond:
        yield "a tensor-parallel expert mixture"


# --- What the reference authoring would drop or mix up without a word


def _unsound(spec: ModelSpec) -> Iterator[str]:
    yield from _counts("spec", d=spec.d, vocab=spec.vocab, layers=len(spec.layers))
    yield from _finite("spec", embedding_scale=spec.embedding_scale, logit_scale=spec.logit_scale)
    for number, layer in enumerate(spec.layers):
        path = f"spec.layers[{number}]"
        yield from _unsound_layer(layer, path)
        yield from _unsound_mixer(layer.mixer, f"{path}.mixer")
        yield from _unsound_feed_forward(layer.ffn, f"{path}.ffn")
    yield from _colliding_tables(spec)


def _counts(path: str, **fields: int) -> Iterator[str]:
    for name, count in fields.items():
        if count < 1:
            yield f"{path}.{name} is {count}, wanted at least 1"


def _finite(path: str, **fields: float | None) -> Iterator[str]:
    for name, value in fields.items():
        if value is not None and not math.isfinite(value):
            yield f"{path}.{name} is {value}, wanted a finite number"


def _set_positive(path: str, **fields: float | None) -> Iterator[str]:
    for name, value in fields.items():
        if value is not None and not _positive(value):
            yield f"{path}.{name} is {value}, wanted a positive number"


def _unsound_layer(layer: Layer, path: str) -> Iterator[str]:
    normed = layer.normed_residual
    yield from _finite(path, residual_scale=layer.residual_scale)
    if layer.parallel and not layer.pre_norm:
        yield f"{path}.parallel is true, wanted pre_norm beside it: both blocks read what it norms"
    if normed is None:
        return
    path = f"{path}.normed_residual"
    yield from _finite(path, **vars(normed))
    if not layer.pre_norm:
        yield f"{path} is set, wanted pre_norm beside it: the stream goes on from what it norms"
    if layer.parallel:
        yield f"{path} is set, wanted parallel false: each block has a norm of its own"
    if layer.residual_scale is not None:
        yield f"{path} is set, wanted no residual_scale: it has factors of its own"


def _unsound_mixer(mixer: Mixer, path: str) -> Iterator[str]:
    match mixer:
        case Attention():
            yield from _unsound_attention(mixer, path)
        case GatedDelta(k_heads=k, v_heads=v, head_dim=width, conv_taps=taps):
            yield from _counts(path, k_heads=k, v_heads=v, head_dim=width, conv_taps=taps)
            yield from _multiple(path, v_heads=v, k_heads=k)
            yield from _set_positive(path, unit_eps=mixer.unit_eps)
        case Mla():
            yield from _unsound_latent(mixer, path)
        case ChannelDelta(heads=heads, head_dim=width, conv_taps=taps):
            yield from _counts(path, heads=heads, head_dim=width, conv_taps=taps)
            yield from _counts(path, decay_rank=mixer.decay_rank, gate_rank=mixer.gate_rank)
        case LinearMixer(heads=heads, head_dim=width):
            yield from _counts(path, heads=heads, head_dim=width)
            yield from _set_positive(path, norm_eps=mixer.norm_eps)


def _unsound_attention(a: Attention, path: str) -> Iterator[str]:
    yield from _counts(path, heads=a.heads, kv_heads=a.kv_heads)
    yield from _counts(path, head_dim=a.head_dim, value_dim=a.value_dim)
    yield from _multiple(path, heads=a.heads, kv_heads=a.kv_heads)
    yield from _finite(path, scale=a.scale)
    if a.rope is not None:
        yield from _unsound_rope(a.rope, a.head_dim, path)
    if a.temperature is not None:
        yield from _set_positive(f"{path}.temperature", floor=a.temperature.floor)
    if a.window is not None:
        yield from _counts(f"{path}.window", n=a.window.n)
    if a.qk_norm_whole and not a.qk_norm:
        yield f"{path}.qk_norm_whole is true, wanted qk_norm beside it: it says how that norm runs"
    if a.qk_norm_after_rope and not a.qk_norm:
        yield f"{path}.qk_norm_after_rope is true, wanted qk_norm beside it: it says when that runs"
    if a.qk_norm_after_rope and a.qk_norm_whole:
        yield f"{path}.qk_norm_after_rope is true, wanted qk_norm_whole false: chips meet before it"
    yield from _set_positive(path, clip=a.clip)


def _unsound_latent(m: Mla, path: str) -> Iterator[str]:
    yield from _counts(path, heads=m.heads, kv_lora_rank=m.kv_lora_rank, v_dim=m.v_dim)
    yield from _counts(path, qk_nope=m.qk_nope, qk_rope=m.qk_rope)
    yield from _finite(path, scale=m.scale)
    yield from _set_positive(path, norm_eps=m.norm_eps)
    if m.rope is not None:
        yield from _unsound_rope(m.rope, m.qk_rope, path)
    if m.q_lora_rank is not None:
        yield from _counts(path, q_lora_rank=m.q_lora_rank)


def _unsound_rope(rope: Rope, width: int, path: str) -> Iterator[str]:
    if rope.dims % 2 != 0 or not 2 <= rope.dims <= width:
        yield f"{path}.rope.dims is {rope.dims}, wanted an even number from 2 to {width}"
    if not _positive(rope.theta):
        yield f"{path}.rope.theta is {rope.theta}, wanted a positive number"


def _multiple(path: str, **fields: int) -> Iterator[str]:
    (many, count), (few, parts) = fields.items()
    if parts > 0 and count % parts != 0:
        yield f"{path}.{many} is {count}, wanted a multiple of {few}, which is {parts}"


def _unsound_feed_forward(ffn: Dense | Moe, path: str) -> Iterator[str]:
    if isinstance(ffn, Dense):
        yield from _unsound_dense(ffn, path)
        return
    yield from _counts(path, experts=ffn.experts, top_k=ffn.top_k, expert_dff=ffn.expert_dff)
    if ffn.top_k > ffn.experts:
        yield f"{path}.top_k is {ffn.top_k}, wanted at most experts, which is {ffn.experts}"
    if ffn.shared_experts > 0:
        yield from _counts(path, shared_dff=ffn.shared_dff)
    if ffn.shared_gate and ffn.shared_experts == 0:
        yield f"{path}.shared_gate is true, wanted shared_experts for it to gate"
    if ffn.shared_bias and ffn.shared_experts == 0:
        yield f"{path}.shared_bias is true, wanted shared_experts for it to be added in"
    if ffn.choice_bias and ffn.gating != "softmax_then_top_k":
        yield f"{path}.choice_bias is true, wanted the gating 'softmax_then_top_k'"


def _unsound_dense(f: Dense, path: str) -> Iterator[str]:
    yield from _counts(path, dff=f.dff)
    if f.xielu is None:
        return
    yield from _finite(f"{path}.xielu", beta=f.xielu.beta, cut=f.xielu.cut)
    if f.gated:
        yield f"{path}.xielu is set, wanted gated false: it stands in place of a gate"


def _colliding_tables(spec: ModelSpec) -> Iterator[str]:
    """Temperature tables are named by their width alone, so one width bears one temperature."""
    found: dict[int, tuple[str, object]] = {}
    for number, layer in enumerate(spec.layers):
        if not isinstance(layer.mixer, Attention) or layer.mixer.temperature is None:
            continue
        path = f"spec.layers[{number}].mixer.temperature"
        half = layer.mixer.head_dim // 2
        first, temperature = found.setdefault(half, (path, layer.mixer.temperature))
        if temperature != layer.mixer.temperature:
            yield f"{path} is unlike {first}, wanted the same: both would be the table tcosc{half}"
