"""Settings: one table of every constructor and what each of its settings may be, times wrong values."""

import inspect
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moonwalk as mw
from moonwalk import models, nn, settings

KEY = jax.random.key(0)
NAN = math.nan

# Wrong values for each kind of setting.
WRONG = {
    "count": (0, -1, 1.5, True, "2", None, NAN),
    "count or None": (0, -1, 1.5, True, "2", NAN),
    "count from 0": (-1, 1.5, True, "2", None, NAN),
    "count from 2": (1, 0, 2.5, True, "2", None),
    "counts": (0, -1, 1.5, True, "2", None, (3, 0), (3, 1.5), (3, True), ()),
    "pads": (-1, 1.5, True, None, (1, -1), ((1,),), ((1, 2, 3),), (1.5,), "WRAP"),
    "flag": ("no", 1, 0, None, "False"),
    "finite": (NAN, math.inf, "a", None, True),
    "positive": (0.0, -1.0, NAN, "a", True),
    "not negative": (-1.0, NAN, math.inf, "a", None, True),
    "slope": (0.0, 2.0, -1, NAN, "a", None, True),
    "word": ("x", 3, None, True, ["auto"]),
    "segments": ("x", 0, -1, 1.5, True, NAN, ["auto"]),
    "arguments": ("x", "1", 1.5, None, True, (1, "x"), (True,), (1, 1), NAN, {1: 2}),
    "precision": ("x", 3, "low", NAN),
    "bytes": ("3 apples", 0, -1, 1.5, True, NAN, "-1GiB", "0 B", "8 iB", "", ["8GiB"]),
    "shape": ((), 3, "ab", None, (0, 1), (4, -1), (4, 1.5), (4, True), (1,) * 9),
}

