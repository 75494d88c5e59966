"""A loss differentiated by one walk over everything, whether or not storing or recomputing keeps less."""

import jax
import numpy as np

from moonwalk import certificate, engine, gradient, sources


def walked(loss, method, *args, gains=()):
    """(gradients of the first argument, certificate, the walk)."""
    call, staged, flat = _staged(loss, args)
    made = engine.draft(staged, method, gains=gains)
    whole, walk = _whole_walk(staged, made)
    _, gradients, found = whole(*flat)
    found = certificate.summary(found, whole.places)
    return jax.tree.unflatten(call.tree, gradients)[0], found, walk


def _whole_walk(staged, made):
    envs = None if made.book.values is None else [made.book.values]
    cut = made.cut
    walk, _ = sources.plan_walk(cut, 0, len(cut.nodes), made.options, book=made.book, envs=envs)
    return engine.Engine(staged, cut, [walk]), walk


def _staged(loss, args):
    call = gradient.Call("walked", loss, 0, False, args, {})
    staged = call.stage(())
    return call, staged, (*call.leaves, *call.others, *staged.staged.consts)


def measured(loss, method, *args):
    """Gains measured on the arguments, as a plan carries them."""
    _, staged, flat = _staged(loss, args)
    values = dict(zip((*staged.jaxpr.invars, *staged.jaxpr.constvars), flat, strict=True))
    made = engine.draft(staged, method, values=values)
    _whole_walk(staged, made)
    return tuple(made.book.recorded.items())


def under_jit(loss, method, *args, gains=()):
    """The same, compiled: (gradients, the certificate's error, the walk)."""
    walks = []

    def run(*args):
        gradients, found, walk = walked(loss, method, *args, gains=gains)
        walks.append(walk)
        return gradients, found.error

    gradients, error = jax.jit(run)(*args)
    return gradients, float(error), walks[0]


def difference(found, truth):
    """‖found − truth‖ / ‖truth‖, the largest over the leaves."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs)
