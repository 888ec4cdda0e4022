"""Docs that follow from the code are current; links lead somewhere; ADRs fit on a page."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    p
    for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/*.md")]
    if ".venv" not in p.parts
)


def test_generated_pages_are_current():
    command = [sys.executable, str(ROOT / "scripts/generate_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + "run scripts/generate_docs.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), target


def test_decision_records_fit_on_a_page():
    for page in ROOT.glob("docs/adr/*.md"):
        assert page.read_text(encoding="utf-8").count("\n") <= 60, page.name
