"""Fragments of what expands: dense layers, convolutions, pads, copies, and layers with their own."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow
from networks import conv
from test_engine import arrays, compare, error
from weights import diagonal, general, kernel, lower, normal, orthogonal, upper

import moonwalk as mw
from moonwalk.execute.residuals import nbytes
from moonwalk.rules import fragments
from moonwalk.trace import graph, staging

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

EXACT = 1e-9
ROWS = 64

# --- one block: its fragment and h determine h' -------------------------------------------------------


def blocks_of(fun, *args):
    """The blocks of a function of a state and operands, and the values of all operands."""
    staged = staging.stage(fun, *args)
    env = dict(zip(staged.jaxpr.constvars, staged.consts, strict=True))
    state, outputs = staged.jaxpr.invars[:1], staged.jaxpr.outvars
    cut = graph.build(staged.jaxpr, state, outputs, consts=env)
    env.update(zip(staged.jaxpr.invars, args, strict=True))
    for item in cut.schedule:
        if not isinstance(item, graph.Block) and all(hasattr(v, "val") or v in env for v in item.invars):
            graph.run([item], env)
    return cut.blocks, env


def ways(fun, *args):
    """(block, scheme, operands) of every fragment that is offered."""
    blocks, env = blocks_of(fun, *args)
    return [
        (block, scheme, [env[v] for v in block.operands])
        for block in blocks
        for scheme in fragments.candidates(block, fragments.Ask())
    ]


def check(fun, *args, share):
    """Phase II's and Phase III's half of a fragment give h' back; so much of it is kept."""
    ((block, scheme, operands),) = ways(fun, *args)
    assert scheme == next(fragments.candidates(block, fragments.Ask()))  # by value
    x = tuple(normal(*v.aval.shape, seed=2) for v in block.inputs)
    h_out = tuple(normal(*v.aval.shape, seed=3) for v in block.outputs)

    @jax.jit
    def both(x, operands, h_out):
        _, kept = scheme.keep(block, x, operands)
        factors = scheme.prepare(block, operands)
        h = jax.vjp(lambda *x: block(x, operands), *x)[1](h_out)
        part = scheme.fragment(block, factors, kept, h_out, (0, 0, 0))
        return part, scheme.restore(block, factors, kept, part, h, (0, 0, 0))

    part, found = both(x, operands, h_out)
    np.testing.assert_allclose(found, h_out, atol=1e-12)
    assert nbytes(*jax.tree.leaves(part)) == pytest.approx(share * nbytes(*h_out))


X = normal(3, 5, 6, seed=1)

DENSE = {
    "matrix": (lambda x, w: x @ w, X, general(6, 8), 1 / 4),
    "transposed": (lambda x, w: x @ w.T, X, general(6, 9).T, 1 / 3),
    "weight first": (lambda x, w: w @ x, X, general(5, 8).T, 3 / 8),
    "several axes": (
        lambda x, w: jnp.einsum("aij,jkl->aikl", x, w),
        X,
        general(6, 12).reshape(6, 3, 4),
        1 / 2,
    ),
    "contracting two axes": (
        lambda x, w: jnp.einsum("aij,oij->ao", x, w),
        X,
        general(30, 40).T.reshape(40, 5, 6),
        1 / 4,
    ),
    "batch": (
        lambda x, w: jnp.einsum("aij,ajo->aio", x, w),
        X,
        jnp.stack([general(6, 8, seed=s) for s in range(3)]),
        1 / 4,
    ),
    "batch in the middle, weight first": (
        lambda x, w: jnp.einsum("oji,aij->ioa", w, x),
        X,
        jnp.stack([general(6, 8, seed=s) for s in range(5)]).transpose(2, 1, 0),
        1 / 4,
    ),
    **{
        f"declared {make.__name__}": (
            lambda x, w, kind=make.__name__: x @ mw.declare(w, kind),
            X,
            make(6, 8),
            1 / 4,
        )
        for make in (orthogonal, diagonal, lower, upper)
    },
}


@pytest.mark.parametrize("name", DENSE)
def test_dense(name):
    fun, x, w, share = DENSE[name]
    check(fun, x, w, share=share)


IMAGE = normal(2, 6, 6, 4, seed=2)

