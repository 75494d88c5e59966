"""`moonwalk plan module:function`: the plan, or the plans, of a user's own loss."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import pkgutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import equinox as eqx
from matplotlib import figure

from ... import settings
from ...planning.frontier import Frontier
from ...planning.methods import Checkpoint, Moonwalk, PureForward, Reversible
from ...planning.report import Plan
from ...preview import frontier, plan
from ..files import writing
from ..training.names import lookup, nearest

METHODS: dict[str, Any] = {
    "moonwalk": Moonwalk(),
    "moonwalk-checkpoint": Moonwalk(checkpoint="auto"),
    "pure-forward": PureForward(),
    "checkpoint": Checkpoint(),
    "reversible": Reversible(),
}
HOW = (
    "name a function without arguments that returns (loss, *args): the loss, and what it is called "
    "with, arrays or jax.ShapeDtypeStruct"
)


@dataclass(frozen=True)
class Request:
    """What `moonwalk plan` is asked for.

    **Arguments:**

    - `where`: "module:function", or "path/to/file.py:function". The function is called with `settings`
        and returns (loss, *args). The loss is differentiated with respect to the first of them, as by
        `moonwalk.value_and_grad(loss)`.
    - `settings`: keyword arguments for the function.
    - `method`: a name of `METHODS`.
    - `has_aux`: whether the loss returns a pair of its value and auxiliary data.
    - `budget`: as of `moonwalk.Moonwalk`.
    - `frontier`: the plans from least memory to least time; with a budget, those that fit, and the plan
        that is chosen.
    - `plot`: a file for a figure of these.
    - `verify`: compile the plan.
    - `table`: every block, instead of a summary.
    - `json`: as JSON.
    """

    where: str
    settings: dict[str, Any] = field(default_factory=dict)
    method: str = "moonwalk"
    has_aux: bool = False
    budget: str | None = None
    frontier: bool = False
    plot: Path | None = None
    verify: bool = False
    table: bool = False
    json: bool = False

    @property
    def shows_plan(self) -> bool:
        """Whether one plan is shown: alone, or after the frontier that it is chosen from."""
        return not self.frontier or self.budget is not None

    def __post_init__(self) -> None:
        chosen = lookup("method", self.method, METHODS)
        of_several = {"--frontier": self.frontier, "--plot": self.plot, "--budget": self.budget}
        of_one = {"--verify": self.verify, "--table": self.table}
        for option in (name for name, given in of_several.items() if given):
            if not isinstance(chosen, Moonwalk):
                raise ValueError(
                    f"{option}: the method {self.method} has one plan, and nothing to choose from; pass "
                    f"--method moonwalk, or leave {option} out"
                )
        for option in (name for name, given in of_one.items() if given):
            if not self.shows_plan:
                raise ValueError(
                    f"{option} is for one plan, and --frontier shows several; pass --budget too, or "
                    f"leave {option} out"
                )
        if self.table and self.json:
            raise ValueError("--table: with --json every block is there anyway; leave out one of them")
        if self.budget not in (None, "device"):
            settings.size("--budget", "it", self.budget)
        if self.plot is not None:
            check_figure(self.plot)


def answer(request: Request) -> str:
    """What is printed; writes the figure if there is to be one."""
    method = METHODS[request.method]
    if request.budget is not None:
        method = replace(method, budget=request.budget)
    loss, *args = call(find(request.where), request.where, request.settings)
    check_value(loss, args, request.where, request.has_aux)
    options: dict[str, Any] = {"method": method, "has_aux": request.has_aux}
    found, chosen = None, None
    if request.frontier or request.plot is not None:
        found = frontier(loss, *args, **options)
    if found is not None and request.plot is not None:
        draw(found, request.plot)
    if request.shows_plan:
        if found is not None and request.budget is not None and not request.verify:
            chosen = found[-1]  # the fastest that fits
        else:
            chosen = plan(loss, *args, verify=request.verify, **options)
    if request.json:
        return json.dumps(_as_data(request, found, chosen), indent=1, default=str)
    texts = [str(found)] if request.frontier else []
    texts += [] if chosen is None else [as_text(chosen, table=request.table)]
    return "\n\n".join(texts)


def _as_data(request: Request, found: Frontier | None, chosen: Plan | None) -> Any:
    """A plan; a list of the frontier's; or both, by name."""
    every = [p.to_dict() for p in found or ()]
    if chosen is None:
        return every
    return {"frontier": every, "plan": chosen.to_dict()} if request.frontier else chosen.to_dict()


