"""`results/fig4.py`: runs are kept, skipped when they are there, and drawn."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from moonwalk import data

SCRIPT = pathlib.Path(__file__).parent.parent / "results" / "fig4.py"


def call(*arguments, without=()):
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in without)
    code = f"import sys\n{blocked}import runpy\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, SCRIPT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("side_by_side", [False, True])
def test_figures_are_kept_and_drawn(tmp_path, side_by_side):
    random = np.random.RandomState(0)
    x = random.randint(0, 256, (96, 8, 8, 1)).astype(np.uint8)
    y = (x.reshape(96, -1).mean(1) > 127).astype(np.int32)
    small = data.Dataset("bright", ("no", "yes"), x[:64], y[:64], x[64:], y[64:], (127.0,), (74.0,))
    data.save(tmp_path / "bright.npz", small)
    out = tmp_path / "fig4.json"
    options = [
        "--data",
        tmp_path / "bright.npz",
        "--out",
        out,
        "--seeds",
        2,
        "--epochs",
        2,
        "--batch",
        16,
    ]
    options += ["--widths", 4, 8, "--augment", "flip", "--commit", "abc"]
    options += ["--vmap"] if side_by_side else []
    missing = ("orbax", "typer", "rich", "PIL", "matplotlib", "flax")
    done = call(*options, without=missing)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert set(figures["runs"]) == {f"{p}/{s}" for p in ("free", "lower", "diagonal") for s in (0, 1)}
    assert figures["commit"] == "abc" and figures["data"] == "bright"
    for run in figures["runs"].values():
        assert len(run["test_accuracy"]) == len(run["loss"]) == 2
    assert "means lie within" in done.stdout

    del figures["runs"]["lower/1"]
    kept = figures["runs"]["free/0"]
    out.write_text(json.dumps(figures))
    again = call(*options)
    assert again.returncode == 0, again.stderr
    assert "lower [1] epoch 2" in again.stdout and "free" not in again.stdout.split("bright")[0]
    assert json.loads(out.read_text())["runs"]["free/0"] == kept

    other = call(*options, "--rate", 1)
    assert other.returncode == 1 and "has other settings" in other.stderr
    drawn = call("--plot", tmp_path / "fig4.png", out)
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "fig4.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_what_it_asks_for():
    for arguments, said in [
        ((), "--data is needed"),
        (("--plot", "x.png"), "--plot needs the JSON files"),
    ]:
        done = call(*arguments)
        assert done.returncode == 2 and said in done.stderr
