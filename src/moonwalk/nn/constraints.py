"""Constraints: plain functions from unconstrained arrays to structured weights, for any library.

Each maps a *raw* array, which an optimizer may move anywhere, to a weight with a structure, and declares
it (`moonwalk.declare`). They run in the weight prologue of a trace: once per step, whatever the batch
is.

Diagonals that must stay away from zero are exp(log 2 · tanh(raw)): between 1/2 and 2, and 1 at raw = 0.
No step of an optimizer, however large, makes such a pivot singular.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .. import _jax, settings
from ..trace.declare import declare
from .inputs import checked_raw
from .qr import q_factor

PIVOTS = ("diagonal", "identity", "lower", "free")
STABLE = 0.9  # Σ_j ‖W_pivot⁻¹ W_j‖₂ of a causal convolution (docs/numerics.md §5)


def orthogonal(raw: Float[Array, "*stack n m"]) -> Float[Array, "*stack n m"]:
    """Orthonormal columns, m ≤ n: the Q of raw = Q R with a positive diagonal of R.

    With its signs fixed, Q is a smooth function of raw wherever raw has full rank, and equals raw if raw
    is already orthogonal. Computed in float32 at least, and left there: rounded to fewer bits it would
    not be orthogonal.

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> w = mw.nn.orthogonal(jax.random.normal(jax.random.key(0), (6, 4)))
    >>> bool(jnp.allclose(w.T @ w, jnp.eye(4), atol=1e-5))
    True
    """
    n, m = checked_raw("orthogonal", raw)[-2:]
    if m > n:
        raise ValueError(
            f"orthogonal: {n} rows cannot hold {m} orthonormal columns; give it the transpose, "
            f"[{m}, {n}], and transpose the result"
        )
    return declare(q_factor(raw.astype(_jax.working_dtype(raw.dtype))), "orthogonal")


def bounded(raw: Float[Array, "..."]) -> Float[Array, "..."]:
    """Between 1/2 and 2, and 1 at zero: exp(log 2 · tanh(raw))."""
    return jnp.exp(math.log(2) * jnp.tanh(raw))


def lower(raw: Float[Array, "*stack n m"], scale: float | None = None) -> Float[Array, "*stack n m"]:
    """Lower triangular in [in, out], w[c, c'] = 0 for c < c', with a diagonal that is `bounded`.

    What lies below the diagonal is raw times `scale`, by default 1/√n: with raw drawn from N(0, 1), the
    inverse stays well conditioned at every size (docs/numerics.md §3).

    **Example:**

    >>> import jax.numpy as jnp, moonwalk as mw
    >>> mw.nn.lower(jnp.zeros((2, 2))).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    n, m = _tall("lower", raw)
    if scale is not None:
        settings.finite("lower", "scale", scale)
    below = raw * (1 / math.sqrt(n) if scale is None else scale)
    row, column = np.indices((n, m))
    w = jnp.where(row > column, below, jnp.where(row == column, bounded(raw), 0))
    return declare(w, "lower")


def diagonal(raw: Float[Array, "*stack m"], rows: int | None = None) -> Float[Array, "*stack n m"]:
    """diag(bounded(raw)), padded with zeros below to `rows` rows.

    **Example:**

    >>> import jax.numpy as jnp, moonwalk as mw
    >>> mw.nn.diagonal(jnp.zeros(2), rows=3).tolist()
    [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    """
    m = checked_raw("diagonal", raw, 1, shape="[..., m]")[-1]
    rows = m if rows is None else settings.count("diagonal", "rows", rows)
    if rows < m:
        raise ValueError(f"diagonal: {m} columns need as many rows at least, got rows={rows}")
    eye = jnp.eye(rows, m, dtype=raw.dtype)
    return declare(eye * bounded(raw)[..., None, :], "diagonal")


def pivot_kernel(
    raw: Float[Array, "*taps m out"], structure: str, taps: Sequence[int], groups: int = 1
) -> Float[Array, "*taps m out"]:
    """A kernel whose tap `taps` has a structure, and whose other taps are raw; declared.

    The structure is made of the raw entries of that tap, in each group by itself:

    | structure | the pivot tap |
    |---|---|
    | `"diagonal"` | diag(bounded(raw's diagonal)) |
    | `"identity"` | I; declared diagonal |
    | `"lower"` | bounded(raw) on the diagonal, raw below it |
    | `"free"` | raw, and nothing is declared |

    **Arguments:**

    - `raw`: [*k, in / groups, out], channels last.
    - `structure`: one of those above.
    - `taps`: which tap is the pivot, one number per axis. It must be the tap that the rules use, which
        depends on stride, padding and size: `moonwalk.nn.pivot_taps` returns it.
    - `groups`: groups of the convolution.

    **Example:**

    >>> import jax.numpy as jnp, moonwalk as mw
    >>> w = mw.nn.pivot_kernel(jnp.full((3, 2, 2), 0.1), "identity", (1,))
    >>> w[1].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    if structure not in PIVOTS:
        raise ValueError(
            f"pivot_kernel: unknown structure {structure!r}; choose one of {', '.join(PIVOTS)}"
        )
    shape = checked_raw("pivot_kernel", raw, 3, shape="[*taps, in / groups, out]")
    if structure == "free":
        return raw
    settings.count("pivot_kernel", "groups", groups)
    m, out = shape[-2:]
    is_tap = len(taps) == len(shape) - 2 and all(
        settings.is_count(t, 0) and t < k for t, k in zip(taps, shape, strict=False)
    )
    if not is_tap:
        rule = f"names a tap of a kernel of {shape[:-2]}, one number per axis"
        raise settings.refuse("pivot_kernel", "taps", rule, tuple(taps))
    if out % groups or out // groups > m:
        raise ValueError(
            f"pivot_kernel: a {structure} pivot has as many rows as columns at least, but {groups} "
            f"group(s) take {m} channels each to {out} together; take structure='free'"
        )
    tap = jnp.moveaxis(raw[tuple(taps)].reshape(m, groups, out // groups), 1, 0)
    if structure == "lower":
        made = lower(tap, scale=1.0)
    elif structure == "identity":
        made = jnp.broadcast_to(jnp.eye(m, out // groups, dtype=raw.dtype), tap.shape)
    else:
        made = diagonal(jnp.diagonal(tap, axis1=-2, axis2=-1), rows=m)
    made = jnp.moveaxis(made, 0, 1).reshape(m, out)
    here = np.zeros((*raw.shape[:-2], 1, 1), bool)
    here[tuple(taps)] = True
    word = "lower" if structure == "lower" else "diagonal"
    return declare(jnp.where(here, made, raw), word, groups=groups, taps=taps)


def spectral_bound(w: Float[Array, "*stack n m"], squarings: int = 5) -> Float[Array, "*stack"]:
    """An upper bound of ‖w‖₂ that is smooth, needs products only, and is never below it.

    With G the smaller of wᵀw and w wᵀ, and q = 2^squarings, it is the Schatten norm

        ‖w‖₂ ≤ tr(G^q)^(1/2q) ≤ m^(1/2q) ‖w‖₂,

    with five squarings at most 8 % too large at 128 columns. G^q would overflow, or vanish, so w is
    divided by its largest entry, and every square by its trace t_i: tr(G^q)^(1/q) = Π t_i^(1/2^i).

    **Example:**

    >>> import jax.numpy as jnp, moonwalk as mw
    >>> bool(3 <= mw.nn.spectral_bound(jnp.diag(jnp.array([3.0, 1.0]))) <= 3.01)
    True
    """
    checked_raw("spectral_bound", w)
    settings.count("spectral_bound", "squarings", squarings, 0)
    w = w.astype(_jax.working_dtype(w.dtype))
    largest = jnp.max(jnp.abs(w), axis=(-2, -1), keepdims=True)
    size = lax.stop_gradient(jnp.where(largest > 0, largest, 1))  # the bound does not depend on it
    w = w / size
    # In true float32 on every device: in TF32 it would bound a rounded matrix.
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    transposed = jnp.swapaxes(w, -1, -2)
    g = product(transposed, w) if w.shape[-2] >= w.shape[-1] else product(w, transposed)
    least = jnp.finfo(w.dtype).eps ** 2  # zeros have a bound, and a derivative, too
    log_bound = jnp.zeros(w.shape[:-2], w.dtype)
    for i in range(squarings + 1):
        g = product(g, g) if i else g
        trace = jnp.trace(g, axis1=-2, axis2=-1) + least
        g = g / trace[..., None, None]
        log_bound = log_bound + jnp.log(trace) / 2 ** (i + 1)
    return jnp.exp(log_bound) * size[..., 0, 0]


def stable_taps(raw: Float[Array, "taps n m"]) -> Float[Array, "taps n m"]:
    """Taps V_j with Σ_j ‖V_j‖₂ < 0.9: raw · 0.9 / (0.9 + Σ_j b_j), b_j the `spectral_bound` of raw[j].

    Small taps stay as they are; large ones approach the limit. A recursion
    h'[i] = r[i] - Σ_j V_j h'[i-j] then forgets what lies behind it, whatever the optimizer did to raw.
    """
    checked_raw("stable_taps", raw, 3, 3, "[taps, n, m]")
    total = jnp.sum(spectral_bound(raw)).astype(raw.dtype)
    return raw * (STABLE / (STABLE + total))


def _tall(name: str, raw: Float[Array, "*stack n m"]) -> tuple[int, int]:
    n, m = checked_raw(name, raw)[-2:]
    if m > n:
        raise ValueError(
            f"{name}: {n} inputs have no pivot for {m} outputs; take at most as many outputs as inputs"
        )
    return n, m
