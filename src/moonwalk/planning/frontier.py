"""The plans between least memory and least time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from .. import settings
from ..errors import BudgetError
from ..segments.base import format_bytes
from .report import Plan
from .summary import format_seconds

_BYTES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_CLEARLY = 0.98  # of the time of another plan
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


@dataclass(frozen=True, repr=False)
class Frontier(Sequence[Plan]):
    """Plans none of which is both larger and slower than another, the smallest first.

    Printable; a sequence of plans, each of which `method=` accepts. `total_bytes` of a plan is its
    predicted peak with arguments and results, `seconds` its predicted time.
    """

    plans: tuple[Plan, ...]

    @overload
    def __getitem__(self, place: int) -> Plan: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, place: int | slice) -> Plan | tuple[Plan, ...]:
        return self.plans[place]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def within(self, budget: int | str) -> Plan:
        """The fastest plan whose predicted total is within a budget: bytes, or a size such as "8GiB"."""
        limit = settings.size("Frontier.within", "budget", budget)
        fitting = [plan for plan in self.plans if plan.total_bytes <= limit]
        if not fitting:
            raise BudgetError(
                f"Frontier.within({budget!r}): the least that a plan takes is about "
                f"{format_bytes(self.plans[0].total_bytes)}; print(frontier[0]) says for what"
            )
        return fitting[-1]

    def __repr__(self) -> str:
        return f"<Frontier of {len(self)} plans>"

    def __str__(self) -> str:
        first = self.plans[0]
        beside = first.argument_bytes + first.result_bytes
        plain = first.backprop_bytes // first.parts + beside, first.backprop_seconds
        count = f"{len(self)} plan{'s' * (len(self) > 1)}"
        lines = [
            f"{count}, least memory first; on {first.device}, predicted; of all bytes "
            f"{format_bytes(beside)} are arguments and results",
            f"{'':>4}  {'memory':>10}  {'time':>9}  {'over backprop':>14}  segments",
        ]
        shown = self._shown()
        for number in shown:
            plan = self.plans[number]
            lines.append(_line(str(number), plan.total_bytes, plan.seconds, plain, plan.kinds))
        lines.append(_line("", *plain, plain, "backpropagation"))
        if len(shown) < len(self):
            count = f"{len(shown)} of {len(self)}"
            lines.append(f"Of plans that take about the same time, one is shown: {count}.")
        return "\n".join(lines)

    def _shown(self) -> list[int]:
        """The numbers of plans that are clearly faster than the one before them; and the fastest."""
        shown: list[int] = []
        for number, plan in enumerate(self.plans):
            if not shown or plan.seconds < _CLEARLY * self.plans[shown[-1]].seconds:
                shown.append(number)
        last = len(self.plans) - 1
        return shown if shown[-1] == last else [*shown, last]

    def plot(self, axes: Any = None) -> Any:
        """Draw time over memory with matplotlib; returns the axes.

        **Arguments:**

        - `axes`: matplotlib axes to draw on; None: new ones.
        """
        if axes is None:
            try:
                import matplotlib.pyplot as plt
            except ImportError as error:
                raise ImportError(
                    "Frontier.plot draws with matplotlib: pip install 'moonwalk-jax[plots]'"
                ) from error
            _, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        first = self.plans[0]
        beside = first.argument_bytes + first.result_bytes
        largest = max(p.total_bytes for p in self.plans)
        slowest = max(p.seconds for p in self.plans)
        unit, size = next(((u, s) for u, s in _BYTES if largest >= s), _BYTES[-1])
        second, long = next(((u, s) for u, s in _SECONDS if slowest >= s), _SECONDS[-1])
        axes.step(
            [p.total_bytes / size for p in self.plans],
            [p.seconds / long for p in self.plans],
            where="post",
            marker="o",
            label="plans",
        )
        axes.plot(
            [(first.backprop_bytes // first.parts + beside) / size],
            [first.backprop_seconds / long],
            "s",
            color="0.4",
            label="backpropagation",
        )
        axes.set_xlabel(f"predicted memory, arguments and results included [{unit}]")
        axes.set_ylabel(f"predicted time on {first.device} [{second}]")
        axes.legend()
        return axes


def _line(name: str, bytes_: int, seconds: float, plain: tuple[int, float], what: str) -> str:
    share = f"{bytes_ / plain[0]:.2f} × {seconds / plain[1]:.2f}" if plain[0] and plain[1] else ""
    return f"{name:>4}  {format_bytes(bytes_):>10}  {format_seconds(seconds):>9}  {share:>14}  {what}"
