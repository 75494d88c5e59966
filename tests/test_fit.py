"""The training loop: what a step does, when it stops, and what the methods have in common."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow
from training_worker import Free, Orthogonal

import moonwalk as mw
from moonwalk import data, training
from moonwalk.lab.training import stepping

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")


@pytest.fixture(scope="module")
def signals():
    return data.mnist1d(examples=300)


class Linear(eqx.Module):
    w: jax.Array

    def __init__(self):
        self.w = jnp.zeros((40, 10), jnp.float32)

    def __call__(self, x, *, key=None):
        return x.reshape(len(x), -1) @ self.w


def fit(model, signals, **options):
    settings = dict(optimizer=optax.sgd(0.1), steps=4, batch=32, method="backprop")
    return training.fit(model, signals, **(settings | options))


def test_a_run_is_its_steps_one_by_one(signals):
    """Against the same steps written out, with `jax.grad`, optax and NumPy."""
    optimizer = optax.adam(1e-2)
    seen = []
    found = fit(
        Linear(),
        signals,
        optimizer=optimizer,
        steps=12,
        evaluate_every=5,
        callbacks=[seen.append],
        seed=3,
    )

    def loss(w, x, y):
        logits = x.reshape(len(x), -1) @ w
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])

    w = Linear().w
    state = optimizer.init(w)
    truth = []
    for rows in data.indices(len(signals.train_y), 32, 3, 0, 12):
        x, y = signals.train_x[rows], signals.train_y[rows]
        value, g = jax.value_and_grad(loss)(w, x, y)
        truth.append((value, np.mean(np.argmax(x.reshape(32, -1) @ w, -1) == y)))
        updates, state = optimizer.update(g, state, w)
        w = optax.apply_updates(w, updates)
    np.testing.assert_allclose(found.model.w, w, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose([(r.loss, r.accuracy) for r in seen], truth, rtol=1e-5)
    assert tuple(seen) == found.records and [r.step for r in seen] == list(range(1, 13))
    assert [r.step for r in seen if r.test_accuracy is not None] == [5, 10, 12]
    logits = signals.test_x.reshape(60, -1) @ np.asarray(w)
    assert abs(seen[-1].test_accuracy - np.mean(logits.argmax(-1) == signals.test_y)) < 1e-6
    assert abs(seen[-1].test_loss - loss(w, signals.test_x, signals.test_y)) < 1e-5
    assert [r.seconds for r in seen] == sorted(r.seconds for r in seen)
    assert found.plan is None and found.temp_bytes > 0 and found.backprop_bytes is None


def test_test_examples_are_all_counted():
    """Also those that do not fill a last part."""
    loss = lambda w, x, y: (jnp.mean(w * x), jnp.mean(y, dtype=jnp.float32))
    x, y = jnp.arange(10.0), jnp.arange(10)
    for size in (3, 5, 10, 20):
        evaluate = stepping.make_evaluate(loss, lambda x: x, size)
        np.testing.assert_allclose(evaluate(2.0, stepping.Examples(x, y)), (9.0, 4.5), rtol=1e-6)


@pytest.mark.slow
def test_steps_in_one_program_are_the_same_steps(signals):
    one = fit(Orthogonal(2, key=jax.random.key(0)), signals, steps=7, method="moonwalk")
    many = fit(
        Orthogonal(2, key=jax.random.key(0)), signals, steps=7, method="moonwalk", steps_per_call=3
    )
    np.testing.assert_allclose([r.loss for r in many.records], [r.loss for r in one.records], rtol=1e-5)
    assert [r.step for r in many.records] == list(range(1, 8))


class Strided(eqx.Module):
    """Convolutions of stride 2 whose pivot is the identity, with LeakyReLU of slope 1/4."""

    kernels: list[jax.Array]
    head: jax.Array

    def __init__(self, *, key, width=8):
        keys = jax.random.split(key, 4)
        shapes = [(3, 1, width), (3, width, width), (3, width, width)]
        self.kernels = [
            0.3 * jax.random.normal(k, s, jnp.float32) for k, s in zip(keys, shapes, strict=False)
        ]
        self.head = 0.3 * jax.random.normal(keys[3], (width, 10), jnp.float32)

    def __call__(self, x, *, key=None):
        for i, w in enumerate(self.kernels):
            if i:
                w = mw.declare(w.at[1].set(jnp.eye(w.shape[-1], dtype=w.dtype)), "diagonal")
            dims = ("NHC", "HIO", "NHC")
            x = jax.lax.conv_general_dilated(x, w, (2,), [(1, 1)], dimension_numbers=dims)
            x = jax.nn.leaky_relu(x, 0.25)
        return x.mean(1) @ self.head


@pytest.mark.slow  # one gradient is in test_exactness
def test_moonwalk_trains_as_backpropagation_does_to_the_last_bit(signals):
    """Identity pivots and slopes that are powers of 2: nothing is rounded on the way back."""
    settings = dict(optimizer=optax.adam(3e-2), steps=30, steps_per_call=10)
    truth = fit(Strided(key=jax.random.key(0)), signals, **settings)
    found = fit(
        Strided(key=jax.random.key(0)),
        signals,
        method=mw.Moonwalk(walk="always"),
        compare_memory=True,
        **settings,
    )
    assert found.plan.walked >= 4 and found.plan.anchors <= 1  # the head's
    for a, b in zip(jax.tree.leaves(found.model), jax.tree.leaves(truth.model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert found.records[-1].loss < found.records[0].loss - 0.2
    assert found.backprop_bytes == truth.temp_bytes


@pytest.mark.parametrize(
    "method", ["moonwalk", slow("moonwalk-checkpoint"), slow(mw.Moonwalk(anchor_every=1))]
)
def test_the_first_gradient_is_backpropagations(signals, method):
    model = Orthogonal(3, key=jax.random.key(0))
    found = fit(model, signals, method=method, steps=1)
    truth = fit(model, signals, steps=1)
    for new, want, old in zip(
        *(jax.tree.leaves(m) for m in (found.model, truth.model, model)), strict=True
    ):
        np.testing.assert_allclose(new - old, want - old, rtol=1e-4, atol=1e-6)
    assert 0 <= found.records[0].certificate < 1e-4


def test_the_callers_arrays_stay(signals):
    model = Linear()
    fit(model, signals)
    assert float(jnp.abs(model.w).max()) == 0.0


# --- stopping ---------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops(signals):
    class Log(Linear):
        def __call__(self, x, *, key=None):
            return jnp.log(
                1.0 - x.reshape(len(x), -1)[:, :1] * 0 - jnp.abs(self.w).sum()
            ) + super().__call__(x)

    seen = []
    with pytest.raises(
        mw.NonFiniteError,
        match=r"step \d+: the loss is (nan|-?inf)\. Nothing of this step was applied\. There is no checkpoint",
    ):
        fit(Log(), signals, steps=100, callbacks=[seen.append], steps_per_call=5)
    assert seen and np.isfinite([r.loss for r in seen]).all()


def test_a_gradient_that_is_not_finite_stops(signals):
    class Root(Linear):
        def __call__(self, x, *, key=None):
            return super().__call__(x) + jnp.sqrt(self.w[0])

    with pytest.raises(
        mw.NonFiniteError, match=r"step 1: at a loss of 2.303 a gradient is not finite\. "
    ):
        fit(Root(), signals)


DRIFTING = dict(
    optimizer=optax.adam(0.02),
    steps=10,
    batch=128,
    measure=True,
    method=mw.Moonwalk(tolerance=1e-5, walk="always"),
)


@pytest.mark.slow
def test_a_certificate_over_the_tolerance_stops(signals):
    text = r"step \d+: the certificate \d.\de-0\d exceeds the tolerance 1.0e-05\. Nothing of this step was applied"
    with pytest.raises(mw.InexactError, match=text):
        fit(Free(4, key=jax.random.key(0)), signals, **DRIFTING)


def test_or_plans_anew_and_goes_on(signals):
    model = Free(4, key=jax.random.key(0))
    found = fit(model, signals, on_inexact="replan", steps_per_call=2, **DRIFTING)
    assert found.replans >= 1 and found.plan.anchors >= 1 and found.plan.measured
    assert [r.step for r in found.records] == list(range(1, 11))
    assert max(r.certificate for r in found.records) <= 1e-5
    truth = fit(model, signals, **(DRIFTING | dict(method="backprop")))
    np.testing.assert_allclose(
        [r.loss for r in found.records], [r.loss for r in truth.records], rtol=1e-3
    )


def test_a_walk_that_no_plan_helps_stops_in_the_end(signals, monkeypatch):
    monkeypatch.setattr("moonwalk.lab.training.loop.stricter", lambda method, tolerance, attempt: method)
    monkeypatch.setattr("moonwalk.lab.training.loop._Trainer.run", _inexact)
    with pytest.raises(
        mw.InexactError, match="certificate 1.0e.00 exceeds .*, and 3 new plans did not help"
    ):
        fit(Free(2, key=jax.random.key(0)), signals, on_inexact="replan", method="moonwalk")


def _inexact(trainer, step, count):
    no, yes = np.zeros(count, bool), np.ones(count, bool)
    return stepping.Metrics(np.ones(count), np.ones(count), np.ones(count), yes, no)


# --- arguments --------------------------------------------------------------------------------------------


def test_names_are_resolved_in_one_place(signals):
    with pytest.raises(
        ValueError, match="unknown method 'monwalk'; did you mean 'moonwalk'. There are: backprop, "
    ):
        fit(Linear(), signals, method="monwalk")
    with pytest.raises(ValueError, match="did you mean 'moonwalk-checkpoint'"):
        training.method("moonwalk_checkpoints")
    with pytest.raises(ValueError, match=r"unknown optimizer 'zzz'\. There are: adam, "):
        training.optimizer("zzz", 1e-3)
    with pytest.raises(ValueError, match="unknown schedule 'cosin'; did you mean 'cosine'"):
        training.optimizer("adam", 1e-3, "cosin")
    with pytest.raises(TypeError, match="method= takes moonwalk.Moonwalk"):
        fit(Linear(), signals, method=3)
    for name in training.OPTIMIZERS:
        made = training.optimizer(name, 1e-2)
        updates, _ = made.update(jnp.ones(3), made.init(jnp.ones(3)), jnp.ones(3))
        assert (updates < 0).all()
    for name, rates in {
        "constant": (1, 1, 1),
        "cosine": (1, 0.5, 0),
        "warmup-cosine": (0, 0.587, 0),
    }.items():
        rate = training.SCHEDULES[name](1.0, 100)
        found = [rate(i) if callable(rate) else rate for i in (0, 50, 100)]
        np.testing.assert_allclose(found, rates, atol=1e-3)


def test_settings_are_checked(signals):
    with pytest.raises(ValueError, match="on_inexact must be 'stop' or 'replan', got 'raise'"):
        fit(Linear(), signals, on_inexact="raise")
    with pytest.raises(ValueError, match="evaluate_every must be a multiple of steps_per_call=3, got 4"):
        fit(Linear(), signals, steps_per_call=3, evaluate_every=4)
    with pytest.raises(
        ValueError, match="checkpoint_every must be a multiple of steps_per_call=1, got 0"
    ):
        fit(Linear(), signals, checkpoint_every=0)
    with pytest.raises(TypeError, match="fit: Lambda has no inexact arrays to train"):
        fit(eqx.nn.Lambda(lambda x: Linear()(x)), signals)
    with pytest.raises(mw.DataError, match="batch must lie in 1 … 240"):
        fit(Linear(), signals, batch=1000)


class Few(Linear):
    """Fewer logits than there are labels."""

    def __call__(self, x, *, key=None):
        return super().__call__(x)[:, :7]


class Flat(Linear):
    def __call__(self, x, *, key=None):
        return super().__call__(x).reshape(-1)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            dict(optimizer="adam"),
            TypeError,
            r"fit: optimizer takes an optax.GradientTransformation, such as optax.adam\(1e-3\) .*, got 'adam'",
        ),
        (dict(optimizer=optax.adam), TypeError, "fit: optimizer takes .*, got <function adam"),
        (
            dict(model={}),
            TypeError,
            "fit: the model is called with a batch and must be callable, .* got dict",
        ),
        (dict(model={"w": jnp.ones(3)}), TypeError, "fit: the model is called with a batch"),
        (
            dict(dataset=(1, 2)),
            TypeError,
            r"takes a moonwalk.data.Dataset, such as data.mnist1d\(\), got tuple",
        ),
        (dict(augment="flip"), TypeError, "fit: augment must be callable, got 'flip'"),
        (dict(callbacks=[3]), TypeError, "callbacks must be callable, got 3"),
        (
            dict(checkpoints="run"),
            TypeError,
            r"takes training.Checkpoints\(folder, settings\), got 'run'",
        ),
        *(
            (dict([(name, value)]), ValueError, f"fit: {name} is a whole number, at least {least}, got ")
            for name, least in (("steps", 1), ("batch", 1), ("steps_per_call", 1), ("seed", 0))
            for value in (least - 1, 1.5, True, "3", None)
        ),
        (dict(measure="no"), ValueError, "fit: measure is True or False, got 'no'"),
        (dict(compare_memory=1), ValueError, "fit: compare_memory is True or False, got 1"),
        (
            dict(evaluate_every=1.5),
            ValueError,
            "evaluate_every must be a multiple of steps_per_call=1, got 1.5",
        ),
        (
            dict(model=Few()),
            ValueError,
            "fit: the model returns 7 logits, but MNIST-1D.* has 10 classes; give its last layer one output",
        ),
        (
            dict(model=Flat()),
            ValueError,
            r"takes a batch \[32, 40, 1\] to logits \[32, 10\], .* but it returned float32\[320\]",
        ),
    ],
)
def test_wrong_settings_of_fit(signals, changes, error, words):
    given = dict(model=Linear(), dataset=signals, optimizer=optax.sgd(0.1), steps=4, batch=32)
    with pytest.raises(error, match=words):
        training.fit(**(given | dict(method="backprop") | changes))


@pytest.mark.parametrize("rate", [0.0, -1.0, np.nan, np.inf, "a", True])
def test_a_rate_is_positive(rate):
    with pytest.raises(ValueError, match=f"optimizer: rate is a positive number, got {rate!r}"):
        training.optimizer("adam", rate)
    with pytest.raises(ValueError, match="optimizer: steps is a whole number, at least 1, got 0"):
        training.optimizer("adam", 0.1, "cosine", steps=0)
    with pytest.raises(ValueError, match="unknown optimizer 3"):
        training.optimizer(3, 0.1)


# --- augmentation -----------------------------------------------------------------------------------------


def test_augmentation_moves_and_mirrors():
    x = np.random.RandomState(0).randint(0, 256, (64, 8, 8, 3)).astype(np.uint8)
    key = jax.random.key(1)
    flipped = np.asarray(training.flip(key, x))
    mirrored = [(f == i[:, ::-1]).all() for f, i in zip(flipped, x, strict=True)]
    assert all(m or (f == i).all() for m, f, i in zip(mirrored, flipped, x, strict=True))
    assert 16 < sum(mirrored) < 48
    padded = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="reflect")
    places = set()
    for image, source in zip(np.asarray(training.crop(key, x, padding=2)), padded, strict=True):
        found = [
            (a, b) for a in range(5) for b in range(5) if (source[a : a + 8, b : b + 8] == image).all()
        ]
        places |= {found[0]}
        assert found
    assert len(places) > 15
    both = training.flip_and_crop(key, x)
    assert both.dtype == np.uint8
    np.testing.assert_array_equal(both, jax.jit(training.flip_and_crop)(key, x))
    assert (both != training.flip_and_crop(jax.random.key(2), x)).any()


def test_augmentation_is_used_with_a_key_per_step(signals):
    keys = []

    def augment(key, x):
        jax.debug.callback(
            lambda k: keys.append(tuple(np.asarray(k).tolist())), jax.random.key_data(key)
        )
        return x

    fit(Linear(), signals, steps=4, steps_per_call=2, augment=augment)
    jax.effects_barrier()
    assert len(set(keys)) == 4


# --- records ----------------------------------------------------------------------------------------------


def test_curves(tmp_path):
    records = [
        training.Record(
            i + 1, 2.3 / (i + 1), 0.1 * i, 1e-6, 0.5 * i, *((1.0, 0.5) if i % 3 == 0 else ())
        )
        for i in range(9)
    ]
    training.write_csv(tmp_path / "curves.csv", records)
    assert training.read_csv(tmp_path / "curves.csv") == records
    assert (
        (tmp_path / "curves.csv")
        .read_text()
        .splitlines()[0]
        .startswith("step,loss,accuracy,certificate")
    )
    assert training.read_csv(tmp_path / "nothing.csv") == []
    pytest.importorskip("matplotlib")
    training.plot(
        tmp_path / "curves.png",
        {"backprop": records, "moonwalk": records},
        {"backprop": 9 << 20, "moonwalk": 1 << 20},
    )
    assert (tmp_path / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