# Constructor -> (arguments that will do, the kind of each setting). `key` and functions are not listed.
CONVOLUTION = dict(
    in_channels="count", out_channels="count", kernel_size="counts", stride="counts", padding="pads",
    dilation="counts", groups="count", pivot="word", use_bias="flag", slope="finite",
)  # fmt: skip
ORTHOGONAL = dict(
    channels="count from 2", kernel_size="count", padding="word", use_bias="flag", spread="finite"
)
CHANNELS = dict(in_channels=4, out_channels=4)
KEYED = dict(key=KEY)
TABLE = {
    mw.Moonwalk: (
        {},
        dict(
            tolerance="positive",
            anchor_every="count or None",
            fragment="word",
            checkpoint="segments",
            walk_precision="precision",
            inputs="arguments",
            on_inexact="word",
            walk="word",
            budget="bytes",
        ),
    ),
    mw.PureForward: (
        {},
        dict(
            chunk="count",
            per_example="flag",
            tolerance="positive",
            walk_precision="precision",
            inputs="arguments",
            on_inexact="word",
        ),
    ),
    mw.Checkpoint: ({}, dict(segments="segments", inputs="arguments")),
    mw.Reversible: ({}, dict(tolerance="positive", inputs="arguments", on_inexact="word")),
    mw.Forward: ({}, dict(chunk="count")),
    mw.ProjectedForward: (dict(key=0), dict(samples="count")),
    mw.Fragment: ({}, dict(span="count from 2", stagger="flag")),
    nn.Linear: (
        dict(in_features=4, out_features=4) | KEYED,
        dict(in_features="count", out_features="count", kind="word", use_bias="flag", slope="finite"),
    ),
    **{
        conv: (CHANNELS | dict(kernel_size=3) | KEYED, CONVOLUTION)
        for conv in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    },
    nn.CausalConv1d: (
        CHANNELS | dict(kernel_size=3) | KEYED,
        dict(
            in_channels="count",
            out_channels="count",
            kernel_size="count",
            dilation="count",
            use_bias="flag",
        ),
    ),
    nn.Patchify: (
        CHANNELS | dict(patch=2) | KEYED,
        dict(
            in_channels="count",
            out_channels="count",
            patch="count",
            dims="count",
            kind="word",
            use_bias="flag",
            slope="finite",
        ),
    ),
    **{
        conv: (dict(channels=4, kernel_size=3) | KEYED, ORTHOGONAL)
        for conv in (nn.OrthogonalConv1d, nn.OrthogonalConv2d)
    },
    nn.Downsample: (
        CHANNELS | KEYED,
        dict(in_channels="count", out_channels="count", factor="count", dims="count"),
    ),
    nn.Unshuffle: ({}, dict(factor="count", dims="count")),
    nn.MeanPool: (dict(window=2), dict(window="count", dims="count", orthonormal="flag")),
    nn.MaxPool: (dict(window=2), dict(window="count", dims="count")),
    nn.GlobalMean: ({}, dict(dims="count")),
    nn.GlobalMax: ({}, dict(dims="count")),
    nn.GroupNorm: (
        dict(groups=2, channels=4),
        dict(groups="count", channels="count", dims="count from 0", eps="not negative"),
    ),
    nn.LeakyReLU: ({}, dict(slope="slope")),
    nn.PReLU: ({}, dict(channels="count or None", slope="slope")),
    nn.Stack: (dict(make=lambda key: nn.Abs(), depth=2) | KEYED, dict(depth="count")),
    nn.paraunitary_init: (
        dict(channels=4, taps=3) | KEYED,
        dict(channels="count from 2", taps="count", dims="count", spread="finite"),
    ),
    models.isometric_mlp: (
        dict(in_shape=(4, 1), classes=2) | KEYED,
        dict(in_shape="shape", classes="count", width="count", depth="count", activation="word"),
    ),
    models.isometric_cnn: (
        dict(in_shape=(4, 1), classes=2) | KEYED,
        dict(
            in_shape="shape",
            classes="count",
            channels="count",
            depth="count",
            activation="word",
            kernel_size="count",
            stem_size="count",
            padding="word",
            spread="finite",
            head="word",
        ),
    ),
    models.pyramid_cnn: (
        dict(in_shape=(8, 8, 1), classes=2) | KEYED,
        dict(
            in_shape="shape",
            classes="count",
            width="count",
            depth="count from 0",
            pivot="word",
            slope="slope",
            stem_size="count",
            use_bias="flag",
        ),
    ),
    models.conv1d_cnn: (
        dict(in_shape=(8, 1), classes=2) | KEYED,
        dict(
            in_shape="shape",
            classes="count",
            width="count",
            depth="count",
            pivot="word",
            slope="slope",
            kernel_size="count",
        ),
    ),
    models.residual_cnn: (
        dict(in_shape=(8, 8, 1), classes=2) | KEYED,
        dict(in_shape="shape", classes="count", widths="counts", halved="arguments", slope="slope"),
    ),
    models.reversible_transformer: (
        dict(in_shape=(8, 1), classes=2) | KEYED,
        dict(
            in_shape="shape",
            classes="count",
            width="count",
            depth="count",
            heads="count",
            ratio="count",
            patch="count or None",
        ),
    ),
}


def is_allowed(make, name, value):
    """Wrong values of a kind that a certain setting takes after all."""
    own = {
        (mw.Moonwalk, "fragment"): (None,),
        (nn.Patchify, "dims"): (),
        (models.pyramid_cnn, "depth"): (None,),
        (models.residual_cnn, "halved"): ((1, 1),),
    }
    return any(value is v or value == v for v in own.get((make, name), ()))


@pytest.mark.parametrize("make", TABLE, ids=lambda m: m.__name__)
def test_wrong_settings_are_refused_by_name(make):
    """The message names who refuses, the setting or what it is, and the value."""
    given, kinds = TABLE[make]
    for name, kind in kinds.items():
        for value in WRONG[kind]:
            if is_allowed(make, name, value):
                continue
            with pytest.raises((ValueError, TypeError)) as raised:
                make(**(given | {name: value}))
            words = str(raised.value)
            by_layer = inspect.isfunction(make) and re.match(r"[A-Z]\w+: ", words)
            assert words.startswith(f"{make.__name__}: ") or by_layer, (name, value, words)
            assert repr(value) in words, (name, value, words)
            assert re.search("got|unknown|take at least", words), (name, value, words)