CONVOLUTIONS = {
    "1×1": (functools.partial(conv, stride=1, padding=(0, 0)), kernel((1, 1), 4, 6, (0, 0)), 1 / 3),
    "1×1, strided": (functools.partial(conv, padding=(0, 0)), kernel((1, 1), 4, 6, (0, 0)), 1 / 3),
    "patches": (
        functools.partial(conv, padding=(0, 0)),
        normal(2, 2, 4, 20, seed=5),
        1 / 5,
    ),
    "one pivot of several taps": (conv, kernel((3, 3), 4, 8, (1, 1)), 1 / 2),
    "groups": (
        functools.partial(conv, padding=(0, 0), groups=2),
        normal(2, 2, 2, 24, seed=6),
        1 / 3,
    ),
    "declared": (
        functools.partial(conv, stride=1, padding=(0, 0), structure="orthogonal"),
        orthogonal(4, 8)[None, None],
        1 / 2,
    ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name):
    fun, w, share = CONVOLUTIONS[name]
    check(fun, IMAGE, w, share=share)


def test_convolution_in_another_layout():
    def fun(x, w):
        return lax.conv_general_dilated(
            x, w, (2,), [(0, 0)], dimension_numbers=("CNW", "OWI", "WNC"), feature_group_count=2
        )

    check(fun, normal(4, 3, 8), normal(12, 2, 2, seed=7), share=1 / 3)


def test_convolutions_that_need_more_than_their_cokernel():
    """Windows that meet in every row, and what has no elimination at all."""
    same = functools.partial(conv, stride=1, padding=(1, 1))
    assert not ways(same, IMAGE, kernel((3, 3), 4, 8, (1, 1)))
    causal = functools.partial(conv, stride=1, padding=(2, 0))
    assert not ways(causal, IMAGE, kernel((3, 3), 4, 8, (2, 2)))
    dilated = lambda x, w: lax.conv_transpose(x, w, (2, 2), "VALID")
    assert not ways(dilated, IMAGE, kernel((2, 2), 4, 8, (0, 0)))


MOVES = {
    "pad": (lambda x: jnp.pad(x, ((1, 2), (0, 1), (2, 0))), 1 - 3 * 5 * 6 / (6 * 6 * 8)),
    "shift": (lambda x: lax.pad(x, 0.0, [(0, 0, 0), (1, -1, 0), (0, 0, 0)]), 1 / 5),
    "shift back": (lambda x: lax.pad(x, 0.0, [(0, 0, 0), (0, 0, 0), (-2, 2, 0)]), 1 / 3),
    "shift, and more": (lambda x: lax.pad(x, 1.0, [(-1, 1, 0), (2, -1, 0), (0, 0, 0)]), 5 / 9),
    "circular": (lambda x: jnp.pad(x, ((0, 0), (2, 1), (0, 0)), mode="wrap"), 3 / 8),
    "circular by hand": (lambda x: jnp.concatenate([x[:, -1:], x, x[:, :1]], 1), 2 / 7),
    "reflected": (lambda x: jnp.pad(x, ((0, 0), (0, 0), (2, 0)), mode="reflect"), 1 / 4),
    "twice": (lambda x: jnp.concatenate([x, x], -1), 1 / 2),
    "three times, in part": (lambda x: jnp.concatenate([x[..., :2], x[..., 1:], x], -1), 7 / 13),
    "zeros": (lambda x: jnp.concatenate([x, jnp.zeros((3, 3, 6))], 1), 3 / 8),
    "two states and a zero": (
        lambda x: jnp.concatenate([jnp.sin(x[:, :2]), jnp.cos(x[:, 2:]), jnp.zeros((3, 1, 6))], 1),
        1 / 6,
    ),
    "two states, one twice": (
        lambda x: jnp.concatenate([a := jnp.sin(x[:, :2]), jnp.cos(x[:, 2:]), a], 1),
        2 / 7,
    ),
    "zeros between": (lambda x: jnp.concatenate([x[:, :2], jnp.zeros((3, 1, 6)), x[:, 2:]], 1), 1 / 6),
}


@pytest.mark.parametrize("name", MOVES)
def test_pads_and_copies(name):
    fun, share = MOVES[name]
    check(fun, X, share=share)


def test_what_has_no_such_fragment():
    assert not ways(lambda x: lax.pad(x, 0.0, [(0, 0, 1), (0, 0, 0), (0, 0, 0)]), X)  # interior
    assert not ways(lambda x: lax.pad(x, 0.0, [(0, 0, 0), (-1, 0, 0), (0, 0, 0)]), X)  # a crop
    assert not ways(lambda x: jnp.roll(x, 1, 1), X)
    assert not ways(lambda x: jnp.concatenate([x[:, :1], x[:, 1:]], 1), X)
    assert not ways(lambda x: jnp.concatenate([x, x[:, ::-1, ::-1]], 1), X)  # two axes at once
    # a slice for every entry
    assert not ways(lambda x: jnp.concatenate([x, x[::2], x[::-1]]), normal(200))


# --- in networks --------------------------------------------------------------------------------------


def square(x):
    return jnp.mean((x - 0.5) ** 2)


def shapes(args):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)


