"""`python -m moonwalk.lab.bench`: as `moonwalk bench`, with JAX and this package alone."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from ... import settings
from . import command, experiments
from .tasks import Request
from .text import Lines


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m moonwalk.lab.bench", description=command.__doc__)
    add = found.add_argument
    add("names", nargs="*", metavar="EXPERIMENT", help=", ".join(experiments.NAMES))
    add("--all", action="store_true", help="all experiments")
    add("--quick", action="store_true", help="the smallest sizes that still show something")
    add("--device", default="auto", help="cpu, gpu, or auto: a GPU where there is one")
    add("--out", type=Path, default=command.Options.out, help="the folder for what it leaves")
    add(
        "--limit",
        type=partial(settings.size, "moonwalk bench", "limit"),
        help="of depth and batch, such as 24GB",
    )
    add("--residual", action="store_true", help="fig2 with skips")
    add("--data", help="images for fig4: a folder of Fashion-MNIST, or a .npz file")
    add("--seed", type=int, default=0, help="of weights and data")
    add("--only", action="append", default=[], metavar="WORD", help="measurements whose line has it")
    add("--timeout", type=float, default=command.Options.timeout, help="seconds for a measurement")
    add("--jobs", type=int, default=1, help="measurements that compile at once; they run one by one")
    add("--retry", action="store_true", help="measure once more what failed")
    add("--fresh", action="store_true", help="forget what the folder has")
    add("--dry-run", action="store_true", help="say what would be measured")
    add("--report-only", action="store_true", help="draw what the folder has")
    add("--commit", default="", help="for the files, where git is not at hand")
    return found


def main(arguments: list[str] | None = None) -> None:
    try:
        given = parser().parse_args(arguments)
        request = Request(
            quick=given.quick,
            residual=given.residual,
            limit_bytes=given.limit,
            seed=given.seed,
            data=given.data,
            only=tuple(given.only),
        )
        options = command.Options(
            given.names,
            given.all,
            given.device,
            given.out,
            request,
            given.timeout,
            given.retry,
            given.fresh,
            given.dry_run,
            given.report_only,
            given.commit,
            given.jobs,
        )
        command.run(options, Lines())
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"moonwalk bench: {error}")
    except KeyboardInterrupt:
        sys.exit("moonwalk bench: stopped; the same command goes on from there")


if __name__ == "__main__":
    main()
