"""Sets JAX up before anything uses it: eight simulated chips, strict promotion, checked shapes."""

import jax
from hypothesis import settings
from jaxtyping import install_import_hook

CHIPS = 8

# Before the first import of either package: annotations of shapes hold while tests run.
install_import_hook(["kernels", "tp"], "beartype.beartype")

from tp.launch import devices  # noqa: E402

devices(CHIPS)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile("repeatable", derandomize=True, max_examples=25, deadline=None)
settings.load_profile("repeatable")
