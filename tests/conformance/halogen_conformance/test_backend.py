"""The suite as pytest tests; collected only with `--backend`."""

from __future__ import annotations

from typing import Any

import pytest

from halogen_conformance.case import BAD, Status


@pytest.mark.timeout(0)
def test_case(conformance_case: str, conformance_results: dict[str, Any]) -> None:
    result = conformance_results[conformance_case]
    if result.status in BAD:
        pytest.fail(f"{result.status}: {result.reason}\n{result.output}", pytrace=False)
    if result.status in (Status.FILTERED, Status.UNSUPPORTED):
        pytest.skip(f"{result.status}: {result.reason}")
    if result.status in (Status.WAIVED, Status.XFAIL):
        pytest.xfail(f"{result.status}: {result.reason}")