def check_figure(path: Path) -> None:
    """Check that matplotlib can draw a file of that name."""
    formats = figure.Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise ValueError(
            f"--plot {path}: matplotlib draws no such file; name one that ends in "
            f"{', '.join('.' + name for name in sorted(formats))}"
        )


def draw(found: Frontier, path: Path) -> None:
    """Write a figure of the frontier; no screen is needed."""
    drawn = figure.Figure(figsize=(6, 4), layout="constrained")
    found.plot(drawn.subplots())
    with writing(path, "the figure"):
        drawn.savefig(path)


def check_value(loss: Any, args: list[Any], where: str, has_aux: bool) -> None:
    """Check that the loss returns a number, or with `has_aux` a pair of it and auxiliary data."""
    value = eqx.filter_eval_shape(loss, *args)
    is_pair = isinstance(value, tuple) and len(value) == 2
    if is_pair and not has_aux:
        raise ValueError(
            f"the loss of {where} returns a pair; if that is its value and auxiliary data, pass "
            "--has-aux, as value_and_grad takes has_aux=True"
        )
    if has_aux and not is_pair:
        raise ValueError(
            f"--has-aux: the loss of {where} is to return a pair of its value and auxiliary data, but "
            f"returns {_kind(value)}"
        )


def find(where: str) -> Any:
    """The object that 'module:name' names; modules are also searched in the current folder."""
    name, colon, attribute = where.rpartition(":")
    if not colon or not name or not attribute:
        raise ValueError(f"expected module:function, got {where!r}; {HOW}")
    found: Any = from_file(Path(name)) if name.endswith(".py") else from_name(name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            own = [n for n in dir(found) if not n.startswith("_")]
            known = [n for n in own if callable(getattr(found, n))]
            raise ValueError(nearest(f"name in {name}", part, known))
        found = getattr(found, part)
    return found


def from_name(name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # An existing module that fails to import another one is a different error.
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        parent = error.name.rpartition(".")[0]
        paths = importlib.import_module(parent).__path__ if parent else None
        known = sorted({module.name for module in pkgutil.iter_modules(paths)})
        close = difflib.get_close_matches(error.name.rpartition(".")[2], known, 1)
        guess = f"; did you mean {close[0]!r}?" if close else f" in {folder}, nor installed"
        raise ValueError(f"there is no module {error.name!r}{guess}") from error


def from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script: neighbours can be imported
    spec.loader.exec_module(module)
    return module


def call(factory: Any, where: str, settings: dict[str, Any]) -> tuple[Any, ...]:
    """(loss, *args) from a factory."""
    if not callable(factory):
        raise ValueError(f"{where} is no function but {_kind(factory)}; {HOW}")
    try:
        inspect.signature(factory).bind(**settings)
    except TypeError as error:
        raise ValueError(
            f"{where}{inspect.signature(factory)} cannot be called with "
            f"{', '.join(settings) or 'no arguments'}: {error}; {HOW}, and pass settings by --set"
        ) from error
    made = factory(**settings)
    if not isinstance(made, tuple | list) or len(made) < 2 or not callable(made[0]):
        raise ValueError(f"{where} returned {_kind(made)}; {HOW}")
    return tuple(made)


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of ({', '.join(type(v).__name__ for v in value)})"
    return f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}"


def as_text(found: Plan, *, table: bool = False) -> str:
    """The plan, and advice if it saves little."""
    advice = found.advice() if isinstance(found.method, Moonwalk) else None
    return "\n\n".join(filter(None, (found.table() if table else str(found), advice)))
