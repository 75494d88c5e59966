"""Convolutions declared isometric whose zero padding cuts off windows: what walks keep of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow, some
from test_cokernels import blocks_of, compare_all, rows_of, shapes, square
from weights import normal, orthogonal

import moonwalk as mw
from moonwalk.execute.residuals import nbytes
from moonwalk.rules import fragments

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")


def paraunitary(channels, *taps, seed=0):
    """A kernel [*taps, c, c] of an orthogonal convolution: random factors of two taps along each axis."""
    rng = np.random.default_rng(seed)
    w = np.linalg.qr(rng.standard_normal((channels, channels)))[0]
    w = w.reshape((1,) * len(taps) + w.shape)
    for axis, k in enumerate(taps):
        for _ in range(k - 1):
            u = np.linalg.qr(rng.standard_normal((channels, channels // 2)))[0]
            here, on = w @ (u @ u.T), w @ (np.eye(channels) - u @ u.T)
            w = np.concatenate([here, np.zeros_like(w).take([0], axis)], axis)
            w = w + np.concatenate([np.zeros_like(on).take([0], axis), on], axis)
    return jnp.asarray(w)


def conv(x, w, padding, strides=None, structure="isometric"):
    dims = w.ndim - 2
    letters = "HW"[-dims:]
    return lax.conv_general_dilated(
        x,
        mw.declare(w, structure) if structure else w,
        strides or (1,) * dims,
        padding,
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
    )


CASES = {  # shape, kernel, padding, strides, which part of the windows is cut off
    "1D": ((2, 9, 4), (3,), [(1, 1)], None, 2 / 9),
    "1D, even": ((2, 9, 4), (4,), [(1, 2)], None, 3 / 9),
    "1D, causal": ((2, 9, 4), (3,), [(2, 0)], None, 2 / 9),
    "1D, fewer windows": ((2, 9, 4), (4,), [(1, 0)], None, 1 / 7),
    "1D, odd channels": ((2, 9, 5), (3,), [(1, 1)], None, 2 / 9),
    "2D": ((2, 6, 5, 4), (3, 3), [(1, 1), (1, 1)], None, 1 - 4 * 3 / 30),
    "2D, even": ((1, 6, 5, 4), (2, 4), [(0, 1), (2, 1)], None, 1 - 5 * 2 / 30),
    "2D, one axis": ((1, 6, 5, 4), (3, 3), [(0, 0), (1, 1)], None, 2 / 5),
}


@pytest.mark.parametrize("name", some(CASES, ["1D, even", "2D"]))
def test_inside_windows_are_orthonormal_and_orthogonal_to_the_edges(name):
    """What the module's derivation says, of the dense Jacobian; and the fragment gives h' back."""
    shape, taps, padding, strides, share = CASES[name]
    w, x = paraunitary(shape[-1], *taps), normal(*shape, seed=1)
    fun = lambda x, w: conv(x, w, padding, strides)
    ((block,), env) = blocks_of(fun, x, w)
    scheme = next(fragments.candidates(block, fragments.Ask()))
    assert scheme.name == "edges" and scheme.gain(block).factor == 1
    operands = [env[v] for v in block.operands]
    h_out = (normal(*block.outputs[0].aval.shape, seed=3),)

    @jax.jit
    def both(x, operands, h_out):
        _, kept = scheme.keep(block, (x,), operands)
        part = scheme.fragment(block, (), kept, h_out, (0, 0, 0))
        h = jax.vjp(lambda x: block((x,), operands), x)[1](h_out)
        return part, scheme.restore(block, (), kept, part, h, (0, 0, 0))

    part, found = both(x, operands, h_out)
    np.testing.assert_allclose(found, h_out, atol=1e-13)
    assert nbytes(*jax.tree.leaves(part)) == pytest.approx(share * nbytes(*h_out))

    jacobian = jax.jacobian(lambda x: fun(x, w)[0])(x[:1])
    jacobian = np.asarray(jacobian).reshape(h_out[0][0].size, -1)
    inside = np.ones(h_out[0].shape[1:], bool)
    for axis, (k, (low, _), n) in enumerate(zip(taps, padding, shape[1:-1], strict=True)):
        for i in range(inside.shape[axis]):
            if i < low or i + k - low > n:
                np.moveaxis(inside, axis, 0)[i] = False
    inside = inside.reshape(-1)
    assert 1 - inside.mean() == pytest.approx(share)
    expected = np.zeros((inside.size, inside.sum()))
    expected[inside] = np.eye(inside.sum())
    np.testing.assert_allclose(jacobian @ jacobian[inside].T, expected, atol=1e-12)


def test_strided_windows():
    """Orthonormal rows at stride 2, of which the first and the last are cut off."""
    w = jnp.concatenate([orthogonal(8, 4).reshape(2, 4, 4), jnp.zeros((1, 4, 4))])
    x = normal(2, 9, 4, seed=1)
    ((block,), _) = blocks_of(lambda x, w: conv(x, w, [(1, 1)], (2,)), x, w)
    scheme = next(fragments.candidates(block, fragments.Ask()))
    assert scheme.describe(block).endswith("at the edges, 1 + 1 of 5")


# --- networks -----------------------------------------------------------------------------------------


def network(dims, scanned, taps=3):
    pads = [((taps - 1) // 2, taps // 2)] * dims
    layer = lambda x, w: jnp.abs(conv(x, w, pads))

    def loss(params, x):
        x = x @ params[0]
        if scanned:
            return square(lax.scan(lambda x, w: (layer(x, w), None), x, params[1])[0])
        for w in params[1]:
            x = layer(x, w)
        return square(x)

    return loss


def arguments(dims, taps=3, count=3):
    shape = (4, 24, 4) if dims == 1 else (2, 12, 12, 4)
    kernels = jnp.stack([paraunitary(4, *(taps,) * dims, seed=s) for s in range(count)])
    return (orthogonal(4, seed=9), kernels), normal(*shape, seed=2)


@pytest.mark.parametrize(
    ("dims", "scanned", "taps"), [(1, True, 3), slow(1, False, 3), slow(1, True, 4), slow(2, False, 3), (2, True, 3)]
)  # fmt: skip
def test_networks(dims, scanned, taps):
    loss, args = network(dims, scanned, taps), arguments(dims, taps)
    method = mw.Moonwalk(walk="always")
    plan = mw.plan(loss, *shapes(args), method=method)  # nothing but declarations: no gain is measured
    found = rows_of(plan)
    assert sum(r.times for r in found) == 3, str(plan)
    n = args[1].shape[1]
    kept = 1 - (1 - (taps - 1) / n) ** dims
    for row in found:
        assert row.gain == 1 and row.bytes == round(kept * args[1].size) * 8
        assert "declared isometric; padding cuts off windows at the edges" in row.why
        assert f"{(taps - 1) // 2} + {taps // 2} of {n}" in row.why
    assert plan.predicted_gain == 1
    compare_all(loss, *args, method=method, eagerly=(dims, scanned) == (2, False))


@pytest.mark.slow
def test_depth_costs_no_accuracy():
    """In float32, after 200 layers, the certificate is at rounding level."""
    loss = network(1, True)
    (first, _), x = arguments(1)
    ws = jnp.stack([paraunitary(4, 3, seed=s) for s in range(10)])
    args = jax.tree.map(lambda a: a.astype(jnp.float32), ((first, jnp.tile(ws, (20, 1, 1, 1))), x))
    found, truth = jax.jit(
        lambda *a: (mw.grad(loss, certify=True)(*a), jax.grad(loss)(*jax.tree.map(jnp.float64, a)))
    )(*args)
    gradients, certificate = found
    assert certificate.error <= 1e-5
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(truth), strict=True)
    assert all(np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b) for a, b in pairs)


@pytest.mark.slow
def test_a_circle_along_one_axis():
    """A wrap along the other axis: still right, whatever the plan keeps."""

    def loss(params, x):
        x = x @ params[0]
        for w in params[1]:
            x = jnp.concatenate([x[:, -1:], x, x[:, :1]], 1)
            x = jnp.abs(conv(x, w, [(0, 0), (1, 1)]))
        return square(x)

    compare_all(loss, *arguments(2, count=2), method=mw.Moonwalk())


# --- refusals and alarms ------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [(1, 1), (2, 0)])
def test_vijp_refuses(padding):
    """Causal ones too: their last tap is singular, and no pivot."""
    w = paraunitary(4, 3)
    with pytest.raises(mw.NotSubmersiveError) as refused:
        jax.jit(lambda x: mw.vijp(lambda x: conv(x, w, [padding]), x)[0])(normal(2, 9, 4))
    first, last = padding
    assert f"its padding cuts off windows at the edges ({first} + {last} of 9)" in str(refused.value)
    assert "pad circularly; or differentiate with moonwalk.value_and_grad" in str(refused.value)


def test_a_declaration_that_does_not_hold():
    wrong = jnp.stack([orthogonal(4, seed=s) for s in range(3)]) / math.sqrt(3)  # Σ w[j]ᵀw[j] = I alone
    (first, ws), x = arguments(1)
    args = ((first, ws.at[1].set(wrong)), x)
    loss = network(1, scanned=False)
    plan = mw.plan(loss, (first, ws), x, method=mw.Moonwalk(walk="always"))
    assert len(rows_of(plan)) == 3
    with pytest.raises(mw.DeclarationError, match="not the identity on windows inside the input; check"):
        mw.value_and_grad(loss, method=plan)(*args)


def test_unpadded_windows_are_all_inside():
    w = paraunitary(4, 3)
    mw.testing.check_vijp(lambda x: conv(x, w, "VALID"), normal(2, 9, 4))
    mw.testing.check_vijp(lambda x: conv(x, w, [(-1, 0)]), normal(2, 9, 4), modes=["jit"])
