"""Every mutant is killed, where it belongs, by a case that a sound backend passes."""

from pathlib import Path

import pytest

from halogen_conformance.catalogue import suite_cases
from halogen_conformance.mutants.registry import all_mutants
from halogen_conformance.mutants.score import judge, page
from halogen_conformance.oracle.scaled import SCALED

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference/mutation-score.md"
VERDICTS = {}


@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda m: m.name)
def test_mutant_is_killed(mutant):
    verdict = VERDICTS[mutant.name] = judge(mutant)
    seen = [(r.status, r.id, r.reason) for r in verdict.results]
    assert verdict.killed, seen
    assert verdict.fair, [(r.status, r.id, r.reason) for r in verdict.control]
    assert all(r.id.startswith(f"L{mutant.level}/") for r in verdict.killers[:1]), seen


def test_every_case_of_formats_with_scales_kills_a_mutant():
    topics = ("four_bits", "int8", "float8")
    verdicts = [VERDICTS.get(m.name) or judge(m) for m in all_mutants() if m.topic in topics]
    killers = {result.id for verdict in verdicts for result in verdict.killers}
    asked = {c.id for c in suite_cases() if c.column in SCALED and c.opening.dtype in (None, "f32")}
    assert asked <= killers, sorted(asked - killers)


def test_there_are_enough_mutants_of_every_level():
    levels = [m.level for m in all_mutants()]
    assert len(levels) >= 40
    assert {1, 2, 3} <= set(levels)


def test_the_published_score_is_current():
    verdicts = [VERDICTS.get(m.name) or judge(m) for m in all_mutants()]
    assert PAGE.read_text(encoding="utf-8") == page(verdicts), (
        "run `python -m halogen_conformance.mutants --write docs/reference/mutation-score.md`"
    )
