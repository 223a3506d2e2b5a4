"""The stages from a spec to a compiled step, each as text or JSON that can be read on its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from author.chips import chip_program
from author.manifest import manifest_to_json
from author.program import Program
from tp.authored import authored
from tp.columns import json_lines
from tp.outline import Outline, outline_json
from tp.roll import roll
from tp.rolled import write_rolled


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Of what a stage is wanted: a model on so many chips, all of a step or one layer of it.

    `chip` asks for one chip's own program.
    """

    outline: Outline
    chips: int
    context: int
    layer: int | None = None
    chip: int | None = None

    @property
    def joint(self) -> Program:
        """The program of a decode step, or of one layer of it, for all chips."""
        kind, read = "tp_decode_step", {"tok": 0}
        if self.layer is not None:
            kind, read = "tp_decode_layer", {"l": self.layer}
        of = {"chips": self.chips, "context": self.context}
        return authored(self.outline.spec, kind, **of, pos=1, **read)

    @property
    def program(self) -> Program:
        """The program that was asked for."""
        return self.joint if self.chip is None else chip_program(self.joint, self.chip)

    @property
    def result(self) -> str:
        """The name of what the step is for."""
        return "logits" if self.layer is None else f"xo{self.layer}"


def spec(asked: Asked) -> str:
    """The spec as JSON, as `inspect` and `author` read it."""
    return json_lines(outline_json(asked.outline))


def text(asked: Asked) -> str:
    """The English of the program, as `read` reads it."""
    return asked.program.text


def manifest(asked: Asked) -> str:
    """The manifest of the program as JSON."""
    found = asked.program.manifest
    assert found is not None
    return json_lines(manifest_to_json(found))


def rolled(asked: Asked) -> str:
    """The program with its loops."""
    return write_rolled(roll(asked.joint))


def kernels(asked: Asked) -> str:
    """The path that each statement takes on this machine, and why others declined."""
    from tp.traced import paths, traced

    return paths(traced(roll(asked.joint), asked.chips, asked.result))


def hlo(asked: Asked) -> str:
    """What XLA makes of the step on the devices of this machine."""
    from tp.traced import traced

    return traced(roll(asked.joint), asked.chips, asked.result).compiled_text()


STAGES: Mapping[str, Callable[[Asked], str]] = {
    "spec": spec,
    "text": text,
    "manifest": manifest,
    "rolled": rolled,
    "kernels": kernels,
    "hlo": hlo,
}
