"""A traced program, evaluated by NumPy: no compilation, which would take most of a run over many networks.

`evaluate(jax.make_jaxpr(f)(*args), args)` gives what `jax.jit(f)(*args)` gives, up to rounding. What NumPy has
no function for (convolutions, scatters, factorisations, random bits) is left to JAX, one primitive at a time.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moonwalk import _jax

HALF = {np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)}
GUARDS = {"moonwalk_guard"}
CALLS = {
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call",
    "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin",
}  # fmt: skip


_tf32 = False  # whether products of float32 whose precision nobody chose round their operands


def evaluate(closed, args, tf32=False):
    """The outputs of a closed jaxpr, as a list; with `tf32` as a GPU computes products by default."""
    global _tf32
    _tf32 = tf32
    try:
        with np.errstate(all="ignore"):
            return program(closed.jaxpr)(*map(value, closed.consts), *map(value, args))
    finally:
        _tf32 = False


def value(a):
    """An array as the programs take it: NumPy's, except for PRNG keys."""
    if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        return a
    return np.asarray(a)


def program(jaxpr, consts=()):
    """A function of the constants (unless given) and inputs of a jaxpr that returns its outputs."""
    slots, start = {}, []

    def slot(atom, dtype_of=None):
        if isinstance(atom, _jax.Literal):
            start.append(np.asarray(atom.val, atom.aval.dtype))
            return len(start) - 1
        if atom not in slots:
            slots[atom] = len(start)
            start.append(None)
        return slots[atom]

    inputs = [slot(v) for v in (*jaxpr.constvars, *jaxpr.invars)]
    steps = [([slot(a) for a in e.invars], step(e), [slot(v) for v in e.outvars]) for e in jaxpr.eqns]
    outputs = [slot(a) for a in jaxpr.outvars]
    consts = [value(c) for c in consts]

    def run(*args):
        env = start.copy()
        for i, a in zip(inputs, (*consts, *args), strict=True):
            env[i] = a
        for ins, fun, outs in steps:
            for i, a in zip(outs, fun(*[env[i] for i in ins]), strict=True):
                env[i] = a
        return [env[i] for i in outputs]

    return run


def step(eqn):
    """A function of an equation's inputs that returns the list of its outputs."""
    name = eqn.primitive.name
    if name in CONTROL:
        return CONTROL[name](eqn)
    if name in CALLS:
        jaxpr, consts = _jax.called_jaxpr(eqn)
        return program(jaxpr, consts)
    if name == "custom_vijp_call":
        return inner(jax.make_jaxpr(eqn.params["call"])(*(_jax.struct(v.aval) for v in eqn.invars)))
    if name in GUARDS:
        return functools.partial(guard, eqn.params["report"])
    if name in TABLE:
        dtypes = [v.aval.dtype for v in eqn.outvars]
        fun = TABLE[name](eqn) if all(isinstance(d, np.dtype) for d in dtypes) else None
        if fun is not None:
            return rounding(eqn, fun)
    return rounding(eqn, by_jax(eqn))


def rounding(eqn, fun):
    """As TF32 products are: operands of 10 bits of mantissa, sums in float32."""
    if not (_tf32 and eqn.primitive.name in ("dot_general", "conv_general_dilated")):
        return fun
    precision = eqn.params["precision"]
    chosen = precision if isinstance(precision, tuple) else (precision,)
    if eqn.outvars[0].aval.dtype != np.float32 or not all(
        p in (None, jax.lax.Precision.DEFAULT) for p in chosen
    ):
        return fun
    return lambda *args: fun(*(to_ten_bits(a) for a in args))


