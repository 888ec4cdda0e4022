"""The comparison of real files (`benchmarks/gpu/greedy.py`) on a tiny model, in the interpreter."""

import sys
from pathlib import Path

import attrs
import pytest

from halogen_core.spi import BackendOptions, TorchBackend

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks/gpu"))
from greedy import Pick, partings, picks_of
from identity import Session

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_backend import triton_backend
from tiny_models import tiny

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5]]
NEW = 4


@pytest.fixture(scope="module")
def expected():
    plain = TorchBackend(BackendOptions(extra={"dtype": "f32"}), name="torch")
    return picks_of(Session(plain, tiny(), "f32", per=1, most=2), PROMPTS, NEW)


@pytest.fixture
def session():
    return Session(triton_backend(), tiny(), "f32", per=1, most=2)


def test_equal_tokens_have_no_partings(expected, session):
    assert [len(picks) for picks in expected] == [NEW, NEW]
    assert all(pick.behind[0][1] > 0 for picks in expected for pick in picks)
    assert not list(partings(session, PROMPTS, expected))
    assert not list(partings(session, PROMPTS[1:], expected[1:]))


def test_a_token_that_differs_is_told_with_its_distance_and_the_rest_goes_on(expected, session):
    first = expected[1][0]
    (other, gap), *_ = first.behind
    # as if the CPU had picked its last token otherwise, so that nothing after it depends on that
    last = expected[1][-1]
    wrong = attrs.evolve(last, token=int(last.behind[0][0]), behind=[[last.token, 0.25]])
    changed = [expected[0], [*expected[1][:-1], wrong]]
    (found,) = partings(session, PROMPTS, changed)
    assert found == {"prompt": 1, "at": NEW - 1, "token": last.token, "gap": 0.25}
    assert first.gap_to(int(other)) == gap
    assert Pick(1, [[2, 0.1]]).gap_to(3) is None, "further behind than what was written down"