@pytest.mark.parametrize("make", TABLE, ids=lambda m: m.__name__)
def test_every_setting_is_in_the_table(make):
    given, kinds = TABLE[make]
    free = {"key", "make", "direction", "self"}
    if make is models.residual_cnn:
        free |= {"pivot"}  # None is a choice; `Conv2d` refuses others
    assert set(inspect.signature(make).parameters) - free == set(kinds)


def test_every_layer_method_and_model_is_in_the_table():
    layers = [v for v in vars(nn).values() if isinstance(v, type) and inspect.signature(v).parameters]
    own = {nn.Sequential, nn.Coupling}  # take layers and functions
    networks = [v for n, v in vars(models).items() if inspect.isfunction(v)]
    assert set(layers) - own | set(networks) <= set(TABLE)
    methods = (
        mw.Moonwalk,
        mw.PureForward,
        mw.Checkpoint,
        mw.Reversible,
        mw.Forward,
        mw.ProjectedForward,
    )
    assert {*methods, mw.Fragment} <= set(TABLE)


def test_numbers_of_numpy_will_do():
    assert mw.Moonwalk(anchor_every=np.int64(3), tolerance=np.float32(0.5), inputs=np.int32(1)) == (
        mw.Moonwalk(anchor_every=3, tolerance=0.5, inputs=1)
    )
    assert mw.Checkpoint(np.int64(2)) == mw.Checkpoint(2) and mw.Fragment(np.int8(4)) == mw.Fragment(4)
    assert hash(mw.Forward(np.int64(2))) == hash(mw.Forward(2))
    assert nn.Linear(np.int64(3), np.int32(2), key=KEY).raw.shape == (3, 2)


