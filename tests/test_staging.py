"""One flat jaxpr: calls opened, custom rules kept, nothing done twice, names and places kept."""

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import halved, rounded
from marks import slow
from weights import general, normal

import moonwalk as mw
from moonwalk import _jax
from moonwalk.trace import staging

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
    assert f"test_staging.py:{model.__code__.co_firstlineno + 1}" in _jax.source_line(last)


# --- compat -------------------------------------------------------------------------------------------


def test_an_unsupported_jax_is_refused_with_a_sentence():
    with pytest.raises(
        ImportError, match=r"moonwalk needs JAX 0\.10\.1 or newer, but JAX 0\.9\.1 is installed"
    ):
        _jax.refuse_unsupported_jax("0.9.1")
    for fine in ("0.10.1", "0.11.0", "0.12.0.1", "1.0.dev2"):
        _jax.refuse_unsupported_jax(fine)


@pytest.mark.parametrize(
    ("versions", "name"),
    [(("0.10.2",), "JAX"), (("0.10.2", "0.10.2"), "JAX"), (("0.11.0", "0.10.2"), "jaxlib")],
)
def test_a_jax_that_computes_wrong_numbers_is_refused(versions, name):
    with pytest.raises(ImportError) as raised:
        _jax.refuse_unsupported_jax(*versions)
    words = str(raised.value)
    assert words.startswith(
        f"moonwalk does not run on {name} 0.10.2: its CPU compiler returns wrong numbers"
    )
    assert "jax/issues/39103" in words
    assert 'pip install --upgrade "jax>=0.10.1,!=0.10.2"' in words and "Python 3.12" in words


@pytest.mark.parametrize(
    ("working", "stubs", "found"),
    [
        (["python3.12", "python3.13", "python3"], [], "python3.13"),
        (["python3.12", "python3"], ["python3.14", "python3.13"], "python3.12"),
        (
            [".pyenv/versions/3.13.2/bin/python3", "python3.12"],
            ["python3.13"],
            ".pyenv/versions/3.13.2/bin/python3",
        ),
        (["python3.11", "python3"], ["python3.12"], "python3.11"),
        (["python3"], [], "python3"),
        ([], ["python3"], ""),
    ],
)
def test_make_takes_the_newest_python_that_runs(working, stubs, found, tmp_path):
    """Of names on PATH, which may be stubs that fail, and of pyenv's versions."""
    for name in (*working, *stubs):
        version = (re.search(r"3\.\d+", name) or ["3.11"])[0]
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Asked whether it lies between two versions: `-c code LOW HIGH`.
        fits = f'[ "$3" = {version} ] || [ "$3 $4" = "3.11 3.14" ]' if name in working else "false"
        path.write_text(f"#!/bin/sh\n{fits}\n")
        path.chmod(0o755)
    for tool in ("bash", "env", "seq"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    script = pathlib.Path(__file__).parent.parent / "requirements" / "find-python.sh"
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([script, "3.11", "3.14"], env=env, capture_output=True, text=True)
    assert done.stdout.strip().removeprefix(f"{tmp_path}/") == found
    assert (done.returncode == 0) == bool(found)


def test_every_statement_of_versions_agrees():
    """The check at import, the package's metadata, the locks, and what the README says."""
    root = pathlib.Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    (jax_bound,) = (d for d in project["dependencies"] if re.match(r"jax\W", d))
    low = ".".join(map(str, _jax.MINIMUM_JAX))
    bad = [".".join(map(str, v)) for v in _jax.DEFECTIVE_JAX]
    assert jax_bound == ",".join([f"jax>={low}", *(f"!={v}" for v in bad)])
    assert f"JAX {low} or newer, except {', '.join(bad)}" in " ".join(
        (root / "README.md").read_text().split()
    )
    for lock in (root / "requirements").glob("*.lock"):
        pins = dict(line.split("==") for line in lock.read_text().splitlines() if "==" in line)
        assert pins["jax"] not in bad and pins["jaxlib"] not in bad
        _jax.refuse_unsupported_jax(pins["jax"], pins["jaxlib"])
    assert f"\njax=={low}\n" in (root / "requirements/py311.lock").read_text()


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.4.30", "needs JAX 0.10.1 or newer, but JAX 0.4.30"),
        slow("0.10.2", "does not run on JAX 0.10.2: its CPU compiler returns wrong numbers"),
    ],
)
def test_the_refusal_happens_at_import(version, said, tmp_path):
    """A process whose JAX says it is old gets the sentence, and nothing else was imported before."""
    code = f"import jax; jax.__version__ = '{version}'; import moonwalk"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0
    assert f"ImportError: moonwalk {said}" in done.stderr


def test_version():
    assert mw.__version__


@pytest.mark.parametrize("text", ["0.10.2", "0.11.2.dev3+g1", "1.2"])
def test_version_tuple(text):
    assert _jax.version_tuple(text)[:2] == tuple(int(n) for n in text.split(".")[:2])


def test_equal_equations_under_different_settings_stay_two():
    """How bits are drawn is a setting: the same key and shape do not make the same numbers."""

    def loss(ws, x, key):
        for i, w in enumerate(ws):
            with jax.threefry_partitionable(bool(i % 2)):
                x = jnp.tanh(x @ w) * jax.random.uniform(key, x.shape)
        return jnp.sum(x)

    args = [jnp.eye(3), 2 * jnp.eye(3)], jnp.ones((5, 3)), jax.random.key(0)
    expected = jax.value_and_grad(loss)(*args)
    for fun in (mw.value_and_grad(loss), jax.jit(mw.value_and_grad(loss))):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), fun(*args), expected)
