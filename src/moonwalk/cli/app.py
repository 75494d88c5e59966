"""The commands and their options."""

from __future__ import annotations

import ast
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import models
from ..errors import MoonwalkError
from ..training import METHODS, OPTIMIZERS, SCHEDULES, nearest
from . import train as training_run

app = typer.Typer(
    name="moonwalk",
    help="Exact gradients of deep networks without keeping their activations.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

MODELS = [n for n in sorted(dir(models)) if callable(getattr(models, n)) and not n.startswith("_")]
DATA = ("mnist1d", "fashion-mnist", "cifar10")
AUGMENT = ("none", "flip", "crop", "flip-and-crop")


def _show_version(asked: bool) -> None:
    if asked:
        try:
            print(version("moonwalk-jax"))
        except PackageNotFoundError:
            print("0.0.0+source")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Exact gradients of deep networks without keeping their activations."""


def _one_of(kind: str, names: Any) -> Any:
    """A callback that suggests the nearest name."""

    def check(given: str) -> str:
        if given not in names:
            raise typer.BadParameter(nearest(kind, given, names))
        return given

    return check


def _model(given: str) -> str:
    return _one_of("model", MODELS)(given.replace("-", "_"))


def _data(given: str) -> str:
    return given if given.endswith(".npz") else _one_of("data set", DATA)(given)


def _assignment(given: str) -> tuple[str, Any]:
    """'width=64' -> ('width', 64); values are Python's, or else plain words."""
    name, found, value = given.partition("=")
    if not found or not name.isidentifier():
        raise typer.BadParameter(f"expected name=value, got {given!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


@app.command()
def train(
    model: Annotated[
        str, typer.Option(callback=_model, help=f"Of moonwalk.models: {', '.join(MODELS)}.")
    ] = "isometric_mlp",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of the model; may be repeated."),
    ] = None,
    data: Annotated[
        str,
        typer.Option(callback=_data, help=f"{', '.join(DATA)}, or a .npz file of moonwalk.data."),
    ] = "mnist1d",
    data_path: Annotated[
        Path | None,
        typer.Option(help="The folder, or archive, of fashion-mnist or cifar10."),
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="A folder for images once decoded.")] = None,
    method: Annotated[
        str, typer.Option(callback=_one_of("method", METHODS), help=f"{', '.join(METHODS)}.")
    ] = "moonwalk",
    optimizer: Annotated[
        str, typer.Option(callback=_one_of("optimizer", OPTIMIZERS), help=f"{', '.join(OPTIMIZERS)}.")
    ] = "adam",
    rate: Annotated[float, typer.Option(help="The learning rate.")] = 1e-3,
    schedule: Annotated[
        str, typer.Option(callback=_one_of("schedule", SCHEDULES), help=f"{', '.join(SCHEDULES)}.")
    ] = "constant",
    steps: Annotated[int, typer.Option(min=1, help="In all, those before a --resume included.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Examples in a batch.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, batches and augmentation.")] = 0,
    augment: Annotated[
        str, typer.Option(callback=_one_of("augmentation", AUGMENT), help=f"{', '.join(AUGMENT)}.")
    ] = "none",
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Plan from the initial weights: for undeclared layers."),
    ] = False,
    on_inexact: Annotated[
        str,
        typer.Option(
            callback=_one_of("choice", ("stop", "replan")),
            help="When a certificate exceeds the tolerance: stop, or replan with more anchors.",
        ),
    ] = "stop",
    out: Annotated[Path, typer.Option(help="The folder for what it leaves.")] = Path("moonwalk-run"),
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the last checkpoint in --out, if any."),
    ] = False,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    evaluate_every: Annotated[
        int, typer.Option(min=1, help="Steps between looks at the test examples.")
    ] = 100,
    steps_per_call: Annotated[
        int, typer.Option(min=1, help="Steps that run as one program; more is faster on a GPU.")
    ] = 1,
    compare_memory: Annotated[
        bool, typer.Option(help="Compile backpropagation too, to show its memory.")
    ] = True,
) -> None:
    """Train a network on a data set, by Moonwalk or by backpropagation."""
    request = training_run.Request(
        model=model,
        model_settings=dict(map(_assignment, settings or ())),
        data=data,
        data_path=data_path,
        cache=cache,
        method=method,
        optimizer=optimizer,
        rate=rate,
        schedule=schedule,
        steps=steps,
        batch=batch,
        seed=seed,
        augment=augment,
        measure=measure,
        on_inexact=on_inexact,
        out=out,
        resume=resume,
        checkpoint_every=checkpoint_every,
        evaluate_every=evaluate_every,
        steps_per_call=steps_per_call,
        compare_memory=compare_memory,
    )
    try:
        training_run.run(request)
    except (MoonwalkError, ValueError, TypeError, ImportError, OSError) as error:
        typer.echo(f"moonwalk train: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo(f"moonwalk train: stopped; --resume goes on from {out}", err=True)
        raise typer.Exit(130) from None
