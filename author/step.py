"""A step being authored: the pieces that every kind of program is made of."""

from functools import partial

from author import parallel, single
from author import statements as say
from author.blocks import layer_input, write_layer
from author.names import Name, listed
from author.parallel import Split
from author.program import Program
from author.refusals import check, check_tp
from author.spec import ModelSpec, SpecError
from author.tables import declare_rotations
from author.writer import Rows, Scope, Writer


class Step:
    """A step in the making, on one device or split; the spec is checked first."""

    def __init__(self, spec: ModelSpec, folder: str, rows: Rows, split: Split | None) -> None:
        if split is None:
            check(spec)
        else:
            check_tp(spec, split.chips, beyond=split.beyond)
        if rows.count < 1:
            raise SpecError("a step of no rows, wanted one at least")
        self.spec = spec
        self.rows = rows
        self.split = split
        self.writer = Writer(spec, folder, None if split is None else split.chips)

    def token(self, token: int) -> None:
        """Bind the token of the one row."""
        self._refuse_tokens(token)
        self.writer.say(say.Number(Name("tok"), token))

    def position(self, position: int) -> None:
        """Bind the position of the one row."""
        self._position(Name("pos"), position)

    def positions(self, *positions: int) -> None:
        """Bind the position of each sequence."""
        for sequence, position in enumerate(positions):
            self._position(Name("pos", sequence=sequence), position)

    def _position(self, name: Name, position: int) -> None:
        if not 1 <= position <= (self.rows.ctx or position):
            raise SpecError(f"{name} is {position}, wanted a position from 1 to {self.rows.ctx}")
        self.writer.say(say.Number(name, position))

    def _refuse_tokens(self, *tokens: int) -> None:
        vocab = self.spec.vocab
        unknown = dict.fromkeys(t for t in tokens if t >= vocab)
        if unknown:
            raise SpecError(f"no token {listed(unknown)}, wanted ids from 0 to {vocab - 1}")

    def input(self, layer: int) -> None:
        """Declare what a layer, or past the last one the head, reads."""
        self.writer.tensor(layer_input(self.rows, layer), self.rows.count, self.spec.d)

    def rotations(self, layer: int | None = None) -> None:
        """Declare the rotary tables, of one layer or of all."""
        declare_rotations(self.writer, self.rows.ctx, layer)

    def layer(self, number: int) -> None:
        """Write a layer."""
        write = single.write_block
        if self.split is not None:
            write = partial(parallel.write_block, split=self.split)
        write_layer(Scope(writer=self.writer, number=number, rows=self.rows), write)

    def layers(self) -> None:
        """Write all layers."""
        for number in range(len(self.spec.layers)):
            self.layer(number)

    def embedding(self, tokens: tuple[int, ...] | None = None) -> None:
        """Write the embedded row of `tok`, or the rows of tokens."""
        self._refuse_tokens(*(tokens or ()))
        if self.split is not None and self.split.vocabulary:
            parallel.write_embedding(self.writer, tokens, split=self.split)
        else:
            single.write_embedding(self.writer, tokens)

    def head(self) -> Name:
        """Write the logits of every row."""
        stacked = self.rows.stacked is not None
        x = layer_input(self.rows, len(self.spec.layers))
        return self._logits(x, *(("bxf", "blogits") if stacked else ("xf", "logits")))

    def last_row_head(self) -> Name:
        """Write the logits of the last row."""
        x = layer_input(self.rows, len(self.spec.layers))
        row = self.writer.let(Name("xl"), say.Row(self.rows.count, x))
        return self._logits(row, "xf", "logits")

    def _logits(self, x: Name, normed: str, out: str) -> Name:
        weight = self.writer.float_matrix(Name("on"), 1, self.spec.d)
        norm = self.writer.stream_norm(x, weight)
        write = single.write_logits
        if self.split is not None and self.split.vocabulary:
            write = partial(parallel.write_logits, split=self.split)
        return write(self.writer, Name(out), lambda: self.writer.let(Name(normed), norm))

    def next_token(self, logits: Name) -> None:
        """Choose the next token."""
        self.writer.let(logits._replace(base="next"), say.Argmax(logits))

    def next_tokens(self, logits: Name) -> None:
        """Choose the next token of each sequence."""
        for sequence in range(self.rows.count):
            row = Name("logits", sequence=sequence)
            self.next_token(self.writer.let(row, say.Row(sequence + 1, logits)))

    @property
    def program(self) -> Program:
        """What was authored."""
        return self.writer.program()
