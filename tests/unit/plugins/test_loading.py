"""Discovery and loading: a broken plugin is a line in a list, never a crash."""

import pytest

from halogen_core.errors import PluginError, SpiMismatch
from halogen_core.plugins import PluginOptions, PluginRegistry, PluginStatus


def discover(**options):
    registry = PluginRegistry.discover(PluginOptions(**options))
    return registry, {p.name: p for p in registry.plugins}


def test_a_good_plugin_is_found_with_its_backends(install):
    install("acme")
    _, found = discover()
    acme = found["acme"]
    assert (acme.status, acme.distribution, acme.version) == ("ok", "halogen-acme", "1.2")
    assert [b.name for b in acme.backends] == ["acme"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ImportError('libacme.so.3: cannot open')", "libacme.so.3"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("def broken(:", "SyntaxError"),
        (
            "from halogen_core.spi import hookimpl\n"
            "@hookimpl\n"
            "def halogen_backends():\n"
            "    return ['acme']",
            "not a BackendSpec",
        ),
        (
            "from halogen_core.spi import hookimpl\n"
            "@hookimpl\n"
            "def halogen_backends(color):\n"
            "    return []",
            "color",
        ),
    ],
)
def test_a_broken_plugin_is_reported_and_harmless(install, code, words):
    install("broken", code)
    install("acme")
    _, found = discover()
    assert found["broken"].status is PluginStatus.BROKEN
    assert words in found["broken"].reason
    assert found["acme"].status is PluginStatus.OK
    assert found["cpu_reference"].status is PluginStatus.OK


def test_an_unknown_hook_means_a_newer_spi(install):
    code = (
        "from halogen_core.spi import hookimpl\n@hookimpl\ndef halogen_teleport():\n    return []"
    )
    install("future", code)
    _, found = discover()
    assert found["future"].status is PluginStatus.BROKEN
    assert "newer SPI" in found["future"].reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spi": ">=2.0,<3"}, "SPI >=2.0,<3"),
        ({"more": 'python = ">=4"'}, "python >=4"),
        ({"more": 'torch = ">=99"'}, "torch >=99"),
        ({"manifest": ""}, "no `halogen-backend.toml`"),
        ({"manifest": "manifest = 1\nname = 'x'\n"}, "lacks ['spi']"),
        ({"more": "color = 'red'"}, "unknown keys ['color']"),
        ({"spi": "roughly 1"}, "not a version range"),
        ({"manifest": "=broken"}, "cannot be read"),
    ],
)
def test_an_incompatible_plugin_is_not_imported(install, change, words):
    install("acme", "raise AssertionError('imported')", **change)
    _, found = discover()
    assert found["acme"].status is PluginStatus.INCOMPATIBLE
    assert words in found["acme"].reason


def test_strict_lets_the_failure_through(install):
    install("acme", spi=">=2")
    with pytest.raises(SpiMismatch):
        discover(strict=True)


def test_allow_block_and_none(install):
    install("acme")
    assert discover(block=frozenset({"acme"}))[1]["acme"].status is PluginStatus.DISABLED
    allowed = discover(allow=frozenset({"acme"}))[1]
    assert allowed["acme"].status is PluginStatus.OK
    assert allowed["cpu_reference"].status is PluginStatus.DISABLED
    assert {p.status for p in discover(none=True)[1].values()} == {PluginStatus.DISABLED}


def test_a_name_claimed_twice_breaks_the_second(install):
    install("acme")
    code = "from halogen_core.spi import BackendSpec, hookimpl\n@hookimpl\ndef halogen_backends():\n    return [BackendSpec(name='acme', factory='x:y')]"
    install("usurper", code)
    _, found = discover()
    assert found["acme"].status is PluginStatus.OK
    assert found["usurper"].status is PluginStatus.BROKEN
    assert "claims backend name `acme`" in found["usurper"].reason
    assert found["usurper"].backends == ()


@pytest.mark.parametrize(
    "body", ["raise RuntimeError('boom')", "yield 1; raise RuntimeError('boom')"]
)
def test_one_raising_hook_does_not_lose_the_others(install, body):
    code = f"from halogen_core.spi import hookimpl\n@hookimpl\ndef halogen_doctor_checks(context):\n    {body}"
    install("raising", code)
    install(
        "fine",
        "from halogen_core.spi import hookimpl\n@hookimpl\ndef halogen_doctor_checks(context):\n    return ['finding']",
    )
    registry, found = discover()
    results = registry.collect("halogen_doctor_checks", context=None)
    assert ("fine", "finding") in [(p.name, r) for p, r in results]
    assert found["raising"].status is PluginStatus.BROKEN
    assert "boom" in found["raising"].reason


def test_errors_carry_codes():
    assert PluginError("x").code == "HRT-1100"
    assert str(SpiMismatch("x", fix="y")) == "[HRT-1103] x — y"
