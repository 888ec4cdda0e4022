"""Plugins written to disk as installed distributions, the way pip would leave them."""

import sys
import textwrap

import pytest

MANIFEST = 'manifest = 1\nname = "{name}"\nspi = "{spi}"\n{more}'
GOOD = """
    from halogen_core.spi import BackendSpec, DeviceInfo, ProbeResult, hookimpl

    @hookimpl
    def halogen_backends():
        return [BackendSpec(name="{name}", factory="halogen_{name}.plugin:create", priority=5)]

    @hookimpl
    def halogen_probe(name, context):
        return ProbeResult(score=7, devices=(DeviceInfo(id="{name}:0", name="made up"),))

    def create(options):
        return options
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(name, code, spi=..., more=...) makes `halogen-<name>` discoverable, here and in children."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name, code=GOOD, *, spi=">=1.0,<2", more="", manifest=None):
        package = tmp_path / f"halogen_{name}"
        info = tmp_path / f"halogen_{name}-1.2.dist-info"
        package.mkdir()
        info.mkdir()
        (package / "__init__.py").write_text("")
        (package / "plugin.py").write_text(textwrap.dedent(code).replace("{name}", name))
        text = MANIFEST.format(name=name, spi=spi, more=more) if manifest is None else manifest
        if text:
            (package / "halogen-backend.toml").write_text(text)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: halogen-{name}\nVersion: 1.2\n"
        )
        (info / "entry_points.txt").write_text(
            f"[halogen.plugins]\n{name} = halogen_{name}.plugin\n"
        )

    yield write
    for module in [
        m for m in sys.modules if m.startswith("halogen_") and hasattr(sys.modules[m], "__file__")
    ]:
        if str(tmp_path) in str(sys.modules[module].__file__):
            del sys.modules[module]
