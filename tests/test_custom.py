"""custom_vijp: the twin of jax.custom_vjp; register_vijp: one rule per primitive."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import halved, rounded, turn
from jax import lax
from marks import slow, some
from weights import general, normal, orthogonal

import moonwalk as mw
from moonwalk.rules import chain, registry
from moonwalk.trace import graph, staging

X = normal(3, 6)


def scaled_sum():
    @mw.custom_vijp
    def fun(x, scale):
        return {"sum": x["a"] * scale + x["b"]}

    return fun


def test_pytrees_and_operands():
    fun = scaled_sum()
    fun.defvijp(lambda primals, h: {"sum": h["b"]})
    x = {"a": X, "b": 2 * X}
    mw.testing.check_vijp(lambda x: fun(x, 3.0), x)


TRANSFORMS = {
    "jacrev": jax.jacrev,
    "jacfwd": jax.jacfwd,
    "jit": jax.jit,
    "hessian": jax.hessian,
    "vmap": jax.vmap,
    "jacrev under vmap": lambda f: jax.vmap(jax.jacrev(f)),
}


@pytest.mark.parametrize("name", some(TRANSFORMS, set(TRANSFORMS) - {"jacfwd", "jacrev under vmap"}))
def test_everything_else_sees_the_function(name):
    x, angle = normal(2), 0.3
    arg = jnp.stack([x, 2 * x]) if "vmap" in name else x
    got, want = (TRANSFORMS[name](lambda x, f=f: f(x, angle) ** 2)(arg) for f in (turn, turn.fun))
    np.testing.assert_allclose(got, want)


def test_a_call_and_the_gradient_of_an_operand():
    x, angle = normal(2), 0.3
    np.testing.assert_allclose(turn(x, angle), turn.fun(x, angle))
    got, want = (jax.grad(lambda a, f=f: f(x, a).sum())(angle) for f in (turn, turn.fun))
    np.testing.assert_allclose(got, want)


def test_the_rule_is_used_and_gets_the_primals():
    seen = []

    @mw.custom_vijp
    def triple(x, w):
        return 3 * x @ w

    @triple.defvijp
    def rule(primals, h):
        seen.append([p.shape for p in primals])
        return h @ jnp.linalg.inv(primals[1]).T / 3

    w = general(6)
    mw.testing.check_vijp(lambda x: jnp.tanh(triple(0.3 * x, w)), X, modes=["eager"])
    assert seen[0] == [(3, 6), (6, 6)]


def test_closed_over_tracers_are_operands():
    @mw.custom_vijp
    def unused(x):
        return x

    unused.defvijp(lambda primals, h: h)

    @jax.jit
    def step(w, x, h):
        @mw.custom_vijp
        def dense(x):
            return x @ w

        dense.defvijp(lambda primals, h: h @ w)
        return mw.vijp(lambda x: unused(dense(x)), x)[1](h)

    w = orthogonal(6)
    np.testing.assert_allclose(step(w, X, X @ w.T), X, atol=1e-12)


def test_vmap_with_batched_weights():
    @mw.custom_vijp
    def dense(x, w):
        return x @ w

    dense.defvijp(lambda primals, h: h @ jnp.linalg.inv(primals[1]).T)
    ws = jnp.stack([general(6, seed=s) for s in range(3)])
    mw.testing.check_vijp(lambda x: jax.vmap(dense)(x, ws), X)
    mw.testing.check_vijp(lambda x: jax.vmap(dense, in_axes=(0, None))(x, ws[0]), X)
    with pytest.raises(mw.NotSubmersiveError, match="repeats entries"):
        mw.vijp(lambda x: jax.vmap(dense, in_axes=(None, 0))(x, ws), X[0])


def test_inside_scan():
    @mw.custom_vijp
    def dense(x, w):
        return x @ w

    dense.defvijp(lambda primals, h: h @ primals[1])
    ws = jnp.stack([orthogonal(6, seed=s) for s in range(3)])
    mw.testing.check_vijp(lambda x: lax.scan(lambda c, w: (dense(c, w), None), x, ws)[0], X)


def test_control_flow_with_a_users_rule():
    @mw.custom_vijp
    def either(x, flag):
        return lax.cond(flag, lambda x: 2 * x, lambda x: -x, x)

    either.defvijp(lambda primals, h: jnp.where(primals[1], h / 2, -h))
    mw.testing.check_vijp(lambda x: either(x, True), X)


def test_mistakes():
    fun = scaled_sum()
    x = {"a": X, "b": X}
    with pytest.raises(AttributeError, match="no rule was set for .*fun"):
        fun(x, 1.0)
    with pytest.raises(TypeError, match=r"takes a function rule\(primals, h\) or moonwalk.MatrixFree"):
        fun.defvijp(3)
    fun.defvijp(lambda primals, h: h["b"])
    with pytest.raises(mw.DuplicateRuleError, match="already has a rule"):
        fun.defvijp(lambda primals, h: h["b"])
    with pytest.raises(TypeError, match="must return a cotangent with the structure of the output"):
        mw.vijp(lambda x: fun(x, 1.0), x)[1](x)
    with pytest.raises(TypeError, match="custom_vijp: .*fun: missing a required argument: 'x'"):
        fun()
    state_by_keyword = mw.custom_vijp(lambda *, x: x)
    state_by_keyword.defvijp(lambda primals, h: h)
    with pytest.raises(TypeError, match="needs its state as the first positional argument"):
        state_by_keyword(x=X)

    @mw.custom_vijp
    def doubled(x, y):
        return x + y

    doubled.defvijp(lambda primals, h: h[:1])
    with pytest.raises(
        TypeError, match=r"must return a cotangent of shape \(3, 6\), but returned \(1, 6\)"
    ):
        mw.vijp(lambda x: doubled(x, 1.0), X)[1](X)
    with pytest.raises(mw.NotSubmersiveError, match="an operand of `.*doubled` depends on the state"):
        mw.vijp(lambda x, y: doubled(x, y), X, X)


# --- JAX's own custom derivatives -----------------------------------------------------------------------


def test_a_straight_through_estimator_keeps_its_derivative():
    (h,) = jax.vjp(rounded, X)[1](X)
    np.testing.assert_allclose(h, 2 * X)  # its own rule says 2, inlining would say 0
    np.testing.assert_allclose(mw.vijp(rounded, X)[1](h), X)
    (h,) = jax.vjp(halved, X)[1](X)
    np.testing.assert_allclose(mw.vijp(halved, X)[1](h), X)


def test_relu_at_zero_is_differentiated_by_its_own_rule():
    """jax.nn.relu says 0 at 0 where max(x, 0) says 1/2: with a leak, 1/4 is what must be divided by."""
    leaky = lambda x: 0.75 * jax.nn.relu(x) + 0.25 * x
    inlined = lambda x: 0.75 * jnp.maximum(x, 0) + 0.25 * x
    zero = jnp.zeros(3)
    np.testing.assert_allclose(mw.vijp(leaky, zero)[1](jnp.ones(3)), 4.0)
    np.testing.assert_allclose(mw.vijp(inlined, zero)[1](jnp.ones(3)), 1 / 0.625)
    mw.testing.check_vijp(leaky, X)


def test_a_nonlinear_backward_rule_is_refused():
    @jax.custom_vjp
    def clipped(x):
        return x * 1.0

    clipped.defvjp(lambda x: (x * 1.0, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
    with pytest.raises(mw.NotSubmersiveError, match="cannot be read as a linear map|not linear"):
        mw.vijp(clipped, X)


# --- the registry ---------------------------------------------------------------------------------------


def test_a_second_registration_is_refused():
    before = registry.primitives_with_rules()
    with pytest.raises(mw.DuplicateRuleError, match="`dot_general` already has the rule 'Dense'"):
        mw.register_vijp(lax.dot_general_p)(registry.Rule)
    assert registry.primitives_with_rules() == before


def test_what_can_be_registered():
    with pytest.raises(TypeError, match="takes JAX primitives"):
        mw.register_vijp("dot_general")
    with pytest.raises(TypeError, match="takes JAX primitives"):
        mw.register_vijp()


def test_a_new_primitive_gets_its_rule():
    primitive = jax.extend.core.Primitive("negated_twice")
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    jax.interpreters.ad.deflinear(primitive, lambda ct: [ct])
    with pytest.raises(mw.NotSubmersiveError, match="no vijp rule is registered for `negated_twice`"):
        mw.vijp(primitive.bind, X)

    @mw.register_vijp(primitive)
    class Same(registry.Rule):
        name = "same"

        def verdict(self, block):
            return registry.Verdict(True, "the identity")

        def vijp(self, block, factors, kept, h):
            return h

    try:
        np.testing.assert_array_equal(mw.vijp(primitive.bind, X)[1](X), X)
    finally:
        del registry._BY_PRIMITIVE[primitive]


# --- gains ------------------------------------------------------------------------------------------


def scaled(**options):
    @mw.custom_vijp
    def scale_and_turn(x, w, scale):
        return scale * jnp.abs(x @ w)

    def rule(primals, h):
        x, w, scale = primals
        return jnp.where(x @ w >= 0, 1, -1) * (h @ w) / scale

    scale_and_turn.defvijp(rule, **options)

    def loss(ws, x):
        for w in ws:
            x = scale_and_turn(x, w, 0.5)
        return jnp.sum(x**2)

    return loss, ([orthogonal(8, seed=s) for s in range(6)], normal(64, 8))


@pytest.mark.parametrize("gain", [1.0, slow(2), slow(np.float32(1.5)), jnp.ones(())])
def test_a_rule_with_a_gain_is_walked_under_jit(gain):
    loss, args = scaled(gain=gain)
    method = mw.Moonwalk(walk="always")
    plans = []

    def run(*args):
        plans.append(mw.plan(loss, *args, method=method))
        return mw.grad(loss, method=method)(*args)

    got, want = jax.jit(run)(*args), jax.grad(loss)(*args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    (plan,) = plans
    assert [row.mode for row in plan.rows].count("walk") >= 5
    assert plan.anchors == 0
    assert plan.checked  # it is taken on trust, so there is a certificate


def test_without_a_gain_the_plan_says_what_is_missing():
    loss, args = scaled()
    plan = mw.plan(loss, *args, method=mw.Moonwalk(walk="always"))
    reasons = [row.why for row in plan.rows if "states no gain" in row.why]
    assert reasons
    assert "scale_and_turn.defvijp(rule, gain=...)" in reasons[0]


def test_a_gain_may_depend_on_the_operands():
    seen = []

    def gain(w, scale):
        seen.append((np.shape(w), float(scale)))
        return np.linalg.cond(w)

    loss, args = scaled(gain=gain)
    method = mw.Moonwalk(walk="always")
    plan = mw.plan(loss, *args, method=method)  # concrete values
    assert plan.anchors == 0
    assert set(seen) == {((8, 8), 0.5)}
    reasons = []

    def run(*args):
        reasons.extend(row.why for row in mw.plan(loss, *args, method=method).rows)
        return 0

    jax.jit(run)(*args)
    assert any("a function of values: plan with concrete arguments" in why for why in reasons)


def test_gains_of_batched_operands_are_the_largest():
    @mw.custom_vijp
    def stretched(x, w):
        return x @ w

    stretched.defvijp(lambda primals, h: h @ jnp.linalg.inv(primals[1]).T, gain=lambda w: w[0, 0])
    ws = jnp.stack([jnp.diag(jnp.array([s, 1.0])) for s in (3.0, 7.0, 5.0)])
    fun = lambda x: jax.vmap(stretched)(x, ws)
    staged = staging.stage(fun, normal(3, 2))
    known = dict(zip(staged.jaxpr.constvars, staged.consts, strict=True))
    cut = graph.build(staged.jaxpr, staged.jaxpr.invars, staged.jaxpr.outvars, consts=known)
    (link,) = chain.build(cut).links
    assert link.rule.gain(link.block, [known[v] for v in link.block.operands]).factor == 7.0


@pytest.mark.parametrize("gain", [0.5, 0, -1.0, np.nan, np.inf, True, "1", [1.0, 2.0]])
def test_gains_that_are_none(gain):
    with pytest.raises(ValueError, match="scale_and_turn must be a finite number of at least 1.*got"):
        scaled(gain=gain)
    loss, args = scaled(gain=lambda w, scale: gain)
    with pytest.raises(ValueError, match="scale_and_turn must be a finite number of at least 1.*got"):
        mw.plan(loss, *args)
