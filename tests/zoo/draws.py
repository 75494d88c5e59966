"""What a layer draws from: choices, weights and constants, all from one seed.

A network is a Python function that draws its own structure while it is traced. Every trace draws the same, because
a `Draw` is made from the seed each time; only the first one, `fill`, makes weights, and the others take them from
the function's arguments. So a kind of layer is ordinary JAX code, whatever it draws.
"""

import zlib

import jax
import jax.numpy as jnp
import numpy as np


def generator(*seed):
    """A NumPy generator for this seed and place."""
    return np.random.default_rng([zlib.crc32(str(s).encode()) for s in seed])


class Settings:
    """What holds for a whole network: how large its numbers are, what its data looks like."""

    def __init__(self, seed):
        rng = generator(seed, "settings")
        pick = lambda *options: options[rng.integers(len(options))]
        self.seed = seed
        self.dtype = pick(*["float64"] * 10, *["float32"] * 8, "bfloat16", "float16")
        self.shape = pick((16, 8), (16, 8), (16, 8), (4, 6), (32, 4), (1, 8), (2, 4), (4, 8, 4), (4, 8, 4), (2, 4, 6), (2, 6, 6, 4),
                          (2, 6, 6, 4), (2, 4, 4, 4), (8,), (6,), (0, 8), ())  # fmt: skip
        self.data = pick("normal", "normal", "normal", "integers", "ties", "zeros", "sparse", "range")
        small = self.dtype in ("bfloat16", "float16")
        scale = lambda: (
            1.0 if small or rng.random() < 0.8 else 10.0 ** pick(-30, -12, -6, -3, 3, 6, 12, 30)
        )
        self.data_scale, self.weight_scale, self.loss_scale = scale(), scale(), scale()
        self.weights = pick("normal", "normal", "normal", "normal", "integers", "zeros")
        self.depth = pick(1, 1, 2, 2, 2, 3, 3, 4, 5, 8)
        self.tied = pick(0.0, 0.1, 0.4)
        self.theme = pick(*["any"] * 5, *["walked"] * 7, "jax.nn", "convolutions", "control", "custom")
        if self.theme == "walked" and rng.random() < 0.8:  # large enough for walks to pay
            self.shape = pick((16, 8), (32, 4), (64, 8), (16, 8, 4), (8, 6, 6, 4))
            self.depth = pick(3, 3, 4, 5, 6)
        self.inputs = pick("params", "params", "params", "params and data", "data as input", "two trees")
        self.has_aux = rng.random() < 0.35
        self.python_scalar = rng.random() < 0.15
        self.eager = rng.random() < 0.03
        self.compiled = rng.random() < 0.02


def array(rng, shape, kind, scale=1.0):
    """Data or weights of a kind; integer and tied values are exact in every dtype."""
    n = int(np.prod(shape))
    a = {
        "normal": lambda: rng.standard_normal(n),
        "integers": lambda: rng.integers(-3, 4, n),
        "ties": lambda: rng.integers(0, 2, n),
        "zeros": lambda: rng.standard_normal(n) * 0,
        "sparse": lambda: rng.standard_normal(n) * (rng.random(n) < 0.3),
        "range": lambda: rng.permutation(n) - n // 2,
        "positive": lambda: 0.5 + rng.random(n),
    }[kind]()
    return np.asarray(a, np.float64).reshape(shape) * scale


def orthogonal(rng, shape):
    *stack, n, m = shape
    k = max(n, m)
    a = rng.standard_normal((*stack, k, k))
    return (np.linalg.qr(a)[0] if a.size else a)[..., :n, :m]


def triangular(rng, shape):
    *_, n, m = shape
    a = np.tril(rng.standard_normal(shape) / np.sqrt(max(n, 1)), -1)
    return a + np.eye(n, m) * (0.75 + 0.5 * rng.random((*shape[:-1], 1)))


def diagonal(rng, shape):
    *_, n, m = shape
    return np.eye(n, m) * (0.75 + 0.5 * rng.random((*shape[:-1], 1)))


STRUCTURED = {"orthogonal": orthogonal, "lower": triangular, "diagonal": diagonal}