def to_ten_bits(a):
    bits = np.asarray(a, np.float32).view(np.uint32)
    return (
        (bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    ).view(np.float32)


def by_jax(eqn):
    """The primitive, bound eagerly: JAX compiles it once for every shape."""

    def run(*args):
        return [
            value(a)
            for a in _jax.bind(
                eqn, [jnp.asarray(a) if isinstance(a, np.ndarray | np.generic) else a for a in args]
            )
        ]

    return run


def guard(report, one, bad, *details):
    """Where a compiled program calls back to raise, raise."""
    if np.any(bad):
        raise report(*map(np.asarray, details))
    return [one]


# --- control flow -----------------------------------------------------------------------------------


def inner(closed):
    return program(*_jax.open_jaxpr(closed))


def scan(eqn):
    counts, length = _jax.scan_counts(eqn), eqn.params["length"]
    order = range(length)[::-1] if eqn.params["reverse"] else range(length)
    body = inner(eqn.params["jaxpr"])
    stacked = [v.aval for v in eqn.outvars[counts.carry :]]

    def run(*args):
        consts, carry, xs = counts.groups(args)
        ys = [None] * length
        for i in order:
            out = body(*consts, *carry, *(x[i] for x in xs))
            carry, ys[i] = out[: counts.carry], out[counts.carry :]
        columns = [stack([y[k] for y in ys], aval) for k, aval in enumerate(stacked)]
        return [*carry, *columns]

    return run


def stack(rows, aval):
    if not rows:
        return np.zeros(aval.shape, aval.dtype)
    return jnp.stack(rows) if isinstance(rows[0], jax.Array) else np.stack(rows)


def while_(eqn):
    p = eqn.params
    n, m = p["cond_nconsts"], p["body_nconsts"]
    holds, body = inner(p["cond_jaxpr"]), inner(p["body_jaxpr"])

    def run(*args):
        cond_consts, body_consts, state = args[:n], args[n : n + m], list(args[n + m :])
        while np.all(holds(*cond_consts, *state)[0]):
            state = body(*body_consts, *state)
        return state

    return run


def cond(eqn):
    branches = [inner(b) for b in eqn.params["branches"]]

    def run(index, *args):
        return branches[int(np.clip(int(index), 0, len(branches) - 1))](*args)

    return run


CONTROL = {"scan": scan, "while": while_, "cond": cond}

# --- primitives -------------------------------------------------------------------------------------


def plain(fun):
    """A function of arrays whose result has the output's dtype by itself, or is cast to it."""

    def make(eqn):
        dtype = eqn.outvars[0].aval.dtype
        return lambda *args: [np.asarray(fun(*args), dtype)]

    return make


def real(fun):
    """As `plain`, in float32 where the arguments are of half precision (NumPy's loops for it round in between)."""

    def make(eqn):
        dtype = eqn.outvars[0].aval.dtype
        if dtype in HALF:
            return lambda *args: [np.asarray(fun(*(np.asarray(a, np.float32) for a in args)), dtype)]
        return lambda *args: [np.asarray(fun(*args), dtype)]

    return make


def with_params(fun, wide=False):
    """`fun(eqn.params, *args)`; with `wide` in float32 where arguments are of half precision."""

    def make(eqn):
        dtype, params = eqn.outvars[0].aval.dtype, eqn.params
        if wide and dtype in HALF:
            return lambda *args: [
                np.asarray(fun(params, *(np.asarray(a, np.float32) for a in args)), dtype)
            ]
        return lambda *args: [np.asarray(fun(params, *args), dtype)]

    return make


def for_floats(make):
    """Only where the output is a real floating-point number."""
    return lambda eqn: make(eqn) if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating) else None


def convert(eqn):
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    exact = jnp.issubdtype(new, jnp.inexact) or new == np.bool_ or not jnp.issubdtype(old, jnp.inexact)
    if not exact or (
        jnp.issubdtype(old, jnp.complexfloating) and not jnp.issubdtype(new, jnp.complexfloating)
    ):
        return None  # XLA saturates, and drops imaginary parts
    if new == np.bool_:
        return lambda a: [np.asarray(a != 0)]
    return lambda a: [np.asarray(a).astype(new)]


