"""`moonwalk plan`: what it prints of a user's loss, what it says to what is none."""

import json
import sys

import pytest

testing = pytest.importorskip("typer.testing")
pytest.importorskip("orbax.checkpoint")

SOURCE = """
import jax, jax.numpy as jnp, moonwalk as mw

number = 3.0

def loss(ws, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.abs(x @ mw.declare(w, "orthogonal")), None), x, ws)
    return jnp.mean(x ** 2)

def network(rows=512, width=4):
    s = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return loss, s(16, width, width), s(rows, width)

def with_aux():
    return lambda ws, x: (loss(ws, x), x), *network()[1:]

def loss_alone():
    return loss

class Networks:
    network = staticmethod(network)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_network.py").write_text(SOURCE)
    (tmp_path / "broken_network.py").write_text("import a_package_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_network", raising=False)


def run(*arguments):
    from moonwalk.lab.cli.app import app

    return testing.CliRunner().invoke(app, ["plan", *arguments])


@pytest.mark.parametrize("where", ["my_network:network", "my_network.py:Networks.network"])
def test_a_plan_is_printed(where):
    done = run(where, "--set", "rows=4096")
    assert done.exit_code == 0, done.output
    assert "2 blocks walked" in done.output
    assert "scan of 16 × layers" in done.output and "my_network.py:7" in done.output


def test_every_block_is_in_the_table():
    done = run("my_network:network", "--set", "rows=4096", "--table")
    assert done.exit_code == 0, done.output
    assert "2 blocks walked, 0 anchors" in done.output
    assert "dot_general f32[4096,4]" in done.output and "my_network.py:7" in done.output


def test_the_frontier_and_the_plan_within_a_budget():
    wide = ["my_network:network", "--set", "rows=4096"]
    every = run(*wide, "--frontier").output
    assert "plans, least memory first" in every and "backpropagation" in every
    both = run(*wide, "--frontier", "--budget", "500KiB").output
    assert ", least memory first" in both
    assert "Moonwalk(budget='500KiB')" in both and "budget 500.0 KiB" in both
    assert "Moonwalk(budget='500KiB')" in run(*wide, "--budget", "500KiB").output
    found = json.loads(run(*wide, "--frontier", "--json").output)
    sizes = [plan["peak_bytes"] for plan in found]
    times = [plan["seconds"] for plan in found]
    assert len(found) >= 2
    assert sizes == sorted(sizes) and times == sorted(times, reverse=True)
    both = json.loads(run(*wide, "--frontier", "--budget", "500KiB", "--json").output)
    assert both["plan"]["budget_bytes"] == 500 * 2**10
    assert [p["peak_bytes"] for p in both["frontier"]] == sizes[: len(both["frontier"])]


def test_a_generous_budget_is_no_reason_to_complain():
    done = run("my_network:network", "--set", "rows=65536", "--budget", "1GiB")
    assert done.exit_code == 0, done.output
    assert "1 store" in done.output and "saves less" not in done.output


def test_the_frontier_is_drawn(tmp_path):
    done = run("my_network:network", "--plot", "frontier.png")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert "2 blocks walked" in done.output


def test_a_verified_plan_shows_compiled_bytes():
    done = run("my_network:network", "--verify")
    assert done.exit_code == 0, done.output
    assert "this plan, as compiled" in done.output


def test_a_loss_with_auxiliary_data():
    found = run("my_network:with_aux", "--has-aux")
    assert found.exit_code == 0, found.output
    assert "blocks walked" in found.output and "scan of 16 × layers" in found.output


def test_as_json_and_by_another_method():
    found = json.loads(run("my_network:network", "--json").output)
    assert found["backprop_bytes"] > 0 and {"block", "mode", "why"} <= found["rows"][0].keys()
    recomputed = run("my_network:network", "--method", "checkpoint").output
    assert "blocks walked" not in recomputed and "run again" in recomputed
    assert "saves less" not in recomputed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["my_network"],
            "expected module:function, got 'my_network'; name a function without arguments",
        ),
        (["my_netwrk:network"], "there is no module 'my_netwrk'; did you mean 'my_network'?"),
        (["moonwalk.modls:x"], "there is no module 'moonwalk.modls'; did you mean 'models'?"),
        (["nowhere.py:network"], "there is no file nowhere.py"),
        (["broken_network:network"], "No module named 'a_package_that_is_not_there'"),
        (["my_network:netwrk"], "unknown name in my_network 'netwrk'; did you mean 'network'?"),
        (["my_network:number"], "my_network:number is no function but a float; name a function"),
        (["my_network:loss"], "my_network:loss(ws, x) cannot be called with no arguments"),
        (["my_network:network", "--set", "row=3"], "cannot be called with row"),
        (["my_network:loss_alone"], "my_network:loss_alone returned a function; name a function"),
        (["my_network:network", "--method", "reversible"], "cannot be inverted"),
        (
            ["my_network:network", "--budget", "3 apples"],
            "--budget: it is a number of bytes above zero, or a size such as '24GB' or '512MiB', got",
        ),
        (["my_network:network", "--budget", "-3"], "a number of bytes above zero"),
        (
            ["my_network:network", "--budget", "1kB"],
            "Moonwalk(budget='1kB'): the arguments and the results alone take 10.0 KiB",
        ),
        (
            ["my_network:network", "--budget", "30KiB"],
            "the least that a plan takes is about",
        ),
        (
            ["my_network:network", "--budget", "device"],
            "Moonwalk(budget='device'): this device does not say how much memory it has; name a number",
        ),
        (
            ["my_network:network", "--budget", "1GB", "--method", "checkpoint"],
            "--budget: the method checkpoint has one plan, and nothing to choose from; pass --method",
        ),
        (
            ["my_network:network", "--frontier", "--table"],
            "--table is for one plan, and --frontier shows several; pass --budget too, or leave --table",
        ),
        (
            ["my_network:network", "--table", "--json"],
            "--table: with --json every block is there anyway",
        ),
        (["my_network:network", "--plot", "a.txt"], "--plot a.txt: matplotlib draws no such file"),
        (
            ["my_network:with_aux"],
            "the loss of my_network:with_aux returns a pair; if that is its value and auxiliary data, pass --has-aux",
        ),
        (
            ["my_network:network", "--has-aux"],
            "--has-aux: the loss of my_network:network is to return a pair of its value and auxiliary data, but returns",
        ),
    ],
)
def test_what_is_no_network(arguments, said):
    done = run(*arguments)
    assert done.exit_code == 1
    assert said in done.output


def test_wrong_names_of_methods_get_the_nearest():
    done = run("my_network:network", "--method", "moonwlk")
    assert done.exit_code == 2
    assert "unknown method 'moonwlk'; did you mean 'moonwalk'?" in " ".join(done.output.split())
