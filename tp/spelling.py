"""How a tokenizer spells: the bytes of each token, and text from tokens one at a time."""

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import tokenizers

from tp.chat_template import TokenizerError

SINGLE_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Maps the characters in which byte-level tokens are spelt to bytes (GPT-2).

    Printable bytes of Latin-1 stand for themselves, the other 68 for U+0100 onwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


BYTE_OF = byte_alphabet()


def byte_level_bytes(text: str) -> bytes:
    """Spells a byte-level token; one with a character outside the alphabet is plain text."""
    try:
        return bytes([BYTE_OF[character] for character in text])
    except KeyError:
        return text.encode()


def fallback_bytes(text: str) -> bytes:
    """Spells a SentencePiece token."""
    single = SINGLE_BYTE.fullmatch(text)
    return text.replace("▁", " ").encode() if single is None else bytes.fromhex(single[1])


@dataclass(frozen=True, kw_only=True, eq=False)
class Spelling:
    """Knows the bytes each token stands for.

    `byte_level`: tokens are spelt in GPT-2's alphabet of bytes; else in text with "▁" for
    space and `<0x0A>` for single bytes. `leading_space`: whole texts were given a space in
    front, which decoding takes away.
    """

    library: tokenizers.Tokenizer
    added: Mapping[int, tokenizers.AddedToken]
    byte_level: bool
    leading_space: bool
    vocab_size: int
    known: dict[int, bytes] = field(default_factory=dict, repr=False)

    def bytes_of(self, token: int) -> bytes:
        """Gives the bytes of a token, spelt once and then remembered."""
        if token not in self.known:
            self.known[token] = self.spell(token)
        return self.known[token]

    def is_special(self, token: int) -> bool:
        """Whether a token marks something rather than standing for text."""
        return token in self.added and self.added[token].special

    def spell(self, token: int) -> bytes:
        """Spells a token, or raises TokenizerError for an id that has none."""
        text = self.library.id_to_token(token) if 0 <= token < self.vocab_size else None
        if text is None:
            raise TokenizerError(
                where="token ids",
                found=f"{token} is not in the vocabulary",
                remedy=f"pass ids from 0 to {self.vocab_size - 1}",
            )
        if not self.byte_level:
            return fallback_bytes(text)
        return text.encode() if token in self.added else byte_level_bytes(text)


class Stream:
    """Decodes ids one at a time into text that never ends inside a character."""

    def __init__(self, *, spelling: Spelling, special: bool, strip: bool) -> None:
        """Starts with nothing decoded; `strip` takes away one leading space."""
        self.spelling = spelling
        self.special = special
        self.strip = strip
        self.characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Gives the text that is certain after one more id; "" inside a character."""
        data = self.spelling.bytes_of(token)
        if not self.special and self.spelling.is_special(token):
            return ""
        if self.strip and data != b"":
            self.strip = False
            data = data.removeprefix(b" ")
        return self.characters.decode(data)

    def finish(self) -> str:
        """Gives what was withheld: U+FFFD if the ids end inside a character."""
        return self.characters.decode(b"", final=True)


PIECE_STEPS = (
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)


def spelling_of(library: tokenizers.Tokenizer, *, size: int, where: str) -> Spelling:
    """Reads from its decoder how a tokenizer spells its tokens."""
    decoder = None if library.decoder is None else json.loads(library.decoder.__getstate__())
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    byte_level = kinds == ["ByteLevel"]
    pieces = "Replace" in kinds and all(step in PIECE_STEPS for step in steps)
    if not byte_level and not pieces:
        raise TokenizerError(
            where=where,
            found=f"the decoder of tokenizer.json is {' + '.join(kinds) or 'missing'}",
            remedy="supported are ByteLevel, and Replace + ByteFallback + Fuse (+ Strip)",
        )
    return Spelling(
        library=library,
        added=library.get_added_tokens_decoder(),
        byte_level=byte_level,
        leading_space="Strip" in kinds,
        vocab_size=size,
    )


def spelled(tokens: Iterator[int], stream: Stream) -> Iterator[str]:
    """Tokens as text, piece by piece, as soon as their bytes make characters."""
    for token in tokens:
        piece = stream.push(token)
        if piece:
            yield piece
    rest = stream.finish()
    if rest:
        yield rest
