"""The functions behind the layers: raw arrays to weights with a structure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weights import normal

import moonwalk as mw
from moonwalk import nn


def test_orthogonal_is_orthogonal_in_stacks_and_every_type():
    w = nn.orthogonal(normal(3, 5, 4))
    np.testing.assert_allclose(
        np.swapaxes(w, -1, -2) @ w, np.broadcast_to(np.eye(4), (3, 4, 4)), atol=1e-14
    )
    half = nn.orthogonal(normal(6, 6).astype(jnp.bfloat16))
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half.T @ half, np.eye(6), atol=1e-5)


def test_orthogonal_is_continuous_and_keeps_what_is_orthogonal():
    """LAPACK's own signs jump; these do not: raw = Q R with R near I gives Q back."""
    q = nn.orthogonal(normal(6, 6))
    np.testing.assert_allclose(nn.orthogonal(q), q, atol=1e-14)
    for seed in range(5):
        np.testing.assert_allclose(nn.orthogonal(q + 1e-8 * normal(6, 6, seed=seed)), q, atol=1e-6)
    np.testing.assert_allclose(nn.orthogonal(-q), -q, atol=1e-14)


def test_lower_is_lower_and_well_conditioned_at_every_size():
    for m in (4, 64, 256):
        w = np.asarray(nn.lower(normal(m, m)))
        assert not np.triu(w, 1).any()
        assert np.all(np.abs(np.log2(np.diagonal(w))) <= 1)
        below = w[np.tril_indices(m, -1)]
        assert np.std(below) <= 1.5 / np.sqrt(m)
        # ‖P‖_F ‖P⁻¹‖_F / m (docs/numerics.md §1), which a Gaussian matrix has at about 25
        assert np.linalg.norm(w) * np.linalg.norm(np.linalg.inv(w)) / m <= 4
    tall = np.asarray(nn.lower(normal(5, 3), scale=1.0))
    np.testing.assert_array_equal(tall[3:], normal(5, 3)[3:])


def test_diagonals_stay_away_from_zero_wherever_raw_goes():
    raw = jnp.array([-1e30, -1.0, 0.0, 1.0, 1e30])
    d = np.diagonal(nn.diagonal(raw))
    np.testing.assert_allclose(d[[0, 2, 4]], [0.5, 1, 2])
    assert np.all((d >= 0.5) & (d <= 2))
    assert np.all(np.isfinite(jax.grad(lambda raw: jnp.sum(nn.diagonal(raw)))(raw)))


@pytest.mark.parametrize("groups", [1, 2])
def test_pivot_kernel_changes_one_tap(groups):
    raw = normal(3, 3, 4, 4)
    for structure in ("diagonal", "identity", "lower"):
        w = nn.pivot_kernel(raw, structure, (1, 2), groups)
        others = np.ones((3, 3), bool)
        others[1, 2] = False
        np.testing.assert_array_equal(np.asarray(w)[others], np.asarray(raw)[others])
        assert not np.array_equal(w[1, 2], raw[1, 2])
    assert nn.pivot_kernel(raw, "free", (1, 2)) is raw


@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (3, 20), (4, 6, 6), (1, 1)])
def test_the_spectral_bound_is_one_and_is_tight(shape):
    for seed in range(5):
        w = normal(*shape, seed=seed)
        true, found = np.linalg.norm(w, 2, axis=(-2, -1)), jax.jit(nn.spectral_bound)(w)
        assert np.all(found >= true * (1 - 1e-12))
        assert np.all(found <= true * min(shape[-2:]) ** (1 / 64) * (1 + 1e-12))
    for scale in (1e-15, 1e15):  # in float32, where squares overflow long before
        w = (scale * normal(6, 6)).astype(jnp.float32)
        np.testing.assert_allclose(nn.spectral_bound(w), np.linalg.norm(w, 2), rtol=0.05)
    orthogonal = nn.orthogonal(normal(6, 6))  # the worst case: all singular values alike
    np.testing.assert_allclose(nn.spectral_bound(orthogonal), 6 ** (1 / 64), rtol=1e-12)


def test_stable_taps_are_stable_wherever_raw_goes():
    stable = jax.jit(nn.stable_taps)
    pulled = jax.jit(jax.grad(lambda raw: jnp.sum(nn.stable_taps(raw))))
    raw = normal(3, 5, 5)
    for scale in (0.0, 1e-3, 1.0, 1e6):
        assert sum(np.linalg.norm(t, 2) for t in np.asarray(stable(scale * raw))) < 0.9
        assert np.all(np.isfinite(pulled(scale * raw)))
    np.testing.assert_allclose(stable(1e-6 * raw), 1e-6 * raw, rtol=1e-4)


def test_declared_for_the_rules():
    """What the functions say of their weights stays in a trace, and is true of the values."""
    for make, shape, word in (
        (nn.orthogonal, (6, 6), "orthogonal"),
        (nn.lower, (6, 6), "lower"),
        (nn.diagonal, (6,), "diagonal"),
        (lambda raw: nn.pivot_kernel(raw, "identity", (0,)), (3, 6, 6), "diagonal"),
    ):
        assert f"structure={word}" in str(jax.make_jaxpr(make)(normal(*shape)))
        assert mw.declare(make(normal(*shape)), word).shape[-1] == 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nn.orthogonal(normal(3, 4)), "3 rows cannot hold 4 orthonormal columns.*transpose"),
        (lambda: nn.lower(normal(3, 4)), "lower: 3 inputs have no pivot for 4 outputs"),
        (lambda: nn.diagonal(normal(4), rows=3), "4 columns need as many rows"),
        (
            lambda: nn.pivot_kernel(normal(3, 4, 4), "upper", (1,)),
            "unknown structure 'upper'.*diagonal, identity",
        ),
        (
            lambda: nn.pivot_kernel(normal(3, 4, 8), "lower", (1,)),
            "as many rows as columns.*structure='free'",
        ),
        (
            lambda: nn.pivot_kernel(normal(3, 2, 6), "lower", (1,), 2),
            "2 group\\(s\\) take 2 channels each to 6",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
