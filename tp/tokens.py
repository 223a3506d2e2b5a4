"""Turns text into token ids and back: tokenizers of Hugging Face directories and GGUF files."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import tokenizers

from tp import gguf_tokenizer
from tp.chat_template import TokenizerError, choose, directory_templates, gguf_templates, render
from tp.spelling import Spelling, Stream, spelling_of

# Texts of tokens after which a model has said all it will. They count only where the
# vocabulary marks them as special; the list follows llama.cpp's end-of-generation tokens.
# fmt: off
ENDINGS = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>",
    "<|calls|>", "<|flush|>", "<end_of_turn>", "<|end_of_turn|>", "<turn|>",
    "<end_of_utterance>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<EOT>",
    "_<EOT>", "[EOT]", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_pad|>", "<|repo_name|>",
    "<reponame>", "<|file_sep|>", "<|tool_response>",
))
# fmt: on

SPECIAL_TEXTS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
    """A model's tokenizer and chat template.

    `first` and `last` are the ids put around every text, `stop_ids` those after which
    generation ends. `vocab_size` counts the ids the tokenizer knows, which may be fewer
    than the rows of the model's embedding.
    """

    where: str
    library: tokenizers.Tokenizer = field(repr=False)
    first: tuple[int, ...]
    last: tuple[int, ...]
    bos_id: int | None
    stop_ids: frozenset[int]
    vocab_size: int
    texts: Mapping[str, str]
    templates: Mapping[str, str] = field(repr=False)
    spelling: Spelling = field(repr=False)
    lock: Lock = field(default_factory=Lock, repr=False)

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """Reads a Hugging Face directory; TokenizerError if it has no sound tokenizer.json."""
        return from_directory(Path(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, where: str = "GGUF metadata") -> "Tokenizer":
        """Builds the tokenizer that the metadata of a GGUF file describes; TokenizerError if none.

        `where` names the file in messages.
        """
        return from_gguf(metadata, where=where)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model was published with a chat template."""
        return len(self.templates) > 0

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Gives the ids of a text, with what the tokenizer puts around every text.

        `special`: whether the names of special tokens in the text become those tokens.
        A prompt from the command line wants it, as in llama.cpp; text of a stranger, who
        could end the turn with it, does not. An empty text may have no ids.
        """
        return [*self.first, *self.ids_of(text, special=special), *self.last]

    def ids_of(self, text: str, *, special: bool) -> list[int]:
        """Gives the ids of a text and nothing around them."""
        try:
            # The library keeps this choice in the tokenizer, which servers share.
            with self.lock:
                self.library.encode_special_tokens = not special
                return self.library.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeError) as error:
            raise TokenizerError(
                where="prompt", found=f"not Unicode text ({error})", remedy="pass valid UTF-8"
            ) from error

    def decode(self, ids: Iterable[int], *, special: bool = False, continued: bool = False) -> str:
        """Gives the text of ids; bytes that are not UTF-8 become U+FFFD.

        `special`: whether special tokens are written out or left out. `continued`: the ids
        go on after other text, so a SentencePiece tokenizer's leading space is part of it.
        Raises TokenizerError for an id outside the vocabulary.
        """
        stream = self.stream(special=special, continued=continued)
        return "".join([*map(stream.push, ids), stream.finish()])

    def stream(self, *, special: bool = False, continued: bool = True) -> Stream:
        """Starts decoding ids one at a time: by default, those generated after a prompt."""
        return Stream(
            spelling=self.spelling,
            special=special,
            strip=self.spelling.leading_space and not continued,
        )

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        template: str = "default",
        **variables: Any,
    ) -> str:
        """Renders messages (`role`, `content`) with the model's chat template.

        `template` names one where there are several; `variables` are handed to it (such as
        `enable_thinking`). Raises TokenizerError without a template or when it fails.
        """
        name = choose(self.templates, template, where=self.where)
        known = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        return render(
            self.templates[name],
            name=name,
            where=self.where,
            variables={**self.texts, **known, **variables},
            messages=messages,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Gives the ids of messages rendered by `chat_prompt`, ready for the answer.

        What the tokenizer puts before every text is added unless the template wrote it.
        """
        ids = self.ids_of(self.chat_prompt(messages, **variables), special=True)
        written = tuple(ids[: len(self.first)]) == self.first
        begun = self.bos_id is not None and ids[:1] == [self.bos_id]
        return ids if written or begun else [*self.first, *ids]