def rows_of(plan, mode="fragment"):
    return [r for r in plan.rows if r.mode == mode]


def compare_all(loss, *args, method, eagerly=False):
    fun = mw.value_and_grad(loss, method=method)

    @jax.jit
    def both(*args):
        return arrays(fun(*args)), arrays(jax.value_and_grad(loss)(*args))

    found, expected = both(*args)
    compare(found, expected, EXACT)
    if eagerly:
        compare(arrays(fun(*args)), expected, EXACT)


def run_in_turn(layer, scanned):
    """A loss that applies a layer for each of its parameters, in a loop or in a scan."""

    def loss(params, x):
        if scanned:
            return square(lax.scan(lambda x, p: (layer(x, p), None), x, params)[0])
        for i in range(len(jax.tree.leaves(params)[0])):
            x = layer(x, jax.tree.map(lambda p, i=i: p[i], params))
        return square(x)

    return loss


def stack(make, *args, count=3, **options):
    return jnp.stack([make(*args, seed=s, **options) for s in range(count)])


def bottleneck(x, p):
    """Wider and narrower again: what a walk keeps is a quarter of the wide cotangent, and bits."""
    return jnp.abs(x @ p[0]) @ p[1]


def padded(x, p):
    """One column more, in front; the matrix takes it away again."""
    return jnp.abs(jnp.pad(x, ((0, 0), (1, 0))) @ p)


def shifted(x, p):
    return jnp.abs(lax.pad(x, 0.0, [(0, 0, 0), (1, -1, 0)]) @ mw.declare(p, "orthogonal"))


def wrapped(x, p):
    x = jnp.concatenate([x[:, -1:], x, x[:, :1]], 1)
    return jnp.abs(x @ mw.declare(p, "orthogonal"))


FLAT = normal(ROWS, 12, seed=9)
NETS = {
    "dense": (bottleneck, (stack(general, 12, 16), stack(general, 16, 12)), "25 %", "dense 12 -> 16"),
    "pad": (padded, stack(orthogonal, 13, 12), "7.7 %", "pads by ((0, 0), (1, 0))"),
    "shift": (shifted, stack(orthogonal, 12), "8.3 %", "pads by ((0, 0), (1, -1))"),
    "wrap": (wrapped, stack(orthogonal, 14, 12), "14 %", "copies leave no trace"),
}


def whole(layer, scanned=False):
    """The network with a layer before it that reads the data."""
    loss = run_in_turn(layer, scanned)
    return lambda params, x: loss(params[1], x @ params[0])


FIRST = orthogonal(12, seed=20)


@pytest.mark.parametrize(
    ("name", "scanned"),
    [("dense", True), slow("dense", False), slow("pad", False), slow("shift", True), ("wrap", True)],
)
def test_networks(name, scanned):
    layer, params, share, why = NETS[name]
    loss, args = whole(layer, scanned), ((FIRST, params), FLAT)
    plan = mw.plan(loss, *args, method=mw.Moonwalk(walk="always"))
    found = rows_of(plan)
    assert sum(r.times for r in found) == 3, str(plan)
    for row in found:
        assert row.why.startswith(f"fragment: {share} of the cotangent; "), row.why
        assert why in row.why
    assert plan.fragments == len(found)
    assert plan.checked
    compare_all(loss, *args, method=plan, eagerly=(name, scanned) == ("pad", False))


