"""What `_jax` expects of the version of JAX that is installed, where a miss would pass unnoticed."""

import jax
import jax.numpy as jnp
import pytest

from moonwalk import _jax


@pytest.mark.parametrize("name", _jax._INTERNALS)
def test_internals_are_where_they_are_looked_up(name):
    assert _jax._internal(name) is not None, f"jax._src.{_jax._INTERNALS[name]} has no {name}"


def test_only_listed_internals_are_looked_up(monkeypatch):
    with pytest.raises(KeyError, match="Jaxpr"):
        _jax._internal("Jaxpr")
    monkeypatch.setitem(_jax._INTERNALS, "nothing", "core")
    monkeypatch.setitem(_jax._INTERNALS, "nowhere", "no_such_module")
    assert _jax._internal("nothing") is _jax._internal("nowhere") is None


def test_primitives_by_name():
    assert _jax.lax_primitives("add mul") == {jax.lax.add_p, jax.lax.mul_p}
    with pytest.raises(AttributeError, match="ad_p"):
        _jax.lax_primitives("ad mul")


@pytest.mark.parametrize("name", _jax._NEWER_PRIMITIVES)
def test_newer_primitives(name):
    found = _jax.lax_primitives(name)
    assert found or _jax.version_tuple(jax.__version__) < _jax._NEWER_PRIMITIVES[name]


def test_how_a_batching_rule_sees_an_unbatched_operand():
    seen = []
    primitive = _jax.Primitive("pair")
    primitive.def_impl(lambda x, y: x)
    primitive.def_abstract_eval(lambda x, y: x)

    def batched(args, dims):
        seen.extend(dims)
        return args[0], dims[0]

    _jax.batching.primitive_batchers[primitive] = batched
    jax.vmap(primitive.bind, in_axes=(0, None))(jnp.ones(3), jnp.ones(()))
    assert seen == [0, _jax.not_mapped]
