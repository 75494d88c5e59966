"""What a gradient will take, before it runs: budgets, frontiers, verified plans, the memory of a program."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow, some
from weights import orthogonal
from zoo.networks import Network as Drawn

import moonwalk as mw
from moonwalk.lab.bench import networks
from moonwalk.lab.bench.tasks import Task

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")


# --- networks -----------------------------------------------------------------------------------------


def of_the_bench(name, variant="tiny", **sizes):
    made = networks.make(Task("", name, "", variant, **sizes))
    return made.loss, made.types()


def walked(depth=24, rows=2048, width=32):
    def loss(ws, x):
        for w in ws:
            x = jnp.abs(x @ mw.declare(w, "orthogonal"))
        return jnp.mean(x**2)

    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return loss, ([struct(width, width)] * depth, struct(rows, width))


MADE = {
    "gpt": lambda: of_the_bench("gpt", depth=6, width=32, length=64, batch=4),
    "gpt, scanned": lambda: of_the_bench("gpt", "scanned, tiny", depth=6, width=32, length=64, batch=4),
    "resnet": lambda: of_the_bench("resnet", depth=4, width=8, length=32, batch=8),
    "mixer": lambda: of_the_bench("mixer", depth=6, width=32, length=16, batch=16),
    "walked": walked,
}


@pytest.fixture(scope="module")
def frontiers():
    """name -> (loss, arguments, frontier), each made once."""
    made = {}

    def of(name):
        if name not in made:
            loss, args = MADE[name]()
            made[name] = loss, args, mw.frontier(loss, *args)
        return made[name]

    return of


# --- the frontier -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(MADE, ["gpt", "gpt, scanned", "walked"]))
def test_no_plan_is_both_larger_and_slower_than_another(frontiers, name):
    *_, found = frontiers(name)
    assert len(found) >= 2
    for smaller, larger in itertools.pairwise(found):
        assert smaller.total_bytes < larger.total_bytes
        assert smaller.seconds > larger.seconds
    assert found[-1].seconds <= found[0].backprop_seconds  # backpropagation is among them


@pytest.mark.parametrize("name", some(MADE, ["gpt", "gpt, scanned", "walked"]))
def test_the_default_takes_at_most_a_tenth_more_than_the_least(frontiers, name):
    loss, args, found = frontiers(name)
    assert mw.plan(loss, *args).peak_bytes <= 1.1 * found[0].peak_bytes


def test_every_plan_of_a_frontier_is_exact_and_data():
    loss, (ws, x) = walked(depth=6, rows=64, width=8)
    ws = [orthogonal(8, seed=i) for i in range(len(ws))]
    x = jax.random.normal(jax.random.key(0), x.shape)
    truth = jax.jit(jax.grad(loss))(ws, x)
    for plan in mw.frontier(loss, ws, x):
        assert mw.Plan.from_json(plan.to_json()) == plan
        for a, b in zip(jax.jit(mw.grad(loss, method=plan))(ws, x), truth, strict=True):
            assert jnp.linalg.norm(a - b) <= 1e-11 * jnp.linalg.norm(b)


def test_what_a_frontier_prints(frontiers):
    *_, found = frontiers("gpt")
    head, columns, *rows, last, of_all = str(found).splitlines()
    assert head.startswith(f"{len(found)} plans, least memory first; on cpu, predicted; of all bytes ")
    assert columns.split() == ["memory", "time", "over", "backprop", "segments"]
    shown = [int(row.split()[0]) for row in rows]
    assert (shown[0], shown[-1]) == (0, len(found) - 1) and len(shown) < 25
    for one, other in itertools.pairwise(shown[:-1]):
        assert found[other].seconds < 0.98 * found[one].seconds
    assert (
        of_all == f"Of plans that take about the same time, one is shown: {len(shown)} of {len(found)}."
    )
    assert last.endswith("backpropagation") and "1.00 × 1.00" in last


def test_a_frontier_is_a_sequence_of_plans(frontiers):
    *_, found = frontiers("gpt")
    assert found[0] is next(iter(found)) and found[1:3] == found.plans[1:3]
    assert found.within(found[1].total_bytes) == found[1]
    assert found.within(2**60) == found.within("1TiB") == found[-1]
    assert repr(found) == f"<Frontier of {len(found)} plans>"
    with pytest.raises(ValueError, match=r"Frontier\.within: budget is a number of bytes above zero"):
        found.within("3 apples")
    message = r"Frontier\.within\(1000\): the least that a plan takes is about .* MiB"
    with pytest.raises(mw.BudgetError, match=message):
        found.within(1000)


def test_a_frontier_is_drawn(frontiers):
    figure = pytest.importorskip("matplotlib.figure")
    *_, found = frontiers("gpt")
    axes = figure.Figure().subplots()
    assert found.plot(axes) is axes
    assert "MiB" in axes.get_xlabel() and "ms" in axes.get_ylabel()
    curve = axes.get_lines()[0]
    assert list(curve.get_xdata()) == [p.total_bytes / 2**20 for p in found]


def test_methods_with_one_plan_have_no_frontier():
    loss, args = walked(depth=2)
    with pytest.raises(
        ValueError, match=r"frontier: Checkpoint has one plan; pass method=moonwalk\.Moon"
    ):
        mw.frontier(loss, *args, method=mw.Checkpoint())


# --- budgets ------------------------------------------------------------------------------------------


def shares(found, *parts):
    """Budgets between the least memory and backpropagation's."""
    least, most = found[0].total_bytes, found[-1].total_bytes
    return [int(least + part * (most - least)) for part in parts]


