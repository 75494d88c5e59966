"""A plan is data: it runs as it is, without the planner, and goes through JSON unchanged."""

import functools
import json
import warnings

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import NETWORKS

import moonwalk as mw
from moonwalk.planning import cotangents, moonwalk, search
from moonwalk.segments import codec

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

METHODS = {
    "own": None,
    "always": mw.Moonwalk(walk="always"),
    "checkpoint": mw.Checkpoint(),
    "recursive": mw.Checkpoint("recursive"),
}


def program(case, method):
    """The traced program of a gradient, as a hash."""
    run = mw.value_and_grad(case.loss, **{**case.options, "method": method})
    leaves, tree = jax.tree.flatten(case.args)
    arrays = [a for a in leaves if hasattr(a, "dtype")]

    def flat(*arrays):
        values = iter(arrays)
        args = jax.tree.unflatten(tree, [next(values) if hasattr(a, "dtype") else a for a in leaves])
        return [a for a in jax.tree.leaves(run(*args, **case.kwargs)) if hasattr(a, "dtype")]

    return golden.digest(str(jax.make_jaxpr(flat)(*arrays)))


def forbid(*args, **kwargs):
    raise AssertionError("the planner was asked, though there is a plan")


CASES = [(name, "own") for name in NETWORKS] + [
    (name, method) for name in list(NETWORKS)[::4] for method in list(METHODS)[1:]
]
SOME = [
    pytest.param(*case, marks=() if i % 11 == 0 else pytest.mark.slow) for i, case in enumerate(CASES)
]


@pytest.mark.parametrize(("name", "method"), SOME)
def test_a_plan_runs_without_the_planner(name, method, monkeypatch):
    case = NETWORKS[name]
    settings = METHODS[method] or case.method
    if not isinstance(settings, mw.Moonwalk | mw.Checkpoint | mw.Reversible | mw.PureForward):
        pytest.skip("there is no plan")
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype) if hasattr(a, "dtype") else a, case.args
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plan = mw.plan(case.loss, *shapes, **case.kwargs, **{**case.options, "method": settings})
        except (ValueError, mw.NotSubmersiveError, mw.NotInvertibleError):
            pytest.skip("the method refuses this network")
        expected = program(case, settings)
        text = plan.to_json()
        assert mw.Plan.from_json(text) == plan and hash(mw.Plan.from_json(text)) == hash(plan)
        json.loads(text, parse_constant=forbid)  # no Infinity, which is no JSON
        for module, function in (
            (search, "choose"),
            (cotangents, "plan_walk"),
            (moonwalk, "draft"),
        ):
            monkeypatch.setattr(module, function, forbid)
        assert program(case, mw.Plan.from_json(text)) == expected


def dense(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


PARAMS, X = [jnp.eye(4)] * 3, jnp.ones((2, 4))


def test_a_plan_of_another_function_is_refused():
    plan = mw.plan(dense, PARAMS, X)
    with pytest.raises(mw.PlanMismatchError, match=r"another function.*block \d+ was `.*`, and is `.*`"):
        mw.grad(lambda params, x: dense(params[:2], x) + jnp.sum(params[2]), method=plan)(PARAMS, X)
    with pytest.raises(mw.PlanMismatchError, match="other arguments"):
        mw.grad(dense, method=plan)(PARAMS, jnp.ones((3, 4)))


def test_names_of_arguments_are_no_part_of_a_plan():
    plan = mw.plan(dense, PARAMS, X)
    found = mw.grad(lambda *args: dense(*args), method=plan)(PARAMS, X)
    jax.tree.map(np.testing.assert_array_equal, found, mw.grad(dense, method=plan)(PARAMS, X))


def test_a_message_on_other_arguments_lists_a_few():
    plan = mw.plan(dense, [jnp.eye(4)] * 12, X)
    message = r"(?s)params\[0\]: planned float64\[4,4\], called with float64\[5,5\].*… and 5 more"
    with pytest.raises(mw.PlanMismatchError, match=message) as error:
        mw.grad(dense, method=plan)([jnp.eye(5)] * 12, jnp.ones((2, 5)))
    assert len(str(error.value).splitlines()) == 11


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is no JSON"),
        ("[1]", "this is no plan"),
        ('{"is": "Plam"}', "it holds 'Plam'; make the plan anew"),
        ('{"is": "Store", "begin": 1}', "no plan that this version of moonwalk can read"),
    ],
)
def test_what_is_no_plan_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        mw.Plan.from_json(text)


def test_numbers_that_json_has_no_name_for():
    values = (float("inf"), -float("inf"), jax.lax.Precision.HIGHEST, None, True, 3, 0.1, "a", (1, (2,)))
    assert codec.decode(json.loads(json.dumps(codec.encode(values), allow_nan=False))) == values
    assert np.isnan(codec.decode(codec.encode(float("nan"))))
    with pytest.raises(TypeError, match="a plan cannot hold .*decorate object with in_plans"):
        codec.encode(object())


def test_a_damaged_field_is_no_plan():
    """Whatever field it is, of the plan or of what it holds: refused when it is read, not when it runs."""
    loss = lambda ws, x: jnp.sum(functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x))
    plan = mw.plan(loss, [jnp.eye(4)] * 4, jnp.ones((8, 4)))
    data = json.loads(plan.to_json())
    wrong = {dict: "zzz", list: "zzz", str: 3, bool: "zzz", int: "zzz", float: "zzz"}
    places = [(data, k) for k in data]
    places += [(item, k) for group in ("segments", "rows") for item in data[group][:1] for k in item]
    refused = 0
    for holder, name in places:
        kept = holder[name]
        if name == "is" or kept is None:
            continue
        holder[name] = wrong[type(kept)]
        with pytest.raises(
            ValueError, match="this is no plan that this version of moonwalk can read: .*is"
        ):
            mw.Plan.from_json(json.dumps(data))
        holder[name] = kept
        refused += 1
    assert refused > 25
    assert mw.Plan.from_json(json.dumps(data)) == plan
