"""Plans that are written, not searched for: one walk over everything, or equal pieces of given kinds."""

import dataclasses
import itertools

import jax
import numpy as np

import moonwalk as mw
from moonwalk import gradient
from moonwalk.network import loss as losses
from moonwalk.planning import cotangents, report
from moonwalk.planning.draft import PlanRequest, draft
from moonwalk.planning.search import Choice
from moonwalk.segments.store import RecomputeExecutor, StoreExecutor


def planned(loss, method, *args, kinds=("walk",), gains=(), values=None, **options):
    """(a plan of equal pieces of these kinds, what runs them, the gains that it rests on).

    Kinds: "walk", "rewalk" (a walk whose Phase I is run again), "store", "recompute". `values`: the
    arguments, where gains are to be measured. `options`: of `mw.grad`.
    """
    options = {"argnums": 0, "has_aux": False, **options}
    call = gradient.Call("walked", loss, options["argnums"], options["has_aux"], args, {})
    staged = call.stage(())
    network = losses.cut(staged)
    if values is not None:
        flat = (*call.leaves, *call.others, *staged.staged.consts)
        values = dict(zip((*staged.jaxpr.invars, *staged.jaxpr.constvars), flat, strict=True))
    made = draft(network, method, gains=gains, values=values)
    envs = None if made.table.values is None else [made.table.values]
    ends = [len(network.nodes) * i // len(kinds) for i in range(len(kinds) + 1)]
    pieces = []
    for kind, (start, stop) in zip(kinds, itertools.pairwise(ends), strict=True):
        if start == stop:
            continue
        if kind in ("walk", "rewalk"):
            walk, _ = cotangents.plan_walk(
                network, start, stop, made.options, table=made.table, envs=envs
            )
            walk.recomputed = kind == "rewalk"
            pieces.append(walk)
        else:
            pieces.append(
                {"store": StoreExecutor, "recompute": RecomputeExecutor}[kind](network, start, stop)
            )
    plan = made.describe(Choice(pieces, 0, 0), method, PlanRequest(call.signature(), (), None, False))
    plan = report.with_rows(plan, network, pieces, fused=False)
    return plan, pieces, tuple(made.table.recorded.items())


def whole_walk(loss, method, *args, **options):
    """(a plan of one walk, the walk, the gains that it rests on)."""
    plan, (walk,), gains = planned(loss, method, *args, **options)
    return plan, walk, gains


def walked(loss, method, *args, gains=()):
    """(gradients of the first argument, certificate, the walk)."""
    plan, walk, _ = whole_walk(loss, method, *args, gains=gains)
    plan = dataclasses.replace(plan, method=dataclasses.replace(method, on_inexact="ignore"))
    gradients, found = mw.grad(loss, method=plan, certify=True)(*args)
    return gradients, found, walk


def measured(loss, method, *args):
    """Gains measured on the arguments, as a plan carries them."""
    return whole_walk(loss, method, *args, values=args)[2]


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
