"""Draws flows.svg, the computation flows of Moonwalk and of backpropagation (the paper's Fig. 1).

    python docs/figures/flows.py [another-output.png]

Needs matplotlib (the `plots` extra). The output is the same on every run.
"""

from __future__ import annotations

import io
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams.update(
    {"svg.hashsalt": "moonwalk", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 10}
)

import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle  # noqa: E402

X, H, G, GREY = "#2f6db3", "#d2691e", "#2e8b57", "#555555"
LAYERS = 3
STEP = 2.0  # from one state to the next; the operator stands half-way
RADIUS = 0.32
SHELF = 0.85  # how far above its operator a stored value lies


class Panel:
    """One phase: a few lines of a drawing language, so that the figure below reads as what it shows."""

    def __init__(self, ax: Any, title: str, bottom: float):
        self.ax = ax
        ax.set_anchor("N")  # panels of one row begin at one height
        ax.set(xlim=(-0.75, LAYERS * STEP + 2.05), ylim=(bottom - 0.45, 1.62), aspect="equal")
        ax.axis("off")
        ax.text(-0.4, 1.5, title, fontsize=11, va="top", weight="bold", color="#222222")

    def state(self, letter: str, i: int, y: float, colour: str, kept: bool = False) -> None:
        """x_i or h_i; filled if it is kept for the next phase."""
        place, fill, ink = (STEP * i, y), colour if kept else "white", "white" if kept else colour
        self.ax.add_patch(Circle(place, RADIUS, facecolor=fill, edgecolor=colour, lw=1.6, zorder=3))
        self._text(place, f"${letter}_{i}$", ink)

    def operator(self, i: int, y: float, label: str) -> None:
        """What takes state i-1 to state i, or back."""
        place = (STEP * (i - 0.5), y)
        self.ax.add_patch(_rounded(place, 0.62, 0.4, "#eeeeee", GREY))
        self._text(place, label, "#222222", 9)

    def loss(self, y: float) -> None:
        place = (STEP * LAYERS + 1.35, y)
        self.ax.add_patch(_rounded(place, 0.5, 0.5, "#eeeeee", GREY))
        self._text(place, "$J$", "#222222")

    def gradient(self, i: int, y: float) -> None:
        place = (STEP * (i - 0.5), y)
        self.ax.add_patch(Circle(place, RADIUS, facecolor="white", edgecolor=G, lw=1.6, zorder=3))
        self._text(place, f"$g_{i}$", G)

    def whole(self, i: int) -> None:
        """A stored activation: the input of layer i, all its bits."""
        place = (STEP * (i - 0.5), SHELF)
        self.ax.add_patch(_rounded(place, 1.5, 0.44, X, X))
        self._text(place, f"$x_{i - 1}$", "white")

    def bits(self, i: int) -> None:
        """A stored x̂: one bit per entry, say, where a whole activation has thirty-two."""
        draw_bits(self.ax, STEP * (i - 0.5), SHELF)
        self._text((STEP * (i - 0.5) + 0.5, SHELF), rf"$\hat x_{i}$", X)

    def chain(
        self, y: float, colour: str, back: bool = False, loss: bool = True, first: int = 0
    ) -> None:
        """The arrows along a row of states and operators, from state `first` on."""
        stops = [STEP * n / 2 for n in range(2 * LAYERS + 1)] + ([STEP * LAYERS + 1.35] if loss else [])
        for n, (a, b) in enumerate(pairwise(stops)):
            if n < 2 * first - 1:
                continue
            gap_a, gap_b = (RADIUS, 0.31) if n % 2 == 0 else (0.31, RADIUS)
            if n == 2 * LAYERS:
                gap_b = 0.25
            start, end = (a + gap_a, y), (b - gap_b, y)
            self.arrow(*((end, start) if back else (start, end)), colour)

    def store(self, i: int, y: float = 0.0) -> None:
        at = STEP * (i - 0.5)
        self.arrow((at, y + 0.2), (at, SHELF - 0.22), X)

    def read(self, i: int, y: float = 0.0) -> None:
        at = STEP * (i - 0.5)
        self.arrow((at, SHELF - 0.22), (at, y + 0.2), X)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        self.ax.add_patch(
            FancyArrowPatch(
                start, end, arrowstyle="-|>", mutation_scale=10, lw=1.4, color=colour, zorder=2
            )
        )

    def _text(self, place: tuple[float, float], text: str, colour: str, size: float = 11) -> None:
        self.ax.text(*place, text, color=colour, fontsize=size, ha="center", va="center", zorder=4)


def _rounded(place: tuple[float, float], width: float, height: float, fill: str, edge: str) -> Any:
    corner = (place[0] - width / 2, place[1] - height / 2)
    style = "round,pad=0,rounding_size=0.08"
    return FancyBboxPatch(corner, width, height, style, facecolor=fill, edgecolor=edge, lw=1.2, zorder=3)


def draw_bits(ax: Any, x: float, y: float) -> None:
    """Six little squares, some of them set."""
    side = 0.1
    for n, is_set in enumerate((1, 0, 1, 0, 0, 1)):
        corner = (x + (n - 3) * side, y - side / 2)
        fill = X if is_set else "white"
        ax.add_patch(Rectangle(corner, side, side, facecolor=fill, edgecolor=X, lw=0.9, zorder=3))


