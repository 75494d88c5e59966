"""The command line: what it trains and leaves, what it says to wrong names, what it needs."""

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
from marks import slow

from moonwalk import training
from moonwalk.lab import cli
from moonwalk.lab.cli import entry
from moonwalk.lab.training import curves

testing = pytest.importorskip("typer.testing")
pytest.importorskip("orbax.checkpoint")

SMALL = "--model conv1d_cnn --set width=4 --set depth=2 --batch 32 --evaluate-every 3 --checkpoint-every 2".split()


HEAD = ",".join(curves.COLUMNS).encode()


def run(*arguments):
    from moonwalk.lab.cli.app import app

    return testing.CliRunner().invoke(app, [str(a) for a in arguments])


def losses(folder):
    return [(r.step, r.loss, r.test_accuracy) for r in training.read_csv(folder / "curves.csv")]


@pytest.fixture(scope="module", params=["backprop", slow("moonwalk")])
def whole(request, tmp_path_factory):
    """A run of seven steps: its method, its folder, what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    done = run("train", *SMALL, "--method", request.param, "--steps", 7, "--out", folder)
    assert done.exit_code == 0, done.output
    return request.param, folder, " ".join(done.output.split())


def test_a_run_says_what_it_does(whole):
    method, folder, words = whole
    assert (
        f"conv1d_cnn on MNIST-1D: 4,000 training and 1,000 test examples; {method}, adam, 7 steps"
        in words
    )
    assert "temporaries of a step: " in words
    assert ("by backpropagation" in words) == (method == "moonwalk")
    assert [s for s, _, accuracy in losses(folder) if accuracy is not None] == [3, 6, 7]
    assert "step 3: loss" in words and "step 7: loss" in words and "test accuracy" in words


def test_a_run_leaves_curves_a_picture_and_its_settings(whole):
    method, folder, _ = whole
    assert [s for s, _, _ in losses(folder)] == list(range(1, 8))
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    about = json.loads((folder / "run.json").read_text())
    assert about["settings"]["model settings"] == {"width": 4, "depth": 2}
    assert set(about["temporaries"]) == {"backprop", method}
    assert about["last"]["step"] == 7


@pytest.mark.slow
def test_a_resumed_run_has_the_curves_of_a_whole_one(whole, tmp_path):
    method, folder, _ = whole
    options = [*SMALL, "--method", method, "--out", tmp_path, "--no-compare-memory"]
    assert run("train", *options, "--steps", 5).exit_code == 0
    with (tmp_path / "curves.csv").open("a") as file:
        file.write("6,1.0,1.0,0.0,1.0,,\n7,2.")  # steps that no checkpoint has, and a torn line
    done = run("train", *options, "--steps", 7, "--resume")
    assert done.exit_code == 0 and "resumed after step 5" in done.output
    found, truth = losses(tmp_path), losses(folder)
    assert [row[:2] for row in found] == [row[:2] for row in truth]
    assert found[-1] == truth[-1]


def test_a_folder_that_is_taken(whole):
    method, folder, _ = whole
    options = [*SMALL, "--method", method, "--steps", 9, "--out", folder, "--no-compare-memory"]
    done = run("train", *options)
    assert done.exit_code == 1
    assert "has checkpoints already, the last after step 7: resume that run (--resume)" in done.output
    done = run("train", *options, "--resume", "--rate", 0.1)
    assert done.exit_code == 1 and "rate: 0.001 there, 0.1 here" in done.output


@pytest.mark.parametrize(
    ("option", "given", "said"),
    [
        ("--model", "conv1d-cn", "unknown model 'conv1d_cn'; did you mean 'conv1d_cnn'? There are: "),
        ("--data", "fashion_mnst", "unknown data set 'fashion_mnst'; did you mean 'fashion-mnist'?"),
        (
            "--method",
            "monwalk",
            "unknown method 'monwalk'; did you mean 'moonwalk'? There are: backprop, ",
        ),
        ("--optimizer", "adamm", "unknown optimizer 'adamm'; did you mean 'adam'?"),
        ("--schedule", "cosin", "unknown schedule 'cosin'; did you mean 'cosine'?"),
        ("--on-inexact", "raise", "unknown choice 'raise'. There are: stop, replan"),
        ("--set", "width", "expected name=value, got 'width'"),
        ("--rate", "-1", "expected a positive number, got -1"),
        ("--rate", "0", "expected a positive number, got 0"),
        ("--rate", "nan", "expected a positive number, got nan"),
        ("--steps", "0", "expected a whole number, at least 1, got 0"),
        ("--batch", "-2", "expected a whole number, at least 1, got -2"),
        ("--seed", "-1", "expected a whole number, at least 0, got -1"),
        ("--checkpoint-every", "0", "expected a whole number, at least 1, got 0"),
        ("--evaluate-every", "0", "expected a whole number, at least 1, got 0"),
        ("--steps-per-call", "0", "expected a whole number, at least 1, got 0"),
    ],
)
def test_wrong_names_get_the_nearest(option, given, said, tmp_path):
    done = run("train", *SMALL, option, given, "--out", tmp_path)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--data fashion-mnist",
            "fashion-mnist is read from --data-path, which is not given. Fashion-MNIST comes",
        ),
        ("--data cifar10 --data-path nowhere", "there is no file or folder nowhere"),
        ("--data nowhere.npz", "there is no file nowhere.npz"),
        ("--set widht=3", "--set: conv1d_cnn() got an unexpected keyword argument 'widht'"),
        ("--steps-per-call 3", "checkpoint_every must be a multiple of steps_per_call=3, got 2"),
        (
            "--optimizer sgd --rate 1e30 --method backprop",
            "the loss is nan. Nothing of this step was applied.",
        ),
    ],
)
def test_what_cannot_be_trained(options, said, tmp_path):
    done = run("train", *SMALL, *options.split(), "--out", tmp_path, "--no-compare-memory")
    assert done.exit_code == 1
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize("under", ["", "folder"])
def test_out_that_is_a_file(under, tmp_path):
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "file" / under
    done = run("train", *SMALL, "--out", out)
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert (
        f"moonwalk train: {out} cannot be a folder: {tmp_path / 'file'} is a file; name" in done.stderr
    )
    assert (tmp_path / "file").read_text() == "mine"


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill_disk(monkeypatch, what):
    """Make a run's disk full when it comes to writing `what`."""
    if what == "curves.csv":
        monkeypatch.setattr(curves, "_cells", full)
    elif what == "the checkpoint":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    elif what == "the checkpoint, half way":
        import orbax.checkpoint as orbax

        monkeypatch.setattr(orbax.CheckpointManager, "save", full)
    else:
        import matplotlib.figure

        monkeypatch.setattr(matplotlib.figure.Figure, "savefig", full)


