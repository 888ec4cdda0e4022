"""Probing in isolation and choosing a backend."""

import os
import re
import time
import tomllib
from pathlib import Path

import pytest

from halogen_core.errors import BackendUnavailable, PluginError
from halogen_core.plugins import PluginRegistry, create_backend, select
from halogen_core.plugins.missing import packages
from halogen_core.plugins.probe import probe
from halogen_core.spi import BackendOptions, ProbeContext

PROBE = """
    from halogen_core.spi import BackendSpec, ProbeResult, Reason, hookimpl

    @hookimpl
    def halogen_backends():
        return [BackendSpec(name="{name}", factory="halogen_{name}.plugin:create", priority=99)]

    @hookimpl
    def halogen_probe(name, context):
        BODY

    def create(options):
        raise OSError("libacme.so is missing a symbol")
"""


def with_probe(body):
    return PROBE.replace("BODY", body)


def registry_and_plugin(name="acme"):
    registry = PluginRegistry.discover()
    return registry, next(p for p in registry.plugins if p.name == name)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("import os; os._exit(5)", "exit code 5"),
        ("raise OSError('no libacme')", "OSError: no libacme"),
        ("return 80", "not one ProbeResult"),
        ("return None", "not one ProbeResult"),
        (
            "return ProbeResult(score=0, reasons=(Reason(code='x', text='no card', hint='plug one in'),))",
            "no card",
        ),
    ],
)
def test_a_bad_probe_is_isolated_and_explained(install, body, words):
    install("acme", with_probe(body))
    registry, plugin = registry_and_plugin()
    result = probe(plugin, "acme", ProbeContext())
    assert result.score == 0
    assert words in result.reasons[0].text
    with pytest.raises(BackendUnavailable, match="cannot run here") as error:
        select(registry, "acme")
    assert words in str(error.value)


def test_a_hanging_probe_times_out(install):
    install("acme", with_probe("import time; time.sleep(60)"))
    _, plugin = registry_and_plugin()
    began = time.monotonic()
    result = probe(plugin, "acme", ProbeContext(), timeout_s=1.5)
    assert time.monotonic() - began < 50
    assert result.reasons[0].code == "probe_timeout"


def test_a_printing_probe_cannot_forge_its_answer(install, capfd):
    install("acme", with_probe("print('{\"score\": 100}'); return ProbeResult(score=3)"))
    _, plugin = registry_and_plugin()
    assert probe(plugin, "acme", ProbeContext()).score == 3
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    "body",
    [
        "long = 'x' * 5_000_000; return ProbeResult(score=3, reasons=(Reason(code='x', text=long),))",
        "import sys; sys.stderr.write('x' * 5_000_000); return ProbeResult(score=3)",
        # a vendor's daemon: it keeps what it inherited open
        "import os, time; os.fork() or (time.sleep(30), os._exit(0)); return ProbeResult(score=3)",
    ],
    ids=["more than a socket holds", "more than a pipe holds", "a process left behind"],
)
def test_a_probe_may_say_much_and_leave_something_running(install, body):
    install("acme", with_probe(body))
    _, plugin = registry_and_plugin()
    began = time.monotonic()
    assert probe(plugin, "acme", ProbeContext()).score == 3
    assert time.monotonic() - began < 25


def test_half_an_answer_is_a_crash(install):
    body = """
        import os, sys
        os.write(int(sys.argv[1]), b'{"score": 3, "dev')
        print("driver gave up", file=sys.stderr)
        os._exit(7)
    """
    install("acme", with_probe(body))
    _, plugin = registry_and_plugin()
    result = probe(plugin, "acme", ProbeContext())
    assert result.reasons[0].code == "probe_crash"
    assert result.reasons[0].text.endswith("exit code 7: driver gave up")


def test_the_best_usable_backend_wins_when_none_is_named(install):
    install("acme", with_probe("return ProbeResult(score=1)"))
    install("broken", "raise ImportError('x')")
    registry, _ = registry_and_plugin()
    assert select(registry, None).spec.name == "acme"


def test_an_unusable_one_of_higher_priority_does_not_win(install):
    install("acme", with_probe("return ProbeResult(score=0)"))
    registry, _ = registry_and_plugin()
    assert select(registry, None).spec.name != "acme"


def test_a_broken_one_asked_for_says_why(install):
    install("acme", "raise ImportError('libacme.so.3: cannot open')")
    registry, _ = registry_and_plugin()
    with pytest.raises(BackendUnavailable, match="libacme.so.3"):
        select(registry, "acme")


def test_an_unknown_name_lists_the_known():
    with pytest.raises(PluginError, match="installed: .*cpu_reference") as error:
        select(PluginRegistry.discover(), "warp_drive")
    assert error.value.code == "HRT-1107"


