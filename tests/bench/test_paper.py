"""docs/paper.md: every row of its figures and claims has a command, and every command exists."""

import pathlib
import re

import pytest
from typer.testing import CliRunner

from moonwalk.lab.bench import experiments
from moonwalk.lab.cli.app import app

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "paper.md").read_text()


def rows(title):
    section = TEXT[TEXT.index(f"## {title}") :].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


ROWS = [*rows("Figures"), *rows("Claims"), *rows("Beyond the paper")]


def exists(command):
    """Whether what a reader would type is there: a target, a file, an experiment with these options."""
    words = re.findall(r'[^\s"=]+="[^"]*"|\S+', command)
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        found = re.search(rf"^{re.escape(words[1])}:", makefile, re.MULTILINE)
        named = [w for word in words[2:] if word.startswith("ARGS=") for w in word[6:-1].split()]
        return bool(found) and all((ROOT / name).exists() for name in named)
    if words[:2] == ["moonwalk", "bench"]:
        help_text = re.sub(
            r"\x1b\[[0-9;]*m",
            "",
            CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "200"}).output,
        )
        options = [w for w in words[3:] if w.startswith("--")]
        return words[2] in experiments.NAMES and all(re.search(rf"{o}\b", help_text) for o in options)
    return False


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r[0][:40])
def test_every_row_has_commands_that_exist(row):
    assert len(row) == 4 and all(row)
    commands = re.findall(r"`([^`]+)`", row[3])
    assert commands, row[0]
    for command in commands:
        assert exists(command), command


def test_commands_that_do_not_exist():
    for command in (
        "make nothing",
        "moonwalk bench fig9",
        "moonwalk bench fig2 --loud",
    ):
        assert not exists(command)
    assert not exists('make test ARGS="tests/test_nothing.py"')


def test_every_experiment_and_figure_has_its_row():
    named = " ".join(row[3] for row in ROWS)
    for name in experiments.NAMES:
        assert f"moonwalk bench {name}" in named, name
    for figure in ("Fig. 2a", "Fig. 2b", "Fig. 3a", "Fig. 3b", "Fig. 4", "Table 1"):
        assert any(row[0].startswith(figure) for row in ROWS), figure


def test_what_the_text_leaves_unsaid():
    unsaid = " ".join(cell for row in rows("What the text leaves unsaid") for cell in row)
    for word in ("slope", "initialisation", "14 GB", "Fig. 4", "ResNet", "rematerialisation", "head"):
        assert word in unsaid, word
