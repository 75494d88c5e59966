"""`moonwalk bench`: what it says, leaves and refuses."""

import errno
import json
import pathlib
import sys

import pytest

from moonwalk import settings
from moonwalk.lab.bench import Request, command, experiments, runner, text
from moonwalk.lab.bench import __main__ as plain
from moonwalk.lab.bench.tasks import Table, Task, record

testing = pytest.importorskip("typer.testing")
pytest.importorskip("orbax.checkpoint")

HEADER = dict(platform="cpu", device="cpu", jax="1", jaxlib="1", commit="a", date="", python="")


def run(*arguments):
    from moonwalk.lab.cli.app import app

    return testing.CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture
def no_processes(monkeypatch):
    """Measurements that cost nothing."""
    monkeypatch.setattr(runner, "header", lambda device, quick, commit: {**HEADER, "quick": quick})
    monkeypatch.setattr(command, "find_spec", lambda name: None)  # nor pictures

    def measure(task, *_):
        return record(task, temp_bytes=2**20, gradient_error=1e-6)

    monkeypatch.setattr(runner, "in_process", measure)


def test_a_run_in_processes_of_its_own(tmp_path):
    """The smallest form of `moonwalk bench --all --quick`."""
    options = command.Options(
        ["pareto"], out=tmp_path, device="cpu", request=Request(quick=True, only=("backprop",))
    )
    command.run(options, text.Lines())
    data = json.loads((tmp_path / "pareto.json").read_text())
    assert data["header"]["platform"] == "cpu" and data["header"]["settings"]["quick"]
    (found,) = data["records"]
    assert found["status"] == "ok" and found["gradient_error"] < 1e-5
    assert (tmp_path / "pareto.csv").read_text().count("\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in experiments.NAMES if n not in ("table1", "vijp")])
def test_quick_runs_end_well(tmp_path, name):
    command.run(command.Options([name], out=tmp_path, request=Request(quick=True)), text.Lines())
    data = json.loads((tmp_path / f"{name}.json").read_text())
    assert {r["status"] for r in data["records"]} <= {"ok", "refused"}
    for found in data["records"]:
        method, lower = found["task"]["method"], found["task"]["variant"].startswith("lower")
        printed = "aligned" in method or ("as-printed" in method and lower)
        if found["gradient_error"] is not None:
            assert (found["gradient_error"] > 1e-2) == printed, found["task"]


@pytest.mark.usefixtures("no_processes")
def test_the_screen(tmp_path):
    done = run("fig2", "pareto", "--quick", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert experiments.load("fig2").TITLE in done.output
    words = " ".join(done.output.split())
    assert "pyramid (identity, slope 0.25), moonwalk, depth 6" in words
    assert "1.0 MiB" in words and "1.0e-06" in words
    assert {p.name for p in tmp_path.iterdir()} == {"fig2.json", "fig2.csv", "pareto.json", "pareto.csv"}
    again = run("fig2", "--out", tmp_path)
    assert again.exit_code == 1 and "measured with quick = True, not False" in again.output


@pytest.mark.usefixtures("no_processes")
def test_plain_lines(tmp_path, capsys):
    plain.main(["fig2", "--quick", "--only", "backprop", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "[2/2] fig2: pyramid (identity, slope 0.25), backprop, depth 6" in said
    assert "method    depth  gradient" in said
    plain.main(["fig2", "--quick", "--only", "backprop", "--out", str(tmp_path)])
    assert capsys.readouterr().out.count("(had)") == 2


@pytest.mark.usefixtures("no_processes")
def test_what_would_be_measured(tmp_path):
    done = run("fig2", "depth", "--quick", "--dry-run", "--out", tmp_path / "none")
    assert done.exit_code == 0
    words = " ".join(done.output.split())
    assert "memory and time over depth: 9 measurements" in words
    assert "3 measurements, then what they find is run" in words
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["fig22"], 2, "unknown experiment 'fig22'; did you mean 'fig2'? There are: table1, fig2"),
        (["fig2", "--device", "gpus"], 2, "unknown device 'gpus'; did you mean 'gpu'?"),
        (
            ["depth", "--limit", "much"],
            2,
            "limit is a number of bytes above zero, or a size such as '24GB' or '512MiB', got 'much'",
        ),
        ([], 1, "name experiments, or --all. There are: table1, fig2"),
        (["fig2", "--all"], 1, "--all, or names (fig2), not both"),
        (["fig2", "--seed", "-1"], 2, "expected a whole number, at least 0, got -1"),
        *(
            (["fig2", "--timeout", value], 2, f"expected a positive number, got {value}")
            for value in ("0", "-1", "nan", "inf")
        ),
        (["fig2", "--out", __file__], 1, f"{__file__} cannot be a folder: {__file__} is a file; name"),
        (
            ["fig2", "--report-only", "--out", "nowhere"],
            1,
            "nowhere has no results of fig2 to report; measure",
        ),
        (["--report-only", "--out", "nowhere"], 1, "nowhere has no results of table1, fig2, fig3, "),
    ],
)
def test_what_it_refuses(arguments, code, said):
    done = run(*arguments)
    assert done.exit_code == code
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fig2", "--seed", "-1"], "bench: seed is a whole number, at least 0, got -1"),
        (["fig2", "--timeout", "0"], "bench: timeout is a positive number, got 0.0"),
        (["fig2", "--timeout", "nan"], "bench: timeout is a positive number, got nan"),
        (["fig2", "--out", __file__], "cannot be a folder"),
    ],
)
def test_what_the_module_refuses(arguments, said):
    with pytest.raises(SystemExit, match=f"moonwalk bench: .*{said}"):
        plain.main(arguments)


