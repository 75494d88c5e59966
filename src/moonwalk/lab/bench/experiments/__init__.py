"""The experiments by name; `moonwalk.lab.bench.tasks` describes what such a module contains."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...training.names import nearest

NAMES = (
    "table1",
    "fig2",
    "fig3",
    "fig4",
    "depth",
    "batch",
    "vijp",
    "pareto",
    "engine",
    "checkpoint",
    "zoo",
    "segments",
    "fragments",
    "reversible",
    "certificates",
    "fused",
    "isometric",
    "lowering",
)


def load(name: str) -> Any:
    """The module of an experiment."""
    if name not in NAMES:
        raise ValueError(nearest("experiment", name, NAMES))
    return import_module(f".{name}", __name__)
