"""Declarations: seen through every transformation, checked whenever values are concrete."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import circular, declared_conv
from jax import lax
from marks import slow
from weights import STRUCTURED, kernel, normal, orthogonal

import moonwalk as mw
from moonwalk.rules import chain, control_flow
from moonwalk.trace import graph, staging

X = normal(3, 6)


def links(fun, *primals):
    staged = staging.stage(lambda *p: (fun(*p), None), *primals)
    known = dict(zip(staged.jaxpr.constvars, staged.consts, strict=True))
    cut = graph.build(staged.jaxpr, staged.jaxpr.invars, staged.jaxpr.outvars, consts=known)
    found = chain.build(cut).links
    while found[-1].rule.name == "scan":
        found = control_flow._checked(found[-1].block).chain.links
    return found


def reason(fun, *primals):
    return next(
        r.verdict.reason
        for r in links(fun, *primals)
        if r.rule.name in ("dense", "convolution", "isometry")
    )


def stacked(w):
    return jnp.stack([w, w])


# how a weight may travel from its declaration to the product; True: used transposed
WAYS = {
    "plain": (lambda x, w, d: x @ d(w), False),
    "transposed": (lambda x, w, d: x @ d(w).T, True),
    "twice transposed": (lambda x, w, d: x @ d(w).T.T, False),
    "contracted on its last axis": (lambda x, w, d: jnp.einsum("bi,oi->bo", x, d(w)), True),
    "jit": (lambda x, w, d: jax.jit(lambda x, w: x @ d(w))(x, w), False),
    "declared under jit": (lambda x, w, d: x @ jax.jit(d)(w), False),
    "checkpoint": (lambda x, w, d: jax.checkpoint(lambda x: x @ d(w))(x), False),
    "vmap over data": (lambda x, w, d: jax.vmap(lambda x: x @ d(w))(x), False),
    "vmap over weights": (lambda x, w, d: jax.vmap(lambda x, w: x @ d(w))(x, jnp.stack([w] * 3)), False),
    "vmap over weights, last axis": (
        lambda x, w, d: jax.vmap(lambda x, w: x @ d(w), in_axes=(0, 2))(x, jnp.stack([w] * 3, 2)), False,
    ),
    "scan, inside": (lambda x, w, d: lax.scan(lambda c, w: (c @ d(w), None), x, stacked(w))[0], False),
    "scan, on the stack": (lambda x, w, d: lax.scan(lambda c, w: (c @ w, None), x, d(stacked(w)))[0], False),
    "scan, as a constant": (lambda x, w, d: lax.scan(lambda c, _: (c @ d(w), None), x, None, length=2)[0], False),
    "scan, constant declared outside": (
        lambda x, w, d: (lambda v: lax.scan(lambda c, _: (c @ v, None), x, None, length=2)[0])(d(w)), False,
    ),
    "indexed": (lambda x, w, d: x @ d(stacked(w))[1], False),
    "unstacked": (lambda x, w, d: x @ jnp.unstack(d(stacked(w)))[1], False),
    "split": (lambda x, w, d: x @ jnp.split(d(stacked(w)), 2)[1][0], False),
    "stacked after": (lambda x, w, d: x @ jnp.stack([d(w), d(w)])[0], False),
    "concatenated after": (lambda x, w, d: x @ jnp.concatenate([d(w)[None], d(w)[None]])[0], False),
    "dynamically indexed": (lambda x, w, d: x @ lax.dynamic_index_in_dim(d(stacked(w)), 1, keepdims=False), False),
    "widened": (lambda x, w, d: x @ d(w.astype(jnp.float64)).astype(jnp.float64), False),
    "negated": (lambda x, w, d: x @ -d(w), False),
    "stop_gradient": (lambda x, w, d: x @ lax.stop_gradient(d(w)), False),
}  # fmt: skip


@pytest.mark.parametrize("structure", ["orthogonal", "lower", "diagonal"])
@pytest.mark.parametrize("way", WAYS)
def test_seen_through(way, structure):
    fun, transposed = WAYS[way]
    w = STRUCTURED[structure](6)
    expected = {"lower": "upper"}.get(structure, structure) if transposed else structure
    assert expected in reason(lambda x: fun(x, w, lambda w: mw.declare(w, structure)), X)


# Of a lower matrix, what is solved with depends on the way; of the others, which are symmetric in it, not.
@pytest.mark.parametrize("structure", [slow("orthogonal"), "lower", slow("diagonal")])
@pytest.mark.parametrize("way", WAYS)
def test_recovered_through(way, structure):
    w = STRUCTURED[structure](6)
    fun = lambda x: WAYS[way][0](x, w, lambda w: mw.declare(w, structure))
    mw.testing.check_vijp(fun, X, modes=["jit"])


DROPPED = {
    "narrowed": lambda x, w: x @ w.astype(jnp.float32).astype(jnp.float64),
    "scaled": lambda x, w: x @ (2 * w),
    "part of a matrix": lambda x, w: x[:, :4] @ w[:4, 2:5],
    "concatenated along the matrix": lambda x, w: x @ jnp.concatenate([w[:, :3], w[:, 3:]], 1),
}


@pytest.mark.parametrize("way", DROPPED)
def test_dropped(way):
    assert "general" in reason(lambda x: DROPPED[way](x, mw.declare(orthogonal(6), "orthogonal")), X)


def test_a_kernel_is_read_as_the_convolution_reads_it():
    k = kernel((3,), 4, 4, (1,), "lower")
    x = normal(2, 9, 4)

    def oiw(x):
        w = mw.declare(jnp.transpose(k, (2, 1, 0)), "lower")
        return lax.conv_general_dilated(
            jnp.swapaxes(x, 1, 2), w, [2], [(1, 1)], dimension_numbers=("NCW", "OIW", "NCW")
        )

    assert "lower" in reason(oiw, x)
    mw.testing.check_vijp(oiw, x)
    # taken from a stack it stays; with taps cut off nothing is known of its pivot
    index = lambda w, low=1: (
        lambda x: lax.conv_general_dilated(
            x, w(), [2], [(low, 1)], dimension_numbers=("NWC", "WIO", "NWC")
        )
    )
    assert "lower" in reason(index(lambda: mw.declare(jnp.stack([k, k]), "lower")[1]), x)
    assert "general" in reason(index(lambda: mw.declare(k, "lower")[:2]), x)
    assert "general" in reason(index(lambda: mw.declare(k, "lower")[:1], low=0), x)


def test_isometries_take_their_expanding_step_with_them():
    assert reason(circular, normal(2, 9, 4)) == "declared isometric"
    (link,) = links(circular, normal(2, 9, 4))
    assert {e.primitive.name for e in link.block.eqns} >= {"concatenate", "conv_general_dilated"}


@pytest.mark.parametrize("structure", ["orthogonal", "diagonal", "lower", "upper", "isometric"])
def test_concrete_values_are_checked(structure):
    make = STRUCTURED["orthogonal" if structure == "isometric" else structure]
    good = make(6)
    np.testing.assert_array_equal(mw.declare(good, structure), good)
    mw.declare(jnp.stack([good, good]), structure)  # a stack
    mw.declare(make(6, 4), structure)  # tall
    with pytest.raises(mw.DeclarationError, match=f"is not {structure}"):
        mw.declare(good + 1e-3, structure)
    with pytest.raises(mw.DeclarationError, match=f"is not {structure}"):
        mw.declare(normal(3, 6, 6), structure)  # neither a stack nor a kernel with such a pivot
    wide = good.astype(jnp.float32)
    mw.declare(wide, structure)
    mw.declare(good.astype(jnp.bfloat16), structure)


def test_triangles_are_not_confused():
    with pytest.raises(mw.DeclarationError, match="not lower: its largest entry off the lower pattern"):
        mw.declare(jnp.triu(normal(4, 4)), "lower")
    with pytest.raises(mw.DeclarationError, match="not upper"):
        mw.declare(jnp.tril(normal(4, 4)), "upper")


@pytest.mark.parametrize("structure", ["orthogonal", "diagonal", "lower", "upper"])
def test_kernels_are_checked_by_their_taps(structure):
    k = kernel((3, 3), 4, 4, (1, 1), structure)
    mw.declare(k, structure)
    mw.declare(jnp.transpose(k, (3, 2, 0, 1)), structure)
    with pytest.raises(mw.DeclarationError):
        mw.declare(normal(3, 3, 4, 4), structure)


def test_a_wrong_declaration_under_a_trace_is_caught_eagerly_at_use():
    hidden = lambda x: jax.jit(lambda x, w: x @ mw.declare(w, "orthogonal"))(x, 1.01 * orthogonal(6))
    with pytest.raises(mw.DeclarationError, match="declared 'orthogonal', but its values are not"):
        mw.vijp(hidden, X)[1](X)
    wrong_tap = lambda x: declared_conv(kernel((3,), 4, 4, (0,), "lower"), "lower", 2, (1, 1))(x)
    with pytest.raises(mw.DeclarationError, match="pivot tap 1"):
        mw.vijp(wrong_tap, normal(1, 9, 4))[1](normal(1, 9, 4))
    not_isometric = lambda x: lax.conv_general_dilated(  # neighbouring windows are not orthogonal
        x, mw.declare(jnp.stack([jnp.eye(2), jnp.eye(2)]) / 2**0.5, "isometric"), [1], "VALID",
        dimension_numbers=("NWC", "WIO", "NWC"),
    )  # fmt: skip
    with pytest.raises(mw.DeclarationError, match="J Jᵀ is not the identity; check the kernel"):
        mw.vijp(not_isometric, normal(1, 5, 2))[1](normal(1, 5, 2))


def test_a_wrong_declaration_in_a_scan_names_the_layer():
    ws = jnp.stack([orthogonal(6), orthogonal(6) + 0.1])
    fun = lambda x: lax.scan(lambda c, w: (c @ mw.declare(w, "orthogonal"), None), x, ws)[0]
    with pytest.raises(mw.DeclarationError, match=r"at \(1,\)"):
        mw.vijp(fun, X)[1](X)


def test_bad_declarations():
    with pytest.raises(ValueError, match="unknown structure 'unitary'; choose one of orthogonal"):
        mw.declare(jnp.eye(2), "unitary")
    with pytest.raises(ValueError, match=r"but the array has shape \(3,\)"):
        mw.declare(jnp.ones(3), "lower")
    with pytest.raises(TypeError, match="floating-point arrays, got int"):
        mw.declare(jnp.eye(3, dtype=int), "lower")


def test_an_identity_under_every_transformation():
    w = orthogonal(4)
    loss = lambda w: jnp.sum(jnp.sin(X[:, :4] @ mw.declare(w, "orthogonal")))
    plain = lambda w: jnp.sum(jnp.sin(X[:, :4] @ w))
    np.testing.assert_array_equal(jax.grad(loss)(w), jax.grad(plain)(w))
    np.testing.assert_array_equal(jax.jvp(loss, (w,), (w,))[1], jax.jvp(plain, (w,), (w,))[1])
    np.testing.assert_array_equal(jax.hessian(loss)(w), jax.hessian(plain)(w))
    batched = jnp.stack([w, w.T])
    np.testing.assert_array_equal(jax.vmap(jax.grad(loss))(batched), jax.vmap(jax.grad(plain))(batched))


def test_kernels_in_groups_are_checked_group_by_group():
    """[*k, in/g, g·out]: each group has a pivot of its own."""
    w = kernel((3,), 6, 4, (1,), "diagonal", groups=2)
    mw.declare(w, "diagonal", groups=2)
    mw.declare(jnp.transpose(w, (2, 1, 0)), "diagonal", groups=2)  # the layout of Equinox
    with pytest.raises(mw.DeclarationError, match="off the diagonal pattern"):
        mw.declare(w, "diagonal")
    with pytest.raises(mw.DeclarationError, match="off the diagonal pattern"):
        mw.declare(w.at[1, 0, 3].set(0.1), "diagonal", groups=2)
    with pytest.raises(ValueError, match=r"groups=2 speaks of a kernel.*shape \(4, 4\)"):
        mw.declare(jnp.eye(4), "diagonal", groups=2)


@pytest.mark.parametrize("structure", ["orthogonal", "diagonal", "lower", "upper", "isometric"])
@pytest.mark.parametrize(("value", "name"), [(np.nan, "NaN"), (np.inf, "infinity")])
@pytest.mark.parametrize("shape", [(4, 4), (3, 4, 4)])
def test_what_is_not_finite_is_called_so(structure, value, name, shape):
    w = jnp.broadcast_to(jnp.eye(4), shape).at[..., 1, 1].set(value)
    with pytest.raises(
        mw.DeclarationError, match=rf"holds {name} \(at .* are not finite.*learning rate"
    ):
        mw.declare(w, structure)


@pytest.mark.parametrize("taps", [(7,), (3,), (-1,)])
def test_taps_that_a_kernel_does_not_have(taps):
    w = jnp.stack([jnp.eye(8)] * 3)
    message = r"none of the taps of a kernel \[\*taps, in, out\] of shape \(3, 8, 8\).*transposed"
    with pytest.raises(ValueError, match=message):
        mw.declare(w, "orthogonal", taps=taps)
    with pytest.raises(ValueError, match="none of the taps"):
        jax.eval_shape(lambda w: mw.declare(w, "orthogonal", taps=taps), w)


@pytest.mark.parametrize("taps", [(), (0, 1), 1.5, "1", (True,), (None,)])
def test_taps_that_are_not_taps(taps):
    with pytest.raises(ValueError, match="one for each spatial axis of a kernel.*got"):
        mw.declare(jnp.stack([jnp.eye(8)] * 3), "orthogonal", taps=taps)
    with pytest.raises(ValueError, match="one for each spatial axis of a kernel.*got"):
        mw.declare(jnp.eye(8), "orthogonal", taps=(0,))


def test_the_tap_that_is_named_has_the_structure():
    w = jnp.stack([jnp.eye(4), 2 * jnp.eye(4), jnp.ones((4, 4))])
    mw.declare(w, "orthogonal", taps=(0,))
    mw.declare(w, "lower", taps=[1])
    with pytest.raises(mw.DeclarationError, match=r"not orthogonal at its tap \(1,\)"):
        mw.declare(w, "orthogonal", taps=(1,))
