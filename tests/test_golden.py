"""A part of `make golden`: plans and programs of every eighth network are those on record."""

import json
import re

import golden
import pytest

RECORDS = json.loads(golden.FILE.read_text())
CASES = dict(list(golden.cases().items())[::8])


@pytest.mark.skipif(RECORDS["ground"] != golden.ground(), reason="the records are of another JAX")
@pytest.mark.parametrize("name", CASES)
def test_plans_and_programs_are_those_on_record(name):
    found = golden.record(CASES[name], compiled=False)
    lines = golden.differences(RECORDS["networks"].get(name, {}), found)
    assert not lines, "\n".join(
        [*lines, "if that is meant: make golden WRITE=1, and say why in the commit"]
    )


def test_every_network_is_on_record():
    assert set(RECORDS["networks"]) == set(golden.cases())


def test_no_record_holds_a_line_of_a_file():
    assert not re.search(r"\.py:\d", golden.FILE.read_text())
    said = "its body has no vijp: add (of 12 equations) at {}/tests/golden.py:51 (f.<locals>.<lambda>): reason"
    assert (
        golden.without_lines(said.format("/home/a"))
        == "its body has no vijp: add (of 12 equations): reason"
    )


def test_records_do_not_depend_on_where_the_checkout_is():
    program = (
        "report=Place(block='tanh', line='{}/tests/networks.py:98 (turn)', limit=1e-14) name=f at 0x7f01"
    )
    here, there = golden.digest(program.format("/home/a")), golden.digest(program.format("/tmp/b"))
    assert here == there != golden.digest(program.replace("1e-14", "1e-13"))
