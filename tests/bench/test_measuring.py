"""One measurement: memory, time, error, limits, refusals, searches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

import moonwalk as mw
from moonwalk.lab.bench import Task, measuring, methods, worker

TASK = Task("pareto", "dense", "moonwalk", "abs", depth=6, width=4, batch=8, settings={"repeats": 2})


def by(method, **settings):
    changed = Task(**{**TASK.to_dict(), "method": method})
    return changed.with_settings(**settings)


@pytest.fixture(scope="module")
def problem():
    network = measuring.networks.make(TASK)
    args = network.arguments(0)
    return network.loss, args, jax.jit(jax.grad(network.loss))(*args)


EXACT = (
    "backprop accumulate-4 moonwalk moonwalk-measured moonwalk-checkpoint moonwalk-as-printed".split()
)
MORE = "checkpoint checkpoint-sqrt checkpoint-recursive checkpoint-block forward pure-forward".split()
MORE += ["pure-forward-per-example", "moonwalk-fragment-4", "moonwalk-fragment-4-aligned"]


@pytest.mark.parametrize("name", [EXACT[0], *map(slow, (*EXACT[1:], *MORE))])
def test_every_exact_method_has_the_gradient(problem, name):
    loss, args, truth = problem
    value, g = jax.jit(methods.differentiate(name, loss, args))(*args)
    np.testing.assert_allclose(value, loss(*args), rtol=1e-5)
    assert measuring.error(g, truth) < 1e-4


def test_names_of_methods():
    assert {*EXACT, *MORE} <= {*methods.NAMES, "moonwalk-fragment-4", "moonwalk-fragment-4-aligned"}
    with pytest.raises(ValueError, match="unknown method 'monwalk'; did you mean 'moonwalk'"):
        methods.differentiate("monwalk", None, None)
    with pytest.raises(ValueError, match="accumulate-3: a batch of 8 has no 3 equal parts"):
        methods.differentiate("accumulate-3", None, (None, jnp.zeros((8, 4))))


def test_a_measurement(tmp_path):
    found = measuring.measure(by("moonwalk", reference="float64", plan=True), tmp_path)
    assert found["parameters"] == 6 * 16
    assert min(found[k] for k in ("temp_bytes", "argument_bytes", "output_bytes")) > 0
    times = found["seconds"]
    assert times["low"] <= times["median"] <= times["high"] and times["runs"] == 2
    assert found["reference"] == "backprop, float64" and 1e-9 < found["gradient_error"] < 1e-5
    assert found["compile_seconds"] > 0
    assert found["extra"]["plan"][0]["m_theta"] > 0
    # the next method of the same network takes arguments and reference from the disk
    kept = {len(np.load(path).files): path for path in tmp_path.glob("*.npz")}
    assert set(kept) == {1, 3}
    np.savez(kept[1], np.zeros((6, 4, 4)))
    assert measuring.measure(by("backprop", reference="float64"), tmp_path)["gradient_error"] > 1e-3


def test_a_gradient_that_is_wrong_is_shown_as_wrong():
    truth = {"stack": np.arange(24.0).reshape(2, 3, 4), "head": np.ones(5)}
    assert measuring.error(jax.tree.map(lambda a: 1.5 * a, truth), truth) == pytest.approx(0.5)
    assert measuring.error({"w": np.ones(3)}, {"w": np.zeros(3)}) == pytest.approx(3**0.5)
    for bad in (np.nan, np.inf):
        assert measuring.error({"w": np.full(3, bad)}, {"w": np.ones(3)}) == measuring.BOUNDLESS


def test_an_overflow_of_the_network_is_nobodys_fault(monkeypatch):
    monkeypatch.setattr(measuring, "reference", lambda *_: lambda args: {"w": np.array([1.0, np.nan])})
    found = measuring.measure(by("backprop", reference="float64"))
    assert (
        np.isnan(found["gradient_error"])
        and found["message"] == "the reference is not finite: an overflow"
    )


def test_memory_alone_and_limits():
    found = measuring.measure(by("backprop", run=False))
    assert found["temp_bytes"] > 0 and "seconds" not in found
    needs = measuring.held(found)
    over = measuring.measure(by("backprop", limit_bytes=needs - 1))
    assert over["status"] == "oom" and over["message"] == f"{needs} bytes, of {needs - 1}"
    assert over["temp_bytes"] == found["temp_bytes"]


def test_a_refusal_is_a_result():
    found = worker.measure(by("reversible"), None)
    assert found["status"] == "refused" and "abs" in found["message"]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED: 3 GiB"), "oom", "RuntimeError: RESOURCE_EXHAUSTED: 3 GiB"),
        (MemoryError(), "oom", "MemoryError: "),
        (mw.InexactError("too far"), "refused", "too far"),
        (RuntimeError("x\n._EquinoxRuntimeError: too far\n--"), "refused", "too far"),
        (KeyError("x"), "error", "KeyError: 'x'"),
    ],
)
def test_failures_are_results(error, status, message):
    assert measuring.failure(error) == {"status": status, "message": message}


def test_times_are_known_where_the_reference_fails(monkeypatch):
    def fail(*_):
        raise MemoryError("too large")

    monkeypatch.setattr(measuring, "reference", fail)
    monkeypatch.setattr(measuring, "timed", lambda *_: ((None, None), {"runs": 2}))
    monkeypatch.setattr(measuring, "argument_leaves", lambda *_: [])
    monkeypatch.setattr(measuring.Program, "arguments", lambda self: None)
    found = measuring.measure(by("backprop", reference="highest"))
    assert found["seconds"] == {"runs": 2} and "gradient_error" not in found
    assert found["message"] == "no reference: MemoryError: too large"


def test_sizes_that_do_not_even_compile_are_too_large(monkeypatch):
    class Program:
        def __init__(self, task):
            if task.depth > 10:
                raise RuntimeError("RESOURCE_EXHAUSTED")
            self.found = {"temp_bytes": task.depth, "argument_bytes": 0, "output_bytes": 0}

    monkeypatch.setattr(measuring, "Program", Program)
    asked = {"over": "depth", "step": 2, "most": 64}
    found = measuring.measure(by("backprop", search=asked, limit_bytes=1000))
    assert found["extra"]["largest"] == 10


def test_memory_is_known_where_a_run_fails(monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(measuring.networks.Network, "arguments", fail)
    found = measuring.measure(by("backprop"))
    assert found["status"] == "oom" and found["temp_bytes"] > 0


@pytest.mark.slow
def test_the_largest_size():
    asked = {"over": "depth", "step": 2, "most": 64}
    limit = measuring.held(measuring.measure(by("backprop", run=False)))
    found = measuring.measure(by("backprop", search=asked, limit_bytes=limit))
    assert found["extra"]["largest"] == 6 and measuring.held(found) == limit
    assert (6, limit) in found["extra"]["probes"]
    nothing = measuring.measure(by("backprop", search=asked, limit_bytes=10))
    assert nothing["status"] == "oom" and "bytes at depth 2, of 10" in nothing["message"]


@pytest.mark.parametrize(
    ("needs", "most"),
    [
        (lambda n: 7 * n, 4),
        (lambda n: 100 + 3 * n, 6),
        (lambda n: 40 * n**0.5, 12),
        (lambda n: n**2 + 50, 18),
    ],
    ids=["line", "offset", "root", "square"],
)
def test_bisection(needs, most):
    for limit in (1, 60, 200, 333, 5000):
        asked = []

        def counted(n, asked=asked):
            asked.append(n)
            return needs(n)

        truth = max((n for n in range(1, 301) if needs(n) <= limit), default=0)
        assert measuring.bisect(counted, limit, 300) == truth
        assert len(set(asked)) <= most


def test_tasks_are_measured_in_float32_whatever_the_process():
    assert jax.config.jax_enable_x64
    loss = measuring.networks.make(TASK).loss
    types = measuring.networks.make(TASK).types()
    assert {a.dtype for a in jax.tree.leaves(types)} == {jnp.dtype("float32")}
    assert jax.eval_shape(mw.value_and_grad(loss), *types)[0].dtype == jnp.float32
