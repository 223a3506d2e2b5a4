"""A model to talk to: contexts that end, conversations that keep their cache, text in pieces."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tp.decoder import ContextError
from tp.engine import Conversation, Engine, load
from tp.generation import NumbersError
from tp.launch import LaunchError
from tp.sample import Sampling

CHECKPOINTS = Path(__file__).parent / "checkpoints"


@pytest.fixture(scope="module")
def small() -> Engine:
    """A model of 160 tokens on three chips, with room for 32."""
    return load(str(CHECKPOINTS / "smollm2"), chips=3, context=32)


@pytest.fixture(scope="module")
def roomy() -> Engine:
    """The same with room for 64."""
    return load(str(CHECKPOINTS / "smollm2"), chips=3, context=64)


def prompt(length: int) -> list[int]:
    return [7 * i % 160 for i in range(1, length + 1)]


@pytest.mark.parametrize(("length", "made"), [(24, 8), (25, 7), (30, 2), (31, 1), (32, 0)])
def test_generation_stops_where_the_context_is_full(
    small: Engine, roomy: Engine, length: int, made: int
) -> None:
    conversation = small.chat()
    tokens = list(conversation.tokens(prompt(length), max_tokens=8))
    assert len(tokens) == made
    assert conversation.counts.reason == "length"
    assert tokens == list(roomy.chat().tokens(prompt(length), max_tokens=8))[:made]


def test_a_prompt_longer_than_the_context_is_refused(small: Engine) -> None:
    conversation = small.chat()
    with pytest.raises(ContextError, match="33 tokens do not fit a context of 32"):
        list(conversation.tokens(prompt(33)))
    assert list(conversation.tokens(prompt(5), max_tokens=3)) == list(
        small.chat().tokens(prompt(5), max_tokens=3)
    )


@pytest.mark.parametrize(
    ("ids", "said"),
    [([], "an empty prompt"), ([160], "token ids 160 are not among the 160"), ([-1], "ids -1")],
)
def test_ids_that_cannot_be_read_are_refused(small: Engine, ids: list[int], said: str) -> None:
    with pytest.raises(ContextError, match=said):
        small.logits(ids)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory) -> Engine:
    """A model whose 160 tokens are letters."""
    folder = tmp_path_factory.mktemp("speaking") / "model"
    shutil.copytree(CHECKPOINTS / "smollm2", folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:160]
    library = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(folder / "tokenizer.json"))
    return load(str(folder), chips=3, context=32)


@pytest.mark.parametrize("at_once", [1, 2, 8])
@pytest.mark.parametrize("options", [{}, {"max_tokens": 3}, {"max_tokens": 0}], ids=str)
def test_several_prompts_are_answered_as_each_alone(speaking, at_once, options) -> None:
    prompts = ["one", "another-that-is-longer", "a", "the-last"]
    wanted = [speaking.generate(prompt, **options) for prompt in prompts]
    assert speaking.generate_batch(prompts, at_once=at_once, **options) == wanted
    assert options == {"max_tokens": 0} or len(set(wanted)) == 4


@pytest.mark.parametrize(
    ("prompts", "words", "said"),
    [
        ("one", {}, "one prompt was given as several: a list of them would do"),
        (["one"], {"at_once": 0}, "at_once is 0; wanted at least 1"),
        (["one"], {"max_tokens": -1}, "max_tokens is -1; wanted at least 0, or None"),
    ],
    ids=str,
)
def test_what_cannot_be_generated_is_said(speaking, prompts, words, said) -> None:
    with pytest.raises(ValueError, match=said):
        speaking.generate_batch(prompts, **words)


def test_a_model_whose_numbers_grow_too_large_says_so(tmp_path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(CHECKPOINTS / "smollm2", folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("input_layernorm.weight"):
            weights[name] = np.full(weight.shape, 1e38, np.float32)
    save_file(weights, folder / "model.safetensors")
    model = load(str(folder), context=32)
    with pytest.raises(NumbersError, match="the logits after the prompt are not numbers"):
        list(model.chat().tokens(prompt(5)))


def test_a_model_is_shown_in_a_line(small: Engine) -> None:
    assert repr(small) == f"<{CHECKPOINTS / 'smollm2'}, chips=3, context=32>"


def test_a_cache_of_another_kind_is_refused() -> None:
    with pytest.raises(LaunchError, match="caches of 'f8': wanted f32 or f16"):
        load(str(CHECKPOINTS / "smollm2"), cache="f8")


def test_no_prompt_is_read_where_one_does_not_fit(speaking) -> None:
    with pytest.raises(ContextError, match="40 tokens do not fit a context of 32"):
        speaking.generate_batch(["one", "x" * 40])
    assert speaking.generate_batch([]) == []


def test_a_conversation_reads_only_what_is_new(small: Engine) -> None:
    conversation = small.chat()
    first = list(conversation.tokens(prompt(9), max_tokens=4))
    longer = [*prompt(9), *first, 3, 5]
    again = list(conversation.tokens(longer, max_tokens=4))
    # The last token made was never read, and two are new.
    assert conversation.counts.prompt_tokens == 3
    assert again == list(small.chat().tokens(longer, max_tokens=4))


def test_a_conversation_goes_back_where_the_text_differs(small: Engine) -> None:
    conversation = small.chat()
    list(conversation.tokens(prompt(12), max_tokens=4))
    changed = [*prompt(5), 99, 98]
    made = list(conversation.tokens(changed, max_tokens=4))
    assert conversation.counts.prompt_tokens == 2
    assert made == list(small.chat().tokens(changed, max_tokens=4))


def test_a_conversation_left_half_way_can_go_on(small: Engine) -> None:
    conversation = small.chat()
    made = conversation.tokens(prompt(6), max_tokens=20)
    next(made), next(made)
    made.close()
    after = list(conversation.tokens(prompt(7), max_tokens=4))
    assert after == list(small.chat().tokens(prompt(7), max_tokens=4))


def test_stop_tokens_end_a_generation_unseen(small: Engine) -> None:
    free = list(small.chat().tokens(prompt(6), max_tokens=12))
    stop = next(t for t in free[2:] if t not in free[:2])
    conversation = small.chat()
    stops = frozenset({stop, 159})
    held = list(conversation.tokens(prompt(6), max_tokens=12, stops=stops))
    assert held == free[: free.index(stop)]
    assert conversation.counts.reason == "stop"


def test_the_same_seed_draws_the_same_tokens(small: Engine) -> None:
    def drawn(seed: int) -> list[int]:
        sampling = Sampling(temperature=2.0, top_k=50, seed=seed)
        return list(small.chat().tokens(prompt(6), max_tokens=12, sampling=sampling))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_steps_give_the_logits_of_the_prompt_read_at_once(small: Engine) -> None:
    at_once = small.logits(prompt(20))
    by_steps = small.logits_by_steps(prompt(20))
    assert np.abs(at_once - by_steps).max() < 1e-4 * at_once.std()


def test_a_conversation_can_be_made_by_hand(small: Engine) -> None:
    made = Conversation(engine=small).tokens(prompt(4), max_tokens=2)
    assert len(list(made)) == 2


def test_a_reply_left_for_a_newer_one_says_so(small: Engine) -> None:
    conversation = small.chat()
    old = conversation.tokens(prompt(6), max_tokens=20)
    next(old), next(old)
    newer = list(conversation.tokens(prompt(5), max_tokens=4))
    with pytest.raises(ContextError, match="left for a newer one of the same conversation"):
        list(old)
    assert newer == list(small.chat().tokens(prompt(5), max_tokens=4))


def test_a_context_of_one_token_holds_one() -> None:
    tiny = load(str(CHECKPOINTS / "smollm2"), chips=2, context=1)
    assert tiny.logits([5]).shape == (1, 160)
    with pytest.raises(ContextError, match="2 tokens do not fit a context of 1"):
        tiny.logits([5, 6])


@pytest.mark.parametrize("temperature", [1e-50, 1e-7])
def test_a_temperature_near_zero_takes_the_likeliest(small: Engine, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=3)
    drawn = list(small.chat().tokens(prompt(6), max_tokens=6, sampling=sampling))
    assert drawn == list(small.chat().tokens(prompt(6), max_tokens=6))


def test_without_compiled_kernels_all_goes_through_xla(
    small: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = small.logits(prompt(20))
    made = list(small.chat().tokens(prompt(6), max_tokens=9))
    for module in ("kernels.native.chain", "kernels.table"):
        monkeypatch.setattr(f"{module}.why_not", lambda: "no native kernels: no compiler")
    monkeypatch.setattr("kernels.native.call.target", lambda: pytest.fail("there is no handler"))
    plain = load(str(CHECKPOINTS / "smollm2"), chips=3, context=32)
    assert np.abs(plain.logits(prompt(20)) - wanted).max() < 1e-4 * wanted.std()
    assert list(plain.chat().tokens(prompt(6), max_tokens=9)) == made
    assert "native" not in set(plain.decoder.decode.kernels.values())