def without(*distributions):
    """What is installed but for these: their plugins cannot be found."""
    found = PluginRegistry.discover()
    found.plugins = [p for p in found.plugins if p.distribution not in distributions]
    return found


HOW = "in a checkout of halogen: pip install"
ROCM = "./plugins/triton_kernels ./plugins/rocm_strixhalo"


@pytest.mark.parametrize("asked", ["rocm_strixhalo", "rocm"])
def test_one_of_ours_that_is_not_installed_names_its_package(asked):
    registry = without("halogen-rocm-strixhalo")
    with pytest.raises(PluginError, match="not installed; installed: .*cpu_reference") as error:
        select(registry, asked)
    assert (error.value.code, error.value.fix) == ("HRT-1107", f"{HOW} {ROCM}")
    with pytest.raises(PluginError, match="not installed"):
        select(registry, None, device=f"{asked}:0")


def test_a_misspelt_name_gets_the_nearest():
    with pytest.raises(PluginError, match="there is no backend `cpu_referense`") as error:
        select(PluginRegistry.discover(), "cpu_referense")
    assert error.value.fix == "did you mean `cpu_reference`?"
    with pytest.raises(PluginError) as error:
        select(without("halogen-rocm-strixhalo"), "rocm-strixhalo")
    assert error.value.fix == f"did you mean `rocm_strixhalo`? ({HOW} {ROCM})"
    with pytest.raises(PluginError) as error:
        select(PluginRegistry.discover(), "warp_drive")
    assert "name one of these" in error.value.fix


def test_the_packages_that_errors_name_are_those_of_the_plugins():
    """Each plugin of this repository that is installed under all its names."""
    root = Path(__file__).parents[3] / "plugins"
    own = {tomllib.loads(p.read_text())["project"]["name"] for p in root.glob("*/pyproject.toml")}
    offered = {
        name: plugin.distribution
        for plugin in PluginRegistry.discover().plugins
        if plugin.distribution in own
        for spec in plugin.backends
        for name in (spec.name, *spec.aliases)
    }
    named = {name: package for name, (package, _) in packages().items()}
    assert {n: p for n, p in named.items() if p in offered.values()} == offered
    assert set(named.values()) <= own
    for package, folders in packages().values():
        projects = [root.parent / folder / "pyproject.toml" for folder in folders.split()]
        told = [tomllib.loads(project.read_text())["project"] for project in projects]
        assert told[-1]["name"] == package
        needed = {re.split("[<>=]", need)[0] for need in told[-1]["dependencies"]} & own
        assert needed <= {project["name"] for project in told}


def test_the_device_names_its_backend(install):
    install("acme", with_probe("return ProbeResult(score=int(context.device == 'acme:1'))"))
    registry, _ = registry_and_plugin()
    assert select(registry, None, device="acme:1").spec.name == "acme"
    with pytest.raises(BackendUnavailable):
        select(registry, None, device="acme:2")


def test_a_probe_is_cached_by_version_and_environment(install, tmp_path):
    count = tmp_path / "count"
    body = f"open({str(count)!r}, 'a').write('x'); return ProbeResult(score=3)"
    install("acme", with_probe(body), more='probe_env = ["ACME_VISIBLE"]')
    _, plugin = registry_and_plugin()

    def ask(**environment):
        return probe(
            plugin, "acme", ProbeContext(), cache_dir=tmp_path / "cache", environment=environment
        )

    assert [ask().score, ask(OTHER="1").score, ask(ACME_VISIBLE="1").score] == [3, 3, 3]
    assert count.read_text() == "xx"
    os.utime(Path(plugin.manifest.path).parent / "plugin.py", (2e9, 2e9))  # an edit in a checkout
    ask()
    assert count.read_text() == "xxx"


def test_a_failed_probe_is_not_cached(install, tmp_path):
    flag = tmp_path / "plugged"
    install(
        "acme",
        with_probe(f"import os; return ProbeResult(score=int(os.path.exists({str(flag)!r})))"),
    )
    _, plugin = registry_and_plugin()
    assert probe(plugin, "acme", ProbeContext(), cache_dir=tmp_path).score == 0
    flag.touch()
    assert probe(plugin, "acme", ProbeContext(), cache_dir=tmp_path).score == 1


def test_a_factory_that_fails_is_wrapped_with_its_distribution(install):
    install("acme", with_probe("return ProbeResult(score=1)"))
    registry, _ = registry_and_plugin()
    with pytest.raises(BackendUnavailable, match="missing a symbol") as error:
        create_backend(select(registry, "acme"), BackendOptions())
    assert "halogen-acme" in str(error.value)
