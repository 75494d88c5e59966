"""What once went wrong, or could: mostly under jit, where no value is there to be checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from weights import general, kernel, lower, normal, orthogonal

import moonwalk as mw

X = normal(3, 6)
NWC = ("NWC", "WIO", "NWC")
check = mw.testing.check_vijp


def conv1d(x, w, stride=2, padding=((1, 1),), numbers=NWC):
    return lax.conv_general_dilated(x, w, [stride], list(padding), dimension_numbers=numbers)


# --- an isometry is an isometry of its own layer, nothing more -------------------------------------------

Q = orthogonal(6)


def test_isometric_weights_do_not_make_other_things_isometric():
    stack = jnp.stack([orthogonal(6, seed=s) for s in range(3)])
    iso = lambda w: mw.declare(w, "isometric")
    leaky = lambda x: jax.nn.leaky_relu(x, 0.3)
    check(lambda x: lax.scan(lambda c, w: (leaky(c @ w), None), x, iso(stack))[0], X)
    check(
        lambda x: (lambda w: lax.scan(lambda c, _: (leaky(c @ w), None), x, None, length=2)[0])(iso(Q)),
        X,
    )

    @jax.custom_jvp
    def doubled(x, w):
        return x @ w

    doubled.defjvp(lambda p, t: (p[0] @ p[1], 2 * (t[0] @ p[1])))
    check(lambda x: doubled(x, iso(Q)), X)

    @mw.custom_vijp
    def twice(x, w):
        return 2 * x @ w

    twice.defvijp(lambda primals, h: h @ primals[1] / 2)
    check(lambda x: twice(x, iso(Q)), X)
    check(lambda w: general(6) @ mw.declare(w, "isometric"), Q, modes=["jit"])
    check(lambda x: jnp.einsum("bli,lio->bo", x, iso(stack)), normal(2, 3, 6), modes=["jit"])
    with pytest.raises(mw.NotSubmersiveError, match="opaque"):
        mw.vijp(lambda x: (lambda w: lax.cond(True, lambda: x @ w, lambda: x @ w))(iso(Q)), X)


@pytest.mark.parametrize(
    "before",
    [
        lambda x: jnp.maximum(x, 0),
        lambda x: x + 0.5 * jnp.roll(x, 1, 1),
        lambda x: (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True),
    ],
)
def test_isometric_layers_do_not_swallow_what_stands_before_them(before):
    with pytest.raises(mw.NotSubmersiveError):
        mw.vijp(lambda x: before(x) @ mw.declare(Q, "isometric"), X)
    k = jnp.zeros((1, 6, 6)).at[0].set(Q)
    with pytest.raises(mw.NotSubmersiveError):
        mw.vijp(lambda x: conv1d(before(x), mw.declare(k, "isometric"), 1, [(0, 0)]), normal(2, 3, 6))


# --- declarations do not outlive what they speak of ------------------------------------------------------

K = jnp.stack([lower(3), general(3, seed=5)])  # [2, in, out], tap 0 lower


@pytest.mark.parametrize(
    "use",
    {
        "in and out exchanged": lambda x, k: conv1d(x, jnp.swapaxes(k, 1, 2), 2, [(0, 0)]),
        "taps permuted": lambda x, k: conv1d(x, k[jnp.array([1, 0])], 2, [(0, 0)]),
        "taps reversed": lambda x, k: conv1d(x, k[::-1], 2, [(0, 0)]),
        "another tap": lambda x, k: conv1d(x, k[1][None], 2, [(0, 0)]),
        "layout changed": lambda x, k: conv1d(
            jnp.swapaxes(x, 1, 2), jnp.transpose(k, (2, 1, 0)), 2, [(0, 0)], ("NCW", "OIW", "NCW")
        ),
        "layout changed and exchanged": lambda x, k: conv1d(
            jnp.swapaxes(x, 1, 2), jnp.transpose(k, (1, 2, 0)), 2, [(0, 0)], ("NCW", "OIW", "NCW")
        ),
        "joined with itself": lambda x, k: conv1d(x, jnp.concatenate([k, k]), 4, [(0, 0)]),
    }.items(),
    ids=lambda item: item[0],
)
def test_declared_kernels_on_detours(use):
    check(lambda x: use[1](x, mw.declare(K, "lower")), normal(2, 8, 3), modes=["jit"])


def test_a_declared_matrix_as_a_kernel():
    oiw = ("NCW", "OIW", "NCW")
    check(
        lambda x: conv1d(x, mw.declare(lower(3), "lower")[:, :, None], 2, [(0, 0)], oiw),
        normal(2, 3, 6), modes=["jit"],
    )  # fmt: skip


def test_joined_isometries_are_none():
    one = lambda s: mw.declare(orthogonal(3, seed=s)[None], "isometric")
    check(
        lambda x: conv1d(x, jnp.concatenate([one(0), one(1)]), 2, [(0, 0)]),
        normal(2, 8, 3),
        modes=["jit"],
    )


# --- one state, twice --------------------------------------------------------------------------------------


def test_a_state_that_enters_twice():
    with pytest.raises(mw.NotSubmersiveError, match="one state enters the scan twice"):
        mw.vijp(
            lambda x: lax.scan(lambda c, _: ((c[0] * 2 + c[1], c[1] * 3), None), (x, x), length=3)[0][0],
            X,
        )

    @mw.custom_vijp
    def add(x, w):
        return x[0] + w * x[1]

    add.defvijp(lambda primals, h: h[0])
    with pytest.raises(mw.NotSubmersiveError, match="the same state twice"):
        mw.vijp(lambda x: add((x, x), 2.0), X)
    with pytest.raises(mw.NotSubmersiveError, match="is constant"):
        mw.vijp(lambda x: add((x, jnp.ones_like(x)), 2.0), X)
    check(lambda x, y: add((x, y), 2.0), X, 2 * X)


def test_no_rule_may_accept_an_expanding_block():
    @mw.custom_vijp
    def grow(x):
        return jnp.concatenate([x, x])

    grow.defvijp(lambda primals, h: jnp.concatenate([h, h]))
    with pytest.raises(mw.NotSubmersiveError, match="expands"):
        mw.vijp(grow, X)
    with pytest.raises(mw.NotSubmersiveError):
        mw.vijp(lambda x: lax.sort((x, x), num_keys=1), X)


# --- backward rules that are not linear -------------------------------------------------------------------


def with_backward(bwd, forward=lambda x: x * 1.0):
    @jax.custom_vjp
    def fun(x):
        return forward(x)

    fun.defvjp(lambda x: (forward(x), x), bwd)
    return fun


@pytest.mark.parametrize(
    "bwd",
    [
        lambda x, g: (2 * g + 0.1 * x,),  # affine
        lambda x, g: (jnp.cumsum(g) + 0.1 * x,),
        lambda x, g: ((g * 4).astype(int) / 4.0,),
        lambda x, g: (jnp.clip(g, -0.1, 0.1),),
        lambda x, g: (g * g,),
        lambda x, g: (jnp.where(g > 0, g, 0),),
    ],
)
def test_backward_rules_that_are_not_linear(bwd):
    with pytest.raises(mw.NotSubmersiveError, match="not linear|cannot be read as a linear map"):
        mw.vijp(with_backward(bwd), X[0])


@pytest.mark.parametrize(
    "bwd",
    [
        lambda x, g: (2 * g,),
        lambda x, g: (g / (1 + x**2) + g,),
        lambda x, g: (jnp.where(x > 0, g, 3 * g),),
        lambda x, g: (jnp.cumsum(g),),
        lambda x, g: (g @ general(6),),
        lambda x, g: (jnp.flip(2 * g),),
    ],
)
def test_backward_rules_that_are_linear(bwd):
    fun = with_backward(bwd)
    truth = normal(6, seed=1)
    (h,) = jax.vjp(fun, X[0])[1](truth)
    np.testing.assert_allclose(mw.vijp(fun, X[0])[1](h), truth, rtol=1e-9)


def test_a_custom_jvp_with_equal_outputs():
    @jax.custom_jvp
    def fork(x):
        return x @ Q, x @ Q + 1

    fork.defjvp(lambda p, t: (fork(p[0]), (t[0] @ Q, t[0] @ Q)))
    with pytest.raises(mw.NotSubmersiveError):
        mw.vijp(fork, X)


# --- numbers ------------------------------------------------------------------------------------------------


def test_singular_to_rounding_is_singular():
    w0, w1, s = (np.asarray(normal(3, seed=i)) for i in (1, 2, 3))
    for k in range(6):
        f = lambda a, b, s=s * (k + 1.1): (w0 * a + w1 * b, s * w0 * a + s * w1 * b)
        with pytest.raises(mw.SingularError):
            mw.vijp(f, jnp.ones(3), jnp.ones(3))[1](jnp.ones(3), jnp.ones(3))


def test_scale_does_not_matter():
    for scale in (1e-20, 1e6):
        f = lambda a, b, c, s=scale: (s * (a + b), s * (b - c), s * (c + 0.5 * a))
        check(f, *(normal(3, seed=i) for i in range(3)), modes=["eager"])
    tiny = jnp.full(3, 1e-25, jnp.float32)
    found = mw.vijp(lambda a, b: a * b, tiny, tiny)[1](tiny, tiny)
    np.testing.assert_allclose(found, 1.0, rtol=1e-5)


def test_a_diverging_elimination_is_not_silent():
    wild = kernel((3,), 4, 4, (2,), "orthogonal", others=60.0).astype(jnp.float32)
    x = normal(1, 1024, 4, dtype=jnp.float32)
    f = lambda x: conv1d(x, wild, 1, [(2, 0)])
    with pytest.raises(mw.SingularError, match="not finite"):
        mw.vijp(f, x)[1](x)


INF = jnp.array([1.0, jnp.inf, 2.0])


@pytest.mark.parametrize(
    "fun",
    {
        "scale": lambda x: x * INF,
        "diagonal": lambda x: x @ jax.jit(lambda w: mw.declare(w, "diagonal"))(jnp.diag(INF)),
        "lower": lambda x: x @ jax.jit(lambda w: mw.declare(w, "lower"))(jnp.diag(INF)),
        "rows that a vijp does not read": lambda x: (
            x @ jax.jit(lambda w: mw.declare(w, "lower"))(jnp.eye(3, 2).at[2, 0].set(jnp.nan))
        ),
        "taps that a vijp does not read": lambda x: conv1d(
            x[None, :, None],
            jnp.zeros((3, 1, 1)).at[1].set(1.0).at[0].set(jnp.nan),
        ),
    }.items(),
    ids=lambda item: item[0],
)
def test_weights_that_are_not_finite(fun):
    """A vijp divides by them, or never reads them: either way h' would look healthy."""
    with pytest.raises(mw.SingularError, match="not finite"):
        mw.vijp(fun[1], jnp.ones(3))[1](jnp.ones(3))