@pytest.mark.usefixtures("no_processes")
def test_a_report_without_names_is_of_all_that_there_is(tmp_path, monkeypatch):
    assert run("fig2", "--quick", "--out", tmp_path).exit_code == 0
    asked = []
    monkeypatch.setattr(command, "report", lambda options, _: asked.append(options.chosen))
    assert run("--report-only", "--out", tmp_path).exit_code == 0
    assert run("fig2", "--report-only", "--out", tmp_path).exit_code == 0
    assert asked == [list(experiments.NAMES), ["fig2"]]


@pytest.mark.usefixtures("no_processes")
def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "replace", full)
    done = run("fig2", "--quick", "--out", tmp_path)
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    path = tmp_path / "fig2.json"
    assert f"could not be written to {path} (No space left on device); make room there" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_processes")
def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "in_process", stop)
    done = run("fig2", "--quick", "--out", tmp_path)
    assert done.exit_code == 130
    assert f"stopped; the same command goes on from {tmp_path}" in "".join(done.output.split("\n"))
    with pytest.raises(SystemExit, match="stopped; the same command goes on from there"):
        plain.main(["fig2", "--quick", "--out", str(tmp_path)])


def test_options_are_those_of_the_module():
    """`python -m moonwalk.lab.bench` and `moonwalk bench` know the same ones."""
    own = {o for a in plain.parser()._actions for o in a.option_strings if o.startswith("--")}
    shown = run("--help").output
    assert own and all(option in shown for option in own)


@pytest.mark.slow
def test_the_module_needs_neither_typer_nor_rich():
    import subprocess

    code = "import sys; sys.modules.update(typer=None, rich=None, orbax=None, matplotlib=None)\n"
    code += "import moonwalk.lab.bench.__main__ as m, moonwalk.lab.bench.worker; m.main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "--report-only" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("given", "bytes_"), [("24GB", 24 * 10**9), ("24 GiB", 24 * 2**30), ("1.5m", 1500000), ("512", 512)]
)
def test_sizes(given, bytes_):
    assert settings.size("moonwalk bench", "limit", given) == bytes_


@pytest.mark.parametrize("given", ["", "GB", "-3GB", "24 gigs", "3iB", "0GB"])
def test_no_sizes(given):
    with pytest.raises(ValueError, match="limit is a number of bytes above zero, or a size such as"):
        settings.size("moonwalk bench", "limit", given)


def test_cells_and_lines():
    table = Table(
        "t", ("method", "temporaries, bytes", "seconds", "gradient error"), [["a", 2048, 0.01234, 2e-7]]
    )
    assert text.lines(table)[2].split() == ["a", "2.0", "KiB", "0.0123", "2.0e-07"]
    assert text.cell("seconds", None) == "–" and text.cell("n", 1234) == "1,234"
    long = record(Task("fig2", "pyramid", "moonwalk"), status="refused", message="because " * 99 + "\nx")
    assert text.line(long).endswith("…") and len(text.line(long)) < 200
