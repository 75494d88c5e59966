"""Moonwalk's exceptions and warnings. Every message says what is wrong, where, and what to do."""

from __future__ import annotations


class MoonwalkError(Exception):
    """Base class of everything this package raises on purpose."""


class NotSubmersiveError(MoonwalkError, TypeError):
    """A block has no vijp: its Jacobian is not surjective, or no rule knows that it is.

    The message names the equation, the user's source line, the reason and the way out; the same
    four are kept as attributes for tools.
    """

    def __init__(self, equation: str, source: str, reason: str, way_out: str):
        self.equation, self.source, self.reason, self.way_out = equation, source, reason, way_out
        super().__init__(
            "the function is not known to be submersive: its output cotangent cannot be recovered "
            "from its input cotangent.\n"
            f"  equation: {equation}\n"
            f"  source:   {source}\n"
            f"  reason:   {reason}\n"
            f"  way out:  {way_out}"
        )


class NotInvertibleError(MoonwalkError, TypeError):
    """`Reversible` met a block whose input cannot be reconstructed from its output."""


class SingularError(MoonwalkError, ArithmeticError):
    """A vijp met a singular value at run time: a zero pivot, a vanished derivative."""


class DeclarationError(MoonwalkError, ValueError):
    """A weight's values do not have the structure that `moonwalk.declare` stated."""


class DuplicateRuleError(MoonwalkError, ValueError):
    """A primitive (or a custom function) already has a vijp rule."""


class InexactError(MoonwalkError, ArithmeticError):
    """A walk turned out less exact than its plan promised."""


class PlanMismatchError(MoonwalkError, ValueError):
    """A plan was used with a function, or with shapes, that it was not made for."""


class BudgetError(MoonwalkError, ValueError):
    """No plan fits into the memory that is allowed."""


class EffectError(MoonwalkError, ValueError):
    """A loss reads the answer of a host callback, which a second forward pass would call again."""


class OptimizerError(MoonwalkError, TypeError):
    """An optimizer's update cannot be applied gradient by gradient."""


class DataError(MoonwalkError, ValueError):
    """A data set or table is missing, or does not follow its format."""


class CheckpointError(MoonwalkError, ValueError):
    """A folder of checkpoints is damaged, or belongs to another run."""


class NonFiniteError(MoonwalkError, ArithmeticError):
    """Training met a loss or a gradient that is not finite."""


class WriteError(MoonwalkError, OSError):
    """A file or folder could not be written; the message says which, and why."""


class PlanWarning(UserWarning):
    """A plan saves little, or less than it says; the message names the reason and what would help."""
