"""`--shard`: parts of the suite that are disjoint and leave nothing out."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import shards

SUITE = """
import pytest

@pytest.mark.parametrize("i", range(40))
def test_numbers(i):
    pass

@pytest.mark.parametrize("i", range(20))
def test_others(i):
    pass
"""


def run(folder, *options):
    """Pytest on a small suite, with the shards' hooks and nothing else of ours."""
    (folder / "test_suite.py").write_text(SUITE)
    here = str(pathlib.Path(__file__).parent)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "shards", "-p", "no:cacheprovider", "-rp", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": here, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )


def ran(found):
    return sorted(re.findall(r"^PASSED \S+::(test_\w+\[\d+\])$", found.stdout, re.MULTILINE))


@pytest.mark.parametrize("workers", [[], ["-p", "xdist", "-n", "2"]])
def test_parts_run_every_test_once(workers, tmp_path):
    found = [run(tmp_path, f"--shard={i}/2", *workers) for i in (1, 2)]
    assert [p.returncode for p in found] == [0, 0]
    parts = [ran(p) for p in found]
    every = [f"test_numbers[{i}]" for i in range(40)] + [f"test_others[{i}]" for i in range(20)]
    assert sorted(parts[0] + parts[1]) == sorted(every)
    for i, part in enumerate(parts):
        assert len(part) >= 20
        assert f"shard {i + 1}/2: {len(part)} of 60 tests" in found[i].stdout


def test_a_part_of_what_is_selected(tmp_path):
    found = run(tmp_path, "--shard=2/3", "-k", "others")
    names = ran(found)
    every = [f"test_others[{i}]" for i in range(20)]
    assert names == sorted(n for n in every if shards.part_of(f"test_suite.py::{n}", 3) == 2)
    assert f"shard 2/3: {len(names)} of 20 tests" in found.stdout


def test_parts_of_this_suite(request):
    """Of what is collected now, whatever that is: a file, all the tests, a part of them."""
    names = [item.nodeid for item in request.session.items]
    assert len(set(names)) == len(names)  # tests of one name would go together, but be counted twice
    for parts in (1, 2, 8):
        sizes = [0] * parts
        for name in names:
            sizes[shards.part_of(name, parts) - 1] += 1  # in one part, and no other
        assert sum(sizes) == len(names)
        if len(names) > 1000:
            assert min(sizes) > 0.8 * len(names) / parts and max(sizes) < 1.2 * len(names) / parts


def test_a_part_follows_from_the_name_alone():
    """Neither from the process, as Python's own hashes do, nor from what else is collected."""
    assert [shards.part_of(f"tests/test_api.py::test_{i}", 8) for i in range(6)] == [2, 3, 2, 7, 7, 8]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9/8", "--shard=9/8: parts are counted from 1 to 8"),
        ("0/8", "--shard=0/8: parts are counted from 1 to 8"),
        ("x", "--shard=x: write I/N, the I-th of N parts, such as --shard=3/8"),
        ("", "--shard=: write I/N"),
        ("-1/8", "--shard=-1/8: write I/N"),
    ],
)
def test_bad_values_are_refused(text, message):
    with pytest.raises(pytest.UsageError, match=f"^{re.escape(message)}"):
        shards.parse(text)


def test_a_bad_value_ends_the_run(tmp_path):
    found = run(tmp_path, "--shard=9/8")
    assert found.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --shard=9/8: parts are counted from 1 to 8" in found.stderr
    assert not ran(found)
