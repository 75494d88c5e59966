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


def test_what_a_custom_derivative_computes():
    @jax.custom_jvp
    def halved(x, y):
        return x * y, x

    halved.defjvp(lambda p, t: (halved(*p), (0.5 * t[0] * p[1], t[1])))
    (eqn,) = jax.make_jaxpr(halved)(1.0, 2.0).eqns
    found = _jax.custom_jvp(eqn)
    assert found is not None and found.out_zeros == (False, False)
    out = jax.core.eval_jaxpr(found.jaxpr, found.consts, 3.0, 5.0, 1.0, 7.0)
    assert out == [15.0, 3.0, 2.5, 7.0]
    assert _jax.custom_jvp(jax.make_jaxpr(jnp.sin)(1.0).eqns[0]) is None


def test_what_is_staged():
    seen = []

    def look(x):
        seen.append(_jax.is_staged([x, 1.0]))
        return x

    look(jnp.ones(3))
    jax.vmap(look)(jnp.ones(3))
    jax.grad(look)(1.0)
    assert seen == [False] * 3
    jax.jit(look)(jnp.ones(3))
    assert seen[-1]