FULL = {
    "curves.csv": "the file could not be written to {out}/curves.csv",
    "the checkpoint": "the checkpoint after step 2 (the first) could not be written to {out}/checkpoints",
    "the checkpoint, half way": "the checkpoint after step 2 (the first) could not be written to {out}",
    "curves.png": "the file could not be written to {out}/curves.png",
}


@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_is_one_line(what, tmp_path, monkeypatch):
    fill_disk(monkeypatch, what)
    options = "--method backprop --steps 2 --no-compare-memory".split()
    done = run("train", *SMALL, *options, "--out", tmp_path)
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.output
    said = FULL[what].format(out=tmp_path)
    assert done.stderr.startswith(f"moonwalk train: {said}")
    assert "(No space left on device); make room there, or name another folder" in done.stderr
    assert not list(tmp_path.glob(".*"))  # nothing half written


@pytest.mark.parametrize(
    ("garbage", "why"),
    [
        (b"garbage", "line 1 is not step,loss,accuracy,"),
        (b"a,b\n1,2\n", "line 1 is not step,loss,accuracy,"),
        (b"\xff\xfe\x00", "can't decode byte"),
        (HEAD + b"\n1,x,0.1,0.0,1.0,,\n", "line 2 is '1,x,0.1,0.0,1.0,,'"),
        (HEAD + b"\n1,0.5,0.1,0.0,1.0,,\n2,0.5\n3,0.5,0.1,0.0,1.0,,\n", "line 3 is '2,0.5'"),
        (HEAD + b"\n1,,0.1,0.0,1.0,,\n", "line 2 is"),
    ],
)
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_table_that_is_none_is_not_replaced(garbage, why, resume, tmp_path):
    (tmp_path / "curves.csv").write_bytes(garbage)
    done = run("train", *SMALL, "--method", "backprop", *resume, "--out", tmp_path)
    assert done.exit_code == 1
    assert f"{tmp_path / 'curves.csv'} is not a table of steps that training wrote (" in done.stderr
    assert why in done.stderr and "; move it away, or name another folder" in done.stderr
    assert (tmp_path / "curves.csv").read_bytes() == garbage


def test_torn_tables_are_read(tmp_path):
    """A run that was killed while it wrote."""
    line = b"1,0.5,0.1,0.0,1.0,,\n"
    for content, steps in ((b"", []), (HEAD[:9], []), (HEAD + b"\n" + line + b"2,0.", [1])):
        (tmp_path / "curves.csv").write_bytes(content)
        assert [r.step for r in training.read_csv(tmp_path / "curves.csv")] == steps
    assert training.read_csv(tmp_path / "nothing.csv") == []


def test_help_and_version():
    assert "train" in run("--help").output
    for word in ("--model", "--resume", "--on-inexact", "moonwalk-checkpoint"):
        assert word in run("train", "--help").output
    assert run("--version").output.strip()


def test_packages_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(entry, "find_spec", lambda name: None if name in ("typer", "orbax") else name)
    with pytest.raises(
        SystemExit,
        match=r"needs typer, orbax, which is not installed: pip install 'moonwalk-jax\[cli\]'",
    ):
        cli.main([])


def test_the_module_is_the_script():
    done = subprocess.run(
        [sys.executable, "-m", "moonwalk.lab.cli", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("Usage: moonwalk")
