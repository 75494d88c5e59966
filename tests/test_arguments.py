"""What may be differentiated: integers, complex numbers, modules. As in JAX, or with a way out."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weights import normal

import moonwalk as mw

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

X = normal(30, 4, seed=1)
COMPLEX = 0.3 * (normal(4, 4, seed=2) + 1j * normal(4, 4, seed=3))
METHODS = {
    "default": mw.Moonwalk(),
    "always": mw.Moonwalk(walk="always"),
    "checkpoint": mw.Checkpoint(),
    "backprop": mw.Backprop(),
    "forward": mw.Forward(),
    "pure forward": mw.PureForward(),
}


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def mixed(p, x):
    rows = jnp.tanh(x @ p["w"])[p["rows"]] * p["count"]
    return jnp.sum(rows * jax.random.normal(p["key"], (20, 4))) * jnp.where(p["flag"], 1, 2)


MIXED = {
    "w": normal(4, 4),
    "rows": jnp.arange(20) % 4,
    "flag": jnp.array(True),
    "count": 3,
    "key": jax.random.key(7),
}


@pytest.mark.parametrize("method", METHODS)
def test_allow_int(method):
    run = lambda differentiate, **options: differentiate(mixed, allow_int=True, **options)(MIXED, X)
    same(run(mw.value_and_grad, method=METHODS[method]), run(jax.value_and_grad))
    same(run(mw.grad, method=METHODS[method], argnums=(0, 1)), run(jax.grad, argnums=(0, 1)))


def test_allow_int_under_jit_and_in_a_plan():
    expected = jax.value_and_grad(mixed, allow_int=True)(MIXED, X)
    same(jax.jit(mw.value_and_grad(mixed, allow_int=True))(MIXED, X), expected)
    planned = mw.plan(mixed, MIXED, X, allow_int=True)
    same(mw.value_and_grad(mixed, allow_int=True, method=planned)(MIXED, X), expected)


def test_only_integers():
    options = {"argnums": 0, "allow_int": True}
    loss = lambda rows, x: jnp.sum(x[rows])
    same(
        mw.value_and_grad(loss, **options)(MIXED["rows"], X),
        jax.value_and_grad(loss, **options)(MIXED["rows"], X),
    )


def test_integers_are_refused_as_by_jax_and_named():
    with pytest.raises(TypeError) as expected:
        jax.grad(mixed)(MIXED, X)
    with pytest.raises(TypeError, match="set allow_int to True") as error:
        mw.grad(mixed)(MIXED, X)
    assert str(error.value) == str(expected.value)
    notes = "".join(error.value.__notes__)
    assert "that is `p['count']`" in notes and "eqx.partition" in notes


def analytic(z, x):
    return jnp.sum(jnp.sin(x @ z) @ z * jnp.exp(z)[0])


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("method", ["default", "always", "checkpoint", "backprop"])
def test_holomorphic(method, jit):
    run = mw.value_and_grad(analytic, holomorphic=True, method=METHODS[method])
    found = (jax.jit(run) if jit else run)(COMPLEX, X)
    same(found, jax.value_and_grad(analytic, holomorphic=True)(COMPLEX, X))


@pytest.mark.parametrize("method", ["forward", "pure forward"])
def test_holomorphic_needs_more_than_real_directions(method):
    with pytest.raises(ValueError, match="along real directions only; use moonwalk.Moonwalk"):
        mw.grad(analytic, holomorphic=True, method=METHODS[method])


@pytest.mark.parametrize(
    ("loss", "holomorphic"),
    [
        (analytic, False),  # a complex output
        (lambda z, x: jnp.sum(jnp.abs(z)), True),  # a real one
    ],
)
def test_complex_outputs_as_in_jax(loss, holomorphic):
    messages = []
    for grad in (jax.grad, mw.grad):
        with pytest.raises(TypeError) as error:
            grad(loss, holomorphic=holomorphic)(COMPLEX, X)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_holomorphic_inputs_as_in_jax():
    with pytest.raises(TypeError, match="holomorphic=True requires inputs with complex dtype"):
        mw.grad(analytic, holomorphic=True)(X[:4], X)


@pytest.mark.parametrize("method", METHODS)
def test_complex_parameters_of_a_real_loss(method):
    """Also of `PureForward`, whose seed is then complex."""
    loss = lambda z, x: jnp.sum(jnp.abs(jnp.sin(x @ z) @ z) ** 2)
    same(
        mw.value_and_grad(loss, method=METHODS[method])(COMPLEX, X),
        jax.value_and_grad(loss)(COMPLEX, X),
    )


def test_complex_examples():
    loss = lambda z, x: jnp.sum(jnp.abs(jnp.sin(x @ z) @ z) ** 2)
    method = mw.PureForward(per_example=True)
    same(mw.grad(loss, method=method)(COMPLEX, X), jax.grad(loss)(COMPLEX, X))


# --- modules -----------------------------------------------------------------------------------------


def test_a_module_that_holds_more_than_arrays():
    mlp = eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0), dtype=jnp.float64)
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    with pytest.raises(TypeError, match="of type .*custom_jvp.* is not a valid JAX type") as error:
        mw.value_and_grad(loss)(mlp, X)
    assert (
        "moonwalk.value_and_grad: that is `model.activation`. Differentiate the parameters alone: "
        "params, static = eqx.partition(model, eqx.is_inexact_array), and a function of (params, ...) "
        "that calls eqx.combine(params, static); this is what eqx.filter_value_and_grad does around "
        "jax.value_and_grad. Without Equinox, pass everything that is no parameter as another argument."
    ) in error.value.__notes__

    params, static = eqx.partition(mlp, eqx.is_inexact_array)
    found = mw.value_and_grad(lambda params, x: loss(eqx.combine(params, static), x))(params, X)
    expected = eqx.filter_value_and_grad(loss)(mlp, X)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_a_module_of_arrays_alone():
    linear = eqx.nn.Linear(4, 4, key=jax.random.key(0), dtype=jnp.float64)
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    same(mw.value_and_grad(loss)(linear, X), jax.value_and_grad(loss)(linear, X))
