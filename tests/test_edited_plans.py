"""Plans edited by hand: whatever is changed, the gradient is exact or the plan is refused.

Edits are drawn at random from a plan's JSON: another source for a node, another number, a part left out
or twice. A gradient that is wrong, and an exception that is not the library's, are both failures.
"""

import copy
import json
import random

import jax
import numpy as np
import pytest
from marks import some
from networks import NETWORKS

import moonwalk as mw

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

METHODS = (
    mw.Moonwalk(walk="always"),
    mw.Moonwalk(walk="always", checkpoint=2),
    mw.Checkpoint("recursive"),
    mw.Reversible(),
    mw.PureForward(),
)
SOURCES = (
    {"is": "Anchor"},
    {"is": "Unneeded"},
    {"is": "Given"},
    {"is": "Copies"},
    {"is": "Copies", "kept": [0]},
    {"is": "Copies", "difference": 0},
    {"is": "Copies", "given": [0]},
    {"is": "Vijp"},
    {"is": "Vijp", "through": [0]},
    {"is": "Vijp", "through": [0, 1]},
    {"is": "Layers"},
)
KINDS = {source["is"] for source in SOURCES} | {"Restored"}
NUMBERS = (0, 1, 2, -1, 10**9, 2.5)
SHORT = [
    name
    for name, case in NETWORKS.items()
    if sum(a.size for a in jax.tree.leaves(case.args) if hasattr(a, "size")) < 3000
]


def places(tree, at=()):
    """Every (path, value) inside."""
    yield at, tree
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if key != "is":
                yield from places(value, (*at, key))


def edited(plan, draw):
    """The plan with one part of its segments changed, and what was changed."""
    data = json.loads(plan.to_json())
    found = [(at, v) for at, v in places(data["segments"], ("segments",)) if len(at) > 1]
    at, value = draw.choice([f for f in found if draw.random() < 0.3] or found)
    *way, last = at
    inside = data
    for key in way:
        inside = inside[key]
    if isinstance(value, dict) and value.get("is") in KINDS:
        inside[last] = copy.deepcopy(draw.choice(SOURCES))
    elif isinstance(value, bool):
        inside[last] = not value
    elif isinstance(value, int | float) or value is None:
        inside[last] = draw.choice(NUMBERS)
    elif isinstance(inside, list):
        inside.insert(last, copy.deepcopy(value)) if draw.random() < 0.5 else inside.pop(last)
    elif isinstance(value, list):
        inside[last] = draw.choice([value[1:], value[::-1], value + value, []])
    return data, f"{'/'.join(map(str, at))}: {str(value)[:80]}"


def gradient(case, text):
    """That of a plan's text, or MoonwalkError."""
    try:
        plan = mw.Plan.from_json(text)
    except ValueError as error:
        raise mw.PlanMismatchError(str(error)) from error
    run = mw.value_and_grad(case.loss, **case.options, method=plan)
    return leaves(run(*case.args, **case.kwargs))


def leaves(tree):
    return [np.asarray(a) for a in jax.tree.leaves(tree) if hasattr(a, "dtype")]


# A plan of every method, and in each of them but one an edit that leaves the gradient what it was.
@pytest.mark.parametrize("seed", some(range(120), {4, 6, 7, 10, 11, 31}))
def test_an_edited_plan_is_exact_or_refused(seed):
    draw = random.Random(seed)
    case = NETWORKS[draw.choice(SHORT)]
    method = draw.choice(METHODS)
    try:
        plan = mw.plan(case.loss, *case.args, **case.kwargs, **{**case.options, "method": method})
    except (ValueError, mw.MoonwalkError):
        pytest.skip("the method refuses this network")
    if not plan.segments:
        pytest.skip("there is nothing to edit")
    expected = leaves(jax.value_and_grad(case.loss, **case.options)(*case.args, **case.kwargs))
    for _ in range(4):
        data, what = edited(plan, draw)
        try:
            found = gradient(case, json.dumps(data))
        except mw.MoonwalkError:
            continue
        for a, b in zip(found, expected, strict=True):
            scale = np.max(np.abs(b), initial=1e-30)
            np.testing.assert_allclose(a / scale, b / scale, atol=1e-6, err_msg=f"{case.name}, {what}")
