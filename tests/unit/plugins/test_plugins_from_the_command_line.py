"""Issue 2, test 4: with a broken plugin and one for a newer SPI the command line still works."""

import json

import pytest
from click.testing import CliRunner

from halogen_core.cli.main import main

COMMAND = """
    import click
    from halogen_core.spi import hookimpl

    @hookimpl
    def halogen_cli_commands(group):
        @group.command("hello-plugin")
        def hello():
            click.echo("hello from a plugin")
"""


@pytest.fixture
def halogen(install, tmp_path):
    install("good")
    install("broken", "raise RuntimeError('its library is missing')")
    install("newer", spi=">=9.0")

    def invoke(*arguments):
        return CliRunner().invoke(main, list(arguments))

    invoke.cache = str(tmp_path / "cache")
    return invoke


def test_the_list_says_which_and_why(halogen):
    result = halogen("plugins", "list", "--json", "--cache-dir", halogen.cache)
    rows = {row["name"]: row for row in json.loads(result.output)}
    assert rows["good"]["status"] == "ok"
    assert rows["good"]["backends"][0]["devices"] == [
        {"id": "good:0", "name": "made up", "driver": ""}
    ]
    assert rows["broken"]["status"] == "broken"
    assert "its library is missing" in rows["broken"]["reason"]
    assert rows["newer"]["status"] == "incompatible"
    assert "HRT-1103" in rows["newer"]["reason"]
    people = halogen("plugins", "list", "--no-probe").output
    assert "its library is missing" in people
    assert "wants SPI >=9.0" in people


@pytest.mark.parametrize(
    ("backend", "code", "reason"),
    [
        ("broken", "HRT-1101", "its library is missing"),
        ("newer", "HRT-1101", "wants SPI >=9.0"),
        ("nowhere", "HRT-1107", "cpu_reference"),
    ],
)
def test_asking_for_one_that_cannot_run_is_an_error_with_its_reason(
    halogen, smollm2_path, backend, code, reason
):
    flags = ("--model", str(smollm2_path), "--cache-dir", halogen.cache, "--backend", backend)
    result = halogen("run", *flags, "hi")
    assert result.exit_code == 2
    assert f"[{code}]" in result.stderr
    assert reason in result.stderr


def test_the_doctor_reports_them(halogen):
    result = halogen("doctor", "--json")
    assert result.exit_code == 1
    found = {f["text"]: f for f in json.loads(result.output) if f["code"] == "core.plugin"}
    assert any("`broken`" in text for text in found)
    assert any("`newer`" in text for text in found)


def test_a_plugin_may_add_commands(install, halogen):
    install("speaking", COMMAND)
    result = halogen("hello-plugin")
    assert result.output == "hello from a plugin\n"
    assert halogen("hello-plugins").exit_code == 2
