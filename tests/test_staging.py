"""One flat jaxpr: calls opened, custom rules kept, nothing done twice, names and places kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import halved, rounded
from weights import general, normal

import moonwalk as mw
from moonwalk import compat, staging

X = normal(3, 6)


def primitives(fun, *args):
    return [e.primitive.name for e in staging.stage(fun, *args).jaxpr.eqns]


def test_calls_are_opened():
    f = jax.jit(lambda x: jax.checkpoint(jax.jit(jnp.sin))(jax.nn.leaky_relu(x)))
    assert primitives(f, X) == ["ge", "mul", "select_n", "sin"]


def test_custom_derivatives_stay():
    assert primitives(lambda x: halved(rounded(x)), X) == ["custom_jvp_call", "custom_vjp_call"]
    staged = staging.stage(lambda x: rounded(x), X)
    again = lambda x: staging.evaluate(staged.jaxpr, staged.consts, [x], {})[0]
    np.testing.assert_array_equal(jax.grad(lambda x: again(x).sum())(X), 2.0)


def test_nothing_is_done_twice():
    assert primitives(lambda x: jnp.sin(x) * jnp.sin(x), X) == ["sin", "mul"]
    assert primitives(lambda x: (x[:, ::2], x[:, ::2] + 1, x[:, 1::2]), X).count("slice") == 2
    # random draws with different keys are different equations
    draws = primitives(
        lambda k: jax.random.normal(k[0]) + jax.random.normal(k[1]), jax.random.split(jax.random.key(0))
    )
    assert draws.count("random_bits") == 2


def test_staging_changes_no_value():
    f = lambda x: jax.jit(lambda x: jnp.tanh(x @ general(6)))(x).sum(-1)
    staged = staging.stage(f, X)
    np.testing.assert_allclose(
        staging.evaluate(staged.jaxpr, staged.consts, [X], {})[0], f(X), rtol=1e-14
    )


def test_constants_have_their_names():
    net = {"layers": [general(6), general(6, seed=1)]}
    other = general(6, seed=2)
    staged = staging.stage(lambda x: x @ net["layers"][1] @ other, X)
    assert sorted(staged.names.values()) == ["net['layers'][1]", "other"]


def test_strange_globals_do_no_harm():
    strange = {1: general(6), "a": 2, None: 3}
    assert staging.stage(lambda x: x @ strange[1], X).names == {}


def test_source_lines_survive_staging():
    def model(x):
        return jax.nn.leaky_relu(x @ general(6))

    *_, last = staging.stage(jax.jit(model), X).jaxpr.eqns
    assert f"test_staging.py:{model.__code__.co_firstlineno + 1}" in compat.source_line(last)


# --- compat -------------------------------------------------------------------------------------------


def test_an_unsupported_jax_is_refused_with_a_sentence():
    with pytest.raises(
        ImportError, match=r"moonwalk needs JAX 0\.10\.2 or newer, but JAX 0\.9\.1 is installed"
    ):
        compat.refuse_unsupported_jax("0.9.1")
    for fine in ("0.10.2", "0.11.0", "0.12.0.1", "1.0.dev2"):
        compat.refuse_unsupported_jax(fine)


def test_the_refusal_happens_at_import(tmp_path):
    """A process whose JAX says it is old gets the sentence, and nothing else was imported before."""
    import subprocess
    import sys

    code = "import jax; jax.__version__ = '0.4.30'; import moonwalk"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0
    assert "ImportError: moonwalk needs JAX 0.10.2 or newer, but JAX 0.4.30" in done.stderr


def test_version():
    assert mw.__version__


@pytest.mark.parametrize("text", ["0.10.2", "0.11.2.dev3+g1", "1.2"])
def test_version_tuple(text):
    assert compat.version_tuple(text)[:2] == tuple(int(n) for n in text.split(".")[:2])