def test_complex_states_are_refused():
    with pytest.raises(mw.NotSubmersiveError, match="complex"):
        mw.vijp(lambda x: x * (1 + 2j), X)


def test_promised_unique_windows_still_overlap():
    numbers = lax.GatherDimensionNumbers((1,), (), (0,))
    f = lambda x: lax.gather(
        x, jnp.array([[0], [1]]), numbers, (2,), unique_indices=True, mode="promise_in_bounds"
    )
    with pytest.raises(mw.NotSubmersiveError, match="more than once"):
        mw.vijp(f, normal(6))


def test_a_transposing_derivative_is_not_pointwise():
    @jax.custom_jvp
    def fun(x):
        return x * 1.0

    fun.defjvp(lambda p, t: (p[0] * 1.0, 2 * lax.reshape(t[0], (3, 3), dimensions=(1, 0))))
    (h,) = jax.vjp(fun, X[:, :3])[1](X[:, 3:])
    np.testing.assert_allclose(mw.vijp(fun, X[:, :3])[1](h), X[:, 3:], rtol=1e-12)


def test_a_flat_step_far_from_zero_has_no_bounded_gain():
    from test_gain import gains

    (gain,) = gains(lambda x: jnp.where((x > 4) & (x < 5), 4.0, x), X)
    assert gain.factor == np.inf


