"""The commands and their options."""

from __future__ import annotations

import ast
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from ... import models, settings
from ...errors import MoonwalkError
from ..bench import Request, command, experiments
from ..training import METHODS, OPTIMIZERS, SCHEDULES, nearest
from . import bench as bench_run
from . import plan as plan_run
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


def _positive(given: float) -> float:
    if not 0 < given < float("inf"):
        raise typer.BadParameter(f"expected a positive number, got {given:g}")
    return given


def _at_least(least: int) -> Any:
    """A callback that refuses smaller numbers, and says which it got."""

    def check(given: int) -> int:
        if given < least:
            raise typer.BadParameter(f"expected a whole number, at least {least}, got {given}")
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
    rate: Annotated[float, typer.Option(callback=_positive, help="The learning rate.")] = 1e-3,
    schedule: Annotated[
        str, typer.Option(callback=_one_of("schedule", SCHEDULES), help=f"{', '.join(SCHEDULES)}.")
    ] = "constant",
    steps: Annotated[
        int, typer.Option(callback=_at_least(1), help="In all, those before a --resume included.")
    ] = 1000,
    batch: Annotated[int, typer.Option(callback=_at_least(1), help="Examples in a batch.")] = 128,
    seed: Annotated[
        int, typer.Option(callback=_at_least(0), help="Of weights, batches and augmentation.")
    ] = 0,
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
    checkpoint_every: Annotated[
        int, typer.Option(callback=_at_least(1), help="Steps between checkpoints.")
    ] = 100,
    evaluate_every: Annotated[
        int, typer.Option(callback=_at_least(1), help="Steps between looks at the test examples.")
    ] = 100,
    steps_per_call: Annotated[
        int,
        typer.Option(
            callback=_at_least(1), help="Steps that run as one program; more is faster on a GPU."
        ),
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


def _experiments(given: list[str]) -> list[str]:
    return [_one_of("experiment", experiments.NAMES)(name) for name in given]


def _size(given: str | None) -> int | None:
    try:
        return None if given is None else settings.size("moonwalk bench", "limit", given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="EXPERIMENT",
            callback=lambda given: _experiments(given or []),
            help=f"{', '.join(experiments.NAMES)}.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All experiments.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="The smallest sizes that still show something.")
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            callback=_one_of("device", command.DEVICES),
            help="cpu, gpu (with the paper's sizes), or auto: a GPU where there is one.",
        ),
    ] = "auto",
    out: Annotated[
        Path, typer.Option(help="The folder for what it leaves; begun there before, it goes on.")
    ] = command.Options.out,
    limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of depth and batch: memory, such as 24GB or 512MiB."),
    ] = None,
    residual: Annotated[bool, typer.Option("--residual", help="fig2 with skips.")] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Images for fig4: a folder of Fashion-MNIST, or a .npz file of moonwalk.data."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(callback=_at_least(0), help="Of weights and data.")] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD", help="Only what has this word in its line of --dry-run; repeatable."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(callback=_positive, help="Seconds for one measurement.")
    ] = command.Options.timeout,
    jobs: Annotated[
        int,
        typer.Option(
            callback=_at_least(1), help="Measurements that compile at once; they run one by one."
        ),
    ] = 1,
    retry: Annotated[bool, typer.Option("--retry", help="Measure once more what failed.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what --out has.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be measured.")] = False,
    report_only: Annotated[
        bool,
        typer.Option("--report-only", help="Figures and report of what --out has; without names, all."),
    ] = False,
    commit: Annotated[str, typer.Option(help="For the files, where git is not at hand.")] = "",
) -> None:
    """Measure every method side by side: the paper's table and figures, on this device."""
    request = Request(
        quick=quick,
        residual=residual,
        limit_bytes=_size(limit),
        seed=seed,
        data=None if data is None else str(data),
        only=tuple(only or ()),
    )
    try:
        options = command.Options(
            names or (),
            everything=everything,
            device=device,
            out=out,
            request=request,
            timeout=timeout,
            jobs=jobs,
            retry=retry,
            fresh=fresh,
            dry_run=dry_run,
            report_only=report_only,
            commit=commit,
        )
        bench_run.run(options)
    except (MoonwalkError, ValueError, RuntimeError, ImportError, OSError) as error:
        typer.echo(f"moonwalk bench: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo(f"moonwalk bench: stopped; the same command goes on from {out}", err=True)
        raise typer.Exit(130) from None


@app.command()
def plan(
    where: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function that returns (loss, *args); a module, or a FILE.py.",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An argument of the function; repeatable."),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            callback=_one_of("method", plan_run.METHODS), help=f"{', '.join(plan_run.METHODS)}."
        ),
    ] = "moonwalk",
    has_aux: Annotated[
        bool, typer.Option("--has-aux", help="The loss returns a pair: its value, and auxiliary data.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="The fastest plan within so much memory, such as 8GiB; device: what is free there.",
        ),
    ] = None,
    frontier: Annotated[
        bool, typer.Option("--frontier", help="All plans between least memory and least time.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw these plans; .png, .pdf, .svg.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compile the plan, to show the bytes that it takes.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Every block, with its bytes and the reason.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Print how your own loss would be differentiated: what is walked, kept, recomputed, and why.

    MODULE:FUNCTION is called without arguments, or with those of --set, and returns the loss and what it
    is called with; gradients are for the first of these. The current folder is searched for modules.
    """
    try:
        request = plan_run.Request(
            where=where,
            settings=dict(map(_assignment, settings or ())),
            method=method,
            has_aux=has_aux,
            budget=budget,
            frontier=frontier,
            plot=plot,
            verify=verify,
            table=table,
            json=json,
        )
        text = plan_run.answer(request)
    except (MoonwalkError, ValueError, TypeError, ImportError, OSError) as error:
        notes = getattr(error, "__notes__", ())
        typer.echo("\n".join([f"moonwalk plan: {error}", *notes]), err=True)
        raise typer.Exit(1) from error
    typer.echo(text)
