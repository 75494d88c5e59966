"""The plain functions in somebody else's layers: Flax NNX."""

import forced
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from weights import normal

import moonwalk as mw
from moonwalk import nn


class PivotConv(nnx.Conv):
    """Flax's convolution with a triangular pivot at the tap that walks divide by."""

    def __call__(self, x):
        pads = ((1, 1),) * 2
        taps = nn.pivot_taps(x.shape[1:3], (3, 3), (2, 2), pads, (1, 1))
        w = nn.pivot_kernel(self.kernel[...], "lower", taps)
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (2, 2), pads, dimension_numbers=dims) + self.bias[...]


class Orthogonal(nnx.Linear):
    def __call__(self, x):
        return x @ nn.orthogonal(self.kernel[...]) + self.bias[...]


@pytest.mark.slow
def test_flax_layers_with_constraints_are_walked():
    rngs, wide = nnx.Rngs(0), dict(param_dtype=jnp.float64)
    model = nnx.Sequential(
        nnx.Linear(2, 4, rngs=rngs, **wide),
        PivotConv(4, 4, (3, 3), rngs=rngs, **wide),
        nn.Abs(),
        Orthogonal(4, 4, rngs=rngs, **wide),
        nn.MaxMin(),
        Orthogonal(4, 3, rngs=rngs, **wide),
    )
    graphdef, params = nnx.split(model, nnx.Param)
    x = normal(2, 7, 7, 2)
    loss = lambda p, x: jnp.mean(jnp.sin(nnx.merge(graphdef, p)(x)))
    method = mw.Moonwalk()
    gains = forced.measured(loss, method, params, x)
    found, error, walk = forced.under_jit(loss, method, params, x, gains=gains)
    assert {s.source for s in walk.steps if not s.is_stem} <= {"vijp", "given", "none"}
    assert forced.difference(found, jax.jit(jax.grad(loss))(params, x)) <= 1e-10
    assert error <= 1e-10