def test_slices_of_slices():
    check(lambda x: jnp.concatenate([x[:6][:2], x[2:]]), normal(8))


def test_groupsort_by_reductions():
    f = lambda x: (lambda p: jnp.stack([p.max(-1), p.min(-1)], -1))(x.reshape(3, 3, 2))
    check(f, X)
    with pytest.raises(mw.SingularError, match="a tie"):
        mw.vijp(f, jnp.ones((3, 6)))[1](X)


def test_a_measured_scan():
    from test_gain import gains

    ws = jnp.stack([2.0 * jnp.eye(6), jnp.eye(6)])
    (gain,) = gains(lambda x: lax.scan(lambda c, w: (c @ w, None), x, ws)[0], X, measured=True)
    assert gain.factor == pytest.approx(1.0)


# --- odd but plausible uses -------------------------------------------------------------------------------


def test_scan_that_resets_a_carry():
    f = lambda x: lax.scan(lambda c, _: ((c[0] * 2, 0.0), None), (x, 1.0), length=2)[0][0]
    check(f, X)


def test_fori_loop_over_indexed_weights():
    ws = jnp.stack([orthogonal(6, seed=s) for s in range(3)])
    check(lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(0.5 * c @ ws[i]), x), X)


def test_empty_arrays():
    out, vijp_fun = mw.vijp(lambda x: x @ jnp.eye(3), jnp.zeros((0, 3)))
    assert vijp_fun(jnp.zeros((0, 3))).shape == out.shape == (0, 3)
    assert mw.vijp(lambda x: x @ jnp.zeros((3, 0)), jnp.zeros((2, 3)))[1](jnp.zeros((2, 3))).shape == (
        2,
        0,
    )
    assert mw.vijp(lambda x: jnp.cumsum(x, 0), jnp.zeros((0, 3)))[1](jnp.zeros((0, 3))).shape == (0, 3)


