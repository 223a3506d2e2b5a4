"""Turns the `tokenizer.*` metadata of a GGUF file into a tokenizer of the `tokenizers` library."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tp.chat_template import TokenizerError

MODEL = "tokenizer.ggml.model"
PRE = "tokenizer.ggml.pre"
TOKENS = "tokenizer.ggml.tokens"
KINDS = "tokenizer.ggml.token_type"
MERGES = "tokenizer.ggml.merges"
SCORES = "tokenizer.ggml.scores"
UNKNOWN_ID = "tokenizer.ggml.unknown_token_id"
ADD_SPACE = "tokenizer.ggml.add_space_prefix"

# Token kinds of the GGUF format. "Unknown" tokens are special to llama.cpp as well.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

BROKEN_FILE = "the GGUF file is damaged or was converted wrongly: convert or download it again"

# How each tokenizer cuts text into words before merging, one pattern after another; what no
# pattern matches is a word too. They stand in the models' own tokenizer.json files, except
# that the last alternative "\s+" is left out where it changes nothing.
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN_2 = ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN_3_5 = (
    ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
)
GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
)
DEEPSEEK_3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES
)
CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Says how text is cut into words, and what goes with it.

    `whole_words`: a word that is a token is taken whole, whatever the merges say.
    `starts`: the beginning-of-sequence token is added unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    starts: bool = False


PLAIN = Cut(patterns=(GPT_2,))
DIGITS = Cut(patterns=(r"\p{N}", GPT_2))
LLAMA = Cut(patterns=(LLAMA_3,), whole_words=True, starts=True)
QWEN = Cut(patterns=(QWEN_2,))
O200K = Cut(patterns=(GPT_4O,))
DEEPSEEK = Cut(patterns=(r"\p{N}{1,3}", CJK, DEEPSEEK_3))
# What llama.cpp does with files from before `tokenizer.ggml.pre` was written.
DEFAULT = Cut(patterns=(r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"))

CUTS: Mapping[str, Cut] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "gigachat", "mellum"), PLAIN),
    **dict.fromkeys(("a.x-4.0", "exaone4", "trillion", "granite-docling"), PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), LLAMA),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), LLAMA),
    **dict.fromkeys(("glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), Cut(patterns=(LLAMA_3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), QWEN),
    **dict.fromkeys(("kormo", "solar-open", "grok-2"), QWEN),
    "qwen35": Cut(patterns=(QWEN_3_5,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), O200K),
    "tekken": Cut(patterns=(TEKKEN,), whole_words=True, starts=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), DEEPSEEK),
    "default": DEFAULT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The tokens of a GGUF file and the kind of each, by id."""

    tokens: tuple[str, ...]
    kinds: tuple[int, ...]


def build(metadata: Mapping[str, Any], *, where: str) -> tuple[Tokenizer, bool]:
    """Builds the tokenizer, and says whether it adds the first token when the file is silent.

    Raises TokenizerError for a kind of tokenizer that is not supported and for metadata
    that is missing or does not fit together.
    """
    model = metadata.get(MODEL)
    if model not in ("gpt2", "llama"):
        raise TokenizerError(
            where=where,
            found="no tokenizer.ggml.model" if model is None else f"{MODEL} is '{model}'",
            remedy="supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE); "
            "pass token ids instead of text",
        )
    vocabulary = vocabulary_of(metadata, where=where)
    try:
        if model == "gpt2":
            cut = cut_of(metadata, where=where)
            tokenizer, starts = byte_level(metadata, vocabulary, cut, where=where), cut.starts
        else:
            tokenizer, starts = sentence_piece(metadata, vocabulary, where=where), True
    except TokenizerError:
        raise
    # The library raises plain Exception, for instance when a merge makes no token.
    except Exception as error:
        raise TokenizerError(where=where, found=str(error), remedy=BROKEN_FILE) from error
    tokenizer.add_tokens(added_tokens(vocabulary))
    return tokenizer, starts


def vocabulary_of(metadata: Mapping[str, Any], *, where: str) -> Vocabulary:
    """Reads the tokens and their kinds, and checks that they fit together."""
    tokens = array(metadata, TOKENS, str, where=where)
    # llama.cpp names empty tokens by their place, so that every token has its own text.
    tokens = tuple(token if token != "" else f"[EMPTY_{i}]" for i, token in enumerate(tokens))
    kinds = (1,) * len(tokens)
    if metadata.get(KINDS) is not None:
        kinds = array(metadata, KINDS, Integral, where=where)
    if len(kinds) < len(tokens):
        found = f"{KINDS} has {len(kinds)} entries for {len(tokens)} tokens"
        raise TokenizerError(where=where, found=found, remedy=BROKEN_FILE)
    return Vocabulary(tokens=tokens, kinds=kinds)


def array(metadata: Mapping[str, Any], key: str, kind: type, *, where: str) -> tuple:
    """Reads an array of metadata, of which every entry is of a kind."""
    values = metadata.get(key)
    if values is None:
        raise TokenizerError(where=where, found=f"no {key}", remedy=BROKEN_FILE)
    try:
        entries = tuple(values)
    except TypeError:
        entries = (values,)
    if isinstance(values, str) or len(entries) == 0 or not isinstance(entries[0], kind):
        wanted = "texts" if kind is str else "numbers"
        found = f"{key} is {str(values)[:40]}, not an array of {wanted}"
        raise TokenizerError(where=where, found=found, remedy=BROKEN_FILE)
    return entries


