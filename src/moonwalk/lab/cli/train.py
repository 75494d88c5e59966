"""`moonwalk train`: from options to a run, its progress, and what it leaves in a folder."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ... import models
from ...errors import PlanWarning
from ...planning.report import format_bytes
from .. import data, files, training
from ..training import Record

AUGMENT = {
    "none": None,
    "flip": training.flip,
    "crop": training.crop,
    "flip-and-crop": training.flip_and_crop,
}


@dataclass(frozen=True)
class Request:
    """The options of `moonwalk train`."""

    model: str
    model_settings: dict[str, Any]
    data: str
    data_path: Path | None
    cache: Path | None
    method: str
    optimizer: str
    rate: float
    schedule: str
    steps: int
    batch: int
    seed: int
    augment: str
    measure: bool
    on_inexact: str
    out: Path
    resume: bool
    checkpoint_every: int
    evaluate_every: int
    steps_per_call: int
    compare_memory: bool

    def identity(self, dataset: data.Dataset) -> dict[str, Any]:
        """What distinguishes this run from others, for its checkpoints."""
        names = (
            "model method optimizer rate schedule batch seed augment measure on_inexact steps_per_call"
        )
        found = {name: getattr(self, name) for name in names.split()}
        found["model settings"] = json.loads(json.dumps(self.model_settings, default=str))
        found["data"] = f"{dataset.name}, {dataset.digest()}"
        if self.schedule != "constant":  # the rate depends on the number of steps
            found["steps"] = self.steps
        return found


def run(request: Request, console: Console | None = None) -> None:
    """Train, and leave `curves.csv`, `curves.png`, `run.json` and `checkpoints/` in `request.out`."""
    console = console or Console()
    files.refuse_file(request.out)  # before anything that takes time
    dataset = load(request)
    model = make_model(request, dataset)
    identity = request.identity(dataset)
    folder = request.out
    checkpoints = training.Checkpoints(folder / "checkpoints", identity, resume=request.resume)
    log = training.Log(folder / "curves.csv", until=checkpoints.last_step or 0)
    with Screen(console, request, dataset) as screen, warnings.catch_warnings():
        warnings.showwarning = screen.warn
        found = training.fit(
            model,
            dataset,
            optimizer=training.optimizer(
                request.optimizer, request.rate, request.schedule, request.steps
            ),
            steps=request.steps,
            method=request.method,
            batch=request.batch,
            seed=request.seed,
            augment=AUGMENT[request.augment],
            measure=request.measure,
            on_inexact=request.on_inexact,
            steps_per_call=request.steps_per_call,
            evaluate_every=request.evaluate_every,
            compare_memory=request.compare_memory,
            checkpoints=checkpoints,
            checkpoint_every=request.checkpoint_every,
            on_start=screen.start,
            callbacks=[log.add, screen.show],
        )
    records = log.records
    memory = {request.method: found.temp_bytes}
    if found.backprop_bytes is not None and request.method != "backprop":
        memory = {"backprop": found.backprop_bytes} | memory
    training.plot(folder / "curves.png", {request.method: records}, memory)
    about = {
        "settings": identity,
        "steps": request.steps,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "temporaries": memory,
        "replans": found.replans,
        "last": asdict(records[-1]) if records else None,
    }
    with files.whole(folder / "run.json") as file:
        file.write(json.dumps(about, indent=2) + "\n")
    if records:
        console.print(table(request, records[-1], memory))
    console.print(f"curves, picture and checkpoints are in {folder}", highlight=False, soft_wrap=True)


def load(request: Request) -> data.Dataset:
    """The data set that the options name."""
    if request.data.endswith(".npz"):
        return data.load(request.data)
    if request.data == "mnist1d":
        return data.mnist1d()
    if request.data_path is None:
        where = {"fashion-mnist": data.fashion.SOURCE, "cifar10": data.cifar.SOURCE}[request.data]
        raise ValueError(f"{request.data} is read from --data-path, which is not given. {where}.")
    if request.data == "fashion-mnist":
        return data.fashion_mnist(request.data_path)
    return data.cifar10(request.data_path, cache=request.cache)


def make_model(request: Request, dataset: data.Dataset) -> Any:
    """The network that the options name, for the shapes of the data."""
    make = getattr(models, request.model)
    key = jax.random.key(request.seed)
    try:
        return make(dataset.in_shape, len(dataset.classes), key=key, **request.model_settings)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ValueError(f"--set: {error}") from error


class Screen:
    """A bar with loss, accuracy, memory and certificate; a line for each look at the test examples."""

    def __init__(self, console: Console, request: Request, dataset: data.Dataset):
        self.console, self.request = console, request
        self.memory = ""
        console.print(
            f"{request.model} on {dataset.name}: {len(dataset.train_y):,} training and "
            f"{len(dataset.test_y):,} test examples; {request.method}, {request.optimizer}, "
            f"{request.steps} steps of {request.batch}",
            highlight=False,
        )
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self.task = self.progress.add_task("compiling", total=request.steps, text="")

    def __enter__(self) -> Screen:
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def warn(self, message: Any, category: Any, *_: Any, **__: Any) -> None:
        style = "yellow" if issubclass(category, PlanWarning) else "red"
        self.console.print(str(message), style=style, highlight=False)

    def start(self, step: int, memory: int, backprop: int | None) -> None:
        self.memory = format_bytes(memory)
        text = f"temporaries of a step: {self.memory}"
        if backprop is not None and self.request.method != "backprop":
            self.memory += f" (backprop {format_bytes(backprop)})"
            text += f"; by backpropagation {format_bytes(backprop)}"
        self.console.print(text, highlight=False)
        if step:
            self.console.print(f"resumed after step {step}", highlight=False)
        self.progress.update(self.task, completed=step, description="training")

    def show(self, record: Record) -> None:
        error = f", error {record.certificate:.0e}" if record.certificate else ""
        text = f"loss {record.loss:.4f}, accuracy {record.accuracy:.3f}, {self.memory}{error}"
        self.progress.update(self.task, completed=record.step, text=text)
        if record.test_accuracy is not None:
            self.console.print(
                f"step {record.step:>6}: loss {record.loss:.4f}, test loss {record.test_loss:.4f}, "
                f"test accuracy {record.test_accuracy:.4f}, {record.seconds:.1f} s{error}",
                highlight=False,
            )


def table(request: Request, last: Record, memory: dict[str, int]) -> Table:
    """The run in one row."""
    found = Table(title=f"{request.model}, {last.step} steps")
    cells = {
        "method": request.method,
        "loss": f"{last.loss:.4f}",
        "test accuracy": "" if last.test_accuracy is None else f"{last.test_accuracy:.4f}",
        "memory": format_bytes(memory[request.method]),
        "certificate": f"{last.certificate:.0e}" if last.certificate else "–",
        "seconds": f"{last.seconds:.1f}",
    }
    for name in cells:
        found.add_column(name, justify="left" if name == "method" else "right")
    found.add_row(*cells.values())
    return found
