"""Parts of the suite: `--shard=3/8` runs the third of eight, `make test-all SHARD=3/8`.

A test's part follows from its name alone, so parts are the same on every machine and in every worker,
and a new test moves no other. What -m and -k select is divided, not the whole suite.
"""

import hashlib
import re

import pytest

SHARD = pytest.StashKey[tuple[int, int] | None]()
COUNTS = pytest.StashKey[tuple[int, int]]()  # of the tests in the part, and of all that were selected


def parse(text):
    """'3/8' as (3, 8)."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found:
        raise pytest.UsageError(f"--shard={text}: write I/N, the I-th of N parts, such as --shard=3/8")
    part, parts = map(int, found.groups())
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--shard={text}: parts are counted from 1 to {parts}")
    return part, parts


def part_of(name, parts):
    """Which of the parts, 1 to `parts`, a test of this name belongs to."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % parts + 1


def pytest_addoption(parser):
    parser.addoption("--shard", metavar="I/N", help="run the I-th of N parts of the selected tests")


def pytest_configure(config):
    text = config.getoption("--shard")
    config.stash[SHARD] = None if text is None else parse(text)


@pytest.hookimpl(trylast=True)  # after -m and -k have selected
def pytest_collection_modifyitems(config, items):
    if config.stash[SHARD] is None:
        return
    part, parts = config.stash[SHARD]
    chosen = [i for i in items if part_of(i.nodeid, parts) == part]
    config.hook.pytest_deselected(items=[i for i in items if part_of(i.nodeid, parts) != part])
    config.stash[COUNTS] = len(chosen), len(items)
    if hasattr(config, "workeroutput"):
        config.workeroutput["shard"] = config.stash[COUNTS]
    items[:] = chosen


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """With pytest-xdist only the workers collect, each of them everything."""
    counts = getattr(node, "workeroutput", {}).get("shard")  # a worker that crashed leaves nothing
    if counts is not None:
        node.config.stash[COUNTS] = counts


def pytest_terminal_summary(terminalreporter, config):
    counts = config.stash.get(COUNTS, None)
    if counts is not None:
        part, parts = config.stash[SHARD]
        terminalreporter.write_line(f"shard {part}/{parts}: {counts[0]} of {counts[1]} tests")
