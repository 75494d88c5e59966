"""Moonwalk: exact gradients of deep networks without keeping their activations."""

from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError as _NotFound
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import models as models
from . import nn as nn
from . import rules as _rules  # fills the registry
from .errors import BudgetError as BudgetError
from .errors import CheckpointError as CheckpointError
from .errors import DataError as DataError
from .errors import DeclarationError as DeclarationError
from .errors import DuplicateRuleError as DuplicateRuleError
from .errors import EffectError as EffectError
from .errors import InexactError as InexactError
from .errors import MoonwalkError as MoonwalkError
from .errors import NonFiniteError as NonFiniteError
from .errors import NotInvertibleError as NotInvertibleError
from .errors import NotSubmersiveError as NotSubmersiveError
from .errors import OptimizerError as OptimizerError
from .errors import PlanMismatchError as PlanMismatchError
from .errors import PlanWarning as PlanWarning
from .errors import SingularError as SingularError
from .errors import WriteError as WriteError
from .execute.certificate import Certificate as Certificate
from .fused.fused_update import fused_update as fused_update
from .gradient import grad as grad
from .gradient import value_and_grad as value_and_grad
from .operator import testing as testing
from .operator.custom_vijp import custom_vijp as custom_vijp
from .operator.vijp import vijp as vijp
from .planning.frontier import Frontier as Frontier
from .planning.methods import Backprop as Backprop
from .planning.methods import Checkpoint as Checkpoint
from .planning.methods import Forward as Forward
from .planning.methods import Moonwalk as Moonwalk
from .planning.methods import ProjectedForward as ProjectedForward
from .planning.methods import PureForward as PureForward
from .planning.methods import Reversible as Reversible
from .planning.report import Plan as Plan
from .preview import Memory as Memory
from .preview import frontier as frontier
from .preview import memory as memory
from .preview import plan as plan
from .rules.fragments import Fragment as Fragment
from .rules.generic import MatrixFree as MatrixFree
from .rules.registry import register_vijp as register_vijp
from .trace.declare import declare as declare

try:
    __version__ = _version("moonwalk-jax")
except _NotFound:  # a source tree on PYTHONPATH
    __version__ = "0.0.0+source"
del _rules, _NotFound, _version

if _TYPE_CHECKING:
    from . import lab as lab
    from .lab import data as data
    from .lab import training as training

# Imported when first asked for: the library needs none of it.
_LAZY = {"lab": ".lab", "data": ".lab.data", "training": ".lab.training"}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return _import_module(_LAZY[name], __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