@pytest.mark.parametrize("name", some(MADE, ["gpt", "walked"]))
def test_a_larger_budget_is_never_slower(frontiers, name):
    loss, args, found = frontiers(name)
    budgets = shares(found, 0.0, 0.25, 0.5, 0.75, 1.0, 3.0)
    plans = [mw.plan(loss, *args, method=mw.Moonwalk(budget=b)) for b in budgets]
    for plan, budget in zip(plans, budgets, strict=True):
        assert plan.total_bytes <= budget == plan.budget_bytes
        assert plan == dataclasses.replace(
            found.within(budget), rows=plan.rows, method=plan.method, budget_bytes=budget
        )
    times = [plan.seconds for plan in plans]
    assert times == sorted(times, reverse=True)


# (On a CPU, XLA makes copies for small convolutions that no plan predicts.)
@pytest.mark.parametrize("name", some([n for n in MADE if n != "resnet"], ["gpt", "walked"]))
@pytest.mark.parametrize("part", [0.25, slow(0.5), slow(0.75)])
def test_a_verified_plan_fits_as_compiled(frontiers, name, part):
    loss, args, found = frontiers(name)
    (budget,) = shares(found, part)
    plan = mw.plan(loss, *args, method=mw.Moonwalk(budget=budget), verify=True)
    taken = mw.memory(mw.value_and_grad(loss, method=plan), *args)
    assert plan.compiled_bytes == taken.temporaries
    assert taken.total <= budget
    assert "this plan, as compiled" in str(plan)


