"""`halogen inspect` on a small file."""

import json

from click.testing import CliRunner

from halogen_core.cli.main import main


def test_inspect_takes_its_model_as_other_commands_do(tiny_gguf):
    given = [["inspect", str(tiny_gguf)], ["inspect", "--model", str(tiny_gguf)]]
    first, second = (CliRunner().invoke(main, [*a, "--json"]) for a in given)
    assert first.output == second.output
    assert json.loads(first.output)["architecture"] == "llama"
    for wrong in (["inspect"], [*given[0], "--model", "x"]):
        done = CliRunner().invoke(main, wrong)
        assert done.exit_code == 2
        assert "name one MODEL" in done.output
