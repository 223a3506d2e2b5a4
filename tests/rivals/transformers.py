"""Stands in for transformers: a model that counts the tokens it was given."""

from pathlib import Path
from types import SimpleNamespace

import numpy

__version__ = "0.2"


class AutoModelForCausalLM:
    def __init__(self, dtype):
        self.dtype = dtype

    @staticmethod
    def from_pretrained(folder, *, dtype, local_files_only, gguf_file):
        assert (Path(folder) / gguf_file).is_file() and local_files_only
        return AutoModelForCausalLM(dtype)

    def eval(self):
        return self

    def __call__(self, tokens, *, past_key_values, use_cache, logits_to_keep):
        assert use_cache and logits_to_keep == 1
        held = (past_key_values or 0) + tokens.shape[1]
        return SimpleNamespace(logits=numpy.zeros((1, 1, 8)), past_key_values=held)
