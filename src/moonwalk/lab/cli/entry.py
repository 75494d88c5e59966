"""The console script: what happens before the command line's own packages are there."""

from __future__ import annotations

import sys
from importlib.util import find_spec

NEEDED = ("typer", "rich", "orbax", "matplotlib")


def main(arguments: list[str] | None = None) -> None:
    """Run `moonwalk` with these arguments, or with those of the process."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"moonwalk: the command line needs {', '.join(missing)}, which is not installed: "
            "pip install 'moonwalk-jax[cli]'"
        )
    from .app import app

    app(args=arguments, prog_name="moonwalk")
