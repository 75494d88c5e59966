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
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

from moonwalk import data, training
from moonwalk.bench.accuracy import AUGMENT, PIVOTS, Variant, recipe


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
        "--epochs",
        type=int,
        help="this, --optimizer, --rate and --decay: by default those of moonwalk.bench.accuracy",
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
    for name, value in recipe(dataset).items():
        settings[name] = value if settings[name] is None else settings[name]
    figures = begin(dataset, settings, given.out, given.commit)
    train(dataset, settings, figures, given.out)
    print(summary(figures))


if __name__ == "__main__":
    main()
