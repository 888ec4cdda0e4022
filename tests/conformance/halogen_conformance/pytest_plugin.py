"""`pytest --pyargs halogen_conformance --backend X --level N`: one test per case, isolated as ever.

Without `--backend` the suite collects nothing, so having it installed changes no other run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

RESULTS = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("halogen-conformance")
    group.addoption("--backend", help="halogen backend to certify")
    group.addoption("--level", type=int, default=3, help="highest level to run (default 3)")
    group.addoption("--conform-out", help="folder for the conformance report")
    group.addoption("--conform-only", action="append", default=[], help="pattern of case ids")
    group.addoption("--conform-jobs", type=int, default=1, help="cases beside each other")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if (
        collection_path.name == "test_backend.py"
        and collection_path.parent == Path(__file__).parent
    ):
        return config.getoption("--backend") is None
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "conformance_case" not in metafunc.fixturenames:
        return
    import fnmatch

    from halogen_conformance.catalogue import suite_cases

    level = metafunc.config.getoption("--level")
    only = metafunc.config.getoption("--conform-only")
    ids = [
        case.id
        for case in suite_cases()
        if case.level <= level and (not only or any(fnmatch.fnmatchcase(case.id, p) for p in only))
    ]
    metafunc.parametrize("conformance_case", ids, ids=ids)


@pytest.fixture(scope="session")
def conformance_results(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Results of the whole run by case id, made once."""
    from halogen_conformance.certify import Request, certify
    from halogen_conformance.folder import write_folder
    from halogen_conformance.report import report_of

    option = request.config.getoption
    outcome = certify(
        Request(
            backend=option("--backend"),
            level=option("--level"),
            only=tuple(option("--conform-only")),
            jobs=option("--conform-jobs"),
        )
    )
    if option("--conform-out"):
        write_folder(Path(option("--conform-out")), report_of(outcome))
    if outcome.interrupted:
        raise KeyboardInterrupt
    return {result.id: result for result in outcome.results}
