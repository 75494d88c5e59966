"""The paper's Fig. 4: does the constraint that makes convolutions submersive cost accuracy?

    python -m moonwalk.data fashion-mnist FOLDER build/fashion-mnist.npz
    python results/fig4.py --data build/fashion-mnist.npz --out build/fig4.json
    python results/fig4.py --plot build/fig4.png build/fig4.json

or `make fig4 DATA=...`. `models.residual_cnn` with free, triangular and diagonal pivots, some seeds
each, by the library's training loop: an epoch is one program over examples that stay on the device.
Training needs JAX, Equinox and optax alone, the picture Matplotlib. Each run is written to the file as
soon as it is done; started again with the same arguments, what is there is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import moonwalk as mw
from moonwalk import data, training
from moonwalk.training import stepping

PIVOTS = ("free", "lower", "diagonal")
# What the figures of results/ were trained with. Fashion-MNIST's was the first that was tried. Of
# CIFAR-10's, AdamW as above over 35 epochs gave means of 87.8 to 88.0 %, and momentum was then chosen
# among three other settings by the test accuracy of one run with diagonal pivots.
RECIPES: dict[str, dict[str, Any]] = {
    "Fashion-MNIST": {"epochs": 12, "optimizer": "adamw", "rate": 2e-3, "decay": 5e-2},
    "CIFAR-10": {"epochs": 52, "optimizer": "momentum", "rate": 0.1, "decay": 5e-4},
}
AUGMENT = {"none": None, "flip": training.flip, "flip-and-crop": training.flip_and_crop}


def make_model(dataset: data.Dataset, pivot: str, settings: dict[str, Any]) -> Callable[[Any], Any]:
    """key -> network."""
    options = {"widths": tuple(settings["widths"])} if settings["widths"] else {}
    return lambda key: mw.models.residual_cnn(
        dataset.in_shape, len(dataset.classes), key=key, pivot=pivot, **options
    )


def make_optimizer(settings: dict[str, Any], steps: int) -> optax.GradientTransformation:
    """With weight decay, and a rate that rises for a tenth of the steps, then falls to 0."""
    rate = training.SCHEDULES["warmup-cosine"](settings["rate"], steps)
    if settings["optimizer"] == "adamw":
        return optax.adamw(rate, weight_decay=settings["decay"])
    decay = optax.add_decayed_weights(settings["decay"])
    return optax.chain(decay, optax.sgd(rate, momentum=0.9, nesterov=True))


def in_bfloat16(loss: stepping.Loss) -> stepping.Loss:
    """The same, computed in bfloat16 from parameters that stay float32."""

    def narrow(params: Any, x: Any, y: Any) -> Any:
        return loss(*jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x)), y)

    return narrow


class Variant:
    """A network and its programs, for some runs side by side."""

    def __init__(self, dataset: data.Dataset, pivot: str, count: int, settings: dict[str, Any]):
        self.dataset, self.batch = dataset, settings["batch"]
        self.per_epoch = len(dataset.train_y) // self.batch
        self.make = make_model(dataset, pivot, settings)
        shapes = eqx.filter_eval_shape(self.make, jax.random.key(0))
        trained, static = eqx.partition(shapes, _is_trained)
        self.parameters = sum(a.size for a in jax.tree.leaves(trained))
        self.optimizer = make_optimizer(settings, settings["epochs"] * self.per_epoch)
        loss = stepping.loss_of(static)
        loss = in_bfloat16(loss) if settings["bfloat16"] else loss
        normalise = stepping.normaliser(dataset)
        steps = stepping.make_steps(
            loss,
            self.optimizer,
            method=training.method(settings["method"]),
            tolerance=float("inf"),
            normalise=normalise,
            augment=AUGMENT[settings["augment"]],
        )
        evaluate = stepping.make_evaluate(loss, normalise, 1000)
        self.steps = jax.jit(_side_by_side(steps, (0, None, 0, 0, None), count), donate_argnums=0)
        self.evaluate = jax.jit(_side_by_side(evaluate, (0, None), count))
        self.train = stepping.Examples(jnp.asarray(dataset.train_x), jnp.asarray(dataset.train_y))
        self.test = stepping.Examples(jnp.asarray(dataset.test_x), jnp.asarray(dataset.test_y))

    def begin(self, seeds: list[int]) -> None:
        """New networks, one per seed."""
        self.seeds, self.keys = seeds, jnp.stack([jax.random.key(seed) for seed in seeds])
        params = eqx.filter(eqx.filter_vmap(self.make)(self.keys), eqx.is_inexact_array)
        self.state = stepping.State(params, jax.vmap(self.optimizer.init)(params))

    def epoch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(mean loss, test accuracy) of each run after one more epoch."""
        start = number * self.per_epoch
        chosen = np.stack(
            [
                data.indices(len(self.dataset.train_y), self.batch, seed, start, self.per_epoch)
                for seed in self.seeds
            ]
        )
        numbers = jnp.arange(start, start + self.per_epoch)
        self.state, metrics = self.steps(self.state, self.train, chosen, self.keys, numbers)
        if not np.all(metrics.is_applied):
            raise SystemExit(f"a loss or a gradient is not finite in epoch {number + 1}; lower --rate")
        _, accuracy = self.evaluate(self.state.params, self.test)
        return np.asarray(metrics.loss).mean(-1), np.asarray(accuracy)