def dot_general(eqn):
    (contract_l, contract_r), (batch_l, batch_r) = eqn.params["dimension_numbers"]
    left, right = eqn.invars[0].aval, eqn.invars[1].aval
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    names_l = [next(letters) for _ in left.shape]
    names_r = [next(letters) for _ in right.shape]
    for i, j in (*zip(contract_l, contract_r, strict=True), *zip(batch_l, batch_r, strict=True)):
        names_r[j] = names_l[i]
    free_l = [n for i, n in enumerate(names_l) if i not in (*contract_l, *batch_l)]
    free_r = [n for i, n in enumerate(names_r) if i not in (*contract_r, *batch_r)]
    out = [names_l[i] for i in batch_l] + free_l + free_r
    dtype = eqn.outvars[0].aval.dtype
    wide = np.float32 if dtype in HALF else dtype
    if not batch_l:  # a product of matrices: `tensordot` is the fastest
        axes = (contract_l, contract_r)
        return lambda a, b: [
            np.asarray(np.tensordot(np.asarray(a, wide), np.asarray(b, wide), axes), dtype)
        ]
    if left.ndim == 3 == right.ndim and len(batch_l) == 1 and len(contract_l) == 1:
        order_l = (batch_l[0], 3 - batch_l[0] - contract_l[0], contract_l[0])
        order_r = (batch_r[0], contract_r[0], 3 - batch_r[0] - contract_r[0])

        def product(a, b):
            a, b = np.asarray(a, wide).transpose(order_l), np.asarray(b, wide).transpose(order_r)
            return [np.asarray(np.matmul(a, b), dtype)]

        return product
    text = f"{''.join(names_l)},{''.join(names_r)}->{''.join(out)}"
    return lambda a, b: [np.asarray(np.einsum(text, np.asarray(a, wide), np.asarray(b, wide)), dtype)]


def select_n(eqn):
    if len(eqn.invars) == 3 and eqn.invars[0].aval.dtype == np.bool_:
        return lambda which, no, yes: [np.where(which, yes, no)]
    return lambda which, *cases: [np.choose(which.astype(int), np.broadcast_arrays(*cases))]


def broadcast_in_dim(eqn):
    shape, places = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    ones = [1] * len(shape)
    for n, size in zip(places, eqn.invars[0].aval.shape, strict=True):
        ones[n] = size
    return lambda a, *_: [np.broadcast_to(np.reshape(a, ones), shape)]


def reshape(eqn):
    shape, order = eqn.outvars[0].aval.shape, eqn.params["dimensions"]
    if order is None:
        return lambda a, *_: [np.reshape(a, shape)]
    return lambda a, *_: [np.reshape(np.transpose(a, order), shape)]


def reduced(fun, wide=False):
    return with_params(lambda p, a: fun(a, axis=tuple(p["axes"])), wide)


def cumulative(fun):
    def run(p, a):
        if not p["reverse"]:
            return fun(a, axis=p["axis"])
        return np.flip(fun(np.flip(a, p["axis"]), axis=p["axis"]), p["axis"])

    return with_params(run, wide=True)


def arg_reduced(fun):
    return with_params(lambda p, a: fun(a, axis=p["axes"][0]))


def slice_(p, a):
    strides = p["strides"] or (1,) * a.ndim
    return a[tuple(map(slice, p["start_indices"], p["limit_indices"], strides))]


def starts(shape, sizes, indices):
    return [int(np.clip(int(i), 0, n - m)) for i, n, m in zip(indices, shape, sizes, strict=True)]


def dynamic_slice(p, a, *indices):
    sizes = p["slice_sizes"]
    return a[tuple(slice(i, i + m) for i, m in zip(starts(a.shape, sizes, indices), sizes, strict=True))]


def dynamic_update_slice(p, a, new, *indices):
    a = np.array(a)
    at = starts(a.shape, new.shape, indices)
    a[tuple(slice(i, i + m) for i, m in zip(at, new.shape, strict=True))] = new
    return a


def pad(eqn):
    config = eqn.params["padding_config"]
    if any(low < 0 or high < 0 or between for low, high, between in config):
        return None
    widths = [(low, high) for low, high, _ in config]
    dtype = eqn.outvars[0].aval.dtype

    def run(a, fill):
        out = np.full(
            [n + low + high for n, (low, high) in zip(a.shape, widths, strict=True)], fill, dtype
        )
        out[tuple(slice(low, low + n) for n, (low, _) in zip(a.shape, widths, strict=True))] = a
        return [out]

    return run


def split(eqn):
    axis = eqn.params["axis"]
    cuts = np.cumsum(eqn.params["sizes"])[:-1]
    return lambda a: np.split(a, cuts, axis)


def iota(eqn):
    shape, axis, dtype = (eqn.params[k] for k in ("shape", "dimension", "dtype"))
    if eqn.invars:
        return None
    ones = [1] * len(shape)
    ones[axis] = -1
    result = np.broadcast_to(np.arange(shape[axis]).reshape(ones).astype(dtype), shape)
    return lambda: [result]


