"""Networks that are walked, and weights that are no longer what the plan relies on.

A plan is made on healthy weights, as `jit` keeps it; then one weight drifts, a declaration becomes false, an entry
becomes NaN, or a head becomes singular. The gradient has to be right, or the run loud. And healthy runs, in float32,
with products rounded as TF32 rounds them, and in bfloat16, must not be loud.

`python -m zoo.damage --seeds 0:200 --out damage.json`, with tests/ on the path.
"""

import argparse
import collections
import dataclasses
import json
import sys
import time
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import moonwalk as mw
from moonwalk.planning import tolerance as tolerances

from . import interpreter
from .draws import diagonal, generator, orthogonal, triangular
from .judge import LOUD, apart, is_finite, norm, numbers
from .runner import seeds_of

TOLERANCE = 1e-4
DAMAGES = ("drift", "falsified", "nan", "singular")
PRECISIONS = ("float32", "tf32", "bfloat16")
ACTIVATIONS = {
    "abs": jnp.abs,
    "leaky": lambda x: jnp.where(x > 0, x, 0.5 * x),
    "max-min": lambda x: _max_min(*jnp.split(x, 2, -1)),
    "none": lambda x: x,
}


def _max_min(a, b):
    return jnp.concatenate([jnp.where(a > b, a, b), jnp.where(a > b, b, a)], -1)


def _heads(x, w, say):
    """Every head has a matrix of its own."""
    h, n, _ = w.shape
    return jnp.einsum("bhi,hij->bhj", x.reshape(-1, h, n), say(w)).reshape(x.shape)


def _causal(x, w, say):
    """A convolution over the features of each row in sequences of 4, its pivot the last tap."""
    y = x.reshape(-1, 4, w.shape[-1])
    return lax.conv_general_dilated(
        y, say(w), (1,), [(w.shape[0] - 1, 0)], dimension_numbers=("NWC", "WIO", "NWC")
    ).reshape(x.shape)


def _kernel(make):
    def pivoted(rng, shape):
        *stack, taps, n, m = shape
        w = 0.02 * rng.standard_normal(shape)
        w[..., taps - 1, :, :] = make(rng, (*stack, n, m))
        return w

    return pivoted


# name -> (values from a generator, the weight's shape, the layer, structure that is declared)
PRODUCTS = {
    "orthogonal": (orthogonal, (16, 16), lambda x, w, say: x @ say(w), "orthogonal"),
    "orthogonal heads": (orthogonal, (4, 4, 4), _heads, "orthogonal"),
    "lower": (triangular, (16, 16), lambda x, w, say: x @ say(w), "lower"),
    "diagonal": (diagonal, (16, 16), lambda x, w, say: x @ say(w), "diagonal"),
    "undeclared": (orthogonal, (16, 16), lambda x, w, say: x @ w, "orthogonal"),
    "causal diagonal": (_kernel(diagonal), (2, 4, 4), _causal, "diagonal"),
    "causal orthogonal": (_kernel(orthogonal), (2, 4, 4), _causal, "orthogonal"),
}


