"""What the conformance suite asks of weights with scales beside their codes, kernels interpreted."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_backend import triton_backend

from halogen_conformance.case import Status
from halogen_conformance.catalogue import suite_cases
from halogen_conformance.mutants.score import run_on
from halogen_conformance.oracle.scaled import SCALED

LEVELS = ("L1/linear/", "L2/weights/", "L3/formats/INT4", "L3/formats/W8A8")
CASES = [
    case
    for case in suite_cases()
    if case.column in SCALED and case.id.startswith(LEVELS) and case.opening.dtype in (None, "f16")
]


@pytest.fixture(scope="module")
def backend():
    return triton_backend(dtype="f16")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_case_passes(backend, case):
    result = run_on(backend, case)
    assert result.status is Status.PASS, result.reason
