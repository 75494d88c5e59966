"""A method beside `jax.value_and_grad`, on one network.

In float64 the gradients agree to 1e-9, over all leaves and leaf by leaf. In fewer bits they are as near to the float64
gradient as ten times backpropagation's own error. Otherwise the method has to say so by an error.
"""

import dataclasses
import functools
import warnings
import zlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import moonwalk as mw
from moonwalk.planning import report

from . import interpreter

EXACT = 1e-9
WALKED = 1e-11  # what a plan may lose by default, of all of a float64 gradient
ROUNDING = 4 * float(np.finfo(np.float64).eps)
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}  # what a plan may lose

SHORT = {
    "float64": "f64",
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
}  # as jaxprs print them

DEFAULT = "Moonwalk()"
METHODS = {  # name -> (method, how often it is drawn)
    DEFAULT: (lambda **k: mw.Moonwalk(**k), 0),
    "walk=always": (lambda **k: mw.Moonwalk(walk="always", **k), 8),
    "checkpoint=auto": (lambda **k: mw.Moonwalk(checkpoint="auto", **k), 3),
    "checkpoint=block": (lambda **k: mw.Moonwalk(checkpoint="block", walk="always", **k), 1),
    "anchor_every=3": (lambda **k: mw.Moonwalk(anchor_every=3, walk="always", **k), 1),
    "Checkpoint()": (lambda **k: mw.Checkpoint(**k), 2),
    "Checkpoint(recursive)": (lambda **k: mw.Checkpoint("recursive", **k), 1),
    "Reversible()": (lambda **k: mw.Reversible(**k), 2),
    "PureForward()": (lambda **k: mw.PureForward(**k), 1),
    "certify": (lambda **k: mw.Moonwalk(walk="always", **k), 1),
    "measured": (lambda **k: mw.Moonwalk(walk="always", **k), 1),
    "eager": (lambda **k: mw.Moonwalk(**k), 0),
    "jit": (lambda **k: mw.Moonwalk(**k), 0),
    "fused": (lambda **k: mw.Moonwalk(**k), 1),
}
REFUSALS = (mw.NotSubmersiveError, mw.NotInvertibleError, mw.EffectError, mw.OptimizerError)
LOUD = (mw.InexactError, mw.SingularError, mw.DeclarationError)


@dataclasses.dataclass
class Outcome:
    """`verdict`: right, wrong, inexact (within the method's tolerance, but above ten times backprop's error), loud,
    refused, crash; or that JAX itself has no finite gradient to compare with (overflow), or not one but two, because
    the last bits decide a comparison in it (undecided)."""

    method: str
    verdict: str
    detail: str = ""
    error: float = 0.0
    walked: int = 0  # layers, by the plan
    seconds: float = 0.0


def methods_for(network):
    """The default, and one or two others that the seed picks; for some eagerly, or compiled."""
    rng = np.random.default_rng(zlib.crc32(b"methods%d" % network.seed))
    names = [n for n, (_, often) in METHODS.items() for _ in range(often)]
    picked = dict.fromkeys(
        [DEFAULT, *(names[i] for i in rng.permutation(len(names))[: 1 + rng.integers(2)])]
    )
    if network.settings.eager:
        picked["eager"] = None
    if network.settings.compiled:
        picked["jit"] = None
    return list(picked)


# --- running ----------------------------------------------------------------------------------------


def arrays(tree):
    return [a for a in jax.tree.leaves(tree) if not isinstance(a, str)]


def traced(fun, args):
    """((value, aux), gradients) as flat lists of arrays, from the traced program; and their structure."""
    tree = []

    def flat(*args):
        out = fun(*args)
        tree.append(jax.tree.structure(out))
        return arrays(out[0]), arrays(out[1])

    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*args)
    out = interpreter.evaluate(closed, jax.tree.leaves(args))
    return *jax.tree.unflatten(jax.tree.structure(shapes), out), tree[0]


def reference(loss, network, args):
    return traced(jax.value_and_grad(loss, network.argnums, network.settings.has_aux), args)


def found_by(name, network, args):
    """As `reference`, by a method."""
    s = network.settings
    method = METHODS[name][0](inputs=network.inputs)
    loss = lambda *args: network.loss(*args)  # a function of its own: no gains are known of it
    options = dict(argnums=network.argnums, has_aux=s.has_aux)
    if name == "measured":
        method = mw.plan(loss, *args, method=method, **options)
    fun = mw.value_and_grad(loss, method=method, certify=name == "certify", **options)
    pair = lambda *args: fun(*args)[:2]
    if name == "eager":
        out = pair(*args)
        return arrays(out[0]), arrays(out[1]), jax.tree.structure(out)
    if name == "jit":
        tree = jax.tree.structure(
            jax.eval_shape(
                lambda *a: jax.tree.map(lambda x: 0 if isinstance(x, str) else x, pair(*a)), *args
            )
        )
        out = jax.jit(lambda *a: tuple(map(arrays, pair(*a))))(*args)
        return *out, tree
    return traced(pair, args)


