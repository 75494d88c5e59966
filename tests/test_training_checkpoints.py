"""Runs that are killed and resumed end with the bits of runs that were not; foreign and damaged folders."""

import pathlib
import shutil
import signal
import subprocess
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training_worker as worker
from marks import slow

import moonwalk as mw
from moonwalk import data, training
from moonwalk.lab.training.checkpoints import Checkpoints, Saved
from moonwalk.lab.training.stepping import State

pytest.importorskip("orbax.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

WORKER = pathlib.Path(worker.__file__)


def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        assert x.dtype == y.dtype


@pytest.fixture(scope="module")
def whole():
    """The run that nobody interrupts."""
    return worker.run(None)


def wait_for(folder, condition, process):
    """Until a file under the folder meets the condition, or the process ends."""
    while process.poll() is None:
        if any(map(condition, folder.iterdir() if folder.is_dir() else ())):
            return True
        time.sleep(0.0005)
    return False


MOMENTS = {
    "after some steps": lambda path: path.name == "6",
    "while saving": lambda path: path.name.startswith("8") and "tmp" in path.name,
    "while saving the first": lambda path: path.name.startswith("2") and "tmp" in path.name,
    "when the last is there": lambda path: path.name == str(worker.STEPS),
}


@pytest.mark.parametrize("moment", ["while saving", *map(slow, sorted(set(MOMENTS) - {"while saving"}))])
def test_a_run_that_is_killed_resumes_to_the_same_bits(tmp_path, whole, moment):
    process = subprocess.Popen([sys.executable, WORKER, tmp_path, "0.02"], cwd=WORKER.parent)
    assert wait_for(tmp_path, MOMENTS[moment], process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    saved = worker.checkpoints(tmp_path)
    last = saved.last_step or 0
    assert moment == "when the last is there" or last < worker.STEPS
    resumed = worker.run(saved)
    assert [r.step for r in resumed.records] == list(range(last + 1, worker.STEPS + 1))
    same_bits((resumed.model, resumed.opt_state), (whole.model, whole.opt_state))
    assert [r.loss for r in resumed.records] == [r.loss for r in whole.records[last:]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_again_and_again(tmp_path, whole, seed):
    """At random moments, until it gets through."""
    random = np.random.RandomState(seed)
    for _ in range(4):
        process = subprocess.Popen([sys.executable, WORKER, tmp_path, "0.05"], cwd=WORKER.parent)
        wait_for(tmp_path, lambda path: True, process)
        time.sleep(random.uniform(0, 1.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
    resumed = worker.run(worker.checkpoints(tmp_path))
    same_bits((resumed.model, resumed.opt_state), (whole.model, whole.opt_state))


@pytest.mark.slow
def test_a_run_whose_plan_was_made_anew_resumes_to_the_same_bits(tmp_path):
    """The plan is made again from the weights that it was made from."""
    settings = dict(
        optimizer=optax.adam(0.02), batch=128, measure=True, on_inexact="replan", checkpoint_every=2
    )
    model = worker.Free(5, key=jax.random.key(0))
    signals = data.mnist1d(examples=300)

    def run(steps, saved):
        method = mw.Moonwalk(tolerance=1e-5)
        return training.fit(model, signals, method=method, steps=steps, checkpoints=saved, **settings)

    truth = run(14, None)
    assert truth.replans
    first = run(12, worker.checkpoints(tmp_path))
    assert first.replans and worker.checkpoints(tmp_path).latest(_state(first)).planned != (0, 0)
    resumed = run(14, worker.checkpoints(tmp_path))
    same_bits(resumed.model, truth.model)
    assert resumed.plan.gains == truth.plan.gains


def _state(result):
    return State(eqx.filter(result.model, eqx.is_inexact_array), result.opt_state)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The checkpoints of a run of six steps."""
    path = tmp_path_factory.mktemp("run")
    worker.run(worker.checkpoints(path), steps=6)
    return path


def test_two_are_kept(folder):
    assert worker.checkpoints(folder).steps() == [4, 6]


def test_a_folder_that_is_taken(folder):
    with pytest.raises(
        mw.CheckpointError, match=r"has checkpoints already, the last after step 6: resume .*--resume"
    ):
        worker.checkpoints(folder, resume=False)


def test_another_runs_folder(folder):
    text = r"holds checkpoints of another run; its settings differ:\n  model: orthogonal there, free here\n  rate: nothing there, 0.1 here"
    with pytest.raises(mw.CheckpointError, match=text):
        worker.run(worker.checkpoints(folder, model="free", rate=0.1))


def test_another_models_folder(folder):
    with pytest.raises(
        mw.CheckpointError,
        match=r"its arrays differ:(\n.*)*layers\[1\]: float32\[40, 40\] there, nothing here",
    ):
        training.fit(
            worker.Orthogonal(1, key=jax.random.key(0)),
            data.mnist1d(examples=200),
            optimizer=training.optimizer("adam", 1e-2),
            steps=8,
            batch=32,
            checkpoints=worker.checkpoints(folder),
        )


def largest_file(path):
    return max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize("damage", ["cut", "changed", "removed"])
def test_a_damaged_checkpoint(folder, tmp_path, damage):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    file = largest_file(copy / "6" / "state")
    raw = file.read_bytes()
    if damage == "cut":
        file.write_bytes(raw[: len(raw) // 2])
    elif damage == "changed":
        file.write_bytes(
            raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 1]) + raw[len(raw) // 2 + 1 :]
        )
    else:
        shutil.rmtree(copy / "6" / "state")
    with pytest.raises(
        mw.CheckpointError, match=r"copy/6 cannot be read .*; remove that folder to go on from step 4"
    ):
        worker.run(worker.checkpoints(copy))
    shutil.rmtree(copy / "6")
    if damage == "cut":
        again = worker.run(worker.checkpoints(copy), steps=6)
        same_bits(_state(again), worker.checkpoints(folder).at(6, _state(again)).state)


def test_a_loss_that_is_not_finite_names_the_last_checkpoint(folder, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    broken = data.mnist1d(examples=200)
    broken.train_x[...] = np.nan
    monkeypatch.setattr(worker.data, "mnist1d", lambda examples: broken)
    with pytest.raises(
        mw.NonFiniteError, match=r"step 7: the loss is nan\..* The last checkpoint is after step 6\."
    ):
        worker.run(worker.checkpoints(copy))


def test_orbax_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"written by orbax: pip install 'moonwalk-jax\[cli\]'"):
        worker.checkpoints(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="keep is a whole number, at least 1, got 0"):
        training.Checkpoints(tmp_path, {}, keep=0)


def test_a_checkpoint_that_a_plan_needs_stays(tmp_path):
    """As long as any checkpoint is there whose plan was made from its weights."""
    state = {"w": jnp.ones(3)}
    found = Checkpoints(tmp_path / "run", {"a": 1})
    found.save(Saved(state, 10, 0.0, (0, 0)), protect=True)
    found.save(Saved(state, 20, 0.0, (10, 1)))
    found.save(Saved(state, 30, 0.0, (10, 1)))
    found.save(Saved(state, 35, 0.0, (10, 1)), protect=True)
    found.close()
    again = Checkpoints(tmp_path / "run", {"a": 1}, resume=True)
    latest = again.latest(state)
    assert latest.planned == (10, 1)
    assert again.at(10, state).step == 10
    again.save(Saved(state, 40, 0.0, (35, 1)))
    again.save(Saved(state, 50, 0.0, (35, 1)))
    assert {35, 40, 50} <= set(again.steps())
