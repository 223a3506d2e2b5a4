import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.q8 import dequantise, quantise
from kernels.table import PATHS, Declined, Path, call, choose, pack
from tests.kernel_cases import normal, on_device


def picky(*_):
    raise Declined("wants an even count of rows")


PICKY = Path(name="picky", call=picky, platforms=("cpu",))


def test_the_first_path_that_takes_it_is_chosen_and_the_others_say_why(monkeypatch):
    monkeypatch.setitem(PATHS, "silu", (PICKY, *PATHS["silu"]))
    path, declined = choose("silu", "tpu")
    assert (path.name, declined) == ("xla", {"picky": "runs on cpu, not on tpu"})
    assert choose("silu", "cpu")[0].name == "picky"
    path, declined = choose("silu", "cpu", example=([jnp.ones((3, 2))], {}))
    assert (path.name, declined) == ("xla", {"picky": "wants an even count of rows"})


def test_a_path_wanted_by_name_never_falls_back(monkeypatch):
    monkeypatch.setitem(PATHS, "silu", (PICKY, *PATHS["silu"]))
    assert choose("silu", "cpu", "reference")[0].name == "reference"
    with pytest.raises(Declined, match="silu on tpu: picky: runs on cpu, not on tpu"):
        choose("silu", "tpu", "picky")
    with pytest.raises(
        ValueError, match="silu has no path 'fast': there are auto, picky, xla, ref"
    ):
        choose("silu", "cpu", "fast")
    with pytest.raises(ValueError, match="no operation 'softmax': there are argmax, attention"):
        choose("softmax", "cpu")


def test_a_call_is_by_the_first_path_that_takes_it(monkeypatch):
    monkeypatch.setitem(PATHS, "plus", (Path(name="picky", call=picky), *PATHS["plus"]))
    path, result, declined = call("plus", "cpu", "auto", jnp.ones((1, 2)), jnp.ones((1, 2)))
    assert (path, result.tolist()) == ("xla", [[2, 2]])
    assert declined == {"picky": "wants an even count of rows"}
    with pytest.raises(Declined, match="plus on cpu: picky: wants an even count of rows"):
        call("plus", "cpu", "picky", jnp.ones((1, 2)), jnp.ones((1, 2)))


def test_where_chains_are_wanted_what_they_decline_goes_by_another_path():
    assert choose("silu", "cpu", "native")[0].name == "xla"
    assert call("silu", "cpu", "native", jnp.zeros((1, 2)))[0] == "xla"


def test_an_example_may_be_shapes():
    shape = jax.ShapeDtypeStruct((1, 8), jnp.float32)
    words = {"heads": 2, "groups": 1, "position": jax.ShapeDtypeStruct((), jnp.int32)}
    cache = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    assert choose("attention", "cpu", example=([shape, cache, cache], words))[0].name == "xla"


def test_a_weight_is_packed_as_floats_on_a_cpu_alone():
    q = quantise(normal(4, 40))
    assert pack(q, "tpu") is q
    assert np.array_equal(pack(q, "cpu", "xla"), dequantise(q))
    assert isinstance(pack(on_device(q), "cpu", "xla"), jax.Array)