def from_directory(path: Path) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face directory from its JSON files."""
    library = read_library(path)
    settings = read_json(path / "tokenizer_config.json")
    generation = read_json(path / "generation_config.json")
    config = read_json(path / "config.json")
    ids = library.get_vocab(with_added_tokens=True)
    spelling = spelling_of(library, size=max(ids.values(), default=-1) + 1, where=str(path))
    texts = special_texts(settings)
    bos, eos = ids.get(texts.get("bos_token", "")), ids.get(texts.get("eos_token", ""))
    if bos is None:
        named = (generation.get("bos_token_id"), config.get("bos_token_id"))
        bos = next((token for token in named if isinstance(token, int)), None)
    first, last = surroundings(library)
    stops = {
        *eos_ids(generation, where=path / "generation_config.json"),
        *eos_ids(config, where=path / "config.json"),
        *eos_ids(config.get("text_config"), where=path / "config.json"),
        *(() if eos is None else (eos,)),
    }
    return Tokenizer(
        where=str(path),
        library=library,
        first=around(first, settings.get("add_bos_token"), bos, name="bos", where=str(path)),
        last=around(last, settings.get("add_eos_token"), eos, name="eos", where=str(path)),
        bos_id=bos,
        stop_ids=ending_ids(spelling) | stops,
        vocab_size=spelling.vocab_size,
        texts=texts,
        templates=directory_templates(path, settings),
        spelling=spelling,
    )


def from_gguf(metadata: Mapping[str, Any], *, where: str) -> Tokenizer:
    """Builds the tokenizer that GGUF metadata describes, with llama.cpp's defaults."""
    library, starts = gguf_tokenizer.build(metadata, where=where)
    named = gguf_tokenizer.special_ids(metadata)
    tokens = metadata[gguf_tokenizer.TOKENS]
    spelling = spelling_of(library, size=len(tokens), where=where)
    bos, eos = named.get("bos"), named.get("eos")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", starts)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    return Tokenizer(
        where=where,
        library=library,
        first=around((), add_bos, bos, name="bos", where=where),
        last=around((), add_eos, eos, name="eos", where=where),
        bos_id=bos,
        stop_ids=ending_ids(spelling)
        | {named[name] for name in ("eos", "eot", "eom") if name in named},
        vocab_size=len(tokens),
        texts={
            f"{name}_token": tokens[named[name]]
            for name in ("bos", "eos", "unk", "pad")
            if name in named
        },
        templates=gguf_templates(metadata),
        spelling=spelling,
    )


def read_library(path: Path) -> tokenizers.Tokenizer:
    """Reads tokenizer.json; what it says of cutting and padding texts is for training."""
    file = path / "tokenizer.json"
    if not file.is_file():
        other = [name for name in ("tokenizer.model", "vocab.json") if (path / name).is_file()]
        beside = "" if other == [] else f" (but {', '.join(other)}, which is not read)"
        raise TokenizerError(where=str(path), found=f"no tokenizer.json{beside}", remedy=NO_FILE)
    try:
        library = tokenizers.Tokenizer.from_file(str(file))
    # The library raises plain Exception for whatever is wrong in the file.
    except Exception as error:
        raise TokenizerError(
            where=str(file), found=f"not a tokenizer ({error})", remedy=DOWNLOAD
        ) from error
    library.no_truncation()
    library.no_padding()
    return library


NO_FILE = (
    "put the model's tokenizer.json there (AutoTokenizer.from_pretrained(...).save_pretrained "
    "writes it) or pass token ids instead of text"
)
DOWNLOAD = "download the file again"


def read_json(file: Path) -> Mapping[str, Any]:
    """Reads a JSON object, or nothing where there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(
            where=str(file), found=f"not JSON ({error})", remedy=DOWNLOAD
        ) from error
    if not isinstance(content, dict):
        found = f"a {type(content).__name__}, not an object"
        raise TokenizerError(where=str(file), found=found, remedy=DOWNLOAD)
    return content


def special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Reads the special tokens of tokenizer_config.json: texts, or objects that hold them."""
    values = {key: settings.get(key) for key in SPECIAL_TEXTS}
    texts = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in values.items()
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def eos_ids(config: object, *, where: Path) -> list[int]:
    """Reads `eos_token_id`, which may be missing, one id or several."""
    value = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise TokenizerError(
            where=str(where),
            found=f"eos_token_id is {value!r}",
            remedy="write an id or a list of ids",
        )
    return [token for token in ids if token >= 0]


def surroundings(library: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Finds which ids tokenizer.json puts before and after every text by trying one."""
    tried = library.encode("a", add_special_tokens=True)
    inside = [i for i, sequence in enumerate(tried.sequence_ids) if sequence is not None]
    # A tokenizer that cannot spell "a" leaves nothing between the two.
    start, stop = (inside[0], inside[-1] + 1) if inside != [] else (len(tried.ids),) * 2
    return tuple(tried.ids[:start]), tuple(tried.ids[stop:])


def around(
    ids: tuple[int, ...], wanted: object, token: int | None, *, name: str, where: str
) -> tuple[int, ...]:
    """Follows `add_bos_token` (or eos) where it is given, against what the tokenizer does."""
    if wanted is None:
        return ids
    if not wanted:
        return tuple(i for i in ids if i != token)
    if token is None:
        raise TokenizerError(
            where=where,
            found=f"add_{name}_token is true, but {name}_token is not a token of the vocabulary",
            remedy=f"name one as {name}_token, or set add_{name}_token to false",
        )
    return ids if token in ids else (token, *ids)


# The decoders of SentencePiece tokenizers, as `transformers` writes them for Llama and Gemma.


def ending_ids(spelling: Spelling) -> frozenset[int]:
    """Finds the well-known tokens after which a model has said all it will."""
    found = {token.content: i for i, token in spelling.added.items() if token.special}
    names = ENDINGS & found.keys()
    # Harmony and Solar end a message, not the turn, with <|end|>; Gemma 4 keeps an unused </s>.
    if {"<|return|>", "<|call|>"} <= names or (
        "<|flush|>" in names and names & {"<|call|>", "<|calls|>"}
    ):
        names -= {"<|end|>"}
    if "<|tool_response>" in found:
        names -= {"</s>"}
    return frozenset(found[name] for name in names)