# --- the phases ---------------------------------------------------------------------------------------

NUMBERS = range(1, LAYERS + 1)


def forward(ax: Any, title: str, whole: bool) -> None:
    """Phase I of both: x from left to right; what is kept of it differs."""
    panel = Panel(ax, title, bottom=0)
    panel.chain(0, X)
    for i in range(LAYERS + 1):
        panel.state("x", i, 0, X)
    for i in NUMBERS:
        panel.operator(i, 0, f"$f_{i}$")
        panel.store(i)
        panel.whole(i) if whole else panel.bits(i)
    panel.loss(0)


def moonwalk_reverse(ax: Any) -> None:
    panel = Panel(ax, r"Phase II   reverse, $h$ only: keep $h_0$", bottom=0)
    panel.chain(0, H, back=True)
    for i in range(LAYERS + 1):
        panel.state("h", i, 0, H, kept=i == 0)
    for i in NUMBERS:
        panel.operator(i, 0, "vjp")
        panel.read(i)
        panel.bits(i)
    panel.loss(0)


def moonwalk_sweep(ax: Any) -> None:
    low = -2.3
    panel = Panel(ax, r"Phase III   forward, $x$ and $h$ together: hand out each $g_i$", bottom=low)
    panel.chain(0, H, loss=False)
    panel.chain(low, X, loss=False)
    for i in range(LAYERS + 1):
        panel.state("h", i, 0, H, kept=i == 0)
        panel.state("x", i, low, X)
    for i in NUMBERS:
        panel.operator(i, 0, "vijp")
        panel.operator(i, low, f"$f_{i}$")
        panel.read(i)
        panel.bits(i)
        at = STEP * (i - 0.5)
        panel.gradient(i, low / 2)
        panel.arrow((at + 0.81, -0.26), (at + 0.28, low / 2 + 0.24), H)
        panel.arrow((at - 0.81, low + 0.26), (at - 0.28, low / 2 - 0.24), X)


def backprop_reverse(ax: Any) -> None:
    low = -1.15
    panel = Panel(ax, r"Phase II   reverse: $h$ and every $g_i$", bottom=low)
    panel.chain(0, H, back=True, first=1)
    for i in NUMBERS:
        at = STEP * (i - 0.5)
        panel.state("h", i, 0, H)
        panel.operator(i, 0, "vjp")
        panel.read(i)
        panel.whole(i)
        panel.arrow((at, -0.2), (at, low + RADIUS), G)
        panel.gradient(i, low)
    panel.loss(0)


def legend(ax: Any) -> None:
    ax.set(xlim=(-0.75, LAYERS * STEP + 2.05), ylim=(-2.2, 1.2), aspect="equal")
    ax.axis("off")
    for y, colour, text in (
        (0, X, "activation $x_i$"),
        (-0.6, H, r"cotangent $h_i = \partial J \,/\, \partial x_i$"),
        (-1.2, G, r"gradient $g_i = \partial J \,/\, \partial \theta_i$"),
    ):
        ax.add_patch(Circle((0, y), 0.18, facecolor="white", edgecolor=colour, lw=1.6))
        ax.text(0.45, y, text, va="center", color="#222222")
    ax.add_patch(_rounded((4.35, 0), 0.6, 0.3, X, X))
    ax.text(4.85, 0, "stored whole", va="center", color="#222222")
    draw_bits(ax, 4.35, -0.6)
    ax.text(4.85, -0.6, "stored in part (signs, say)", va="center", color="#222222")
    ax.add_patch(Circle((4.35, -1.2), 0.18, facecolor=H, edgecolor=H))
    ax.text(4.85, -1.2, "kept for the next phase", va="center", color="#222222")


def draw() -> Any:
    figure = plt.figure(figsize=(12.6, 7.6), facecolor="white")
    grid = figure.add_gridspec(
        3,
        2,
        height_ratios=(2.07, 3.22, 4.37),
        left=0.01,
        right=0.99,
        top=0.93,
        bottom=0.01,
        hspace=0.04,
        wspace=0.02,
    )
    axes = [[figure.add_subplot(grid[row, column]) for column in (0, 1)] for row in (0, 1, 2)]
    figure.text(0.25, 0.96, "Moonwalk", ha="center", fontsize=15, weight="bold")
    figure.text(0.75, 0.96, "Backpropagation", ha="center", fontsize=15, weight="bold")
    forward(axes[0][0], r"Phase I   forward: keep $\hat x_i$", whole=False)
    forward(axes[0][1], "Phase I   forward: keep every activation", whole=True)
    moonwalk_reverse(axes[1][0])
    backprop_reverse(axes[1][1])
    moonwalk_sweep(axes[2][0])
    legend(axes[2][1])
    return figure


def main(target: Path) -> None:
    if target.suffix != ".svg":
        draw().savefig(target, dpi=100)
        return
    drawn = io.StringIO()
    draw().savefig(drawn, format="svg", metadata={"Date": None})
    lines = (line.rstrip() for line in drawn.getvalue().splitlines())  # matplotlib leaves blanks at ends
    target.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