def cut_of(metadata: Mapping[str, Any], *, where: str) -> Cut:
    """Finds how text is cut into words by the name in the file."""
    name = metadata.get(PRE, "default")
    if name not in CUTS:
        raise TokenizerError(
            where=where,
            found=f"{PRE} '{name}' is not known",
            remedy=f"known are {', '.join(sorted(CUTS))}; pass token ids instead of text",
        )
    return CUTS[name]


def ids_of(vocabulary: Vocabulary, *, where: str) -> dict[str, int]:
    """Numbers the tokens, refusing a text that two of them have."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    if len(ids) < len(vocabulary.tokens):
        twice = next(t for i, t in enumerate(vocabulary.tokens) if ids[t] != i)
        found = f"{TOKENS} has {twice!r} more than once"
        raise TokenizerError(where=where, found=found, remedy=BROKEN_FILE)
    return ids


def byte_level(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, cut: Cut, *, where: str
) -> Tokenizer:
    """Builds byte-level BPE (GPT-2). Like llama.cpp it normalises nothing.

    The tokenizer.json of Qwen models asks for NFC, which GGUF has no place for: texts not
    in NFC are other tokens there.
    """
    merges = [tuple(merge.split(" ", 1)) for merge in array(metadata, MERGES, str, where=where)]
    broken = next((i for i, merge in enumerate(merges) if len(merge) != 2), None)
    if broken is not None:
        found = f"{MERGES}[{broken}] is {merges[broken][0]!r}, not two parts with a space between"
        raise TokenizerError(where=where, found=found, remedy=BROKEN_FILE)
    ids = ids_of(vocabulary, where=where)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=cut.whole_words))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes, *dropped_bytes(ids)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def dropped_bytes(ids: Mapping[str, int]) -> list[pre_tokenizers.PreTokenizer]:
    """Drops bytes that have no token (SmolLM2 lacks some control characters).

    As in llama.cpp, what stood on either side of one stays apart; the library by itself
    would let it merge.
    """
    lacking = "".join(byte for byte in pre_tokenizers.ByteLevel.alphabet() if byte not in ids)
    if lacking == "":
        return []
    return [pre_tokenizers.Split(Regex(f"[{re.escape(lacking)}]"), "removed")]


def sentence_piece(metadata: Mapping[str, Any], vocabulary: Vocabulary, *, where: str) -> Tokenizer:
    """Builds SentencePiece BPE (Llama 2, Gemma) as the `transformers` library converts it.

    Pieces merge by score; where one piece can be made of two pairs the longer left part is
    tried first, which for overlapping repeats is not always SentencePiece's leftmost pair.
    """
    scores = array(metadata, SCORES, Real, where=where)
    if len(scores) < len(vocabulary.tokens):
        found = f"{SCORES} has {len(scores)} entries for {len(vocabulary.tokens)} tokens"
        raise TokenizerError(where=where, found=found, remedy=BROKEN_FILE)
    ids = ids_of(vocabulary, where=where)
    unknown = int(metadata.get(UNKNOWN_ID, 0))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=merges_of(ids, scores),
            unk_token=vocabulary.tokens[unknown] if unknown < len(vocabulary.tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = bool(metadata.get(ADD_SPACE, True))
    first = [normalizers.Prepend("▁")] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    last = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return tokenizer


def merges_of(ids: Mapping[str, int], scores: tuple[float, ...]) -> list[tuple[str, str]]:
    """Finds the pairs that make each piece, best first (`generate_merges` in `transformers`)."""
    pairs = []
    for piece, number in ids.items():
        cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        local = [(left, right) for left, right in cuts if left in ids and right in ids]
        local.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        pairs += [(scores[number], len(left), len(right), left, right) for left, right in local]
    pairs.sort(key=lambda pair: pair[:3], reverse=True)
    return [(left, right) for *_, left, right in pairs]


def added_tokens(vocabulary: Vocabulary) -> list[AddedToken]:
    """Lists the tokens that are found in a text before it is cut into words."""
    return [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=False)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Reads which tokens begin and end sequences, turns and messages (eot, eom), by name."""
    sentence_piece = metadata[MODEL] == "llama"
    named = {
        "bos": metadata.get("tokenizer.ggml.bos_token_id", 1 if sentence_piece else None),
        "eos": metadata.get("tokenizer.ggml.eos_token_id", 2 if sentence_piece else None),
        "eot": metadata.get("tokenizer.ggml.eot_token_id"),
        "eom": metadata.get("tokenizer.ggml.eom_token_id"),
        "unk": metadata.get(UNKNOWN_ID),
        "pad": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    size = len(metadata[TOKENS])
    # Converters write -1, as 2**32 - 1, for a token the model lacks.
    return {
        name: int(token)
        for name, token in named.items()
        if isinstance(token, Integral) and 0 <= int(token) < size
    }
