"""Networks drawn from seeds, by every method (`zoo`): right, or loud."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow
from zoo import damage, interpreter
from zoo.draws import Settings
from zoo.judge import DEFAULT, METHODS, Reference, arrays, methods_for
from zoo.kinds import KINDS
from zoo.networks import Network
from zoo.runner import FAILURES, examine

# In `make test` 100 networks of one or two layers (which may hold others), by the default method and another one;
# `make test-all` takes whatever 2,000 seeds draw, by every method. A network takes a second, so more of them are left
# to `make fuzz SEEDS=0:10000`.
FEW = [s for s in range(500) if Settings(s).depth <= 2 and not Settings(s).compiled][:150]
# The slowest of these, but for those that alone have a kind of layer or a method that is refused, or walks.
LEFT = set(
    map(
        int,
        """9 15 16 27 35 39 54 75 78 81 83 116 118 129 135 138 149 155
        171 175 176 178 197 209 219 228 248 250 253 266 268 280 287 290 293 294
        299 303 338 344 361 372 383 390 393 403 409 410 418 430""".split(),
    )
)
SHARDS = [
    seeds[i : i + 25]
    for seeds in ([s for s in FEW if s not in LEFT], [s for s in FEW if s in LEFT])
    for i in range(0, len(seeds), 25)
]
ALL = [range(i, i + 100) for i in range(0, 2000, 100)]


@pytest.mark.parametrize(
    "seeds", [*SHARDS[:4], *map(slow, [*SHARDS[4:], *ALL])], ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}"
)
def test_every_method_is_right_or_loud(seeds):
    records = [examine(seed, most=2 if seeds in SHARDS else None) for seed in seeds]
    failures = [(r, o) for r in records for o in r.outcomes if o.verdict in FAILURES]
    assert not failures, "\n\n".join(
        f"{r.listing}\n  {o.verdict} {o.method}: {o.detail}\n  python -m zoo --seeds {r.seed} --shrink"
        for r, o in failures
    )
    loud = [r.seed for r in records for o in r.outcomes if o.verdict == "loud" and o.method == DEFAULT]
    assert len(loud) <= 1, f"alarms in the default configuration: seeds {loud}"


def test_a_seed_is_a_network():
    for seed in (3, 4):
        a, b = Network(seed), Network(seed)
        assert str(a) == str(b)
        jax.tree.map(np.testing.assert_array_equal, a.args(), b.args())


def test_the_twin_draws_the_same_network():
    """Of networks in fewer bits, the float64 twin has the same weights in the same places."""
    narrow = [n for n in map(Network, range(60)) if not n.exact]
    assert len(narrow) > 10
    for network in narrow:
        exact = network.places(exact=True)
        assert exact == network.places(exact=False), network


@pytest.mark.parametrize("seeds", [range(0, 80, 10), slow(range(200))])
def test_the_interpreter_agrees_with_xla(seeds):
    """In float64, where rounding decides nothing."""
    for seed in seeds:
        network = Network(seed)
        if not network.exact:
            continue
        fun = lambda *args, n=network: arrays(
            jax.value_and_grad(n.loss, n.argnums, n.settings.has_aux)(*args)
        )
        args = network.args()
        expected = jax.jit(fun)(*args)
        found = interpreter.evaluate(jax.make_jaxpr(fun)(*args), jax.tree.leaves(args))
        scales = [np.max(np.abs(np.asarray(b, np.float64)), initial=0) for b in expected]
        # A gradient that is zero (of a bias in front of x - mean(x)) is what rounding leaves of others.
        finite = [scale for scale in scales[1:] if np.isfinite(scale)]
        rounding = np.finfo(np.float64).eps * max(finite, default=0)
        for a, b, scale in zip(found, expected, scales, strict=True):
            atol = 1e-8 * scale + rounding
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=atol, err_msg=str(network))


@pytest.mark.slow
def test_every_kind_and_every_method_is_drawn():
    picked, named = set(), set()
    for seed in range(600):
        network = Network(seed)
        picked.update(methods_for(network))
        named.update(line.strip().removeprefix("x = ").split("(")[0] for line in network.lines)
    assert picked == set(METHODS)
    assert named >= set(KINDS), set(KINDS) - named


def test_wrong_gradients_are_called_wrong():
    """The judge notices an error of 1e-8 in one leaf, and a wrong dtype."""
    seed = next(
        s
        for s in range(100)
        if Network(s).exact
        and len(jax.tree.leaves(Network(s).weights)) > 1
        and Reference(Network(s)).is_finite
    )
    ref = Reference(Network(seed))
    value, gradients = ref.value, ref.own
    values = [jnp.asarray(a, t[1]) for a, t in zip(value, ref.types, strict=False)]
    assert ref.compare(values, gradients, ref.tree)[0] == "right"
    largest = max(range(len(gradients)), key=lambda k: np.linalg.norm(gradients[k]))
    off = [g * (1 + 1e-8 * (k == largest)) for k, g in enumerate(gradients)]
    assert ref.compare(values, off, ref.tree)[0] == "wrong"
    assert ref.compare(values, [g.astype(np.float32) for g in gradients], ref.tree)[0] == "crash"
    off[largest] = off[largest] * np.nan
    assert ref.compare(values, off, ref.tree)[0] == "wrong"


# --- damage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seeds",
    [range(4), *(slow(range(i, i + 20)) for i in range(0, 200, 20))],
    ids=lambda s: f"{s[0]}-{s[-1]}",
)
def test_damaged_weights_are_never_silent(seeds):
    """After planning on healthy ones."""
    networks = [damage.Walked(seed) for seed in seeds]
    silent = [(str(n), r) for n in networks for r in damage.examine_damage(n) if r.verdict == "silent"]
    assert not silent, "\n".join(f"{n}: {r}" for n, r in silent)


@pytest.mark.parametrize(
    "seeds",
    [range(6), *(slow(range(i, i + 50)) for i in range(0, 1000, 50))],
    ids=lambda s: f"{s[0]}-{s[-1]}",
)
def test_healthy_weights_raise_no_alarm(seeds):
    """In float32, in TF32 and in bfloat16, in turn."""
    results = [damage.examine_health(damage.Walked(s), damage.PRECISIONS[s % 3]) for s in seeds]
    bad = [r for r in results if r.verdict != "right"]
    assert not bad, "\n".join(map(str, bad))
