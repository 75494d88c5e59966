"""Many devices: the same call, sharded, gives the gradient of one device.

Eight CPU devices (see `conftest.py`), a batch over all of them, parameters whole or divided, axes of a mesh
that are Auto, Explicit or Manual (`jax.shard_map`), and two processes. The truth is `jax.value_and_grad` on
one device, in float64.
"""

import functools
import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from marks import slow, some, some_cases
from networks import CARRY, conv, leaky, network_of, orthogonals, square, stack, turn
from weights import general, kernel, normal

import moonwalk as mw
from moonwalk.execute import residuals

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs eight CPU devices"),
    pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning"),
]

X = normal(64, 8, seed=1)
IMAGES = normal(8, 16, 16, 8, seed=2)


def mesh_of(kind, shape=(8,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(AxisType[kind],) * len(names))


def put(tree, mesh, spec):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def distance(found, truth):
    """The largest relative distance between two trees of arrays, leaf by leaf."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in pairs]
    return max(np.max(np.abs(a - b)) / np.max(np.abs(b)) for a, b in pairs)


@dataclass(frozen=True)
class Network:
    """A loss of (params, x), and whether its plan walks."""

    loss: Any
    params: Any
    x: Any
    walks: bool = True
    method: mw.Moonwalk = field(default_factory=mw.Moonwalk)

    @functools.cached_property
    def truth(self):
        return jax.jit(jax.value_and_grad(self.loss))(self.params, self.x)


def scanned(layer):
    return lambda ws, x: square(lax.scan(CARRY(layer), x, ws)[0])


NETWORKS = {
    "dense layers": Network(
        network_of(lambda x, p: turn(x, p["w"]) + p["b"]),
        [{"w": w, "b": normal(8, seed=i)} for i, w in enumerate(orthogonals(4))],
        X,
        method=mw.Moonwalk(walk="always"),
    ),
    "scan": Network(scanned(turn), stack(orthogonals(8)), X),
    "scan with anchors": Network(
        scanned(turn), stack(orthogonals(10)), normal(256, 8), method=mw.Moonwalk(anchor_every=4)
    ),
    "convolutions": Network(
        network_of(lambda x, w: leaky(conv(x, w, structure="diagonal"))),
        [kernel((3, 3), 8, 8, (1, 1), "diagonal", seed=i) for i in range(3)],
        IMAGES,
        method=mw.Moonwalk(walk="always"),
    ),
    "skips": Network(
        network_of(lambda x, p: x + turn(turn(x, p[0]), p[1])),
        list(zip(orthogonals(2), orthogonals(2, seed=9), strict=True)),
        X,
        method=mw.Moonwalk(walk="always"),
    ),
    "ReLU": Network(network_of(lambda x, w: jax.nn.relu(x @ w)), orthogonals(4), X, walks=False),
}


def check(network, found):
    """The gradient of one device, and a certificate that says whether it was walked."""
    value_and_grad, certificate = found[:2], found[2]
    assert distance(value_and_grad, network.truth) < 1e-12
    assert (float(certificate.error) > 0) == network.walks
    assert float(certificate.error) < 1e-11


FAST = {
    ("Auto", "dense layers"),
    ("Auto", "scan with anchors"),
    ("Auto", "ReLU"),
    ("Explicit", "scan"),
    ("Explicit", "convolutions"),
    ("Explicit", "skips"),
}


@pytest.mark.parametrize(
    ("kind", "name"), some_cases(itertools.product(["Auto", "Explicit"], NETWORKS), FAST)
)
def test_a_batch_over_eight_devices(name, kind):
    network, mesh = NETWORKS[name], mesh_of(kind)
    step = jax.jit(mw.value_and_grad(network.loss, method=network.method, certify=True))
    with jax.set_mesh(mesh):
        found = step(put(network.params, mesh, P()), put(network.x, mesh, P("data")))
    check(network, found)
    assert all(g.sharding.is_fully_replicated for g in jax.tree.leaves(found[1]))  # as JAX's are


@pytest.mark.parametrize("name", some(NETWORKS, sorted(NETWORKS)[::2]))
def test_parameters_over_eight_devices(name):
    """Also stacked ones: the rows of each matrix are divided, and so are those of its gradient."""
    network, mesh = NETWORKS[name], mesh_of("Auto")
    lies = jax.tree.map(
        lambda a: NamedSharding(mesh, P(*[None] * max(0, a.ndim - 2), "data")), network.params
    )
    step = jax.jit(
        mw.value_and_grad(network.loss, method=network.method, certify=True),
        out_shardings=(None, lies, None),
    )
    found = step(jax.device_put(network.params, lies), put(network.x, mesh, P("data")))
    check(network, found)
    same = jax.tree.map(lambda g, s: g.sharding.is_equivalent_to(s, g.ndim), found[1], lies)
    assert all(jax.tree.leaves(same))


# --- parameters divided by hand ---------------------------------------------------------------------------

WS, SCANNED = NETWORKS["scan"].params, NETWORKS["scan"]


def explicit(loss, params, x, mesh, where, rows=None):
    """Under Explicit axes; the gradients lie where the parameters do, by their types."""
    with jax.set_mesh(mesh):
        params = jax.tree.map(lambda a, spec: put(a, mesh, spec), params, where)
        x = put(x, mesh, P("data") if rows is None else rows)
        walking = mw.value_and_grad(loss, method=mw.Moonwalk(walk="always"), certify=True)
        found = jax.jit(walking)(params, x)
    for g, p in zip(jax.tree.leaves(found[1]), jax.tree.leaves(params), strict=True):
        assert g.sharding.is_equivalent_to(p.sharding, g.ndim)
    return found


def gathered_first(x, w):
    return turn(x, jax.sharding.reshard(w, P()))


def declared_first(x, w):
    return leaky(x @ jax.sharding.reshard(mw.declare(w, "orthogonal"), P()))


@pytest.mark.parametrize("layer", [slow(gathered_first), declared_first])
def test_parameters_gathered_layer_by_layer(layer):
    check(SCANNED, explicit(scanned(layer), WS, X, mesh_of("Explicit"), P(None, "data")))


def test_parameters_gathered_in_shard_map():
    mesh = mesh_of("Auto")

    def layer(x, w):
        return turn(x, lax.all_gather(w, "data", axis=0, tiled=True))

    def step(ws, x):
        loss = lambda ws, x: lax.pmean(scanned(layer)(ws, x), "data")
        return mw.value_and_grad(loss, certify=True)(ws, x)

    specs = P(None, "data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs, P()))
    check(SCANNED, jax.jit(mapped)(WS, X))


@pytest.mark.slow
def test_columns_and_rows_in_turn():
    """Tensor parallelism under Explicit axes: x @ (columns), then (rows) summed over devices."""
    mesh = mesh_of("Explicit", (4, 2), ("data", "model"))
    where = [P(None, "model"), P("model")] * 2

    def loss(ws, x):
        for i, w in enumerate(ws):
            out = P("data", "model") if i % 2 == 0 else P("data")
            x = leaky(jnp.matmul(x, mw.declare(w, "orthogonal"), out_sharding=out))
        return square(x)

    ws = orthogonals(4)
    found = explicit(loss, ws, X, mesh, where)
    check(Network(network_of(turn), ws, X), found)


@pytest.mark.parametrize("rows", [slow(P(None, "data")), P("data", "model")])
def test_any_axis_of_a_state_may_be_divided(rows):
    mesh = mesh_of("Explicit", (4, 2), ("data", "model"))
    x = normal(8, 8, 8, seed=3)
    check(Network(scanned(turn), WS, x), explicit(scanned(turn), WS, x, mesh, P(), rows))


# --- shard_map --------------------------------------------------------------------------------------------


def mean_loss(loss, **options):
    """The loss over all devices is what is differentiated."""
    return mw.value_and_grad(lambda params, x: lax.pmean(loss(params, x), "data"), **options)


def mean_gradients(loss, **options):
    """Each device differentiates its own; then the gradients' mean is taken."""

    def step(params, x):
        own = jax.tree.map(lambda a: lax.pcast(a, "data", to="varying"), params)
        value, gradients, certificate = mw.value_and_grad(loss, **options)(own, x)
        return *lax.pmean((value, gradients), "data"), certificate

    return step


def summed_by_jax(loss, **options):
    """JAX sums gradients of parameters that are the same everywhere, as it does for `jax.grad`."""

    def step(params, x):
        value, gradients, certificate = mw.value_and_grad(loss, **options)(params, x)
        mean = jax.tree.map(lambda g: g / lax.axis_size("data"), gradients)
        return lax.pmean(value, "data"), mean, certificate

    return step


@pytest.mark.parametrize(
    ("name", "form"),
    [
        slow("dense layers", mean_loss),
        ("scan", mean_gradients),
        ("scan with anchors", summed_by_jax),
        ("skips", mean_loss),
    ],
)
def test_shard_map(name, form):
    network = NETWORKS[name]
    step = over_the_batch(form(network.loss, method=network.method, certify=True))
    check(network, jax.jit(step)(network.params, network.x))


def over_the_batch(step, **options):
    mesh = mesh_of("Auto")
    return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), **options)