def test_undeclared_weights_need_a_measured_gain():
    layer, params, *_ = NETS["dense"]
    loss = whole(layer)
    assert not rows_of(mw.plan(loss, *shapes(((FIRST, params), FLAT))))
    assert not rows_of(mw.plan(loss, (FIRST, params), FLAT, method=mw.Moonwalk(tolerance=1e-16)))


def test_declared_weights_need_none():
    """Wide and orthogonal, M Mᵀ = I: nothing is lost but what is kept."""

    def layer(x, p):
        wide = jnp.abs(x @ mw.declare(p[0], "orthogonal"))
        return wide @ mw.declare(p[1], "orthogonal")

    params = stack(orthogonal, 12, 16), stack(orthogonal, 16, 12)
    loss, args = whole(layer, scanned=True), ((FIRST, params), FLAT)
    plan = mw.plan(loss, *shapes(args))
    (row,) = rows_of(plan)
    assert row.gain == 1 and not plan.measured and "orthogonal: 4 of 16" in row.why
    compare_all(loss, *args, method=mw.Moonwalk())


@pytest.mark.slow
def test_groups_in_a_network():
    def layer(x, p):
        x = conv(x, p[0], padding=(0, 0), groups=2)  # 2 × [8 -> 10]
        x = conv(jnp.abs(x), p[1], stride=1, padding=(0, 0))
        return x.reshape(*x.shape[:3], 2, 2, 4).transpose(0, 1, 3, 2, 4, 5).reshape(ROWS, 4, 4, 4)

    patches = jnp.stack([normal(2, 2, 2, 20, seed=s) / 3 for s in range(3)])
    params = patches, stack(general, 20, 16)[:, None, None]

    loss, args = whole(layer, scanned=True), ((orthogonal(4), params), normal(ROWS, 4, 4, 4, seed=8))
    plan = mw.plan(loss, *args)
    (row,) = rows_of(plan)
    assert "20 % of the cotangent" in row.why and "2 of 10 channels" in row.why
    compare_all(loss, *args, method=plan)


def test_a_class_token():
    """A learned token before every sequence: its position's cotangent is kept, and its gradient found."""

    def loss(params, x):
        token, ws = params
        x = jnp.abs(x @ mw.declare(ws[0], "orthogonal"))
        x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, 12)), x], 1)
        for w in ws[1:]:
            x = jnp.abs(x @ mw.declare(w, "orthogonal"))
        return square(x)

    args = ((normal(1, 1, 12, seed=1), list(stack(orthogonal, 12, count=4))), normal(8, 7, 12, seed=2))
    method = mw.Moonwalk(walk="always")
    (row,) = rows_of(mw.plan(loss, *args, method=method))
    assert "fragment: 12 % of the cotangent; joins parts along axis 1: constants" in row.why
    compare_all(loss, *args, method=method)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