def fused(network, args):
    """(step by whole gradients of JAX, fused step), each as a function: parameters after a step."""
    s = network.settings
    optimizer = optax.sgd(0.5, momentum=0.9)
    loss = lambda *args: network.loss(*args)
    state = optimizer.init(args[0])

    def whole(params, state, *data):
        value, g = jax.value_and_grad(loss, 0, s.has_aux)(params, *data)
        updates, _ = optimizer.update(g, state, params)
        return value, optax.apply_updates(params, updates)

    def by_moonwalk(params, state, *data):
        return mw.fused_update(loss, optimizer, has_aux=s.has_aux)(params, state, *data)[:2]

    data = (args[0], state, *args[1:])
    return (lambda: traced(whole, data)), (lambda: traced(by_moonwalk, data))


# --- judging ----------------------------------------------------------------------------------------


def numbers(leaves):
    with np.errstate(all="ignore"):
        return [
            np.asarray(a).astype(np.float64)
            for a in leaves
            if not jnp.issubdtype(a.dtype, jax.dtypes.extended)
        ]


def norm(leaves):
    top = max((float(np.max(np.abs(a), initial=0)) for a in leaves), default=0.0)
    if not np.isfinite(top) or top == 0:
        return top
    return top * float(np.sqrt(sum(np.sum((a / top) ** 2) for a in leaves)))  # 1e200² is not finite


def apart(a, b):
    with np.errstate(all="ignore"):
        return [x - y for x, y in zip(a, b, strict=True)]


def is_finite(leaves):
    return all(np.all(np.isfinite(a)) for a in leaves)


class Reference:
    """What JAX says of a network: in its own dtype and, where that has fewer than 64 bits, in float64."""

    def __init__(self, network):
        self.network, self.args = network, network.args()
        (value, gradients, self.tree) = reference(network.loss, network, self.args)
        self.types = [(a.shape, a.dtype) for a in (*value, *gradients)]
        self.value, self.own = numbers(value), numbers(gradients)
        self.is_finite = is_finite(self.own) and is_finite(self.value)

    @functools.cached_property
    def truth(self):
        """The gradients in float64."""
        if self.network.exact:
            return self.own
        return numbers(reference(self.network.twin, self.network, self.network.args("float64"))[1])

    @functools.cached_property
    def tolerance(self):
        """What a plan may lose: as much as the least precise dtype on the way of a derivative allows."""
        network = self.network
        fun = jax.value_and_grad(network.loss, network.argnums, network.settings.has_aux)
        jaxpr = jax.make_jaxpr(lambda *args: arrays(fun(*args)))(*self.args)
        dtypes = {self.network.settings.dtype, *(d for d in TOLERANCE if f"{SHORT[d]}[" in str(jaxpr))}
        return max(TOLERANCE[d] for d in dtypes)

    @functools.cached_property
    def is_settled(self):
        """Whether JAX's own result is the same when XLA computes it: rounding may decide which way a network goes."""
        network = self.network
        fun = jax.value_and_grad(network.loss, network.argnums, network.settings.has_aux)
        compiled = numbers(jax.jit(lambda *args: arrays(fun(*args)))(*self.args))
        limit = EXACT if network.exact else 100 * network.eps
        own = [*self.value, *self.own]
        return all(
            norm([d]) <= limit * norm([b]) for d, b in zip(apart(compiled, own), own, strict=True)
        )

    def sensitivity(self):
        """How far JAX's own float64 gradient moves with its arguments' last bits, leaf by leaf."""
        rng = np.random.default_rng(0)
        moved = jax.tree.map(lambda a: a * (1 + 2.0**-51 * rng.integers(-2, 3, np.shape(a))), self.args)
        return apart(numbers(reference(self.network.loss, self.network, moved)[1]), self.own)

    def compare(self, value, gradients, tree):
        """(verdict, detail, error)."""
        types = [(a.shape, a.dtype) for a in (*value, *gradients)]
        if types != self.types or (tree != self.tree):
            return "crash", f"other types or structure: {types} instead of {self.types}", np.inf
        value, gradients = numbers(value), numbers(gradients)
        if not is_finite(gradients):  # methods raise: nobody asked for NaN
            return "wrong", "not finite where JAX's gradients are", np.inf
        for a, b in zip(value, self.value, strict=True):
            if norm([a - b]) > (EXACT if self.network.exact else 100 * self.network.eps) * norm([b]):
                return (
                    "wrong",
                    f"value or aux: {a.ravel()[:3]} instead of {b.ravel()[:3]}",
                    norm([a - b]) / max(norm([b]), 1e-300),
                )
        eps = float(jnp.finfo(self.network.settings.dtype).eps)
        if all(
            norm([d]) <= eps * norm([b])
            for d, b in zip(apart(gradients, self.own), self.own, strict=True)
        ):
            return "right", "", 0.0
        if not is_finite(self.truth):
            return "overflow", "", 0.0
        off = apart(gradients, self.truth)
        error = norm(off) / max(norm(self.truth), 1e-300)
        return (*(self._exact(off) if self.network.exact else self._rounded(off)), error)

    def _exact(self, off):
        total = norm(self.truth)
        # A leaf may be a difference of numbers as large as the others' gradients: no leaf is better than
        # their rounding.
        allowed = [max(EXACT * norm([b]), ROUNDING * total) for b in self.truth]
        if norm(off) <= EXACT * total and all(norm([d]) <= e for d, e in zip(off, allowed, strict=True)):
            return "right", ""
        moves = self.sensitivity()
        smooth = (
            norm(moves) <= 1e-6 * total
        )  # else the last bits decide a tie, and say nothing of rounding
        if (
            smooth
            and norm(off) <= EXACT * total + 100 * norm(moves)
            and all(
                norm([d]) <= e + 100 * norm([m]) for d, e, m in zip(off, allowed, moves, strict=True)
            )
        ):
            return "right", "ill-conditioned"
        near = norm(off) <= WALKED * total
        return "inexact" if near else "wrong", self._worst(off, self.truth)

    def _rounded(self, off):
        total, eps = norm(self.truth), float(jnp.finfo(self.network.settings.dtype).eps)
        theirs = apart(self.own, self.truth)
        share = norm(theirs) / max(total, 1e-300)
        allowed = [
            max(10 * norm([t]), 10 * max(share, 4 * eps) * max(norm([b]), 1e-3 * total))
            for t, b in zip(theirs, self.truth, strict=True)
        ]
        if norm(off) <= 10 * max(norm(theirs), 4 * eps * total) and all(
            norm([d]) <= e for d, e in zip(off, allowed, strict=True)
        ):
            return "right", ""
        near = norm(off) <= self.tolerance * total
        return "inexact" if near else "wrong", f"backprop's own error {share:.1e}; " + self._worst(
            off, self.truth
        )

    def _worst(self, off, truth):
        ratios = [norm([d]) / max(norm([b]), 1e-300) for d, b in zip(off, truth, strict=True)]
        k = int(np.argmax(ratios))
        names = [jax.tree_util.keystr(p) for p, _ in jax.tree.flatten_with_path(self.args)[0]]
        return f"leaf {k} of {len(ratios)} off by {ratios[k]:.1e}, norm {norm([truth[k]]):.1e} of {norm(truth):.1e}; {names if len(names) < 5 else ''}"


