"""The command line as a whole: quick, lazy, and errors with code and fix."""

import importlib
import json
import resource
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from halogen_core.cli import terminal
from halogen_core.cli.main import COMMANDS, PURPOSES, main
from halogen_core.error_catalogue import catalogue
from halogen_core.plugins import PluginRegistry

ROOT = Path(__file__).parents[3]


def halogen(*arguments, env=None):
    return CliRunner().invoke(main, list(arguments), env=env)


def test_help_is_quick_and_imports_no_torch():
    code = (
        "import sys; from halogen_core.cli.main import main; main(['--help'], standalone_mode=False);"
        "heavy = {'torch', 'fastapi', 'numpy', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # of the processor: the clock also tells what else the machine does
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
    assert min(times) < 0.5
    assert all(name in done.stdout for name in COMMANDS)


def test_every_listed_command_exists_and_has_help():
    for name in COMMANDS:
        result = halogen(name, "--help")
        assert result.exit_code == 0, (name, result.output)
        assert "Usage:" in result.output


def test_every_command_stands_once_in_the_help():
    shown = [name for names in PURPOSES.values() for name in names]
    assert sorted(shown) == sorted(COMMANDS)


def test_a_misspelt_command_names_the_nearest():
    result = halogen("plugns")
    assert result.exit_code == 2
    assert "'plugins'" in result.output


@pytest.mark.parametrize("asked", ["HRT-1102", "1102", "[hrt-1102]"])
def test_explain(asked):
    result = halogen("explain", asked)
    assert result.exit_code == 0
    assert catalogue()["HRT-1102"].fix in result.output


def test_explain_lists_all_and_refuses_unknown_codes():
    assert all(code in halogen("explain").output for code in catalogue())
    result = halogen("explain", "HRT-9999")
    assert result.exit_code == 2
    assert "HRT-1006" in result.output


def test_plugins_list_as_data(tmp_path):
    result = halogen("plugins", "list", "--json", "--cache-dir", str(tmp_path))
    rows = {row["name"]: row for row in json.loads(result.output)}
    reference = rows["cpu_reference"]
    assert reference["status"] == "ok"
    assert reference["backends"][0]["usable"]
    assert reference["backends"][0]["devices"][0]["id"] == "cpu_reference:0"


def test_plugins_can_be_blocked_and_the_list_says_so():
    result = halogen("plugins", "list", "--no-probe", "--no-plugin", "cpu_reference")
    assert "disabled" in result.output
    assert "blocked by --no-plugin" in result.output
    result = halogen("plugins", "list", "--no-probe", env={"HALOGEN_PLUGINS": "other"})
    assert "not in the HALOGEN_PLUGINS list" in result.output


def test_a_bad_setting_ends_with_code_and_fix():
    result = halogen("plugins", "list", "--config", "/nowhere.toml")
    assert result.exit_code == 2
    assert "HRT-1004" in result.output
    assert "fix:" in result.output
    assert "Traceback" not in result.output


def test_plugins_are_not_loaded_for_known_commands(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("plugins were loaded")

    monkeypatch.setattr(PluginRegistry, "discover", refuse)
    assert halogen("explain").exit_code == 0


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("smolm2-135m", "HRT-2301", "did you mean `smollm2-135m`?"),
        ("models/none.gguf", "HRT-2301", "/models/none.gguf`"),
        ("/no/where", "HRT-2301", "there is no file or directory `/no/where`"),
    ],
)
def test_a_model_that_is_not_there(name, code, said, tmp_path):
    flags = ["--models-dir", str(tmp_path), "--model", name]
    done = CliRunner().invoke(main, ["run", *flags, "hi"])
    assert done.exit_code == 2
    assert code in done.stderr
    assert said in done.stderr


def test_a_models_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    done = CliRunner().invoke(main, ["pull", "--models-dir", str(tmp_path / "file" / "models")])
    assert done.exit_code == 2
    assert "HRT-2305" in done.stderr
    assert "Not a directory" in done.stderr


def test_ctrl_c_ends_any_command_with_130(monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    command = importlib.import_module("halogen_core.cli.explain").command
    monkeypatch.setattr(command, "callback", interrupted)
    assert CliRunner().invoke(main, ["explain"]).exit_code == 130


@pytest.mark.parametrize("imported", ["click", "halogen_core.cli.explain"])
def test_ctrl_c_while_the_program_is_imported_leaves_no_trace(imported):
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["halogen"]
    module, _, name = script.partition(":")
    code = f"""
import os, signal, sys
class CtrlC:
    def find_spec(self, name, *_):
        if name == {imported!r}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, CtrlC())
sys.argv[1:] = ["explain", "HRT-1002"]
from {module} import {name} as main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT  # which shells call 130
    assert done.stdout + done.stderr == ""


def test_without_a_terminal_loading_is_a_line_now_and_then(monkeypatch, caplog):
    now = iter((0.0, 1.0, 6.0, 6.0, 7.0))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    caplog.set_level("INFO")
    with terminal.loading_shown() as show:
        for share in (0.1, 0.5, 0.6):
            show(share)
    assert [record.getMessage() for record in caplog.records] == ["loading: 50 %"]


def test_tables_fit_a_small_terminal():
    done = CliRunner().invoke(main, ["simulate", "capacity", "--rates", "1", "--duration", "5"])
    assert done.exit_code == 0
    assert "preempted" in done.output
    assert "…" not in done.output
