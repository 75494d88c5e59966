"""Which parameters of a test are left to `make test-all`."""

import pytest


def slow(*values):
    """A variant of what another one tests: of parameters, where a whole test takes `pytest.mark.slow`."""
    # As a decorator this would make a parameter of the test, which nobody would collect.
    assert not any(getattr(v, "__name__", "").startswith("test_") for v in values), values
    return pytest.param(*values, marks=pytest.mark.slow)


def some(names, fast):
    """Parameters of a test, slow but for `fast`."""
    assert set(fast) <= set(names), set(fast) - set(names)
    return [name if name in fast else slow(name) for name in names]


def some_cases(cases, fast):
    """As `some`, where a case is a value of each of several parameters."""
    cases = list(cases)
    assert set(fast) <= set(cases), set(fast) - set(cases)
    return [case if case in fast else slow(*case) for case in cases]