class Draw:
    """Draws at one place of a network; `child` gives one for a place inside."""

    def __init__(self, settings, path=(), weights=None, *, exact=False, drop=frozenset(), parent=None):
        self.settings, self.path, self.parent = settings, path, parent
        self.exact, self.drop = exact, drop  # `exact`: no stretch is rounded to fewer bits
        self.root = self if parent is None else parent.root
        self.filling = weights is None if parent is None else parent.filling
        self.weights = {} if weights is None else weights
        self.makers = {}  # of each weight here: another one like it, from a generator
        self.compute = None if parent is None else parent.compute  # the dtype of a narrow stretch
        self.nominal = (
            settings.dtype if parent is None else parent.nominal
        )  # the dtype here, but for `exact`
        self.rng = generator(settings.seed, *path)
        self.count, self.notes = 0, []
        if parent is None:
            self.kept, self.places, self.states, self.aux, self.lines, self.narrow = (
                {},
                {},
                [],
                {},
                [],
                set(),
            )

    @property
    def dtype(self):
        """Of whatever the network makes itself."""
        return self.compute or ("float64" if self.exact else self.settings.dtype)

    @property
    def is_wide(self):
        """Whether the network has at least float32 here. What is drawn may not ask for the state's own dtype, which
        is another one in the exact twin."""
        return self.nominal in ("float32", "float64")

    # -- structure -------------------------------------------------------------------------------
    def choice(self, *options):
        picked = options[self.rng.integers(len(options))]
        self.notes.append(getattr(picked, "__name__", repr(picked)))
        return picked

    def chance(self, p):
        return bool(self.rng.random() < p)

    def child(self, name, weights=None):
        """For a place inside this one, whose weights lie beside this one's or, if given, by themselves."""
        beside = weights is None
        child = Draw(self.settings, (*self.path, name), self.weights if beside else weights,
                     exact=self.exact, drop=self.drop, parent=self)  # fmt: skip
        if beside:
            child.makers = self.makers
        return child

    # -- arrays ----------------------------------------------------------------------------------
    def weight(self, *shape, kind=None, scale=1.0):
        """A weight: a new one, or one that is already there, if the network ties weights."""
        sort, place = (shape, kind, scale), (self.path, self.count)
        self.count += 1
        if place not in self.root.places:  # a body may be traced again
            known = self.root.kept.setdefault(sort, [])
            own = self._name()
            tied = known and self.rng.random() < self.settings.tied
            self.root.places[place] = (
                (known[self.rng.integers(len(known))], True) if tied else (own, False)
            )
            if not tied and self.weights is self.root.weights:
                known.append(own)
        name, tied = self.root.places[place]
        holder = self.root if tied else self
        if self.filling and not tied:
            self.add(name, lambda rng: self._values(rng, shape, kind, scale))
        self.notes.append(name + str(list(shape)))
        found = holder.weights[name]
        return jnp.asarray(found, self.dtype) if self.filling or self.compute else found

    def _name(self):
        return "w" + "_".join(map(str, self.path)) + (f"_{self.count}" if self.count > 1 else "")

    def add(self, name, maker):
        self.makers[name] = maker
        self.weights[name] = maker(generator(self.settings.seed, "weight", name))

    def _values(self, rng, shape, kind, scale):
        if kind in STRUCTURED:
            return STRUCTURED[kind](rng, shape)
        kind = kind or self.settings.weights
        fan = np.sqrt(max(np.prod(shape[:-1]), 1)) if kind == "normal" else 1
        return array(rng, shape, kind, scale * self.settings.weight_scale / fan)

    def stack(self, length, child_weights, makers):
        """`length` copies of a place's weights, each with values of its own, stacked."""
        self.count += 1
        name = self._name()
        if self.filling:
            self.add(name, lambda rng: {
                n: jax.tree.map(lambda *a: np.stack(a), *(m(rng) for _ in range(length))) if length else
                jax.tree.map(lambda a: np.zeros((0, *a.shape)), m(rng))
                for n, m in makers.items()
            })  # fmt: skip
        return self.weights[name]

    def constant(self, *shape, kind="normal"):
        """Data that the function closes over."""
        rng = generator(self.settings.seed, *self.path, "constant", shape, kind)
        return jnp.asarray(array(rng, shape, kind).astype(self.settings.dtype), self.dtype)

    def integers(self, high, *shape):
        return generator(self.settings.seed, *self.path, "integers").integers(0, high, shape)

    def key(self):
        return jax.random.key(int(self.rng.integers(1000)))

    # -- the listing -----------------------------------------------------------------------------
    def note(self, kind, x, y, at):
        """A line of the listing, in front of those of the layers inside."""
        if not self.filling:
            return
        describe = lambda a: f"{jnp.result_type(a).name}{list(jnp.shape(a))}"
        notes = "".join(f", {n}" for n in self.notes)
        indent = "    " * (len(self.path) // 2)
        self.root.lines.insert(at, f"{indent}x = {kind}(x{notes})  # {describe(x)} -> {describe(y)}")
