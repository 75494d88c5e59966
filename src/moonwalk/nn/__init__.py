"""Layers that Moonwalk differentiates exactly: Equinox modules, and plain functions beside them."""

from .coupling import Coupling as Coupling
from .coupling import couple as couple
from .coupling import uncouple as uncouple