@pytest.mark.parametrize("method", [mw.Moonwalk, mw.PureForward, mw.Checkpoint, mw.Reversible])
def test_one_input_or_several(method):
    """As `argnums` takes them, and with the gradients that JAX has."""
    assert method(inputs=1).inputs == method(inputs=(1,)).inputs == method(inputs=[1]).inputs == (1,)

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ mw.declare(w, "orthogonal")) ** 2)

    args = jnp.eye(3), jnp.linspace(0.1, 1.0, 6).reshape(2, 3)
    found = mw.grad(loss, (0, 1), method=method(inputs=1))(*args)
    for a, b in zip(found, jax.grad(loss, (0, 1))(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


MESSAGES = [
    (lambda: mw.Moonwalk(tolerance="a"), "Moonwalk: tolerance must be positive (math.inf for no anchors), got 'a'"),
    (lambda: mw.Moonwalk(tolerance=NAN), "Moonwalk: tolerance must be positive (math.inf for no anchors), got nan"),
    (lambda: mw.Moonwalk(inputs="x"), "Moonwalk: inputs takes numbers of differentiated arguments, each once, such as 1 or (1, 2), got 'x'"),
    (lambda: mw.Moonwalk(anchor_every=True), "Moonwalk: anchor_every counts layers, at least 1, got True"),
    (lambda: mw.PureForward(per_example="no"), "PureForward: per_example is True or False, got 'no'"),
    (lambda: mw.Reversible(tolerance=0), "Reversible: tolerance must be positive (math.inf for no limit), got 0"),
    (lambda: nn.Linear(0, 0, key=KEY), "Linear: in_features is a whole number, at least 1, got 0"),
    (lambda: nn.Linear(2, 2, use_bias="no", key=KEY), "Linear: use_bias is True or False, got 'no'"),
    (lambda: nn.Conv2d(2, True, 3, key=KEY), "Conv2d: out_channels is a whole number, at least 1, got True"),
    (lambda: nn.GlobalMean(0), "GlobalMean: dims counts spatial axes, at least 1, got 0"),
    (lambda: models.isometric_mlp((4,), 0, key=KEY), "isometric_mlp: classes is a whole number, at least 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(MESSAGES)))
def test_the_words(number):
    call, words = MESSAGES[number]
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        call()


VECTOR = jnp.ones(3)
CONSTRAINTS = {
    "orthogonal": nn.orthogonal,
    "lower": nn.lower,
    "spectral_bound": nn.spectral_bound,
    "stable_taps": nn.stable_taps,
    "pivot_kernel": lambda raw: nn.pivot_kernel(raw, "lower", (0,)),
    "diagonal": nn.diagonal,
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_refuse_other_ranks_types_and_things(name):
    constraint = CONSTRAINTS[name]
    raw = jnp.ones(()) if name == "diagonal" else VECTOR
    with pytest.raises(ValueError, match=rf"{name}: takes an array \[.*\], got the shape \((3,)?\)"):
        constraint(raw)
    with pytest.raises(TypeError, match=rf"{name}: takes floating-point numbers, got int\d+; convert"):
        constraint(jnp.ones((3, 3, 3), int))
    with pytest.raises(TypeError, match=rf"{name}: takes an array .*, got \[\[1.0\]\] of type list"):
        constraint([[1.0]])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: nn.diagonal(VECTOR, rows=4.0),
            r"diagonal: rows is a whole number, at least 1, got 4.0",
        ),
        (lambda: nn.lower(jnp.eye(2), scale="a"), "lower: scale is a finite number, got 'a'"),
        (lambda: nn.spectral_bound(jnp.eye(2), -1), "squarings is a whole number, at least 0, got -1"),
        (
            lambda: nn.pivot_kernel(jnp.ones((3, 2, 2)), "lower", (7,)),
            r"pivot_kernel: taps names a tap of a kernel of \(3,\), one number per axis, got \(7,\)",
        ),
        (
            lambda: nn.pivot_kernel(jnp.ones((3, 2, 2)), "lower", (1, 1)),
            r"taps names a tap.* got \(1, 1\)",
        ),
        (lambda: nn.pivot_kernel(jnp.ones((3, 2, 2)), "lower", (1,), 0), "groups is a whole number"),
        (
            lambda: nn.pivot_taps((8,), (3, 3), (1,), ((1, 1),), (1,)),
            r"pivot_taps: kernel_size has a positive number for every spatial axis, got \(3, 3\)",
        ),
        (lambda: nn.pivot_taps(8, 3, 1, 1, 1), "pivot_taps: size has a positive number for every"),
        (
            lambda: nn.pivot_taps((8,), (3,), (1,), (1,), (1,)),
            r"pivot_taps: padding has a pair of numbers for every spatial axis, got \(1,\)",
        ),
    ],
)
def test_what_constraints_say_to_wrong_settings(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: nn.paraunitary_kernel(VECTOR), "takes what paraunitary_init returns"),
        (
            lambda: nn.Stack(3, 2, key=KEY),
            "Stack: make is a function of a key that returns a layer, got 3",
        ),
        (lambda: nn.Sequential(nn.Abs()), "Sequential: takes a list of layers, got Abs"),
        (lambda: nn.Coupling(3, jnp.tanh), "Coupling: f is a function of one half of the state, got 3"),
        (lambda: nn.Coupling(jnp.tanh, None), "Coupling: g is a function of one half"),
    ],
)
def test_what_is_no_function(call, words):
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            dict(fallback="x"),
            r"vijp: fallback takes None \(raise\) or a rule, moonwalk.MatrixFree\(\), got 'x'",
        ),
        (dict(fallback=mw.MatrixFree), r"; call it: MatrixFree\(\)"),
        (dict(has_aux="no"), "vijp: has_aux is True or False, got 'no'"),
        (dict(check="no"), r"vijp: check is None .*, got 'no'"),
    ],
)
def test_settings_of_vijp(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        mw.vijp(jnp.sin, VECTOR, **options)
    with pytest.raises(TypeError, match="vijp: fun is a function of the primals, got 3"):
        mw.vijp(3, VECTOR)


def test_sizes_may_be_lists():
    assert settings.sizes("f", "size", [1, np.int64(2)], (2,), "is a size") == (1, 2)
    with pytest.raises(ValueError, match=r"f: size is a size, got \(1, 0\)"):
        settings.sizes("f", "size", [1, 0], (2,), "is a size")