def shift(fun):
    def make(eqn):
        dtype = eqn.outvars[0].aval.dtype
        if not jnp.issubdtype(dtype, jnp.unsignedinteger):
            return None
        bits = np.iinfo(dtype).bits
        return lambda a, n: [np.where(n < bits, fun(a, np.minimum(n, bits - 1)), 0).astype(dtype)]

    return make


def divided(eqn):
    return plain(np.divide)(eqn) if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact) else None


def integer_pow(p, a):
    return 1 / np.power(a, -p["y"]) if p["y"] < 0 else np.power(a, p["y"])


def logistic(a):
    return np.where(a >= 0, 1 / (1 + np.exp(-np.abs(a))), np.exp(-np.abs(a)) / (1 + np.exp(-np.abs(a))))


def sign(a):
    return np.sign(a)


TABLE = {
    **{name: plain(fun) for name, fun in {
        "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative,
        "max": np.maximum, "min": np.minimum, "eq": np.equal, "ne": np.not_equal, "lt": np.less,
        "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "and": np.bitwise_and,
        "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "abs": np.abs,
        "is_finite": np.isfinite, "clamp": lambda low, a, high: np.minimum(np.maximum(a, low), high),
        "stop_gradient": np.asarray, "copy": np.asarray, "copy_p": np.asarray, "real": np.real, "imag": np.imag,
        "conj": np.conj, "moonwalk_declare": np.asarray,
    }.items()},
    **{name: for_floats(real(fun)) for name, fun in {
        "exp": np.exp, "exp2": np.exp2, "log": np.log, "log1p": np.log1p, "expm1": np.expm1, "tanh": np.tanh,
        "sin": np.sin, "cos": np.cos, "tan": np.tan, "sinh": np.sinh, "cosh": np.cosh, "asin": np.arcsin,
        "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
        "atan2": np.arctan2, "sqrt": np.sqrt, "rsqrt": lambda a: 1 / np.sqrt(a), "cbrt": np.cbrt,
        "logistic": logistic, "square": np.square, "pow": np.power, "floor": np.floor, "ceil": np.ceil,
        "sign": sign, "rem": np.fmod,
    }.items()},
    "div": divided,
    "integer_pow": for_floats(with_params(integer_pow, wide=True)),
    "round": for_floats(with_params(lambda p, a: np.round(a) if int(p["rounding_method"]) == 1 else np.trunc(a + np.copysign(np.nextafter(np.asarray(0.5, a.dtype), np.asarray(0, a.dtype)), a)), wide=True)),
    "convert_element_type": convert,
    "dot_general": dot_general,
    "select_n": select_n,
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "squeeze": lambda eqn: (lambda a: [np.reshape(a, eqn.outvars[0].aval.shape)]),
    "expand_dims": lambda eqn: (lambda a: [np.reshape(a, eqn.outvars[0].aval.shape)]),
    "transpose": with_params(lambda p, a: np.transpose(a, p["permutation"])),
    "rev": with_params(lambda p, a: np.flip(a, p["dimensions"])),
    "concatenate": lambda eqn: (lambda *args: [np.concatenate(args, eqn.params["dimension"])]),
    "slice": with_params(slice_),
    "dynamic_slice": with_params(dynamic_slice),
    "dynamic_update_slice": with_params(dynamic_update_slice),
    "pad": pad,
    "split": split,
    "iota": iota,
    "reduce_sum": reduced(np.sum, wide=True),
    "reduce_prod": reduced(np.prod, wide=True),
    "reduce_max": lambda eqn: reduced(np.max)(eqn) if eqn.invars[0].aval.size else None,
    "reduce_min": lambda eqn: reduced(np.min)(eqn) if eqn.invars[0].aval.size else None,
    "reduce_and": reduced(np.all),
    "reduce_or": reduced(np.any),
    "argmax": arg_reduced(np.argmax),
    "argmin": arg_reduced(np.argmin),
    "cumsum": cumulative(np.cumsum),
    "cumprod": cumulative(np.cumprod),
    "cummax": cumulative(np.maximum.accumulate),
    "cummin": cumulative(np.minimum.accumulate),
    "shift_left": shift(operator.lshift),
    "shift_right_logical": shift(operator.rshift),
    "optimization_barrier": lambda eqn: (lambda *args: list(args)),
}  # fmt: skip
