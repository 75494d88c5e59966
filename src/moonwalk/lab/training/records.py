"""The record of one training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """One step, with `test_loss` and `test_accuracy` if the test examples were evaluated after it."""

    step: int  # steps done, this one included
    loss: float
    accuracy: float
    certificate: float  # the largest measured error of a cotangent; 0 where nothing was walked
    seconds: float  # since training began, resumed runs counted on
    test_loss: float | None = None
    test_accuracy: float | None = None