def without_types(loss):
    """As it had to be written before: nothing is known of what varies."""

    def step(params, x):
        value, g, certificate = mw.value_and_grad(loss, certify=True)(params, x)
        return *lax.pmean((value, g), "data"), certificate

    return over_the_batch(step, check_vma=False)


def test_shard_map_without_types():
    check(SCANNED, jax.jit(without_types(SCANNED.loss))(WS, X))


def test_shard_map_over_one_of_two_axes():
    mesh = mesh_of("Auto", (4, 2), ("data", "model"))
    step = mean_loss(SCANNED.loss, certify=True)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}
    )
    check(SCANNED, jax.jit(mapped)(WS, put(X, mesh, P("data", "model"))))


def test_one_state_for_all_devices():
    """Columns and rows in `shard_map`: what all devices read cannot be walked through, and is kept."""
    ws = [general(8, 16, seed=1), general(16, 8, seed=2), *orthogonals(4)]

    def loss(ws, x, total=lambda x: x):
        x = x + total(leaky(x @ ws[0]) @ ws[1])
        return network_of(turn)(ws[2:], x)

    def step(ws, x):
        summed = lambda ws, x: loss(ws, x, lambda y: lax.psum(y, "data"))
        return mw.value_and_grad(summed, method=mw.Moonwalk(walk="always"), certify=True)(ws, x)

    specs = [P(None, "data"), P("data"), *[P()] * 4]
    mapped = jax.shard_map(
        step, mesh=mesh_of("Auto"), in_specs=(specs, P()), out_specs=(P(), specs, P())
    )
    check(Network(loss, ws, X), jax.jit(mapped)(ws, X))


