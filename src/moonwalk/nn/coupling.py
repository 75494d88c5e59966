"""Additive couplings: layers that can be run backwards, whatever the two functions in them are.

    y₁ = x₁ + F(x₂)          x₂ = y₂ − G(y₁)
    y₂ = x₂ + G(y₁)          x₁ = y₁ − F(x₂)

(Dinh et al. 2014; reversible residual networks: Gomez et al. 2017; reversible attention: Kitaev et al.
2020.) A coupling is two *shears* (a, b) ↦ (a + f(b), b). For each, with h the cotangents of (a, b),

    vjp    h_a = h'_a,   h_b = h'_b + h'_a f'(b)
    vijp   h'_a = h_a,   h'_b = h_b − h_a f'(b)

so the vijp exists for every f, and needs the vjp of f alone. `moonwalk.value_and_grad` inverts couplings
(`segments.invert`), and keeps only the last one's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..operator.custom_vijp import custom_vijp


class Coupling(eqx.Module):
    """y₁ = x₁ + f(x₂), y₂ = x₂ + g(y₁): a reversible layer from any two functions.

    The state is a pair (x₁, x₂), or one array whose last axis holds both halves. f and g take one half,
    of whatever dtype and shape, and return the other's increment. They may be modules, or functions that
    close over arrays. `inverse` runs the layer backwards.

    **Arguments:**

    - `f`, `g`: functions of one array, and of a keyword `key` if the coupling is called with a key.

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> layer = mw.nn.Coupling(jnp.tanh, lambda x: 0.5 * x**2)
    >>> x = jnp.arange(8.0)
    >>> bool(jnp.allclose(layer.inverse(layer(x)), x, atol=1e-5))
    True
    """

    f: Callable[..., Any]
    g: Callable[..., Any]

    def __check_init__(self) -> None:
        for name in ("f", "g"):
            if not callable(getattr(self, name)):
                raise TypeError(
                    f"Coupling: {name} is a function of one half of the state, got "
                    f"{getattr(self, name)!r}"
                )

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        return couple(x, self.f, self.g, key=key)

    def inverse(self, y: Any, *, key: Any = None) -> Any:
        """The x that the layer takes to y."""
        return uncouple(y, self.f, self.g, key=key)


def couple(x: Any, f: Callable[..., Any], g: Callable[..., Any], *, key: Any = None) -> Any:
    """The additive coupling of a pair, or of the halves of an array."""
    keys = _keys(key)
    _check(x)
    x = _shear(x, *_split(f, x, 1, keys[0]), 0)
    return _shear(x, *_split(g, x, 0, keys[1]), 1)


def uncouple(y: Any, f: Callable[..., Any], g: Callable[..., Any], *, key: Any = None) -> Any:
    """The inverse of `couple`."""
    keys = _keys(key)
    _check(y)
    y = unshear(y, *_split(g, y, 0, keys[1]), 1)
    return unshear(y, *_split(f, y, 1, keys[0]), 0)


def _keys(key: Any) -> Any:
    return (None, None) if key is None else jax.random.split(key)


def _check(x: Any) -> None:
    if isinstance(x, tuple | list):
        if len(x) != 2 or not all(eqx.is_array_like(a) for a in x):
            raise TypeError(
                "Coupling: the state is a pair of arrays, or one array with both halves in its last "
                f"axis; got {type(x).__name__} of {len(x)}"
            )
        return
    if jnp.ndim(x) < 1 or jnp.shape(x)[-1] % 2:
        raise ValueError(
            "Coupling: the last axis of the state is cut into halves, but its shape is "
            f"{jnp.shape(x)}; use an even number of channels, or a pair of arrays"
        )


def _half(x: Any, which: int) -> Any:
    if isinstance(x, tuple | list):
        return x[which]
    middle = x.shape[-1] // 2
    return x[..., middle:] if which else x[..., :middle]


def _join(halves: list[Any], like: Any) -> Any:
    if isinstance(like, tuple | list):
        return type(like)(halves)
    return jnp.concatenate(halves, -1)


def _split(f: Callable[..., Any], x: Any, which: int, key: Any) -> tuple[Any, Any]:
    """A function of one half of x, as arrays (those that it closes over included) and a static rest."""
    keyed = {} if key is None else {"key": key}
    half = jax.eval_shape(lambda x: _half(x, which), x)
    # Wrapped, because arrays among f's default arguments would remain in the static part.
    f = eqx.filter_closure_convert(lambda b, **keyed: f(b, **keyed), half, **keyed)
    arrays, static = eqx.partition(f, eqx.is_array)
    return (arrays, key), static


def _increment(b: Any, moving: Any, static: Any, like: Any) -> Any:
    arrays, key = moving
    f = eqx.combine(arrays, static)
    out = f(b) if key is None else f(b, key=key)
    if jnp.shape(out) != jnp.shape(like):
        raise ValueError(
            "Coupling: a function must return the increment of the other half, of shape "
            f"{jnp.shape(like)}, but returned {jnp.shape(out)}"
        )
    return out.astype(like.dtype)


def _moved(x: Any, moving: Any, static: Any, which: int, sign: int) -> Any:
    """x with the increment of one half, computed from the other, added or subtracted."""
    halves = [_half(x, 0), _half(x, 1)]
    increment = _increment(halves[1 - which], moving, static, halves[which])
    halves[which] = halves[which] + increment if sign > 0 else halves[which] - increment
    return _join(halves, x)


def shear(x: Any, moving: Any, static: Any, which: int) -> Any:
    """(a, b) ↦ (a + f(b), b), or with `which` = 1, (a, b + f(a))."""
    return _moved(x, moving, static, which, 1)


_shear = custom_vijp(shear, nondiff_argnums=(2, 3))


@_shear.definverse
def unshear(y: Any, moving: Any, static: Any, which: int) -> Any:
    """The inverse of `shear`: the other half is unchanged, and so is f of it."""
    return _moved(y, moving, static, which, -1)


@_shear.defvijp
def _(static: Any, which: int, primals: Any, h: Any) -> Any:
    x, moving = primals
    own, other = _half(x, which), _half(x, 1 - which)
    _, pullback = jax.vjp(lambda b: _increment(b, moving, static, own), other)
    halves = [_half(h, 0), _half(h, 1)]
    (back,) = pullback(halves[which])
    halves[1 - which] = halves[1 - which] - back
    return _join(halves, x)
