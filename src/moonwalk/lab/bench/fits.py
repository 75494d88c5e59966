"""How fast figures grow, compared with the paper's orders, and where two cross: fits on logarithms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SLACK = 0.2
"""How far a fitted exponent may be from the paper's and still count as equal."""


@dataclass(frozen=True)
class Fit:
    """y ≈ factor · x^exponent over the larger sizes.

    `spread` is the largest |log₂| of a measured y over the fitted one: 0 for a straight line, 1 for a
    factor of two.
    """

    exponent: float
    factor: float
    spread: float
    points: int

    def __call__(self, x: float) -> float:
        return self.factor * x**self.exponent


def growth(xs: Sequence[float], ys: Sequence[float | None], tail: int = 3) -> Fit | None:
    """The growth exponent of y in x: least squares on logarithms, over the `tail` largest sizes.

    The paper's orders are asymptotic; at small sizes constants hide the growth. Sizes without a
    measurement (None, not finite, not positive) are left out; with fewer than two there is no fit.

    **Example:**

    >>> from moonwalk.lab.bench import fits
    >>> fits.growth([1, 2, 4, 8], [7, 8, 32, 128]).exponent
    2.0
    """
    usable = [
        (float(x), float(y))
        for x, y in zip(xs, ys, strict=True)
        if y is not None and math.isfinite(y) and x > 0 and y > 0
    ]
    usable = sorted(usable)[-tail:]
    if len({x for x, _ in usable}) < 2:
        return None
    u, v = np.log([x for x, _ in usable]), np.log([y for _, y in usable])
    exponent = float(((u - u.mean()) @ (v - v.mean())) / ((u - u.mean()) @ (u - u.mean())))
    level = float(v.mean() - exponent * u.mean())
    spread = float(np.max(np.abs(v - level - exponent * u)) / math.log(2))
    return Fit(round(exponent, 12), math.exp(level), spread, len(usable))


def compare(
    measured: float | None,
    paper: float | tuple[float, float] | None,
    slack: float = SLACK,
) -> str:
    """ "as the paper", "less" or "more": a measured exponent compared with the paper's.

    An order that is a sum, as M_x L + M_θ, grows between two exponents, whichever term is larger at the
    sizes at hand: `paper` is then the pair of them.

    **Example:**

    >>> from moonwalk.lab.bench import fits
    >>> fits.compare(0.4, (0, 1)), fits.compare(2.0, 3), fits.compare(1.3, 1)
    ('as the paper', 'less', 'more')
    """
    if measured is None or paper is None:
        return "not measured"
    low, high = paper if isinstance(paper, tuple) else (paper, paper)
    if measured < low - slack:
        return "less"
    return "more" if measured > high + slack else "as the paper"


def crossover(
    xs: Sequence[float], first: Sequence[float | None], second: Sequence[float | None]
) -> float | None:
    """The smallest x where the order of `first` and `second` changes.

    Between sizes, both are interpolated linearly on logarithmic scales. None if they do not cross within
    the sizes at which both were measured.

    **Example:**

    >>> from moonwalk.lab.bench import fits
    >>> fits.crossover([1, 4], [1, 4], [2, 2])
    2.0
    """
    usable = sorted(
        (math.log(x), math.log(a / b))
        for x, a, b in zip(xs, first, second, strict=True)
        if a is not None and b is not None and a > 0 and b > 0
    )
    for (u0, d0), (u1, d1) in itertools.pairwise(usable):
        if d0 == 0:
            return round(math.exp(u0), 9)
        if d0 * d1 < 0:
            return round(math.exp(u0 + (u1 - u0) * d0 / (d0 - d1)), 9)
    return None