# --- vijp -------------------------------------------------------------------------------------------------

W = orthogonals(1)[0]


def block(x):
    return leaky(jnp.tanh(x @ W) @ W.T).reshape(-1, 4, 2).mean(-1)


H = jax.vjp(block, X)[1](jnp.ones((64, 4)))[0]


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_vijp_over_eight_devices(kind):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        x, h = put((X, H), mesh, P("data"))
        found = jax.jit(lambda x, h: mw.vijp(block, x)[1](h))(x, h)
    assert distance(found, jnp.ones((64, 4))) < 1e-12
    assert found.sharding.spec[0] == "data"


def vijp_in_shard_map(fun, check=None):
    def pull(x, h):
        return mw.vijp(fun, x, check=check)[1](h)

    return jax.shard_map(pull, mesh=mesh_of("Auto"), in_specs=P("data"), out_specs=P("data"))


def test_vijp_in_shard_map():
    found = jax.jit(vijp_in_shard_map(block, check=True))(X, H)
    assert distance(found, jnp.ones((64, 4))) < 1e-12


def test_vijp_in_shard_map_that_runs_eagerly():
    """There a probe of an activation has to leave the map to have values."""
    assert distance(vijp_in_shard_map(jnp.arctan)(X, 1 / (1 + X**2)), jnp.ones_like(X)) < 1e-12