def test_unassigned_closure_variables():
    def outer():
        w = general(6)

        def fun(x):
            return x @ w if True else later

        result = mw.vijp(fun, X)[1](X)
        later = 1
        return result

    assert outer().shape == (3, 6)


def test_integer_literals_among_the_outputs():
    (_, three), vijp_fun = mw.vijp(lambda x: (2 * x, 3), X)
    assert int(three) == 3
    assert vijp_fun(X)[1].dtype == jax.dtypes.float0


def test_under_jaxs_own_checks():
    body = lambda x: lax.scan(lambda c, w: (jnp.abs(c @ w), None), x, jnp.stack([Q, Q]))[0]
    with jax.checking_leaks():
        mw.vijp(body, X)[1](X)
        jax.jit(lambda x: mw.vijp(body, x)[1](x))(X)
    with jax.debug_nans(True):
        mw.vijp(jnp.sqrt, jnp.abs(X) + 1)[1](X)
    k = kernel((3,), 4, 4, (1,), "diagonal")
    with jax.numpy_rank_promotion("raise"):
        mw.vijp(lambda x: conv1d(x, mw.declare(k, "diagonal")), normal(2, 9, 4))[1](normal(2, 9, 4))
    with jax.numpy_dtype_promotion("strict"):
        b = X.astype(jnp.bfloat16)
        mw.vijp(lambda x: jnp.max(x, -1), b)[1](b)


def test_keywords_defaults_and_static_arguments_of_a_custom_layer():
    import functools

    @functools.partial(mw.custom_vijp, nondiff_argnums=(1,))
    def scaled(x, kind, scale=2.0):
        return {"double": 2.0, "same": 1.0}[kind] * scale * x

    @scaled.defvijp
    def rule(kind, primals, h):
        return h / ({"double": 2.0, "same": 1.0}[kind] * primals[1])

    check(lambda x: scaled(x, "double"), X)
    check(lambda x: scaled(x, kind="same", scale=3.0), X)
    with pytest.raises(TypeError, match="custom_vijp: .*scaled: missing a required argument"):
        scaled(X)


def test_check_vijp_with_aux_and_integers():
    check(lambda x: (2 * x, jnp.sum(x)), X, has_aux=True)
    check(lambda x: (2 * x, jnp.argmax(x), x > 0), X)


def test_check_vijp_looks_at_the_output_too():
    @mw.custom_vijp
    def fine(x):
        return 2 * x

    fine.defvijp(lambda primals, h: h / 2)
    check(fine, X)


@pytest.mark.parametrize("rule", ["jvp", "vjp"])
@pytest.mark.parametrize("mixes", [False, True])
def test_a_linear_function_that_is_its_own_derivative(rule, mixes):
    """JAX transposes what such a call computes of a tangent; asked for a derivative there, it would have no end."""
    compute = (lambda x: 2 * x[..., ::-1]) if mixes else (lambda x: 2 * x)
    if rule == "jvp":
        linear = jax.custom_jvp(compute)
        linear.defjvp(lambda x, t: (linear(*x), linear(*t)))
    else:
        linear = jax.custom_vjp(compute)
        linear.defvjp(lambda x: (compute(x), None), lambda _, h: (linear(h),))

    def loss(ws, x):
        for w in ws:
            x = linear(jnp.tanh(x @ w))
        return jnp.sum(x**2)

    rng = np.random.default_rng(0)
    ws, x = (
        [jnp.asarray(rng.standard_normal((4, 4))) for _ in range(3)],
        jnp.asarray(rng.standard_normal((8, 4))),
    )
    expected = jax.value_and_grad(loss)(ws, x)
    for method in (mw.Moonwalk(), mw.Moonwalk(walk="always"), mw.Checkpoint("block")):
        found = jax.jit(mw.value_and_grad(loss, method=method))(ws, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), found, expected)
