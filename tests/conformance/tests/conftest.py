import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
HALOGEN = "from halogen_core.cli.main import main; main()"


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """A folder of extra distributions for child processes: `site.add(source)`, `site.run(...)`."""
    return Site(tmp_path_factory.mktemp("site"))


class Site:
    """Plugins put here are seen by `run` and by nobody else."""

    def __init__(self, folder):
        self.folder = folder

    def add(self, name, files, entry=None):
        """A package `name` with files and, unless `entry` is None, an entry point to `entry`."""
        package = self.folder / name
        package.mkdir(exist_ok=True)
        for file, text in files.items():
            (package / file).write_text(text, encoding="utf-8")
        info = self.folder / f"{name}-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        if entry:
            lines = f"[halogen.plugins]\n{entry} = {name}.plugin\n"
            (info / "entry_points.txt").write_text(lines)

    def run(self, *arguments, timeout=240, **environment):
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        )

    def conform(self, *arguments, **more):
        return self.run("-c", HALOGEN, "conform", *arguments, **more)


@pytest.fixture
def new_site(tmp_path):
    return Site(tmp_path)
