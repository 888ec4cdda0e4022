"""The seam is locked, narrow and the only thing plugins import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import api_lock  # noqa: E402

PLUGIN_FILES = sorted(
    p for p in ROOT.glob("plugins/*/halogen_*/**/*.py") if "templates" not in p.parts
)
SHARED_LIBRARY = "halogen_triton"


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return found


def test_the_lock_matches_the_code():
    assert api_lock.LOCK.read_text(encoding="utf-8") == api_lock.signatures(), (
        "the seam changed: bump SPI_VERSION (minor for additions, major for the rest), "
        "then run scripts/api_lock.py"
    )


def forbidden(path):
    own = path.relative_to(ROOT).parts[2]
    for module in imports(path):
        top = module.partition(".")[0]
        if top == "halogen_core":
            if module != "halogen_core.spi" and not module.startswith("halogen_core.spi."):
                yield module
        elif top.startswith("halogen_") and top not in {own, SHARED_LIBRARY}:
            yield module


def test_plugins_import_the_seam_and_themselves_only():
    hits = {str(p.relative_to(ROOT)): found for p in PLUGIN_FILES if (found := list(forbidden(p)))}
    assert hits == {}


def test_there_are_plugins_to_check():
    assert len(PLUGIN_FILES) >= 3


@pytest.mark.parametrize(
    "module", ["halogen_core.spi", "halogen_core.kv", "halogen_core.scheduler"]
)
def test_device_free_modules_load_without_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