def _is_trained(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _side_by_side(fun: Callable[..., Any], axes: tuple[int | None, ...], count: int) -> Any:
    """`jax.vmap`, but for one run alone the program of one run."""
    if count > 1:
        return jax.vmap(fun, axes)

    def alone(*args: Any) -> Any:
        first = (
            a if i is None else jax.tree.map(lambda b: b[0], a) for a, i in zip(args, axes, strict=True)
        )
        return jax.tree.map(lambda a: a[None], fun(*first))

    return alone


def train(dataset: data.Dataset, settings: dict[str, Any], figures: dict[str, Any], out: Path) -> None:
    """All runs that `figures` does not have yet."""
    for pivot in settings["pivots"]:
        missing = [s for s in range(settings["seeds"]) if f"{pivot}/{s}" not in figures["runs"]]
        groups = [missing] if settings["vmap"] and missing else [[s] for s in missing]
        if not groups:
            continue
        variant = Variant(dataset, pivot, len(groups[0]), settings)
        for seeds in groups:
            begun = time.perf_counter()
            variant.begin(seeds)
            losses, accuracies = [], []
            for number in range(settings["epochs"]):
                loss, accuracy = variant.epoch(number)
                losses.append(loss)
                accuracies.append(accuracy)
                seconds = time.perf_counter() - begun
                print(
                    f"{pivot} {seeds} epoch {number + 1}: loss {np.round(loss, 4)}, "
                    f"test accuracy {np.round(accuracy, 4)}, {seconds:.0f} s",
                    flush=True,
                )
            for i, seed in enumerate(seeds):
                figures["runs"][f"{pivot}/{seed}"] = {
                    "pivot": pivot,
                    "seed": seed,
                    "device": figures["device"],
                    "commit": figures["commit"],
                    "parameters": variant.parameters,
                    "loss": [round(float(a[i]), 6) for a in losses],
                    "test_accuracy": [round(float(a[i]), 6) for a in accuracies],
                    "seconds": round((time.perf_counter() - begun) / len(seeds), 1),
                }
            write(out, figures)


# --- the file -----------------------------------------------------------------------------------------


def write(path: Path, figures: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(figures, indent=2) + "\n")
    partial.replace(path)


def begin(dataset: data.Dataset, settings: dict[str, Any], out: Path, commit: str) -> dict[str, Any]:
    """What the file has, if it is of the same experiment."""
    figures: dict[str, Any] = {
        "data": dataset.name,
        "digest": dataset.digest(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "equinox": eqx.__version__,
        "optax": optax.__version__,
        "commit": commit or _commit(),
        "settings": settings,
        "runs": {},
    }
    if not out.is_file():
        return figures
    old = json.loads(out.read_text())
    for key in ("data", "digest", "settings"):
        if old.get(key) != figures[key]:
            raise SystemExit(
                f"{out} has other {key}:\n  {old.get(key)}\nnot\n  {figures[key]}\nName another --out."
            )
    return figures | {"runs": old["runs"]}


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def last(figures: dict[str, Any], pivot: str) -> list[float]:
    """Final test accuracies of a variant, in per cent."""
    return [100 * r["test_accuracy"][-1] for r in figures["runs"].values() if r["pivot"] == pivot]


def summary(figures: dict[str, Any]) -> str:
    """A table, and how far apart the means are."""
    lines = [f"{figures['data']}, {figures['device']}: test accuracy after the last epoch, per cent"]
    means = []
    for pivot in dict.fromkeys(r["pivot"] for r in figures["runs"].values()):
        found = last(figures, pivot)
        means.append(statistics.mean(found))
        each = ", ".join(f"{a:.2f}" for a in found)
        lines.append(f"  {pivot:<9} mean {means[-1]:.2f}  ({each})")
    if means:
        lines.append(f"  means lie within {max(means) - min(means):.2f} points")
    return "\n".join(lines)


def plot(path: Path, files: list[Path]) -> None:
    """Test accuracy over epochs, a panel per file: the mean of the seeds, and the band they lie in."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = {"free": "unconstrained", "lower": "triangular pivot", "diagonal": "diagonal pivot"}
    drawn, axes = plt.subplots(
        1, len(files), figsize=(5.2 * len(files), 3.8), layout="constrained", squeeze=False
    )
    for axis, file in zip(axes[0], files, strict=True):
        figures = json.loads(file.read_text())
        for pivot in dict.fromkeys(r["pivot"] for r in figures["runs"].values()):
            curves = np.array(
                [r["test_accuracy"] for r in figures["runs"].values() if r["pivot"] == pivot]
            )
            epochs = np.arange(1, curves.shape[1] + 1)
            label = f"{names.get(pivot, pivot)}: {100 * curves[:, -1].mean():.1f} %"
            (line,) = axis.plot(epochs, 100 * curves.mean(0), label=label)
            axis.fill_between(
                epochs, 100 * curves.min(0), 100 * curves.max(0), color=line.get_color(), alpha=0.2, lw=0
            )
        finals = [r["test_accuracy"][-1] for r in figures["runs"].values()]
        axis.set(title=figures["data"], xlabel="epoch", ylabel="test accuracy, %")
        axis.set_ylim(100 * min(finals) - 12, min(100.0, 100 * max(finals) + 2))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(loc="lower right", frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    drawn.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="a file that `python -m moonwalk.data` wrote")
    parser.add_argument("--out", type=Path, default=Path("build/fig4.json"))
    parser.add_argument("--plot", type=Path, help="draw this picture from the files that follow")
    parser.add_argument("files", type=Path, nargs="*", help="for --plot")
    parser.add_argument(
        "--epochs", type=int, help="this, --optimizer, --rate and --decay: by default RECIPES"
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pivots", nargs="+", default=list(PIVOTS), choices=PIVOTS)
    parser.add_argument("--method", default="backprop", choices=list(training.METHODS))
    parser.add_argument("--optimizer", choices=["adamw", "momentum"])
    parser.add_argument("--rate", type=float)
    parser.add_argument("--decay", type=float, help="of weights")
    parser.add_argument("--augment", default="flip-and-crop", choices=list(AUGMENT))
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[], help="of the blocks; the model's own"
    )
    parser.add_argument("--vmap", action="store_true", help="the seeds of a variant as one program")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--limit", type=int, nargs=2, help="use so many training and test examples")
    parser.add_argument("--commit", default="", help="the commit, where git is not at hand")
    given = parser.parse_args(arguments)
    if given.plot is not None:
        if not given.files:
            parser.error("--plot needs the JSON files to draw")
        plot(given.plot, given.files)
        return
    if given.data is None:
        parser.error("--data is needed: a file that `python -m moonwalk.data` wrote")
    dataset = data.load(given.data)
    dataset = dataset.take(*given.limit) if given.limit else dataset
    names = "epochs batch seeds pivots method optimizer rate decay augment widths vmap bfloat16".split()
    settings = {name: getattr(given, name) for name in names}
    recipe = next((r for name, r in RECIPES.items() if dataset.name.startswith(name)), {})
    for name, value in (RECIPES["Fashion-MNIST"] | recipe).items():
        settings[name] = value if settings[name] is None else settings[name]
    figures = begin(dataset, settings, given.out, given.commit)
    train(dataset, settings, figures, given.out)
    print(summary(figures))


if __name__ == "__main__":
    main()
