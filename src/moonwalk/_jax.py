"""The only module that touches JAX internals or asks for JAX's version.

JAX 0.11 merged `Jaxpr` with `ClosedJaxpr` and changed `scan`'s parameters; Python 3.11 stops at JAX
0.10, so both forms live side by side here and nowhere else.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

MINIMUM_JAX = (0, 10, 1)

# Releases that compute wrong numbers, each with what is known of the defect. A lower bound on the
# version would admit them, and no result of this package would be right on them.
DEFECTIVE_JAX: dict[tuple[int, ...], str] = {
    (
        0,
        10,
        2,
    ): "its CPU compiler returns wrong numbers for a vmapped matrix-vector product followed by a "
    "reduction (https://github.com/jax-ml/jax/issues/39103)",
}

# The pass by which XLA's CPU compiler deletes barriers in JAX 0.10.
_EXPANDER = "cse_barrier_expander"


def version_tuple(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: '0.11.2.dev3+g1' -> (0, 11, 2)."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


def refuse_unsupported_jax(version: str, jaxlib: str | None = None) -> None:
    """Fail at import with a clear message, rather than later with an obscure error or a wrong number."""
    needed = ".".join(map(str, MINIMUM_JAX))
    bounds = ",".join([f">={needed}", *(f"!={'.'.join(map(str, bad))}" for bad in DEFECTIVE_JAX)])
    install = f'pip install --upgrade "jax{bounds}"'
    if version_tuple(version) < MINIMUM_JAX:
        raise ImportError(
            f"moonwalk needs JAX {needed} or newer, but JAX {version} is installed; "
            f"upgrade it with: {install}"
        )
    for name, found in (("JAX", version), ("jaxlib", jaxlib or version)):
        defect = DEFECTIVE_JAX.get(version_tuple(found))
        if defect is not None:
            raise ImportError(
                f"moonwalk does not run on {name} {found}: {defect}. Install another release: {install} "
                "(on Python 3.11 that is JAX 0.10.1; newer releases need Python 3.12)"
            )


refuse_unsupported_jax(jax.__version__, jaxlib.version.__version__)


def barrier_options() -> dict[str, str | bool]:
    """Compiler options that keep XLA from merging Phase III with Phase I, and keeping all between them.

    XLA's CPU compiler deletes barriers in JAX 0.10; other backends and versions need nothing.
    """
    old = version_tuple(jax.__version__) < (0, 11)
    return {"xla_disable_hlo_passes": _EXPANDER} if old and jax.default_backend() == "cpu" else {}


_keeping_barriers = contextvars.ContextVar("keeping_barriers", default=False)


@contextlib.contextmanager
def keeping_barriers() -> Iterator[None]:
    """A context that promises to compile what is traced inside with `barrier_options`."""
    token = _keeping_barriers.set(True)
    try:
        yield
    finally:
        _keeping_barriers.reset(token)


def compiled(
    jitted: Any, *args: Any, compiler_options: Mapping[str, str | bool] = {}, **kwargs: Any
) -> Any:
    """A jitted function compiled for these arguments, or types, with its barriers kept."""
    with keeping_barriers():
        lowered = jitted.lower(*args, **kwargs)
    return lowered.compile(compiler_options={**barrier_options(), **compiler_options} or None)


def deleted_barriers() -> str | None:
    """The warning for a plan that relies on barriers, if the compiler deletes them.

    None if they are kept, because of the version, the backend, `keeping_barriers` or XLA_FLAGS.
    """
    options = barrier_options()
    if not options or _keeping_barriers.get() or _EXPANDER in os.environ.get("XLA_FLAGS", ""):
        return None
    return (
        f"JAX {jax.__version__} deletes optimization barriers when it compiles for a CPU, and merges "
        "what is computed again with what was computed first, which is then kept; compile with "
        f"jax.jit(fun, compiler_options={options}), set XLA_FLAGS=--xla_disable_hlo_passes={_EXPANDER} "
        "before JAX starts, scan over the layers, or use Python 3.12 or newer, for which there are "
        "releases of JAX that keep barriers"
    )


import jax.extend.source_info_util as _source  # noqa: E402  (after the version check)
from jax import lax  # noqa: E402
from jax.core import ShapedArray, Tracer  # noqa: E402
from jax.extend.core import Literal, Primitive  # noqa: E402
from jax.extend.core.primitives import (  # noqa: E402
    add_jaxvals_p,
    closed_call_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    jit_p,
    name_p,
    random_bits_p,
    remat_p,
)
from jax.interpreters import ad, batching, mlir  # noqa: E402

# Every private name of JAX that is used, and the module that has it. If a version of JAX lacks a name,
# the library does without it, and `tests/test_jax.py` reports it.
_INTERNALS: dict[str, str] = {
    "DynamicJaxprTracer": "interpreters.partial_eval",
    "eval_context": "core",
    "prim_requires_devices_during_lowering": "dispatch",
    "pvary_p": "core",
    "reshard_p": "pjit",
}


def _internal(name: str) -> Any:
    """One of `_INTERNALS`, or None if this version of JAX does not have it there."""
    try:
        return getattr(importlib.import_module(f"jax._src.{_INTERNALS[name]}"), name, None)
    except ModuleNotFoundError:
        return None


# Primitives that some supported version of JAX does not have; the first known to have them.
_NEWER_PRIMITIVES: dict[str, tuple[int, ...]] = {"log2": (0, 12), "one_minus_square": (0, 12)}


def lax_primitives(names: str) -> frozenset[Primitive]:
    """Primitives of `jax.lax`, given their names in one string."""
    missing = {n for n in _NEWER_PRIMITIVES if not hasattr(lax, f"{n}_p")}
    return frozenset(getattr(lax, f"{n}_p") for n in names.split() if n not in missing)


# Inside `jax.shard_map`: from "the same on all devices" to "may differ along an axis". The values stay,
# but the pullback is a sum over devices.
pvary_p = _internal("pvary_p")

# Primitives that say where an array lies, and change nothing else. JAX puts the second into derivatives
# of broadcasts wherever there is a mesh.
PLACING: frozenset[Any] = frozenset({lax.sharding_constraint_p, _internal("reshard_p")} - {None})

# Those that hand on the values that they read, whatever their derivative is.
SAME_VALUES: frozenset[Any] = PLACING | ({pvary_p} - {None})

if TYPE_CHECKING:

    class JaxprEqn:
        """The part of an equation that this package reads (JAX's own types say less about avals)."""

        primitive: Primitive
        params: dict[str, Any]
        invars: list[Any]
        outvars: list[Any]
        effects: Any
        source_info: Any
        ctx: Any

        def replace(self, **changes: Any) -> JaxprEqn: ...

else:
    from jax.extend.core import JaxprEqn

__all__ = [
    "CALLS",
    "CUSTOM_RULES",
    "PLACING",
    "SAME_VALUES",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "ScanCounts",
    "Tracer",
    "ad",
    "add_jaxvals_p",
    "barrier",
    "batching",
    "bind",
    "bind_now",
    "called_jaxpr",
    "calling_functions",
    "concrete",
    "context_of",
    "custom_jvp_call_p",
    "custom_vjp_call_p",
    "evaluated_now",
    "explicit_sharding",
    "full",
    "gathered",
    "has_effects",
    "inner_jaxprs",
    "is_call",
    "is_concrete",
    "is_jaxpr",
    "label",
    "largest_anywhere",
    "lax_primitives",
    "levels_to_user",
    "literal",
    "mlir",
    "name_p",
    "named_scopes",
    "not_mapped",
    "on_every_device",
    "open_jaxpr",
    "origin",
    "runs",
    "scan_counts",
    "sees_devices",
    "sharded_axes",
    "shards",
    "silenced",
    "source_context",
    "source_line",
    "struct",
    "type_name",
    "varying_zero",
    "working_dtype",
]

# Calls that do not affect differentiation, and are inlined. Custom derivatives are not among them.
CALLS: frozenset[Primitive] = frozenset({jit_p, closed_call_p, remat_p})
DRAWING: frozenset[Primitive] = frozenset({random_bits_p})  # they make random bits from a key

# For calls with a custom derivative: the parameters that are Python functions.
CUSTOM_RULES: dict[Primitive, frozenset[str]] = {
    custom_jvp_call_p: frozenset({"jvp_jaxpr_fun"}),
    custom_vjp_call_p: frozenset({"fwd_jaxpr_thunk", "bwd", "out_trees"}),
}


def is_call(eqn: JaxprEqn) -> bool:
    """Whether an equation calls functions: plain ones, or ones with a derivative of their own."""
    return eqn.primitive in CALLS or eqn.primitive in CUSTOM_RULES


# Internal frames (JAX's and ours) are never "the user's source line".
_OWN_FOLDER = os.path.dirname(__file__) + os.sep
_source.register_exclusion(_OWN_FOLDER)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """(jaxpr with .eqns, its constants) of either an open or a closed jaxpr, on any version."""
    consts = getattr(jaxpr, "consts", ())
    return getattr(jaxpr, "jaxpr", jaxpr), consts


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, open or closed."""
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def called_jaxpr(eqn: JaxprEqn) -> tuple[Any, Sequence[Any]]:
    """The jaxpr that a call equation calls, and that jaxpr's constants."""
    return open_jaxpr(eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"])


def inner_jaxprs(eqn: JaxprEqn) -> list[Any]:
    """Every jaxpr in an equation's parameters: of calls, loops, branches."""
    values = [v for p in eqn.params.values() for v in (p if isinstance(p, tuple) else (p,))]
    return [open_jaxpr(v)[0] for v in values if is_jaxpr(v)]


def runs(eqn: JaxprEqn, primitive: Primitive) -> bool:
    """Whether an equation is of this primitive, or calls one that is."""
    return eqn.primitive is primitive or any(
        runs(e, primitive) for inner in inner_jaxprs(eqn) for e in inner.eqns
    )


class ScanCounts(NamedTuple):
    """How many of a scan's inputs are constants, and how many carries; the rest is scanned over."""

    consts: int
    carry: int

    @property
    def stacked(self) -> int:
        """Where the scanned-over inputs begin."""
        return self.consts + self.carry

    def groups(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Values of the scan's inputs as (consts, carry, xs)."""
        split = self.stacked
        return list(values[: self.consts]), list(values[self.consts : split]), list(values[split:])


def scan_counts(eqn: JaxprEqn) -> ScanCounts:
    """How the inputs of a scan equation are grouped."""
    params = eqn.params
    if "num_consts" in params:
        return ScanCounts(params["num_consts"], params["num_carry"])
    consts, carry, _ = params["ft_in"].unpack()  # JAX >= 0.11: flat trees of consts, carry, xs
    return ScanCounts(len(list(consts)), len(list(carry)))


def literal(atom: Any) -> Any:
    """A literal as an array of its type."""
    return jax.numpy.asarray(atom.val, atom.aval.dtype)


def bind(eqn: JaxprEqn, args: Sequence[Any], *, as_written: bool = False) -> list[Any]:
    """Evaluate one equation, keeping its source line, its context and its custom rules.

    `as_written`: pads are not rewritten, for a trace that is still to be cut into blocks. (Inside a call
    the value of every pad is a variable, even if the caller passes a literal.)
    """
    params = eqn.primitive.get_bind_params(eqn.params)
    if eqn.primitive in _BRANCHING and not as_written:
        params = {k: _with_pads_opened(v) for k, v in params.items()}
    with source_context(eqn), eqn.ctx.manager:
        if eqn.primitive is lax.pad_p and not as_written and not isinstance(eqn.invars[1], Literal):
            x, value = args
            return [_pad(x, value, eqn.params["padding_config"])]
        out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _pad(x: Any, value: Any, config: Any) -> Any:
    """`lax.pad` with a value that may be differentiated.

    JAX's own rule fails if only the value is differentiated (in a phase that computes gradients of
    weights), and computes its gradient as the difference of two sums.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return lax.pad(x, value, config)
    added = lax.pad(jnp.zeros(x.shape, bool), np.True_, config)
    return jnp.where(added, value, lax.pad(x, np.zeros((), x.dtype), config))


_BRANCHING = frozenset({lax.cond_p, lax.scan_p, lax.while_p})


def _with_pads_opened(value: Any) -> Any:
    """A parameter of a loop or branch, with its pads rewritten by `_pad`."""
    if isinstance(value, tuple) and any(is_jaxpr(v) for v in value):
        return tuple(map(_with_pads_opened, value))
    return _jaxpr_with_pads_opened(value) if is_jaxpr(value) and _pads(value) else value


def _pads(jaxpr: Any) -> bool:
    eqns = open_jaxpr(jaxpr)[0].eqns
    own = any(e.primitive is lax.pad_p and not isinstance(e.invars[1], Literal) for e in eqns)
    return own or any(_pads(inner) for e in eqns for inner in inner_jaxprs(e))


@functools.lru_cache(maxsize=256)
def _jaxpr_with_pads_opened(closed: Any) -> Any:
    jaxpr, consts = open_jaxpr(closed)

    def run(*args: Any) -> list[Any]:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for e in jaxpr.eqns:
            inputs = [v.val if isinstance(v, Literal) else env[v] for v in e.invars]
            env.update(zip(e.outvars, bind(e, inputs), strict=True))
        return [literal(v) if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    return jax.make_jaxpr(run)(*(struct(v.aval) for v in jaxpr.invars))


class CustomJvp(NamedTuple):
    """What a custom derivative computes: (primals, tangents) → (outputs, tangents that are not zero)."""

    jaxpr: Any
    consts: Sequence[Any]
    out_zeros: tuple[bool, ...]  # for each output, whether its tangent is a symbolic zero


def custom_jvp(eqn: JaxprEqn) -> CustomJvp | None:
    """A `custom_jvp` call's derivative, cached by JAX; None if its rule asks which tangents are zero."""
    if eqn.primitive is not custom_jvp_call_p or eqn.params["symbolic_zeros"]:
        return None
    zeros = [False] * (len(eqn.invars) - eqn.params["num_consts"])
    jaxpr, consts, out_zeros = eqn.params["jvp_jaxpr_fun"].call_wrapped(*zeros)
    return CustomJvp(open_jaxpr(jaxpr)[0], consts, tuple(out_zeros))


@functools.lru_cache
def _context_text(context: Any) -> str:
    return repr(context)


def context_of(eqn: JaxprEqn) -> str:
    """The settings under which an equation was traced (mesh, placement), as a key for comparison."""
    return _context_text(eqn.ctx)


def source_context(eqn: JaxprEqn) -> Any:
    """A context in which traced equations keep this equation's place in the user's code.

    A body that JAX traced once and cached (`jax.nn.leaky_relu`) holds no user frame of its own:
    there the surrounding context, which is the call, stays.
    """
    info = eqn.source_info
    stack = _source.current_name_stack() + info.name_stack
    traceback = info.traceback if _frames(eqn) else _source.current().traceback
    return _source.user_context(traceback, name_stack=stack)


# A checkpointed region is inlined like any call, but its equations are marked in the name stack,
# which survives retracing.
_CHECKPOINT = "moonwalk.checkpoint"


def checkpoint_mark(eqn: JaxprEqn) -> Any:
    """A context that marks the equations traced inside if this equation is a `jax.checkpoint`."""
    return jax.named_scope(_CHECKPOINT) if eqn.primitive is remat_p else contextlib.nullcontext()


def checkpointed_as(eqn: JaxprEqn, fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function, wrapped in a `jax.checkpoint` like the equation's if that is one."""
    if eqn.primitive is not remat_p:
        return fun
    return jax.checkpoint(fun, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"])


def in_checkpoint(eqn: JaxprEqn) -> bool:
    """Whether the user wrapped the equation in `jax.checkpoint`."""
    return _CHECKPOINT in str(eqn.source_info.name_stack)


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation does something besides computing: prints, calls back.

    Collectives also have an effect, which only says that they need a named axis.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def silenced(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The equations without those that print or call back, also inside loops and branches."""
    return [e if not has_effects(e) else _quiet(e) for e in eqns if e.outvars or not has_effects(e)]


def _quiet(eqn: JaxprEqn) -> JaxprEqn:
    def inside(value: Any) -> Any:
        if isinstance(value, tuple):  # branches
            return tuple(inside(v) for v in value)
        if not (hasattr(value, "eqns") and hasattr(value, "replace")):
            return value
        inner, _ = open_jaxpr(value)
        eqns = silenced(inner.eqns)
        new = inner.replace(eqns=eqns, effects=set().union(*(e.effects for e in eqns)))
        return new if inner is value else value.replace(jaxpr=new)

    effects = {e for e in eqn.effects if type(e).__name__ == "NamedAxisEffect"}
    return eqn.replace(params={k: inside(v) for k, v in eqn.params.items()}, effects=effects)


def label(eqn: JaxprEqn) -> str:
    """The name that a call carries ('relu' of a custom_jvp_call), or ''."""
    params = eqn.params
    if isinstance(params.get("label"), str):
        return params["label"]
    if "call_jaxpr" in params:
        info = getattr(open_jaxpr(params["call_jaxpr"])[0], "debug_info", None)
        return str(getattr(info, "func_name", "") or "")
    return ""


def origin(function: Callable[..., Any]) -> str:
    """'name' of a function for messages."""
    return getattr(function, "__qualname__", None) or type(function).__name__


_LAB = _OWN_FOLDER + "lab" + os.sep  # it uses the package as anybody does
_INTERNAL = (
    _OWN_FOLDER,
    os.path.dirname(jax.__file__) + os.sep,
    os.sep + "jaxlib" + os.sep,
    os.sep + "contextlib.py",
    os.sep + "functools.py",
    "<frozen",
)


@functools.cache
def _is_internal(file_name: str) -> bool:
    return any(part in file_name for part in _INTERNAL)


def _frames(eqn: JaxprEqn) -> list[Any]:
    """An equation's stack frames outside JAX and this package, innermost first."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback else []
    return [f for f in frames if not _is_internal(f.file_name) or f.file_name.startswith(_LAB)]


def named_scopes(eqn: JaxprEqn) -> str:
    """'GPT/Block_0/attention': the user's named scopes around an equation, the outermost first."""
    stack = getattr(eqn.source_info.name_stack, "stack", ())
    names = [part.name for part in stack if type(part).__name__ == "Scope"]
    return "/".join(name for name in names if name != _CHECKPOINT)


def calling_functions(eqn: JaxprEqn) -> str:
    """'loss/Block.__call__/dense': the user's functions around an equation, the outermost first.

    Those of layer libraries are left out. A function that JAX traced once and cached stands alone.
    """
    names = [f.function_name for f in _frames(eqn) if "site-packages" not in f.file_name]
    return "/".join(name.rpartition("<locals>.")[2] for name in reversed(names))


def source_line(eqn: JaxprEqn) -> str:
    """'model.py:12 (forward)', with the library line it went through where there is one.

    The first frame outside JAX may be in a layer library; the first outside site-packages is the user's
    own. Both help, so both are given if they differ. JAX's tracebacks begin at the traced function. If
    that is JAX's own (`vijp(jax.nn.relu, x)`), the line that is currently running is given instead.
    """
    frames = _frames(eqn)
    if not frames:
        return _call_site()
    inner = frames[0]
    user = next((f for f in frames if "site-packages" not in f.file_name), inner)

    def show(frame: Any) -> str:
        return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"

    return show(inner) if inner is user else f"{show(user)}, through {show(inner)}"


def _call_site() -> str:
    """The innermost running frame outside JAX and this package."""
    frame = sys._getframe()
    while frame is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"


def levels_to_user() -> int:
    """The `stacklevel` of a warning that is to point at the caller outside JAX and this package."""
    level, frame = 0, sys._getframe()
    while frame is not None and _is_internal(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


not_mapped = None  # how a batching rule sees an unbatched operand


def _explicit_sharding(aval: Any) -> Any:
    """The sharding that is part of an aval's type (meshes with Explicit axes), else None."""
    sharding = getattr(aval, "sharding", None)
    explicit = sharding is not None and not sharding.mesh.empty and not sharding.mesh.are_all_axes_auto
    return sharding if explicit else None


def sharded_axes(aval: Any) -> tuple[int, ...]:
    """The axes that a mesh with Explicit axes divides among devices."""
    sharding = _explicit_sharding(aval)
    return () if sharding is None else tuple(i for i, s in enumerate(sharding.spec) if s is not None)


def shards(aval: Any) -> tuple[int, ...]:
    """For each axis, the number of parts into which a mesh with Explicit axes divides it."""
    sharding = _explicit_sharding(aval)
    if sharding is None:
        return (1,) * aval.ndim
    names = [() if s is None else s if isinstance(s, tuple) else (s,) for s in sharding.spec]
    return tuple(math.prod(sharding.mesh.shape[n] for n in axis) for axis in names)


def explicit_sharding(aval: Any) -> Any:
    """For `out_sharding=`: where arrays of this type lie on a mesh with Explicit axes, else None."""
    sharding = _explicit_sharding(aval)
    explicit = jax.sharding.AxisType.Explicit
    return sharding if sharding is not None and explicit in sharding.mesh.axis_types else None


def gathered(array: Any) -> Any:
    """The array, whole on every device, where a mesh with Explicit axes divides it.

    Needed for what JAX does not do across devices: factorisations, triangular solves, diagonals.
    """
    if not sharded_axes(jax.typeof(array)):
        return array
    return jax.sharding.reshard(array, jax.sharding.PartitionSpec())


def type_name(aval: Any) -> str:
    """'f32[8,3]': the same on one device and on many."""
    return ShapedArray(aval.shape, aval.dtype).str_short(short_dtypes=True)


def full(aval: Any, value: float) -> Any:
    """An array of one value, of an aval's type."""
    array = jax.numpy.full(aval.shape, value, aval.dtype, device=_explicit_sharding(aval))
    return varying_over(array, _varying_axes(aval))


def _varying_axes(aval: Any) -> frozenset[str]:
    """Inside `jax.shard_map`: the axes along which devices hold different values of this type."""
    return aval.manual_axis_type.varying


def varying_over(array: Any, axes: Iterable[str]) -> Any:
    """The array, typed as one that may differ along these axes of a mesh (no computation)."""
    missing = frozenset(axes) - _varying_axes(jax.typeof(array))
    return lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array


def varying_zero(like: Any, dtype: Any) -> Any:
    """A zero that may differ wherever one of these arrays does: the start of a loop over them."""
    axes = (_varying_axes(jax.typeof(a)) for a in jax.tree.leaves(like))
    return varying_over(jax.numpy.zeros((), dtype), frozenset().union(*axes))


def largest_anywhere(array: Any) -> Any:
    """The maximum of each entry over the devices on which it may differ inside `jax.shard_map` (over all
    of them with check_vma=False, where types do not say)."""
    mesh = jax.sharding.get_abstract_mesh()
    differs = _varying_axes(jax.typeof(array)) or mesh.manual_axes
    axes = tuple(a for a in mesh.axis_names if a in differs)
    return lax.pmax(array, axes) if axes else array


def barrier(arrays: Sequence[Any]) -> list[Any]:
    """`lax.optimization_barrier`, behind which arrays have the types that they had before.

    Inside `jax.shard_map` JAX 0.10 makes all of them vary if one does; there, each kind has its own.
    """
    behind = list(lax.optimization_barrier(list(arrays)))
    axes, now = ([_varying_axes(jax.typeof(a)) for a in group] for group in (arrays, behind))
    if axes == now:
        return behind
    kinds: dict[frozenset[str], list[int]] = {}
    for i, own in enumerate(axes):
        kinds.setdefault(own, []).append(i)
    for places in kinds.values():
        held = lax.optimization_barrier([arrays[i] for i in places])
        for i, a in zip(places, held, strict=True):
            behind[i] = a
    return behind


def working_dtype(dtype: Any) -> Any:
    """Half precision is solved and summed in float32, where its values are exact."""
    return dtype if jax.numpy.finfo(dtype).bits >= 32 else jax.numpy.float32


def struct(aval: Any) -> jax.ShapeDtypeStruct:
    """An aval's type without a value."""
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=_explicit_sharding(aval), manual_axis_type=aval.manual_axis_type
    )


def sees_devices(primitive: Primitive) -> None:
    """Tell the lowering of a primitive which devices the program will run on."""
    registered = _internal("prim_requires_devices_during_lowering")
    if registered is not None:
        registered.add(primitive)


def on_every_device(lowering: Any, fun: Callable[..., Any]) -> Callable[..., Any] | None:
    """A function of numbers that calls back on every device that runs the program.

    `lowering`: the lowering context of a primitive that `sees_devices`. Returns None if the devices are
    not known, or if JAX has no callbacks there (`jax.shard_map` over only some axes of a mesh).
    """
    context = lowering.module_context.axis_context
    manual = getattr(context, "manual_axes", None)
    if manual is not None:
        return fun if manual == frozenset(context.mesh.axis_names) else None
    devices = getattr(context, "device_assignment", None)
    if devices is None or len(devices) == 1:
        return fun if getattr(context, "num_devices", 0) == 1 else None
    mesh = jax.sharding.Mesh(np.array(devices), ("devices",))
    whole = jax.sharding.PartitionSpec()

    def run(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return jax.shard_map(fun, mesh=mesh, in_specs=whole, out_specs=whole)(*args)

    return run


@contextlib.contextmanager
def evaluated_now() -> Iterator[None]:
    """A context in which operations run at once, whatever is being traced, and outside any mesh.

    `jax.ensure_compile_time_eval` does not leave a `jax.shard_map` that runs eagerly.
    """
    leave_trace = _internal("eval_context") or contextlib.nullcontext
    no_mesh = jax.sharding.AbstractMesh((), ())
    with jax.ensure_compile_time_eval(), leave_trace(), jax.sharding.use_abstract_mesh(no_mesh):
        yield


def bind_now(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Evaluate one equation on concrete numbers, outside the mesh under which it was traced."""
    params = {k: None if k in ("sharding", "out_sharding") else v for k, v in eqn.params.items()}
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


_Staged = _internal("DynamicJaxprTracer") or ()


def sharding(array: Any) -> Any:
    """How an array, or a type of one, was put on devices; None if nobody said."""
    found = getattr(array, "sharding", None)
    return found if len(getattr(found, "device_set", ())) > 1 else None


def parts(array: Any) -> int:
    """Into how many different parts an array, or a type of one, is divided among devices."""
    found = sharding(array)
    if found is None or not array.size:
        return 1
    return array.size // math.prod(found.shard_shape(tuple(array.shape)))


def default_device() -> Any:
    """The device that programs run on unless their arguments say otherwise."""
    chosen = jax.config.jax_default_device
    if isinstance(chosen, jax.Device):
        return chosen
    # A platform's name, or nothing. Of several processes, each has devices of its own.
    return jax.local_devices(backend=chosen)[0]


def _memory_stats() -> dict[str, int]:
    """What the default device says of its memory: nothing on a CPU."""
    try:
        return default_device().memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return {}


_SLOP = 0.95  # XLA's default for `xla_gpu_memory_limit_slop_factor`


def compiler_limit() -> int | None:
    """Bytes of a program beyond which XLA recomputes values by its own choice; None if it does not.

    It compares arguments, results and temporaries with what the allocator of the device may take.
    """
    limit = _memory_stats().get("bytes_limit")
    enabled = jax.config.values.get("jax_compiler_enable_remat_pass", True)
    return int(_SLOP * limit) if limit is not None and enabled else None


def resident_bytes(arrays: Iterable[Any]) -> int:
    """What arrays take that are on the default device already."""
    device, found = default_device(), {}
    for array in arrays:
        if isinstance(array, jax.Array) and is_concrete(array) and device in array.devices():
            found[id(array)] = array.nbytes // parts(array)
    return sum(found.values())


def free_bytes() -> int | None:
    """How much memory the default device has free, as far as it says."""
    found = _memory_stats()
    limit = found.get("bytes_limit")
    return None if limit is None else limit - found.get("bytes_in_use", 0)


def is_staged(*arrays: Any) -> bool:
    """Whether the arrays belong to a program that is being staged, as by `jax.jit`.

    `vmap`, which may be eager, and derivatives do not count.
    """
    tracers = [a for a in jax.tree.leaves(arrays) if isinstance(a, Tracer)]
    return bool(tracers) and all(isinstance(a, _Staged) for a in tracers)


def is_concrete(*arrays: Any) -> bool:
    """Whether every leaf holds values now (no tracer among them)."""
    return not any(isinstance(a, Tracer) for a in jax.tree.leaves(arrays))


def concrete(array: Any) -> np.ndarray | None:
    """The values of an array if this process has them now, else None."""
    if not is_concrete(array):
        return None
    elsewhere = isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    )
    return None if elsewhere else np.asarray(array)
