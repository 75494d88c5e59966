"""A network from a seed: a loss of weights and data, ready for `jax.value_and_grad`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from . import kinds
from .draws import Draw, Settings, array, generator

LOSSES = {
    "squares": lambda g, y: jnp.mean((y - 0.5) ** 2),
    "sum": lambda g, y: jnp.sum(y),
    "absolute": lambda g, y: jnp.sum(jnp.abs(y)),
    "huber": lambda g, y: jnp.mean(jnp.where(jnp.abs(y) < 1, 0.5 * y * y, jnp.abs(y) - 0.5)),
    "logsumexp": lambda g, y: jax.nn.logsumexp(y),
    "masked": lambda g, y: jnp.sum(y * g.constant(*y.shape, kind="ties").astype(y.dtype)),
    "labels": lambda g, y: -jnp.mean(jax.nn.log_softmax(y)[..., 0]) if y.ndim else y,
    "one": lambda g, y: y.reshape(-1)[0],
    "largest": lambda g, y: jnp.max(y),
    "hinge": lambda g, y: jnp.mean(jax.nn.relu(1 - y)),
    "dot": lambda g, y: jnp.sum(y * g.constant(*y.shape).astype(y.dtype)),
}


@dataclasses.dataclass
class Network:
    """`loss(*args)`; without the layers at the places `drop`."""

    seed: int
    drop: frozenset = frozenset()

    def __post_init__(self):
        self.settings = s = Settings(self.seed)
        rng = generator(s.seed, "data")
        self.data = array(rng, s.shape, s.data, s.data_scale)
        self.other = array(rng, (s.shape[-1] if s.shape else 1,), "normal")
        g = Draw(s, drop=self.drop)
        jax.eval_shape(
            lambda x, y: self.run(g, x, y)[0],
            jnp.asarray(self.data, s.dtype),
            jnp.asarray(self.other, s.dtype),
        )
        self.weights, self.lines = g.weights, g.lines
        self.exact = not g.narrow and s.dtype == "float64"  # else there is a twin in more bits
        self.eps = max(float(jnp.finfo(dtype).eps) for dtype in (s.dtype, *g.narrow))

    # -- arguments -------------------------------------------------------------------------------
    def args(self, dtype=None):
        """(weights, data, another differentiated vector, a number), in another dtype if asked."""
        cast = lambda a: jnp.asarray(
            np.asarray(a).astype(self.settings.dtype), dtype or self.settings.dtype
        )
        number = 2.0 if self.settings.python_scalar else cast(2.0)
        return jax.tree.map(cast, self.weights), cast(self.data), cast(self.other), number

    @property
    def argnums(self):
        return {"params": 0, "params and data": (0, 1), "data as input": (0, 1), "two trees": (2, 0)}[
            self.settings.inputs
        ]

    @property
    def inputs(self):
        return (1,) if self.settings.inputs == "data as input" else ()

    # -- the function ----------------------------------------------------------------------------
    def loss(self, *args, exact=False):
        return self._loss(exact, *args)

    def places(self, exact):
        """What each place of the network draws: its weights, in order, and their shapes."""
        g = None

        def run(weights, x, other):
            nonlocal g
            g = Draw(self.settings, (), weights, exact=exact, drop=self.drop)
            self.run(g, x, other)

        jax.eval_shape(run, *self.args("float64" if exact else None)[:3])
        return g.places

    @functools.cached_property
    def twin(self):
        """The same function without stretches of fewer bits, for float64."""
        return functools.partial(self.loss, exact=True)

    def _loss(self, exact, weights, x, other, number):
        s = self.settings
        g = Draw(s, (), weights, exact=exact, drop=self.drop)
        value, aux = self.run(g, x, other)
        value = (value * jnp.asarray(s.loss_scale / 2, value.dtype) * number).astype(value.dtype)
        return (value, aux) if s.has_aux else value

    def run(self, g, x, other):
        s = self.settings
        first = x
        if s.inputs == "two trees":
            x = x + other
        for i in range(s.depth):
            place = g.child(i)
            if place.path not in self.drop:
                g.states.append(x)
                x = kinds.layer(place, x)
        g.states.append(x)
        head = g.child("head")
        value = 0.0 * jnp.sum(first) if first.size else jnp.zeros((), first.dtype)
        if not x.size or head.chance(0.02):
            head.notes.append("weights alone")
        else:
            value = value * 0 + LOSSES[head.choice(*(n for n in LOSSES))](head, x)
        if head.chance(0.2) or not x.size:
            value = value + 1e-3 * sum((jnp.sum(w**2) for w in jax.tree.leaves(g.weights)), 0.0)
            head.notes.append("weight decay")
        if g.filling:
            g.lines.append(f"return {', '.join(head.notes)}")
        aux = dict(g.aux)
        for k in range(head.choice(0, 1, 2)):
            state = g.states[head.rng.integers(len(g.states))]
            aux[f"state {k}"] = head.choice(
                lambda a: a,
                lambda a: a > 0,
                lambda a: jnp.sum(a),
                lambda a: {"a": a, "text": "static"} if not g.filling else a,
            )(state)
        return value.astype(first.dtype), aux

    def __str__(self):
        s = self.settings
        head = (f"# seed {self.seed}: {s.dtype}, theme {s.theme}, data {s.data} * {s.data_scale:g}, weights {s.weights} * "
                f"{s.weight_scale:g}, loss * {s.loss_scale:g}, differentiated: {s.inputs}, aux {s.has_aux}")  # fmt: skip
        drop = f"  # without {sorted(self.drop, key=str)}" if self.drop else ""
        return "\n".join([head + drop, f"x = data{list(s.shape)}", *self.lines])