def judge(ref, name):
    """The outcome of one method on one network."""
    walked, describe = [0], report.describe

    def spied(*args, **kwargs):
        plan = describe(*args, **kwargs)
        walked.append(plan.walked)
        return plan

    with warnings.catch_warnings(), mock.patch.object(report, "describe", spied):
        warnings.simplefilter("ignore")
        outcome = Outcome(name, *_judged(ref, name))
    outcome.walked = walked[-1]
    return outcome


def _judged(ref, name):
    """(verdict, detail, error)."""
    try:
        if name == "fused":
            return _after_a_step(ref)
        found = found_by(name, ref.network, ref.args)
    except REFUSALS as error:
        refusing = name in ("Reversible()", "PureForward()", "fused")
        return "refused" if refusing else "crash", f"{type(error).__name__}: {error}"[:300], 0.0
    except LOUD as error:
        return "loud" if ref.is_finite else "overflow", f"{type(error).__name__}: {error}"[:600], 0.0
    except Exception as error:
        if "JaxRuntimeError" in type(error).__name__ and "value_and_grad" in str(
            error
        ):  # raised by a compiled program
            return "loud" if ref.is_finite else "overflow", str(error)[:600], 0.0
        return "crash", f"{type(error).__name__}: {error}"[:300] + " @ " + place(error), 0.0
    if not ref.is_finite:
        return "overflow", "", 0.0
    verdict, detail, error = ref.compare(*found)
    if verdict == "wrong" and not ref.is_settled:
        return "undecided", detail, error
    return verdict, detail, error


def _after_a_step(ref):
    """Parameters after a fused step, beside those after a step with JAX's gradients."""
    whole, by_moonwalk = fused(ref.network, ref.args)
    try:
        theirs = whole()
    except Exception as error:  # of the parameters alone JAX may have no gradient
        return "undecided", f"JAX itself: {type(error).__name__}: {error}"[:200], 0.0
    ours = by_moonwalk()
    if theirs[2] != ours[2] or [a.dtype for a in theirs[1]] != [a.dtype for a in ours[1]]:
        return "crash", "other types or structure", 0.0
    found, expected = numbers(ours[1]), numbers(theirs[1])
    if not is_finite(expected):
        return "overflow", "", 0.0
    if not is_finite(found):
        return "wrong", "not finite where JAX's parameters are", np.inf
    error = norm(apart(found, expected)) / max(norm(expected), 1e-300)
    if error <= (EXACT if ref.network.exact else 100 * ref.network.eps):
        return "right", "", error
    return "wrong" if ref.network.exact else "inexact", "parameters after a step", error


def place(error):
    """The innermost line of this package that an error came through."""
    lines, tb = [], error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        if "src/moonwalk/" in code.co_filename:
            lines.append(f"{code.co_filename.rsplit('moonwalk/', 1)[1]}:{tb.tb_lineno} {code.co_name}")
        tb = tb.tb_next
    return " < ".join(lines[::-1][:2])