def test_narrow_types(dtype):
    """In a narrow type the fragment is as narrow as the cotangent that it is part of."""
    layer, params, *_ = NETS["dense"]
    loss = whole(layer, scanned=True)
    args = jax.tree.map(lambda a: a.astype(dtype), ((FIRST, params), FLAT))
    plan = mw.plan(loss, *shapes(args), method=mw.Moonwalk(tolerance=math.inf))
    (row,) = rows_of(plan)
    wide = 2 if dtype == jnp.float16 else 1  # whose cotangents are float32
    assert row.bytes == wide * ROWS * 4 * jnp.dtype(dtype).itemsize
    found, expected = jax.jit(lambda *a: [mw.grad(loss, method=plan)(*a), jax.grad(loss)(*a)])(*args)
    for a, b in zip(arrays(found), arrays(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 40 * jnp.finfo(dtype).eps * np.linalg.norm(b)


def test_singular_weights():
    bad = general(12, 16).at[1].set(general(12, 16)[0])
    trust = mw.Moonwalk(tolerance=math.inf, walk="always")

    def loss(params, x):
        for up, down in params:
            x = bottleneck(x, (up, down))
        return square(x)

    pairs = [(general(12, 16, seed=s), general(16, 12, seed=s)) for s in range(4)]
    pairs[2] = (bad, pairs[2][1])
    message = (
        r"the general pivot of the weight `params\[2\]\[0\]` .* is singular, so the output's cotangent "
        r"cannot be recovered; parametrise its diagonal \(or its smallest singular value\) away from zero"
    )
    with pytest.raises(mw.SingularError, match=message):
        mw.value_and_grad(loss, method=trust)(pairs, FLAT)
    rows = rows_of(mw.plan(loss, pairs, FLAT, method=mw.Moonwalk(walk="always")))
    assert len(rows) == 2  # measured, its gain is too large: that one is an anchor, or stored


def test_a_declaration_that_does_not_hold():
    def loss(params, x):
        for up, down in params:
            x = bottleneck(x, (mw.declare(up, "orthogonal"), down))
        return square(x)

    pairs = [(orthogonal(12, 16, seed=s), general(16, 12, seed=s)) for s in range(4)]
    plan = mw.plan(loss, pairs, FLAT, method=mw.Moonwalk(walk="always"))
    assert len(rows_of(plan)) == 3
    pairs[2] = (1.5 * pairs[2][0], pairs[2][1])
    with pytest.raises(mw.DeclarationError, match="is not orthogonal|declared 'orthogonal'"):
        mw.value_and_grad(loss, method=plan)(pairs, FLAT)


# --- layers with a fragment of their own ----------------------------------------------------------------


def expanding_layer():
    """x @ w with w [12, 16] of orthonormal rows: keeps the last four outputs of a rotation."""

    @mw.custom_vijp
    def expanding(x, w):
        return x @ w[:12]

    expanding.deffragment(
        lambda primals, h_out: h_out @ primals[1][12:].T,
        lambda primals, part, h: h @ primals[1][:12] + part @ primals[1][12:],
    )
    return expanding


def own_network(expanding, vmapped=False):
    def layer(x, p):
        if vmapped:
            return jax.vmap(lambda x: jnp.abs(expanding(x, p[0])) @ p[1])(x)
        return jnp.abs(expanding(x, p[0])) @ p[1]

    return layer


OWN = (stack(orthogonal, 16), stack(general, 16, 12))


@pytest.mark.parametrize("vmapped", [False, slow(True)])
def test_own_fragment(vmapped):
    loss = whole(own_network(expanding_layer(), vmapped), scanned=True)
    args = ((FIRST, OWN), FLAT)
    plan = mw.plan(loss, *args)
    (row,) = rows_of(plan)
    assert "fragment: 25 % of the cotangent; fragment given by the author of `" in row.why
    assert plan.checked and row.m_x == 0 and row.bytes == ROWS * 4 * 8  # the state is not kept
    compare_all(loss, *args, method=plan)


def test_own_fragment_in_a_loop_with_batched_weights():
    """Of several layers side by side, each with its own weights."""
    expanding = expanding_layer()

    def loss(params, x):
        first, layers = params
        x = jax.vmap(lambda x: x @ first, in_axes=1, out_axes=1)(x)
        for up, down in layers:
            x = jnp.abs(jax.vmap(expanding, in_axes=(1, 2))(x, up))
            x = jnp.einsum("eao,eoi->aei", x, down)
        return square(x)

    ups = [jnp.stack([orthogonal(16, seed=9 * i + e) for e in range(2)], 2) for i in range(3)]
    downs = [stack(general, 16, 12, count=2) for _ in range(3)]
    args = ((FIRST, list(zip(ups, downs, strict=True))), normal(ROWS, 2, 12, seed=5))
    plan = mw.plan(loss, *args, method=mw.Moonwalk(walk="always"))
    assert [r.why.split(";")[0] for r in rows_of(plan)] == ["fragment: 25 % of the cotangent"] * 3
    compare_all(loss, *args, method=plan)


def test_own_fragment_that_reads_the_state():
    """A product of its halves beside it, of any pytree, with a static argument."""

    @functools.partial(mw.custom_vijp, nondiff_argnums=(1,))
    def with_product(x, scale):
        a, b = jnp.split(x["state"], 2, -1)
        return {"sum": x["state"], "product": scale * a * b}

    def restore(scale, primals, part, h):
        a, b = jnp.split(primals[0]["state"], 2, -1)
        back = jnp.concatenate([b, a], -1) * jnp.tile(part["product"], 2) * scale
        return {"sum": h["state"] - back, "product": part["product"]}

    with_product.deffragment(lambda scale, primals, h_out: {"product": h_out["product"]}, restore)

    def layer(x, p):
        y = with_product({"state": x}, 0.1)
        return jnp.abs(jnp.concatenate([y["sum"], y["product"]], -1) @ p)

    loss, args = whole(layer, scanned=True), ((FIRST, stack(orthogonal, 18, 12)), FLAT)
    plan = mw.plan(loss, *args, method=mw.Moonwalk(tolerance=math.inf))
    (row,) = rows_of(plan)
    assert "33 % of the cotangent" in row.why and "Phase I keeps" in row.why
    compare_all(loss, *args, method=plan)


def test_an_own_fragment_that_is_not_smaller_is_not_used():
    @mw.custom_vijp
    def expanding(x, w):
        return x @ w[:12]

    expanding.deffragment(lambda primals, h_out: h_out, lambda primals, part, h: part)
    loss, args = whole(own_network(expanding), scanned=True), ((FIRST, OWN), FLAT)
    plan = mw.plan(loss, *args)
    assert not rows_of(plan) and not plan.fragments
    compare_all(loss, *args, method=plan)


def test_own_fragment_beside_a_vijp():
    """The vijp serves where the tolerance admits what nothing bounds, the fragment elsewhere."""

    @mw.custom_vijp
    def turn(x, w):
        return x @ w

    turn.defvijp(lambda primals, h: h @ primals[1])
    turn.deffragment(lambda primals, h_out: (), lambda primals, part, h: h @ primals[1])
    x = normal(3, 12)
    mw.testing.check_vijp(lambda x: turn(x, FIRST), x, modes=["eager"])
    loss = whole(lambda x, p: jnp.abs(turn(x, p)), scanned=True)
    args = ((FIRST, stack(orthogonal, 12)), FLAT)
    (row,) = rows_of(mw.plan(loss, *args))
    assert "fragment: 0 % of the cotangent" in row.why
    assert not rows_of(mw.plan(loss, *args, method=mw.Moonwalk(tolerance=math.inf)))
    compare_all(loss, *args, method=mw.Moonwalk())


def test_mistakes():
    expanding = expanding_layer()
    with pytest.raises(mw.DuplicateRuleError, match="expanding already has a fragment"):
        expanding.deffragment(lambda primals, h_out: h_out, lambda primals, part, h: part)
    with pytest.raises(
        TypeError, match=r"deffragment takes two functions, fragment\(primals, h_out\) and"
    ):
        mw.custom_vijp(lambda x: x).deffragment(lambda primals, h_out: h_out, 3)
    with pytest.raises(mw.NotSubmersiveError) as refused:
        mw.vijp(lambda x: expanding(x, orthogonal(16)), FLAT)
    assert "expanding` has no vijp: it needs a fragment of its output's" in str(refused.value)
    assert "differentiate with moonwalk.value_and_grad" in str(refused.value)

    def with_restore(restore):
        layer = mw.custom_vijp(lambda x, w: x @ w[:12])
        layer.deffragment(lambda primals, h_out: h_out[..., :4], restore)
        return lambda: mw.grad(whole(own_network(layer), scanned=True))((FIRST, OWN), FLAT)

    with pytest.raises(
        TypeError, match="`restore` of .*lambda.* must return a cotangent with the struct"
    ):
        with_restore(lambda primals, part, h: {"h": h})()
    with pytest.raises(TypeError, match=r"`restore` of .*lambda.* of shape \(64, 16\), but returned"):
        with_restore(lambda primals, part, h: h)()


def test_own_fragment_on_several_devices():
    """Inside `jax.shard_map`, whose types say along which axes of a mesh arrays differ."""
    loss = whole(own_network(expanding_layer()), scanned=True)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    over, same = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()

    def local(params, x):
        return lax.pmean(loss(params, x), "d")

    def sharded(grad):
        return jax.shard_map(grad, mesh=mesh, in_specs=(same, over), out_specs=same)

    @jax.jit
    def both(*args):
        return arrays(sharded(mw.grad(local))(*args)), arrays(sharded(jax.grad(local))(*args))

    found, expected = both((FIRST, OWN), FLAT)
    assert error(found, expected) <= EXACT
