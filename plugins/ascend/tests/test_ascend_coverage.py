"""The page of what is covered names files and tests that exist, and leaves no row out."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PLUGIN = REPOSITORY / "plugins" / "ascend"
PAGE = REPOSITORY / "docs" / "reference" / "ascend-coverage.md"
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.read_text().splitlines()
    if re.match(r"\| [CDR]\d", line)
]


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


@cache
def functions_by_file():
    """Names of test functions by file name without `.py`; file names are unique."""
    found = {}
    for folder in ("tests", "plugins"):
        for path in (REPOSITORY / folder).rglob("test_*.py"):
            tree = ast.parse(path.read_text())
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
            found[path.stem] = {n.name for n in ast.walk(tree) if isinstance(n, kinds)}
    return found


@cache
def conformance_cases():
    folder = REPOSITORY / "tests/conformance/halogen_conformance/mustpass"
    lines = (line for path in folder.rglob("*.txt") for line in path.read_text().splitlines())
    return {line.removeprefix("!").strip() for line in lines}


def exists(test):
    name, _, function = test.partition("::")
    if not function:
        return test in conformance_cases()
    return function in functions_by_file().get(name, ())


def test_no_row_is_left_out_or_told_twice():
    names = [line[0] for line in ROWS]
    assert len(names) == len(set(names))
    assert {n for n in names if n[0] == "C"} == {f"C{i}" for i in range(1, 59)}
    assert {n for n in names if n[0] == "R"} == {f"R{i}" for i in range(1, 29)}


@pytest.mark.parametrize("line", ROWS, ids=lambda line: line[0])
def test_what_a_row_names_exists(line):
    _, _, where, proof, remark = line
    for name in quoted(where):
        assert any((base / name).exists() for base in (PLUGIN, REPOSITORY)), name
    for test in quoted(proof):
        assert exists(test), test
    assert quoted(proof) or remark.startswith("not here:"), "a test, or why there is none"


def test_a_test_that_is_gone_would_be_noticed():
    assert not exists("test_ascend_cost::test_that_nobody_wrote")
    assert not exists("test_nowhere::test_that_nobody_wrote")
    assert not exists("L9/nothing")
