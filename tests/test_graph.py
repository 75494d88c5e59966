"""Cutting: the finest partition in which every state variable is consumed in one block."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import max_min
from jax import lax
from weights import general, normal

from moonwalk.trace import activity, graph, staging

X = normal(3, 6)


def blocks(fun, *primals):
    staged = staging.stage(fun, *primals)
    outputs = [v for v in staged.jaxpr.outvars if activity.is_differentiable(v.aval)]
    known = dict(zip(staged.jaxpr.constvars, staged.consts, strict=True))
    cut = graph.build(staged.jaxpr, staged.jaxpr.invars, outputs, consts=known, names=staged.names)
    return cut.blocks


def names(fun, *primals):
    return [[e.primitive.name for e in b.eqns] for b in blocks(fun, *primals)]


def test_layers_are_blocks():
    w = general(6)
    assert names(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w), X) == [["dot_general"], ["tanh"]] * 2


def test_an_activation_is_one_block_with_its_comparison():
    assert names(jax.nn.leaky_relu, X) == [["ge", "mul", "select_n"]]
    assert [sorted(n) for n in names(jax.nn.elu, X)] == [
        sorted(["gt", "select_n", "expm1", "mul", "select_n"])
    ]


def test_forks_that_meet_again_are_one_block():
    assert names(lambda x: x + jnp.tanh(x @ general(6)), X) == [["dot_general", "tanh", "add"]]
    (celu,) = names(jax.nn.celu, X)
    assert set(celu) == {"max", "min", "div", "expm1", "mul", "add"}


def test_max_min_falls_into_three():
    assert [sorted(n) for n in names(max_min, X)] == [
        ["slice", "slice"],
        ["max", "min"],
        ["concatenate"],
    ]


def test_independent_parts_stay_apart():
    f = lambda x, y: (jnp.tanh(x), jnp.sin(y @ general(6)))
    assert sorted(map(tuple, names(f, X, X))) == [("dot_general",), ("sin",), ("tanh",)]


def test_values_without_derivative_are_operands():
    (block,) = blocks(lambda x: x / lax.stop_gradient(jnp.linalg.norm(x)), X)
    assert block.eqn.primitive.name == "div"
    assert "reduce_sum" not in {e.primitive.name for e in block.eqns}
    assert len(block.inputs) == 1


def test_dead_code_is_no_block():
    assert names(lambda x: (jnp.pad(x, 1), jnp.tanh(x))[1], X) == [["tanh"]]
    assert names(lambda x: (jnp.sin(x @ general(6)), jnp.tanh(x))[1], X) == [["tanh"]]


def test_a_zero_pad_becomes_the_convolutions_padding():
    w = normal(3, 4, 4)
    conv = lambda x: lax.conv_general_dilated(
        x, w, [1], [(0, 0)], dimension_numbers=("NWC", "WIO", "NWC")
    )
    (block,) = blocks(lambda x: conv(jnp.pad(x, ((0, 0), (2, 0), (0, 0)))), normal(1, 5, 4))
    assert block.eqn.params["padding"] == ((2, 0),)
    ones = names(
        lambda x: conv(jnp.pad(x, ((0, 0), (2, 0), (0, 0)), constant_values=1.0)), normal(1, 5, 4)
    )
    assert ones == [["pad"], ["conv_general_dilated"]]
    used_twice = lambda x: (lambda p: (conv(p), p))(jnp.pad(x, ((0, 0), (2, 0), (0, 0))))
    assert ["pad"] in names(used_twice, normal(1, 5, 4))


def test_inner_values_that_others_read_are_exported():
    """aux reads a value from inside a block: no cotangent of it is asked for."""
    import moonwalk as mw

    def f(x):
        a = jnp.tanh(x)
        mask = x > 0
        return jnp.where(mask, a + 2 * x, 3 * x + a), (a, mask)

    _, vijp_fun, (a, mask) = mw.vijp(f, X, has_aux=True)
    np.testing.assert_allclose(a, jnp.tanh(X))
    np.testing.assert_array_equal(mask, X > 0)
    mw.testing.check_vijp(lambda x: f(x)[0], X)
    truth = normal(3, 6, seed=2)
    (h,) = jax.vjp(lambda x: f(x)[0], X)[1](truth)
    np.testing.assert_allclose(vijp_fun(h), truth, rtol=1e-12)


def test_a_pad_that_others_read_stays():
    import moonwalk as mw

    w = jnp.zeros((3, 4, 4)).at[2].set(general(4))

    def f(x):
        padded = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
        y = lax.conv_general_dilated(padded, w, [1], [(0, 0)], dimension_numbers=("NWC", "WIO", "NWC"))
        return y, padded

    with pytest.raises(mw.NotSubmersiveError, match="do not depend on the input"):
        mw.vijp(f, normal(1, 5, 4), has_aux=True)


def test_blocks_compute_what_the_function_does():
    f = lambda x: max_min(jax.nn.elu(x @ general(6)))
    staged = staging.stage(f, X)
    cut = graph.build(staged.jaxpr, staged.jaxpr.invars, staged.jaxpr.outvars)
    env = dict(zip(staged.jaxpr.constvars, staged.consts, strict=True))
    env[staged.jaxpr.invars[0]] = X
    for item in cut.schedule:
        if isinstance(item, graph.Block):
            y = item([env[v] for v in item.inputs], [env[v] for v in item.operands])
            env.update(zip(item.outputs, y, strict=True))
        else:
            graph.run([item], env)
    np.testing.assert_allclose(env[staged.jaxpr.outvars[0]], f(X), rtol=1e-14)


def test_cutting_a_long_network_is_fast():
    """Linear in the number of equations: 400 layers in a few seconds, most of it JAX's own tracing."""
    import time

    w = general(6)

    def deep(x):
        for _ in range(400):
            x = jax.nn.leaky_relu(x @ w)
        return x

    staged = staging.stage(deep, X)
    start = time.perf_counter()
    cut = graph.build(staged.jaxpr, staged.jaxpr.invars, staged.jaxpr.outvars)
    assert len(cut.blocks) == 800
    assert time.perf_counter() - start < 5


def test_a_replaced_block_remembers_for_itself():
    (block,) = blocks(jnp.tanh, X)
    count = lambda block: len(block.eqns)
    assert block.once(count) == 1
    other = replace(block, eqns=block.eqns * 2)
    assert (other.once(count), block.once(count)) == (2, 1)
