"""Pages of what is covered name files and tests that exist, and leave no row out."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = {"ascend": "ascend-coverage.md", "rocm_strixhalo": "strix-halo-coverage.md"}


def rows(plugin):
    """Cells of every row: name, what, where, proved by, remark."""
    text = (REPOSITORY / "docs" / "reference" / PAGES[plugin]).read_text()
    lines = (line for line in text.splitlines() if re.match(r"\| [A-Z]+\d* \|", line))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


ROWS = [(plugin, *line) for plugin in PAGES for line in rows(plugin)]
WHOLE = [
    ("ascend", {f"C{i}" for i in range(1, 59)}),
    ("ascend", {f"R{i}" for i in range(1, 29)}),
    ("rocm_strixhalo", {f"P{machine}" for machine in "ABCDEFGHIJ"}),
    ("rocm_strixhalo", {f"X{i}" for i in range(1, 7)}),
    ("rocm_strixhalo", {f"D{i}" for i in range(5, 11)}),
    ("rocm_strixhalo", {"A21", "A30", "A31", "A32", "B5", "B6", "B19"}),
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


@pytest.mark.parametrize(("plugin", "demanded"), WHOLE)
def test_no_row_is_left_out_or_told_twice(plugin, demanded):
    names = [line[0] for line in rows(plugin)]
    assert len(names) == len(set(names))
    assert demanded <= set(names)


@pytest.mark.parametrize("line", ROWS, ids=lambda line: f"{line[0]}-{line[1]}")
def test_what_a_row_names_exists(line):
    plugin, _, _, where, proof, remark = line
    for name in quoted(where):
        bases = (REPOSITORY / "plugins" / plugin, REPOSITORY)
        assert any((base / name).exists() for base in bases), name
    for test in quoted(proof):
        assert exists(test), test
    assert quoted(proof) or remark.startswith("not here:"), "a test, or why there is none"


def test_a_test_that_is_gone_would_be_noticed():
    assert not exists("test_ascend_cost::test_that_nobody_wrote")
    assert not exists("test_nowhere::test_that_nobody_wrote")
    assert not exists("L9/nothing")
