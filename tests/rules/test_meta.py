"""A rule without a case is a rule nobody tests."""

import jax
import pytest
from cases import CASES, EAGER

from moonwalk.rules import calls, chain, control_flow, registry
from moonwalk.trace import activity, graph, staging
from moonwalk.trace.partition import POINTWISE

# Pointwise primitives that no state goes through: comparisons, logic, and what has no derivative.
WITHOUT_DERIVATIVE = set(
    "eq ne lt le gt ge and or not xor is_finite sign floor ceil round nextafter stop_gradient".split()
) | {"moonwalk_declare"}  # a weight's, tested in test_declare.py

# Rules without a vijp, whose blocks are walked with a fragment: test_statistics.py.
FRAGMENTS_ONLY = {"statistics"}


def _links(links):
    for link in links:
        yield link
        if link.rule.name == "scan":
            yield from _links(control_flow._checked(link.block).chain.links)
        if link.rule.name == "own derivative":
            yield from _links(calls._checked(link.block).chain.links)


def _served(names):
    """(names of the rules, names of the primitives) that the cases exercise."""
    rules, primitives = set(), set()
    for case in (CASES[name] for name in names):
        staged = staging.stage(lambda *p, f=case.fun: (f(*p), None), *case.primals)
        known = dict(zip(staged.jaxpr.constvars, staged.consts, strict=True))
        outputs = [v for v in staged.jaxpr.outvars if activity.is_differentiable(v.aval)]
        cut = graph.build(staged.jaxpr, staged.jaxpr.invars, outputs, consts=known)
        for block, rule, _ in _links(chain.build(cut).links):
            rules.add(rule.name)
            primitives.update(e.primitive.name for e in block.eqns)
    return rules, primitives


@pytest.fixture(scope="module")
def served():
    return _served(CASES)


def test_every_rule_has_an_eager_case():
    rules, _ = _served(EAGER)
    assert set(registry.all_rules()) - rules == FRAGMENTS_ONLY


def test_every_rule_has_a_case(served):
    rules, _ = served
    assert set(registry.all_rules()) - rules == FRAGMENTS_ONLY


def test_every_primitive_with_a_rule_has_a_case(served):
    _, primitives = served
    registered = {p.name for p in registry.primitives_with_rules()}
    absent = {"sharding_constraint", "reshard", "pvary"}  # need a mesh: test_devices.py
    assert registered - primitives - absent == set()


def test_every_pointwise_primitive_has_a_case(served):
    _, primitives = served
    assert {p.name for p in POINTWISE} - primitives - WITHOUT_DERIVATIVE == set()


def test_the_meta_test_can_fail(served):
    """A rule nobody has a case for is noticed."""

    class Orphan(registry.Rule):
        name = "orphan"

    primitive = jax.extend.core.Primitive("orphan")
    registry.register_vijp(primitive)(Orphan)
    try:
        with pytest.raises(AssertionError, match="orphan"):
            test_every_rule_has_a_case(served)
        with pytest.raises(AssertionError, match="orphan"):
            test_every_primitive_with_a_rule_has_a_case(served)
    finally:
        del registry._BY_PRIMITIVE[primitive]
