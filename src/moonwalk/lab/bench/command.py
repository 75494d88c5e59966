"""`moonwalk bench` without its screen: from options to records, figures and a report in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ... import settings
from .. import files
from ..training.names import nearest
from . import experiments, runner
from .store import Store, load
from .tasks import Record, Request, Table, Task

DEVICES = ("auto", "cpu", "gpu")


@dataclass(frozen=True)
class Options:
    """The options of `moonwalk bench`.

    **Arguments:**

    - `names`: experiments; `everything`: all of them.
    - `device`: "cpu", "gpu", or "auto" for a GPU where there is one.
    - `out`: the folder for records, figures and the report.
    - `request`: the request passed to experiments; its platform is the device's.
    - `timeout`: seconds for one measurement. `jobs`: measurements under way at once.
    - `retry`: measure once more what failed. `fresh`: forget what the folder has.
    - `dry_run`: say what would be measured. `report_only`: draw what the folder has.
    - `commit`: for the header, where git is not at hand.
    """

    names: Sequence[str]
    everything: bool = False
    device: str = "auto"
    out: Path = Path("moonwalk-bench")
    request: Request = field(default_factory=Request)
    timeout: float = runner.TIMEOUT
    retry: bool = False
    fresh: bool = False
    dry_run: bool = False
    report_only: bool = False
    commit: str = ""
    jobs: int = 1

    def __post_init__(self) -> None:
        if self.everything and self.names:
            raise ValueError(f"--all, or names ({', '.join(self.names)}), not both")
        if not self.everything and not self.names and not self.report_only:
            raise ValueError(f"name experiments, or --all. There are: {', '.join(experiments.NAMES)}")
        for name in self.names:
            if name not in experiments.NAMES:
                raise ValueError(nearest("experiment", name, experiments.NAMES))
        if self.device not in DEVICES:
            raise ValueError(nearest("device", self.device, DEVICES))
        settings.positive("bench", "timeout", self.timeout)
        settings.count("bench", "seed", self.request.seed, 0)
        settings.count("bench", "jobs", self.jobs)
        files.refuse_file(self.out)

    @property
    def chosen(self) -> list[str]:
        """The experiments to run; a report without names covers all that have results."""
        return list(dict.fromkeys(self.names) if self.names else experiments.NAMES)


class Screen(Protocol):
    """Where a run reports its progress; `text.Lines` prints plain lines."""

    def say(self, line: str) -> None: ...
    def begin(self, name: str, title: str, total: int) -> None: ...
    def start(self, task: Task) -> None: ...
    def done(self, record: Record, is_new: bool) -> None: ...
    def end(self, tables: Sequence[Table]) -> None: ...


def run(options: Options, screen: Screen) -> None:
    """Measure, and leave JSON, CSV, figures and a report in `options.out`."""
    if options.report_only:
        report(options, screen)
        return
    device = None if options.device == "auto" else options.device
    if options.dry_run and device is not None:  # also for a device that this machine does not have
        show_outline(options, replace(options.request, platform=device), screen)
        return
    header = runner.header(device, options.request.quick, options.commit)
    request = replace(options.request, platform=header["platform"])
    if options.dry_run:
        show_outline(options, request, screen)
        return
    screen.say(f"{header['device']}, JAX {header['jax']}; results in {options.out}")
    header["settings"] = runner.settings(request)
    for name in options.chosen:
        module = experiments.load(name)
        store = Store(options.out, name, header, fresh=options.fresh)
        screen.begin(name, module.TITLE, len(runner.planned(module, request)))
        each = runner.Runner(
            store,
            request.platform,
            timeout=options.timeout,
            retry=options.retry,
            jobs=1 if hasattr(module, "measure") else options.jobs,  # what it does has no turns
            on_start=screen.start,
            on_record=screen.done,
        )
        runner.run(name, request, each)
        screen.end(module.summary(store.records))
    report(options, screen)


def show_outline(options: Options, request: Request, screen: Screen) -> None:
    for name in options.chosen:
        for line in outline(name, request):
            screen.say(line)


def outline(name: str, request: Request) -> list[str]:
    """What an experiment would measure."""
    module = experiments.load(name)
    tasks = runner.planned(module, request)
    more = ", then what they find is run" if hasattr(module, "search") else ""
    lines = [f"{name}: {module.TITLE}: {len(tasks)} measurements{more}"]
    return lines + [f"  {str(task).removeprefix(name + ': ')}" for task in tasks]


def report(options: Options, screen: Screen) -> None:
    """Write figures and the report for all results in the folder."""
    paths = [p for p in (options.out / f"{name}.json" for name in options.chosen) if p.is_file()]
    if not paths:
        raise ValueError(
            f"{options.out} has no results of {', '.join(options.chosen)} to report; measure first, "
            "without --report-only, or name the folder that has them (--out)"
        )
    for needed, what in (("matplotlib", "figures"), ("plotly", "the report")):
        if find_spec(needed) is None:
            screen.say(f"no {what}: {needed} is not installed; `--report-only` makes them later")
            return
    figures: Any = import_module(f"{__package__}.figures")
    for path in paths:
        figures.draw(path.stem, load(path), options.out)
    every = [p for p in (options.out / f"{name}.json" for name in experiments.NAMES) if p.is_file()]
    import_module(f"{__package__}.report").write(every, options.out)
    screen.say(f"figures and report.html are in {options.out}")