def test_vijp_of_what_all_devices_read():
    ws = stack(orthogonals(8))
    mapped = jax.shard_map(
        lambda x, w, h: mw.vijp(lambda x: x @ w[0], x)[1](h),
        mesh=mesh_of("Auto"),
        in_specs=(P(), P("data"), P()),
        out_specs=P("data"),
    )
    with pytest.raises(mw.NotSubmersiveError, match="all devices along the mesh axis 'data' read the"):
        jax.jit(mapped)(X, ws, X)


# --- plans ------------------------------------------------------------------------------------------------


def plan_under(trace, network):
    """The plan that a traced call would make, as text."""
    plans = []

    def record(params, x):
        plans.append(mw.plan(network.loss, params, x, method=network.method).table())
        return 0.0

    trace(record)
    return plans[-1]


def shapes(tree, parts=1):
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((a.shape[0] // parts, *a.shape[1:]), a.dtype), tree
    )


@pytest.mark.parametrize("name", ["dense layers", "skips"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_mesh_changes_no_plan(name, kind):
    network, mesh = NETWORKS[name], mesh_of(kind)
    alone = mw.plan(network.loss, *shapes((network.params, network.x)), method=network.method).table()
    with jax.set_mesh(mesh):
        args = put(network.params, mesh, P()), put(network.x, mesh, P("data"))
        assert plan_under(lambda fun: jax.eval_shape(fun, *args), network) == alone


@pytest.mark.parametrize("name", ["dense layers", "scan"])
def test_in_shard_map_a_plan_is_for_one_device(name):
    network = NETWORKS[name]
    own = shapes(network.params), shapes(network.x, 8)
    alone = mw.plan(network.loss, *own, method=network.method).table()

    trace = lambda fun: jax.eval_shape(over_the_batch(fun), network.params, network.x)
    assert plan_under(trace, network) == alone


FREE = Network(scanned(lambda x, w: leaky(x @ w)), stack(general(8, seed=i) for i in range(6)), X)


def test_a_measured_plan_over_eight_devices():
    """Measured on one device, its gains count on all of them: a mesh is no part of a block's name."""
    mesh, plan = mesh_of("Explicit"), mw.plan(FREE.loss, FREE.params, X)
    step = jax.jit(mw.value_and_grad(FREE.loss, method=plan, certify=True))
    with jax.set_mesh(mesh):
        check(FREE, step(put(FREE.params, mesh, P()), put(X, mesh, P("data"))))


def test_gains_are_measured_on_eight_devices():
    mesh = mesh_of("Auto")
    args = put(FREE.params, mesh, P(None, "data")), put(X, mesh, P("data"))
    assert mw.plan(FREE.loss, *args).walked == mw.plan(FREE.loss, FREE.params, X).walked > 0


# --- memory -----------------------------------------------------------------------------------------------

LAYERS, ROWS, WIDTH = 32, 4096, 256


@pytest.mark.parametrize(
    ("shape", "spec", "kept"),
    [
        ((64, 8), P("data"), (64, 1)),
        ((128, 4), P("data"), (16, 4)),
        ((4, 128, 4), P(None, "data"), (4, 16, 4)),
        ((32, 32), P("data", "model"), (32, 4)),
        ((16, 4), P("data"), (16, 4)),  # four entries on each device: bytes stay bytes
    ],
)
def test_bits_are_packed_where_they_lie(shape, spec, kept):
    mesh = mesh_of("Explicit", (4, 2), ("data", "model"))
    with jax.set_mesh(mesh):
        bits = put(normal(*shape) > 0, mesh, spec)
        packed = jax.jit(residuals.pack)(bits)
        again = jax.jit(lambda packed: residuals.unpack(packed, jax.typeof(bits)))(packed)
    assert packed.shape == kept and packed.sharding.spec[: len(spec)] == tuple(spec)
    assert again.sharding.is_equivalent_to(bits.sharding, bits.ndim)
    np.testing.assert_array_equal(again, bits)


def temporaries(fun, *args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def isometric(ws, x, t):
    layer = lambda x, w: (jnp.abs(x @ mw.declare(w, "orthogonal")), None)
    return jnp.sum(lax.scan(layer, x, ws)[0] * t)


def types(whole=None, rows=None):
    def struct(sharding, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    w, x = struct(whole, LAYERS, WIDTH, WIDTH), struct(rows, ROWS, WIDTH)
    return w, x, x


@functools.cache
def alone():
    return temporaries(mw.value_and_grad(isometric), *types())


@pytest.mark.parametrize(("kind", "certify"), [("Auto", False), ("Auto", True), ("Explicit", False)])
def test_each_of_eight_devices_takes_an_eighth(kind, certify):
    """What is kept, a bit per entry, stays where the activations are."""
    mesh = mesh_of(kind)
    args = types(NamedSharding(mesh, P()), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        each = temporaries(mw.value_and_grad(isometric, certify=certify), *args)
    assert each <= alone() / 6


# --- what must be said ------------------------------------------------------------------------------------

FALSE = WS + 0.1 * normal(*WS.shape)


FORMS = {
    "jit": lambda loss: mw.value_and_grad(loss, certify=True),
    "shard_map": lambda loss: over_the_batch(mean_loss(loss, certify=True)),
    "shard_map without types": without_types,
}


@pytest.fixture
def _forgotten_errors():
    """JAX 0.10 keeps the outcome of each device's last callback, and would raise it again at exit."""
    yield
    nothing = jax.ShapeDtypeStruct((), np.float32)
    call = lambda ws, x: jax.pure_callback(lambda: np.float32(0), nothing)
    jax.block_until_ready(jax.jit(over_the_batch(call))(WS, X))


@pytest.mark.usefixtures("_forgotten_errors")
@pytest.mark.parametrize("form", FORMS)
def test_an_error_reaches_all_devices(form):
    """Raised on one of them, it would leave the others waiting. Afterwards all of them go on."""
    mesh, step = mesh_of("Auto"), jax.jit(FORMS[form](SCANNED.loss))
    x = put(X, mesh, P("data"))
    with pytest.raises(Exception, match="the values are not what is declared"):
        jax.block_until_ready(step(put(FALSE, mesh, P()), x))
    check(SCANNED, step(put(WS, mesh, P()), x))


def test_where_no_error_can_be_raised_gradients_are_nan():
    mesh = mesh_of("Auto", (4, 2), ("data", "model"))
    mapped = jax.shard_map(
        mean_loss(SCANNED.loss, certify=True),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names={"data"},
    )
    _, g, certificate = jax.jit(mapped)(FALSE, X)
    assert np.isnan(g).all()
    assert float(certificate.error) > 1e-3


UNEVEN = X[:12]


def test_a_batch_that_the_mesh_does_not_divide():
    """JAX says so before anything is differentiated, and names the axis."""
    fun, mesh = mw.value_and_grad(SCANNED.loss), mesh_of("Auto")
    lies = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    what = r"P\('data'.*array axis 0 is partitioned 8 times, but the dimension size is 12"
    with pytest.raises(ValueError, match=what):
        put(UNEVEN, mesh, P("data"))
    with pytest.raises(ValueError, match=what):
        jax.jit(fun, in_shardings=lies)(WS, UNEVEN)


def test_a_batch_that_explicit_axes_do_not_divide():
    mesh = mesh_of("Explicit")
    loss = lambda ws, x: SCANNED.loss(ws, jax.sharding.reshard(x, P("data")))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"'data'.*axis 0 is partitioned 8 times.*dimension size 12"),
    ):
        jax.jit(mw.value_and_grad(loss))(put(WS, mesh, P()), put(UNEVEN, mesh, P()))


def test_a_batch_that_shard_map_does_not_divide():
    step = over_the_batch(mean_loss(SCANNED.loss))
    with pytest.raises(ValueError, match=r"(?s)mesh axis 'data' \(of size 8\), but 8.*12.*padding"):
        jax.jit(step)(WS, UNEVEN)


# --- two processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = pathlib.Path(__file__).parent
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, here / "distributed_worker.py", str(rank), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        done = [worker.communicate(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (out, err) in zip(workers, done, strict=True):
        assert worker.returncode == 0, err[-4000:]
        for name, found in json.loads(out.splitlines()[-1]).items():
            assert found["distance"] < 1e-12, name
            assert 0 < found["certificate"] < 1e-11, name