class Walked:
    """A network of walkable layers, from a seed."""

    def __init__(self, seed):
        rng = generator(seed, "walked")
        pick = lambda *options: options[rng.integers(len(options))]
        self.seed, self.rows = seed, 32
        self.product, self.activation = pick(*PRODUCTS), pick(*ACTIVATIONS)
        self.depth = pick(2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
        self.scanned = self.depth > 12 or pick(True, False)
        self.biased = pick(True, False)
        self.measured, self.certify, self.always = (
            pick(True, False),
            pick(True, False),
            pick(True, False),
        )
        make, shape, _, _ = PRODUCTS[self.product]
        self.w = make(generator(seed, "w"), (self.depth, *shape))
        self.b = 0.1 * rng.standard_normal((self.depth, 16))
        self.first = rng.standard_normal((16, 16)) / 4
        self.x = rng.standard_normal((self.rows, 16))

    def __str__(self):
        names = ("product", "activation", "depth", "scanned", "biased", "measured", "certify", "always")
        return f"walked {self.seed}: " + ", ".join(f"{n}={getattr(self, n)}" for n in names)

    def params(self, dtype="float32", w=None):
        return jax.tree.map(
            lambda a: jnp.asarray(np.asarray(a, np.float32), dtype),
            {"first": self.first, "w": self.w if w is None else w, "b": self.b},
        )

    def data(self, dtype="float32"):
        return jnp.asarray(np.asarray(self.x, np.float32), dtype)

    def loss(self, params, x):
        _, _, product, structure = PRODUCTS[self.product]
        act = ACTIVATIONS[self.activation]
        say = (
            (lambda w: w)
            if params["w"].dtype == jnp.bfloat16 and structure == "orthogonal"
            else (lambda w: mw.declare(w, structure))
        )

        def layer(x, p):
            y = act(product(x, p[0], say))
            return (y + p[1] if self.biased else y), None

        x = x @ params["first"]
        if self.scanned:
            x, _ = lax.scan(layer, x, (params["w"], params["b"]))
        else:
            for i in range(self.depth):
                x, _ = layer(x, (params["w"][i], params["b"][i]))
        return jnp.mean((x - 0.5) ** 2)

    def program(self, dtype="float32"):
        """The gradients as `jit` would have them: planned once, run with any weights."""
        loss = lambda params, x: self.loss(params, x)
        method = mw.Moonwalk(walk="always" if self.always else "auto")
        if self.measured:
            method = mw.plan(loss, self.params(dtype), self.data(dtype), method=method)
        fun = mw.value_and_grad(loss, method=method, certify=self.certify)
        closed = jax.make_jaxpr(lambda *args: jax.tree.leaves(fun(*args)[1]))(
            self.params(dtype), self.data(dtype)
        )
        return lambda params, x, **options: interpreter.evaluate(
            closed, jax.tree.leaves((params, x)), **options
        )

    def backprop(self, dtype, **options):
        closed = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.grad(self.loss)(*args)))(
            self.params(dtype), self.data(dtype)
        )
        return lambda params, x: interpreter.evaluate(closed, jax.tree.leaves((params, x)), **options)

    def damaged(self, how):
        """The weights after `how`, in one layer."""
        rng = generator(self.seed, how)
        w = np.array(self.w)
        i = rng.integers(self.depth)
        one = w[i].reshape(-1, *w.shape[-2:])  # heads or taps
        k = len(one) - 1 if "causal" in self.product else rng.integers(len(one))
        structure = PRODUCTS[self.product][3]
        if how == "drift":
            step = 10.0 ** -rng.integers(1, 5)
            moved = one[k] + step * rng.choice([-1, 1], one[k].shape)
            one[k] = (
                np.tril(moved)
                if structure == "lower"
                else np.diag(np.diag(moved))
                if structure == "diagonal"
                else moved
            )
        elif how == "falsified":
            size = 10.0 ** -rng.integers(0, 5)
            one[k] = (
                one[k] * (1 + size)
                if structure == "orthogonal" and rng.random() < 0.5
                else one[k] + size * rng.standard_normal(one[k].shape)
            )
        elif how == "nan":
            one[k].reshape(-1)[
                rng.integers(one[k].size)
                // (17 if one[k].shape[-1] == 16 else 5)
                * (17 if one[k].shape[-1] == 16 else 5)
            ] = np.nan
        elif rng.random() < 0.5:
            one[k] = 0
        else:
            one[k][:, 0] = 0  # a column: that output has no cotangent to give
        w[i] = one.reshape(w[i].shape)
        return w


@dataclasses.dataclass
class Result:
    seed: int
    case: str
    verdict: str  # right, silent, loud, false alarm, crash
    error: float = 0.0
    backprop: float = 0.0
    detail: str = ""


