"""`fit`: the training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ... import _jax, preview, settings
from ...errors import InexactError, NonFiniteError
from ...gradient import Unplanned
from ...planning.methods import Backprop, Moonwalk
from ...planning.report import Plan
from .. import data
from ..data import Dataset
from . import names, stepping
from .checkpoints import Checkpoints, Saved
from .records import Record
from .stepping import Augment, Examples, Metrics, State

ON_INEXACT = ("stop", "replan")
REPLANS = 3  # for one step; see `stricter`


@dataclass(frozen=True)
class Result:
    """What training made."""

    model: Any
    opt_state: Any
    records: tuple[Record, ...]  # those of this call; a resumed run's begin where it resumed
    plan: Plan | None  # the plan of the last steps; None if the method has none
    temp_bytes: int  # for a program of `steps_per_call` steps, besides its arguments
    backprop_bytes: int | None  # the same for backpropagation, with `compare_memory`
    replans: int


def fit(
    model: Any,
    dataset: Dataset,
    *,
    optimizer: optax.GradientTransformation,
    steps: int,
    method: Any = "moonwalk",
    batch: int = 64,
    seed: int = 0,
    augment: Augment | None = None,
    measure: bool = False,
    on_inexact: str = "stop",
    steps_per_call: int = 1,
    evaluate_every: int | None = None,
    compare_memory: bool = False,
    checkpoints: Checkpoints | None = None,
    checkpoint_every: int | None = None,
    on_start: Callable[[int, int, int | None], None] | None = None,
    callbacks: Sequence[Callable[[Record], None]] = (),
) -> Result:
    """Train a classifier: softmax cross entropy, accuracy, any optax optimizer.

    The batch of a step depends on the seed and the step's number alone, so that a run that was killed,
    and is started again with the same arguments and `checkpoints`, ends with the same bits.

    **Arguments:**

    - `model`: an Equinox module (any pytree that is callable) from `[batch, *in_shape]` to logits
        `[batch, classes]`. Its inexact arrays are trained.
    - `dataset`: of `moonwalk.data`.
    - `optimizer`: of optax, or `training.optimizer(name, rate, ...)`.
    - `steps`: the total number, including those of earlier runs.
    - `method`: a name of `training.METHODS`, or what `moonwalk.value_and_grad` takes.
    - `batch`, `seed`: see `data.indices`.
    - `augment`: a function (key, x), applied to batches as the data set stores them, such as
        `training.flip_and_crop`.
    - `measure`: plan from the model's values, for weights that are not declared (README, *Plans from
        concrete weights*).
    - `on_inexact`: "stop" raises `InexactError` at a step whose certificate exceeds the plan's
        tolerance; "replan" makes a new plan for that step from its starting weights, with more anchors
        each time, and stops only if an anchor at every layer does not help.
    - `steps_per_call`: how many steps run as one program, unobserved. Larger numbers are faster on a
        GPU.
    - `evaluate_every`: after how many steps the test examples are evaluated; None: only after the last.
    - `compare_memory`: also compile the program for backpropagation, to compare memory.
    - `checkpoints`, `checkpoint_every`: where states are saved, after how many steps (None: after the
        last); training goes on from the last one there.
    - `on_start`: called with (the first step, bytes of temporaries, those of backpropagation or None).
    - `callbacks`: called with the `Record` of each step, in order.

    **Example:**

    >>> import equinox as eqx, jax, optax
    >>> from moonwalk import data, training
    >>> class Network(eqx.Module):
    ...     head: eqx.nn.Linear
    ...     def __call__(self, x):
    ...         return jax.vmap(self.head)(x.reshape(len(x), -1))
    >>> found = training.fit(
    ...     Network(eqx.nn.Linear(40, 10, key=jax.random.key(0))),
    ...     data.mnist1d(),
    ...     optimizer=optax.adam(1e-2),
    ...     steps=30,
    ...     method="backprop",
    ... )
    >>> found.records[-1].test_accuracy > 0.2
    True
    """
    _check_settings(on_inexact, steps, steps_per_call, evaluate_every, checkpoint_every)
    _check_counts(batch, seed, measure=measure, compare_memory=compare_memory)
    _check_parts(model, dataset, optimizer, augment, checkpoints, on_start, *callbacks)
    trainer = _Trainer(model, dataset, optimizer, names.method(method), batch, seed, augment)
    trainer.plan(trainer.state.params, 0, 0, measure)
    step, before = 0, 0.0
    planned: tuple[int, int] = (0, 0)
    saved = None if checkpoints is None else checkpoints.latest(trainer.state)
    if checkpoints is not None and saved is not None:
        step, before, planned = saved.step, saved.seconds, saved.planned
        if planned != (0, 0):
            params = checkpoints.at(planned[0], trainer.state).state.params
            trainer.plan(params, planned[0], planned[1], measure=True)
        trainer.state = saved.state

    memory = trainer.memory(steps_per_call)
    backprop = None
    if compare_memory:
        backprop = memory if trainer.is_backprop else trainer.memory(steps_per_call, Backprop())
    if on_start is not None:
        on_start(step, memory, backprop)
    records: list[Record] = []
    replans = retries = 0
    begun = time.perf_counter()
    while step < steps:
        # Programs end at multiples of `steps_per_call`, wherever a run resumes.
        count = min(steps_per_call - step % steps_per_call, steps - step)
        metrics = trainer.run(step, count)
        seconds = before + time.perf_counter() - begun
        applied = int(np.sum(metrics.is_applied))
        fresh = [
            Record(step + i + 1, float(m.loss), float(m.accuracy), float(m.certificate), seconds)
            for i, m in enumerate(Metrics(*each) for each in zip(*metrics, strict=True))
            if m.is_applied
        ]
        step += applied
        retries = 0 if applied else retries
        if applied == count and (step == steps or _is_due(step, evaluate_every)):
            test_loss, test_accuracy = trainer.evaluate()
            fresh[-1] = replace(fresh[-1], test_loss=test_loss, test_accuracy=test_accuracy)
        records += fresh
        for record in fresh:
            for callback in callbacks:
                callback(record)
        if applied < count:
            _stop(step, metrics, applied, trainer, checkpoints, on_inexact, retries)
            retries, replans = retries + 1, replans + 1
            if checkpoints is not None:  # later checkpoints refer to these weights for their plan
                checkpoints.save(Saved(trainer.state, step, seconds, planned), protect=True)
            planned = (step, retries)
            trainer.plan(trainer.state.params, step, retries, measure=True)
        elif checkpoints is not None and (step == steps or _is_due(step, checkpoint_every)):
            checkpoints.save(Saved(trainer.state, step, seconds, planned))
    trained = eqx.combine(trainer.state.params, trainer.static)
    state = trainer.state.opt_state
    return Result(trained, state, tuple(records), trainer.current, memory, backprop, replans)


class _Trainer:
    """A model and its data on the device, and the programs for them."""

    def __init__(
        self,
        model: Any,
        dataset: Dataset,
        optimizer: optax.GradientTransformation,
        method: Any,
        batch: int,
        seed: int,
        augment: Augment | None,
    ):
        params, self.static = eqx.partition(model, eqx.is_inexact_array)
        if not jax.tree.leaves(params):
            raise TypeError(
                f"fit: {type(model).__name__} has no inexact arrays to train; a model must be a pytree "
                "that holds them, as Equinox modules are (a function that closes over them is not)"
            )
        # Programs reuse the state's memory, so it must not be the caller's.
        params = jax.tree.map(jnp.copy, params)
        self.state = State(params, optimizer.init(params))
        _check_logits(params, self.static, dataset, batch)
        self.loss = stepping.loss_of(self.static)
        self.dataset, self.optimizer, self.method = dataset, optimizer, method
        self.batch, self.seed, self.augment = batch, seed, augment
        self.normalise = stepping.normaliser(dataset)
        self.train = Examples(jnp.asarray(dataset.train_x), jnp.asarray(dataset.train_y))
        self.test = Examples(jnp.asarray(dataset.test_x), jnp.asarray(dataset.test_y))
        self.key = jax.random.key(seed)
        self.programs: dict[int, Any] = {}
        self.evaluation: Any = None
        self.current: Plan | None = None
        self.tolerance = float("inf")

    @property
    def is_backprop(self) -> bool:
        return isinstance(self.method, Backprop)

    def plan(self, params: Any, step: int, attempt: int, measure: bool) -> None:
        """Plan how to differentiate at `params`, with the batch of `step`."""
        if isinstance(self.method, Unplanned):
            return
        self.programs.clear()
        settings, planned = self.method, None
        if isinstance(settings, Plan):
            settings, planned = settings.method, settings
        if attempt or planned is None:
            rows = data.indices(len(self.dataset.train_y), self.batch, self.seed, step, 1)[0]
            args = (params, self.normalise(self.train.x[rows]), self.train.y[rows])
            if not measure:
                args = jax.eval_shape(lambda *a: a, *args)
            settings = stricter(settings, self.tolerance, attempt)
            with _jax.keeping_barriers():
                planned = preview.plan(self.loss, *args, method=settings, has_aux=True)
        self.current = planned
        if not attempt:
            self.tolerance = planned.tolerance

    def run(self, step: int, count: int) -> Metrics:
        """Take some steps, and wait for them."""
        arguments = self._arguments(step, count)
        self.state, metrics = self._program(arguments)(*arguments)
        return jax.tree.map(np.asarray, metrics)

    def memory(self, count: int, method: Any = None) -> int:
        """Bytes of temporaries of a program of `count` steps."""
        arguments = self._arguments(0, count)
        program = self._program(arguments) if method is None else self._compile(arguments, method)
        return stepping.temporaries(program)

    def evaluate(self) -> tuple[float, float]:
        """(mean loss, accuracy) over the test examples."""
        if self.evaluation is None:
            fun = stepping.make_evaluate(self.loss, self.normalise, max(self.batch, 256))
            self.evaluation = stepping.compiled(fun, self.state.params, self.test)
        loss, accuracy = self.evaluation(self.state.params, self.test)
        return float(loss), float(accuracy)

    def _program(self, arguments: tuple[Any, ...]) -> Any:
        count = len(arguments[-1])
        if count not in self.programs:
            method = self.method if self.current is None else self.current
            self.programs[count] = self._compile(arguments, method)
        return self.programs[count]

    def _compile(self, arguments: tuple[Any, ...], method: Any) -> Any:
        fun = stepping.make_steps(
            self.loss,
            self.optimizer,
            method=method,
            tolerance=self.tolerance,
            normalise=self.normalise,
            augment=self.augment,
        )
        return stepping.compiled(fun, *arguments, donate=True)

    def _arguments(self, step: int, count: int) -> tuple[Any, ...]:
        chosen = data.indices(len(self.dataset.train_y), self.batch, self.seed, step, count)
        numbers = np.arange(step, step + count, dtype=np.int32)
        return self.state, self.train, jnp.asarray(chosen), self.key, jnp.asarray(numbers)


def stricter(method: Any, tolerance: float, attempt: int) -> Any:
    """The settings for another attempt at a step whose walk was less exact than `tolerance`.

    The first attempt only measures gains again; the second allows the plan a hundredth of the error; the
    third puts an anchor at every layer.
    """
    if attempt <= 1:
        return method
    if attempt < REPLANS:
        return replace(method, tolerance=tolerance / 100)
    return replace(method, anchor_every=1)


def _is_due(step: int, every: int | None) -> bool:
    return bool(every) and step % every == 0  # type: ignore[operator]


def _stop(
    step: int,
    metrics: Metrics,
    applied: int,
    trainer: _Trainer,
    checkpoints: Checkpoints | None,
    on_inexact: str,
    retries: int,
) -> None:
    """Raise, unless a new plan may help."""
    where = f"step {step + 1}: "
    last = None if checkpoints is None else checkpoints.last_step
    kept = " There is no checkpoint." if last is None else f" The last checkpoint is after step {last}."
    if not metrics.is_finite[applied]:
        loss = float(metrics.loss[applied])
        what = f"the loss is {loss}" if not np.isfinite(loss) else f"at a loss of {loss:.4g} a gradient"
        what += "" if not np.isfinite(loss) else " is not finite"
        raise NonFiniteError(
            f"{where}{what}. Nothing of this step was applied.{kept} A lower learning rate, or clipped "
            "gradients, may help."
        )
    settings = trainer.method.method if isinstance(trainer.method, Plan) else trainer.method
    can_replan = isinstance(settings, Moonwalk) and retries < REPLANS
    if on_inexact == "replan" and can_replan:
        return
    tried = f", and {retries} new plans did not help" if retries else ""
    if not isinstance(settings, Moonwalk):
        raise InexactError(
            f"{where}the certificate {float(metrics.certificate[applied]):.1e} exceeds the tolerance "
            f"{trainer.tolerance:.1e}. Nothing of this step was applied.{kept} Use moonwalk.Moonwalk(), "
            f"or allow more ({type(settings).__name__}(tolerance=...))."
        )
    raise InexactError(
        f"{where}the certificate {float(metrics.certificate[applied]):.1e} exceeds the tolerance "
        f"{trainer.tolerance:.1e}{tried}. Nothing of this step was applied.{kept} Plan from the weights "
        "(measure), let the run plan anew (on_inexact 'replan'), allow more (Moonwalk(tolerance=...)), "
        "or use constrained layers (moonwalk.nn)."
    )


def _check_logits(params: Any, static: Any, dataset: Dataset, batch: int) -> None:
    """Refuse labels without a logit: their loss is NaN, which no learning rate would cure."""
    x = jax.ShapeDtypeStruct((batch, *dataset.in_shape), jnp.float32)
    out = jax.eval_shape(lambda p, x: eqx.combine(p, static)(x), params, x)
    shape, classes = getattr(out, "shape", None), len(dataset.classes)
    is_real = shape is not None and jnp.issubdtype(out.dtype, jnp.floating)
    if shape is None or len(shape) != 2 or shape[0] != batch or not is_real:
        found = str(jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", out))
        raise ValueError(
            f"fit: the model takes a batch {list(x.shape)} to logits [{batch}, {classes}], one number "
            f"for each class of {dataset.name}, but it returned {found}"
        )
    if shape[1] < classes:
        raise ValueError(
            f"fit: the model returns {shape[1]} logits, but {dataset.name} has {classes} classes; give "
            "its last layer one output for each"
        )


def _check_parts(
    model: Any,
    dataset: Any,
    optimizer: Any,
    augment: Any,
    checkpoints: Any,
    *calls: Any,
) -> None:
    if not callable(model):
        raise TypeError(
            f"fit: the model is called with a batch and must be callable, as an Equinox module is, got "
            f"{type(model).__name__}"
        )
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"fit: dataset takes a moonwalk.data.Dataset, such as data.mnist1d(), got "
            f"{type(dataset).__name__}"
        )
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            "fit: optimizer takes an optax.GradientTransformation, such as optax.adam(1e-3) or "
            f"training.optimizer('adam', 1e-3), got {optimizer!r}"
        )
    if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
        raise TypeError(
            f"fit: checkpoints takes training.Checkpoints(folder, settings), got {checkpoints!r}"
        )
    for name, call in (("augment", augment), *(("on_start and callbacks", c) for c in calls)):
        if call is not None and not callable(call):
            raise TypeError(f"fit: {name} must be callable, got {call!r}")


def _check_counts(batch: Any, seed: Any, **flags: Any) -> None:
    settings.count("fit", "seed", seed, 0)
    settings.count("fit", "batch", batch)
    for name, value in flags.items():
        settings.flag("fit", name, value)


def _check_settings(
    on_inexact: str,
    steps: int,
    steps_per_call: int,
    evaluate_every: int | None,
    checkpoint_every: int | None,
) -> None:
    settings.counts("fit", steps=steps, steps_per_call=steps_per_call)
    if on_inexact not in ON_INEXACT:
        raise ValueError(f"fit: on_inexact must be 'stop' or 'replan', got {on_inexact!r}")
    for name, every in (("evaluate_every", evaluate_every), ("checkpoint_every", checkpoint_every)):
        if every is not None and (not settings.is_count(every) or every % steps_per_call):
            rule = f"must be a multiple of steps_per_call={steps_per_call}"
            raise settings.refuse("fit", name, rule, every)
