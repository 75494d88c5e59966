"""The rules, one module per family. Importing this package fills the registry."""

from . import (
    calls,
    control_flow,
    conv,
    elementwise,
    generic,
    isometry,
    linear,
    pooling,
    statistics,
    structural,
)

__all__ = [
    "calls",
    "control_flow",
    "conv",
    "elementwise",
    "generic",
    "isometry",
    "linear",
    "pooling",
    "statistics",
    "structural",
]
