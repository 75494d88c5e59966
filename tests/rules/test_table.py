"""Every rule recovers h' from h = h' J: {eager, jit, vmap} in float64, and lower precisions."""

import jax
import jax.numpy as jnp
import pytest
from cases import CASES, EAGER
from marks import some

import moonwalk as mw


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in EAGER])
def test_float64_eager(name):
    case = CASES[name]
    mw.testing.check_vijp(case.fun, *case.primals, modes=["eager"], tolerance=case.tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in EAGER])
def test_float64_vmapped(name):
    case = CASES[name]
    mw.testing.check_vijp(case.fun, *case.primals, modes=["vmap"], tolerance=case.tolerance)


@pytest.mark.parametrize("name", CASES)
def test_float64(name):
    """≤ 1e-9 in every mode, for one case of every rule; for the others under `jit`."""
    case = CASES[name]
    limit = case.tolerance
    modes = ("eager", "jit", "vmap") if name in EAGER else ("jit",)
    assert mw.testing.check_vijp(case.fun, *case.primals, modes=modes, tolerance=limit) <= limit


@pytest.mark.parametrize("name", ["dense", "max-min", "conv lemma, parallel", "average windows", "scan"])
def test_vmap_without_jit(name):
    case = CASES[name]
    (x,) = case.primals
    y, vjp_fun = jax.vjp(case.fun, x)
    truth = jnp.ones_like(y)
    (h,) = vjp_fun(truth)
    found = jax.vmap(lambda x, h: mw.vijp(case.fun, x)[1](h))(jnp.stack([x, x]), jnp.stack([h, 2 * h]))
    assert jnp.allclose(found, jnp.stack([truth, 2 * truth]), rtol=1e-9)


# In lower precisions, `make test` runs every rule, and `make test-all` every case.
HALF = [name for name, case in CASES.items() if case.half]


@pytest.mark.parametrize("name", some(CASES, EAGER))
def test_float32(name):
    case = CASES[name]
    primals = jax.tree.map(lambda a: a.astype(jnp.float32), case.primals)
    mw.testing.check_vijp(case.fun, *primals, modes=["jit"], tolerance=max(case.tolerance, 1e-4))


@pytest.mark.parametrize("name", some(HALF, EAGER.intersection(HALF)))
def test_bfloat16(name):
    case = CASES[name]
    primals = jax.tree.map(lambda a: a.astype(jnp.bfloat16), case.primals)
    mw.testing.check_vijp(case.fun, *primals, modes=["jit"], tolerance=0.06)
