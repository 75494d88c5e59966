"""Exponents, verdicts and crossovers of figures whose growth is known."""

import math

import pytest

from moonwalk.lab.bench import fits


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 3.0])
def test_growth_of_a_power(exponent):
    xs = [2, 4, 8, 16]
    fit = fits.growth(xs, [7 * x**exponent for x in xs])
    assert fit.exponent == pytest.approx(exponent, abs=1e-9)
    assert fit.factor == pytest.approx(7)
    assert fit.spread == pytest.approx(0, abs=1e-9)
    assert fit(32) == pytest.approx(7 * 32**exponent)


def test_constants_at_small_sizes_are_left_out():
    xs = [1, 2, 64, 256, 1024]
    fit = fits.growth(xs, [100 + x**2 for x in xs], tail=2)
    assert fit.exponent == pytest.approx(2, abs=0.01) and fit.points == 2
    assert fits.growth(xs, [100 + x**2 for x in xs], tail=5).exponent < 1.8


def test_order_does_not_matter_and_gaps_are_left_out():
    assert fits.growth([8, 2, 4, 16], [64, 4, None, 256]).exponent == pytest.approx(2)
    assert fits.growth([2, 4, 8], [4, math.nan, 64]).exponent == pytest.approx(2)


def test_spread_says_how_straight_it_is():
    assert fits.growth([1, 2, 4], [1, 4, 4]).spread > 0.3


@pytest.mark.parametrize("ys", [[1, None], [None, None], [0, 0]])
def test_no_fit(ys):
    assert fits.growth([1, 2], ys) is None


def test_no_fit_of_one_size():
    assert fits.growth([2, 2], [1, 3]) is None


@pytest.mark.parametrize(
    ("measured", "paper", "verdict"),
    [
        (1.05, 1, "as the paper"),
        (0.5, 1, "less"),
        (1.5, 1, "more"),
        (0.3, (0, 1), "as the paper"),
        (1.1, (0, 1), "as the paper"),
        (1.3, (0, 1), "more"),
        (-0.5, (0, 1), "less"),
        (None, 1, "not measured"),
        (1, None, "not measured"),
    ],
)
def test_verdicts(measured, paper, verdict):
    assert fits.compare(measured, paper) == verdict


def test_crossover():
    xs = [1, 10, 100, 1000]
    line, root = [x / 10 for x in xs], [x**0.5 for x in xs]
    assert fits.crossover(xs, line, root) == pytest.approx(100)
    assert fits.crossover(xs, root, line) == pytest.approx(100)
    assert fits.crossover([1, 1000], [0.1, 100], [1, 1000**0.5]) == pytest.approx(100)
    assert fits.crossover(xs, line, [x * 2 for x in xs]) is None
    assert fits.crossover(xs, line, [None] * 4) is None
