"""What is known of one step of training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """One step; `test_loss` and `test_accuracy` where the test examples were looked at after it."""

    step: int  # steps done, this one included
    loss: float
    accuracy: float
    certificate: float  # the largest measured error of a cotangent; 0 where nothing was walked
    seconds: float  # since training began, resumed runs counted on
    test_loss: float | None = None
    test_accuracy: float | None = None