def _run(program, *args, **options):
    """Gradients, or what was said instead."""
    try:
        found = numbers(program(*args, **options))
    except LOUD as error:
        return None, f"{type(error).__name__}: {error}"
    return (found, "") if is_finite(found) else (None, "NaN")


def examine_damage(network, damages=DAMAGES):
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program, own, exact = network.program(), network.backprop("float32"), network.backprop("float64")
    for how in damages:
        w = network.damaged(how)
        params = network.params(w=w)
        found, said = _run(program, params, network.data())
        truth = numbers(exact(network.params("float64", w), network.data("float64")))
        theirs = numbers(own(params, network.data()))
        if found is None:
            results.append(Result(network.seed, how, "loud", detail=said[:300]))
            continue
        if not is_finite(truth):
            results.append(
                Result(
                    network.seed,
                    how,
                    "silent",
                    np.inf,
                    detail="JAX's gradients are not finite, these are",
                )
            )
            continue
        off, base = (norm(apart(a, truth)) / norm(truth) for a in (found, theirs))
        silent = off > max(10 * base, TOLERANCE)
        results.append(Result(network.seed, how, "silent" if silent else "right", off, base))
    return results


def examine_health(network, precision):
    """Whether a healthy run is loud, or wrong."""
    dtype = "bfloat16" if precision == "bfloat16" else "float32"
    in_tf32 = lambda cut: precision == "tf32" and tolerances.state_dtype(cut) == jnp.float32
    with warnings.catch_warnings(), mock.patch.object(tolerances, "runs_in_tf32", in_tf32):
        warnings.simplefilter("ignore")
        program = network.program(dtype)
    options = dict(tf32=precision == "tf32")
    found, said = _run(program, network.params(dtype), network.data(dtype), **options)
    if found is None:
        return Result(network.seed, precision, "false alarm", detail=said[:400])
    truth = numbers(network.backprop("float64")(network.params("float64"), network.data("float64")))
    theirs = numbers(network.backprop(dtype, **options)(network.params(dtype), network.data(dtype)))
    off, base = (norm(apart(a, truth)) / norm(truth) for a in (found, theirs))
    limit = TOLERANCE if precision == "float32" else 1e-2
    return Result(
        network.seed, precision, "silent" if off > max(10 * base, limit) else "right", off, base
    )


def main(argv=None):
    parser = argparse.ArgumentParser("zoo.damage", description=__doc__)
    parser.add_argument("--seeds", default="0:200")
    parser.add_argument(
        "--health", action="store_true", help="healthy runs, for false alarms, instead of damaged ones"
    )
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds of processor time")
    parser.add_argument("--out")
    options = parser.parse_args(argv)
    counts, results, begin = collections.defaultdict(collections.Counter), [], time.process_time()
    for seed in seeds_of(options.seeds):
        if time.process_time() - begin > options.budget:
            break
        network = Walked(seed)
        try:
            new = (
                [examine_health(network, PRECISIONS[seed % 3])]
                if options.health
                else examine_damage(network)
            )
        except Exception as error:
            new = [Result(seed, "any", "crash", detail=f"{type(error).__name__}: {error}"[:300])]
        for r in new:
            counts[r.case][r.verdict] += 1
            if r.verdict in ("silent", "crash", "false alarm"):
                print(
                    f"{network}\n  {r.verdict.upper()} {r.case}: error {r.error:.1e}, backprop's {r.backprop:.1e} {r.detail}",
                    flush=True,
                )
        results += new
    for case, row in counts.items():
        print(f"{case:12}", dict(row))
    print(f"{time.process_time() - begin:.0f} s")
    if options.out:
        with open(options.out, "w") as file:
            json.dump([dataclasses.asdict(r) for r in results], file)
    return int(any(r.verdict in ("silent", "crash", "false alarm") for r in results))


if __name__ == "__main__":
    sys.exit(main())