def test_a_budget_is_bytes_or_a_size(frontiers):
    loss, args, found = frontiers("mixer")
    mib = -(-found[1].total_bytes // 2**20)
    plans = [
        mw.plan(loss, *args, method=mw.Moonwalk(budget=b))
        for b in (mib * 2**20, f"{mib}MiB", f"{mib} mib")
    ]
    assert len({plan.segments for plan in plans}) == 1


@pytest.mark.parametrize(
    "budget",
    ["3 apples", "-1GiB", -1, 0, "", "GiB", 1.5, True, "8 G i B", "9" * 400 + "GB", math.inf, math.nan],
)
def test_what_is_no_budget(budget):
    message = (
        "Moonwalk: budget is a number of bytes above zero, or a size such as '24GB' or '512MiB', got"
    )
    with pytest.raises(ValueError, match=message):
        mw.Moonwalk(budget=budget)


def test_a_budget_that_the_arguments_exceed(frontiers):
    loss, args, _ = frontiers("mixer")
    message = (
        r"Moonwalk\(budget='20 kB'\): the arguments and the results alone take .* KiB \(arguments .*, results "
        r".*\); raise the budget, or divide the arguments among more devices"
    )
    with pytest.raises(mw.BudgetError, match=message):
        mw.plan(loss, *args, method=mw.Moonwalk(budget="20 kB"))


def test_a_budget_that_no_plan_fits_names_the_least_and_the_node(frontiers):
    loss, args, found = frontiers("gpt")
    budget = found[0].total_bytes - 1
    message = (
        rf"Moonwalk\(budget={budget}\): the least that a plan takes is about .* MiB \([\d,]+ bytes: arguments .*, results .*, "
        r"temporaries .*\), most of it for .* at .*\.py:\d+ \(.*\); raise the budget, or make that smaller"
    )
    with pytest.raises(mw.BudgetError, match=message):
        mw.plan(loss, *args, method=mw.Moonwalk(budget=budget))
    with pytest.raises(mw.BudgetError, match=message):  # and where it is used
        jax.eval_shape(mw.value_and_grad(loss, method=mw.Moonwalk(budget=budget)), *args)


def test_a_device_that_does_not_say_what_it_has():
    loss, args = walked(depth=2)
    with pytest.raises(
        mw.BudgetError, match="this device does not say how much memory it has; name a number"
    ):
        mw.plan(loss, *args, method=mw.Moonwalk(budget="device"))


def test_arguments_on_the_device_are_not_counted_twice(monkeypatch):
    loss, types = walked(depth=6)
    args = jax.tree.map(lambda a: jnp.eye(*a.shape, dtype=a.dtype), types)
    least = mw.frontier(loss, *args)[0]
    monkeypatch.setattr("moonwalk._jax.free_bytes", lambda: least.total_bytes - least.argument_bytes)
    assert mw.plan(loss, *args, method=mw.Moonwalk(budget="device")).peak_bytes == least.peak_bytes
    with pytest.raises(mw.BudgetError, match=r"budget='device'\) \(.* are free\)"):
        mw.plan(loss, *types, method=mw.Moonwalk(budget="device"))


def test_what_a_device_has_free(frontiers, monkeypatch):
    loss, args, found = frontiers("mixer")
    monkeypatch.setattr("moonwalk._jax.free_bytes", lambda: found[1].total_bytes)
    assert mw.plan(loss, *args, method=mw.Moonwalk(budget="device")).segments == found[1].segments


def test_beyond_its_limit_the_compiler_chooses(frontiers, monkeypatch):
    loss, args, found = frontiers("mixer")
    said = "XLA recomputes values by its own choice"
    for limit, told in ((found[0].total_bytes - 1, True), (found[-1].total_bytes + 1, False)):
        monkeypatch.setattr("moonwalk._jax.compiler_limit", lambda limit=limit: limit)
        assert (said in str(mw.plan(loss, *args))) == told


def test_programs_that_take_more_than_their_predictions(frontiers, monkeypatch):
    loss, args, found = frontiers("mixer")
    monkeypatch.setattr("moonwalk.preview._memory", lambda program: mw.preview.Memory(2**40, 0, 0))
    message = (
        rf"{len(found)} plans fit by prediction, but as compiled the smallest of {len(found)} plans takes "
        r"1024.0 GiB \(temporaries 1024.0 GiB, predicted .* MiB\); raise the budget to that"
    )
    with pytest.raises(mw.BudgetError, match=message):
        mw.plan(loss, *args, method=mw.Moonwalk(budget="1GiB"), verify=True)


def test_a_plan_that_fits_as_compiled_though_not_by_prediction(frontiers, monkeypatch):
    """Predictions are not exact either way: those above the budget are compiled where none below fits."""
    loss, args, found = frontiers("mixer")
    sizes = [2**40, *[1000] * (len(found) - 1)]  # the smallest by prediction is the largest as compiled
    made = iter([mw.preview.Memory(size, 0, 0) for size in sizes])
    monkeypatch.setattr("moonwalk.preview._memory", lambda program: next(made))
    budget = found[0].total_bytes
    plan = mw.plan(loss, *args, method=mw.Moonwalk(budget=budget), verify=True)
    assert plan.segments == found[1].segments and plan.compiled_bytes == 1000


@pytest.mark.parametrize("setting", [{"walk": "always"}, {"checkpoint": 3}, {"checkpoint": "sqrt"}])
def test_settings_that_leave_a_budget_no_choice(setting):
    with pytest.raises(
        ValueError, match=r"Moonwalk: budget='1GiB' chooses how much is kept, and .* leaves no"
    ):
        mw.Moonwalk(budget="1GiB", **setting)
    loss, args = walked(depth=4)
    assert len(mw.frontier(loss, *args, method=mw.Moonwalk(**setting))) == 1


@pytest.mark.parametrize("seed", range(12))
def test_the_default_is_within_its_own_memory(seed):
    """A budget of what the default takes is no slower than the default."""
    rng = np.random.default_rng(seed)
    depth, kinds = rng.integers(3, 10), rng.integers(0, 4, 10)
    widths = 8 * rng.integers(1, 5, depth + 1)
    act = [jnp.tanh, jax.nn.gelu, jax.nn.relu, lambda x: jax.nn.softmax(x) + x]

    def loss(ws, x):
        for i, w in enumerate(ws):
            y = act[kinds[i]](x @ w)
            x = x + y if x.shape == y.shape else y
        return jnp.mean(x**2)

    struct = lambda *shape: jax.ShapeDtypeStruct(tuple(map(int, shape)), jnp.float32)
    args = [struct(*pair) for pair in itertools.pairwise(widths)], struct(512, widths[0])
    default = mw.plan(loss, *args)
    within = mw.plan(loss, *args, method=mw.Moonwalk(budget=default.total_bytes))
    assert within.seconds <= default.seconds


@pytest.mark.parametrize("seed", [*range(4), *(slow(seed) for seed in range(4, 40))])
def test_budgets_of_networks_drawn_at_random(seed):
    drawn = Drawn(seed)
    args = drawn.args()
    options = {"argnums": drawn.argnums, "has_aux": drawn.settings.has_aux}
    try:
        jax.make_jaxpr(jax.grad(drawn.loss, **options))(*args)
    except Exception:
        pytest.skip("JAX does not differentiate it")
    method = mw.Moonwalk(inputs=drawn.inputs)
    found = mw.frontier(drawn.loss, *args, method=method, **options)
    for budget in shares(found, 0.0, 0.5, 1.0):
        within = dataclasses.replace(method, budget=budget)
        plan = mw.plan(drawn.loss, *args, method=within, **options)
        assert plan.total_bytes <= budget
        assert plan.segments == found.within(budget).segments


def test_a_budget_is_for_one_of_several_devices():
    loss, (ws, x) = walked(depth=12)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    put = lambda a, *spec: jax.device_put(
        jnp.eye(*a.shape, dtype=a.dtype), jax.NamedSharding(mesh, jax.P(*spec))
    )
    ws, x = [put(w) for w in ws], put(x, "data")
    plan = mw.plan(loss, ws, x, verify=True)
    assert plan.parts == 4 and "bytes of each of 4 devices" in str(plan)
    taken = mw.memory(mw.value_and_grad(loss, method=plan), ws, x)
    assert plan.argument_bytes == taken.arguments
    assert abs(plan.total_bytes - taken.total) <= 8 * (len(ws) + 1)  # a table of the results' addresses
    assert 0.5 < plan.peak_bytes / plan.parts / plan.compiled_bytes < 1.5
    within = mw.plan(loss, ws, x, method=mw.Moonwalk(budget=plan.total_bytes), verify=True)
    assert within.total_bytes <= plan.total_bytes


def test_fused_updates_take_no_budget():
    with pytest.raises(
        ValueError, match="fused_update: a budget counts whole gradients and no optimizer"
    ):
        mw.fused_update(lambda w, x: jnp.sum(w * x), optax.sgd(0.1), method=mw.Moonwalk(budget="1GiB"))


def test_the_gradient_within_a_budget_is_jaxs():
    loss, args = of_the_bench("gpt", depth=2, width=16, length=8, batch=2)
    made = networks.make(Task("", "gpt", "", "tiny", depth=2, width=16, length=8, batch=2))
    wide = lambda a: a.astype(jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a
    args = jax.tree.map(wide, made.arguments(0))
    truth = jax.jit(jax.grad(loss))(*args)
    for budget in shares(mw.frontier(loss, *args), 0.0, 0.4, 1.0):
        found = jax.jit(mw.grad(loss, method=mw.Moonwalk(budget=budget)))(*args)
        for a, b in zip(*map(jax.tree.leaves, (found, truth)), strict=True):
            assert jnp.linalg.norm(a - b) <= 1e-10 * jnp.linalg.norm(b) + 1e-16


# --- memory -------------------------------------------------------------------------------------------


def test_the_memory_of_a_program():
    struct = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    found = mw.memory(lambda x, power: jnp.sin(x @ x.T) ** power, struct, power=2)
    assert (found.arguments, found.results) == (2**18, 2**18)
    assert found.total == found.temporaries + 2**19
    assert str(found).startswith(f"{found.total / 2**10:.1f} KiB: temporaries ")


def test_results_over_donated_arguments_count_once():
    struct = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    kept = mw.memory(lambda x: x + 1, struct)
    assert kept.shared == 0 and kept.total >= 2**19
    donated = mw.memory(jax.jit(lambda x: x + 1, donate_argnums=0), struct)
    assert donated.shared == 2**18 and donated.total == kept.total - 2**18
    assert "of them 256.0 KiB over arguments" in str(donated)


def test_a_verified_plan_shows_what_was_compiled():
    loss, args = walked(depth=4)
    plan = mw.plan(loss, *args, verify=True)
    assert plan.compiled_bytes == mw.memory(mw.value_and_grad(loss, method=plan), *args).temporaries
    assert plan.total_bytes == plan.compiled_bytes + plan.argument_bytes + plan.result_bytes
    fastest = mw.frontier(loss, *args)[-1]
    assert mw.plan(loss, *args, method=fastest, verify=True).segments == fastest.segments
    with pytest.raises(ValueError, match="plan: verify is True or False, got 'yes'"):
        mw.plan(loss, *args, verify="yes")
