"""How memory and time of a method grow, on one network whose sizes can be varied independently.

A layer takes n features to n features: x ↦ LeakyReLU(x Q W). Q is one fixed orthogonal matrix, W is
block diagonal with orthogonal blocks of g × g, of which each layer has its own. So there are

    n²          products in every layer whatever its parameters are, as the paper counts ∂y/∂x,
    d = n g     parameters a layer: proportional to n² where g grows with n, and variable at fixed n,

and all eight methods take it: layers are invertible, and with a slope of 0.99 error hardly grows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import _jax
from ...errors import MoonwalkError
from ...trace.declare import declare
from . import measuring, methods

AXES = ("depth", "width", "parameters", "batch")
SLOPE = 0.99


@dataclass(frozen=True)
class Size:
    """Layers, features n, features of a block g, examples."""

    depth: int
    width: int
    group: int
    batch: int

    def along(self, axis: str) -> int:
        """The size that varies along an axis."""
        return self.width * self.group if axis == "parameters" else getattr(self, axis)

    def times(self, axis: str, factor: int) -> Size:
        """The size further along an axis: more width brings more parameters, as in dense layers."""
        grown = {
            "depth": {"depth": self.depth * factor},
            "width": {"width": self.width * factor, "group": self.group * factor},
            "parameters": {"group": self.group * factor},
            "batch": {"batch": self.batch * factor},
        }[axis]
        return Size(**{**self.__dict__, **grown})


def loss(params: Any, x: Any, target: Any) -> Any:
    """`params`: {"layers": [depth, n / g, g, g]}; x and target: [batch, n]; Q comes with x."""
    x, q = x
    blocks, group = params["layers"].shape[1:3]

    def layer(x: Any, w: Any) -> Any:
        mixed = (x @ declare(q, "orthogonal")).reshape(-1, blocks, group)
        each = jax.vmap(lambda x, w: x @ declare(w, "orthogonal"), in_axes=(1, 0), out_axes=1)
        return jax.nn.leaky_relu(each(mixed, w).reshape(x.shape), SLOPE), None

    return jnp.mean((lax.scan(layer, x, params["layers"])[0] - target) ** 2)


def types(size: Size) -> tuple[Any, Any, Any]:
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    data, n, g = like(size.batch, size.width), size.width, size.group
    return {"layers": like(size.depth, n // g, g, g)}, (data, like(n, n)), data


def arguments(size: Size) -> tuple[Any, Any, Any]:
    """Arguments, by NumPy, which needs no compiler; all layers share blocks, as values do not matter."""
    random = np.random.default_rng(0)
    normal = lambda *shape: random.standard_normal(shape, np.float32)
    n, g = size.width, size.group
    x, target = normal(size.batch, n), normal(size.batch, n)
    q, blocks = (np.linalg.qr(normal(*shape))[0] for shape in ((n, n), (n // g, g, g)))
    return jax.device_put(({"layers": np.tile(blocks, (size.depth, 1, 1, 1))}, (x, q), target))


def measure(method: str, points: list[dict[str, Any]], repeats: int) -> dict[str, Any]:
    """The fields of a record: memory and time at all points, the gradient's error at the first to run.

    **Arguments:**

    - `points`: {"axis", "what": ["memory", "time"] or one of them, "depth", "width", "group", "batch"};
        a size that is on several axes is compiled once, and is not run without "time".
    """
    sizes = [Size(*(p[name] for name in ("depth", "width", "group", "batch"))) for p in points]
    first = next(s for s, p in zip(sizes, points, strict=True) if "time" in p["what"])
    measured: dict[tuple[Size, bool], dict[str, Any]] = {}
    found: dict[str, Any] = {
        "extra": {"points": []},
        "parameters": first.depth * first.along("parameters"),
    }
    for point, size in zip(points, sizes, strict=True):
        key = size, "time" in point["what"]
        if key not in measured:
            try:
                fun = methods.differentiate(method, loss, types(size))
                begun = time.perf_counter()
                program = (measuring.compiled if key[1] else roughly)(fun, *types(size))
            except (MoonwalkError, NotImplementedError) as refusal:
                return {**found, "status": "refused", "message": str(refusal)}
            figures: dict[str, Any] = measuring.memory(program)
            figures |= {"compile_seconds": time.perf_counter() - begun, "seconds": None}
            if key[1]:
                args = arguments(size)
                (_, gradients), figures["seconds"] = measuring.timed(program, args, repeats)
                if size == first:
                    found |= figures | _error(gradients, args)
                    found["extra"] |= _again(program, args, gradients)
            measured[key] = figures
        named = {"axis": point["axis"], "size": size.along(point["axis"])}
        memory = {} if "memory" in point["what"] else {"temp_bytes": None}
        found["extra"]["points"].append(named | measured[key] | memory)
    return found


def roughly(fun: Any, *args: Any) -> Any:
    """`fun`, compiled for programs that do not run, or whose time does not matter.

    Buffers are assigned before machine code is generated, so memory is unaffected. On a CPU the code is
    then not optimised, which halves the time to compile.
    """
    rough = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    options = rough if jax.default_backend() == "cpu" else {}
    return _jax.compiled(jax.jit(fun), *args, compiler_options=options)


def _error(gradients: Any, args: Any) -> dict[str, Any]:
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(jnp.float64), args)
        truth = jax.device_get(roughly(jax.grad(loss), *wide)(*wide))
    error = measuring.error(gradients, truth)
    return {"gradient_error": error, "reference": measuring.REFERENCES["float64"]}


def _again(program: Any, args: Any, gradients: Any) -> dict[str, Any]:
    """Nothing but a new random key makes a compiled program give another gradient."""
    return {"variance": 0.5 * measuring.error(program(*args)[1], gradients) ** 2}
