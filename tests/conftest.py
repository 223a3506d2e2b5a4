"""Sets JAX up before anything uses it: eight simulated chips, strict promotion, checked shapes."""

import jax
from hypothesis import settings
from jaxtyping import install_import_hook

CHIPS = 8

# Before their first import: annotations of shapes hold while tests run. The files of `tp` that
# have none are left alone, since checks slow rolling down four times.
ANNOTATED = ["kernels", "tp.checkpoint", "tp.decoder", "tp.engine", "tp.sample", "tp.tables"]
install_import_hook(ANNOTATED, "beartype.beartype")

from tp.launch import devices  # noqa: E402

devices(CHIPS)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile("repeatable", derandomize=True, max_examples=25, deadline=None)
settings.load_profile("repeatable")
