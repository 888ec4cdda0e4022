"""Rules that a linter does not know: sizes, names, neutrality, codes."""

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SKIP = {".venv", "venv", ".git", "build", "dist", "node_modules"}
SOURCES = sorted(
    p
    for top in ("halogen_core", "plugins", "tests", "scripts", "benchmarks")
    for p in (ROOT / top).rglob("*.py")
    if not SKIP & set(p.parts)
)
PRODUCT = [p for p in SOURCES if "tests" not in p.relative_to(ROOT).parts or "halogen_" in str(p)]
CORE = [p for p in SOURCES if p.is_relative_to(ROOT / "halogen_core")]
FORBIDDEN_NAMES = {"utils", "util", "common", "base", "helpers", "helper", "manager", "misc"}
DEVICE_WORDS = re.compile(
    r"\"cuda\"|'cuda'|\.cuda\(|\bnpu\b|\bhip\b|\bmps\b|\brocm\b", re.IGNORECASE
)

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def relative(path):
    return str(path.relative_to(ROOT))


def test_files_are_short():
    long = {
        relative(p): n for p in PRODUCT if (n := p.read_text(encoding="utf-8").count("\n")) > 400
    }
    assert long == {}


def test_no_file_is_called_utils():
    assert [relative(p) for p in SOURCES if p.stem in FORBIDDEN_NAMES] == []


def test_the_core_names_no_device():
    hits = {relative(p): found for p in CORE if (found := device_words(p))}
    assert hits == {}


def device_words(path):
    code = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(code)):  # docstrings may give examples
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
            code = code.replace(text, "")
    lines = [line.partition("#")[0] for line in code.splitlines()]
    return [line.strip() for line in lines if DEVICE_WORDS.search(line)]


def test_every_error_code_is_explained_and_every_explanation_used():
    texts = [p.read_text(encoding="utf-8") for p in PRODUCT]
    raised = set(re.findall(r"HRT-\d{4}", "\n".join(texts)))
    toml = (ROOT / "halogen_core/error_catalogue.toml").read_text(encoding="utf-8")
    explained = tomllib.loads(toml)
    assert raised - set(explained) == set(), "add these to error_catalogue.toml"
    assert set(explained) - raised == set(), "nothing raises these"
    for entry in explained.values():
        assert all(entry[key] for key in ("title", "cause", "fix"))
