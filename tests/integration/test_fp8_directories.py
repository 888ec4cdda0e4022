"""fp8 directories end to end: logits against float64 over what is stored; what is told of them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, models

from halogen_core.cli.main import main
from halogen_core.spi import BackendOptions
from halogen_cpu_reference.backend import create

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/loader"))
from fp8_files import FORMS
from fp8_models import distance, our_logits, write_model

LAYERS = 7
"""Linear layers of the model."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_gives_the_logits_of_the_stored_values(tmp_path, form):
    want = write_model(tmp_path / "m", form)
    backend = create(BackendOptions())
    assert distance(our_logits(tmp_path / "m", backend), want) < 1e-5
    kept = [line for line in backend.conversions.lines() if " F8_E" in line]
    assert sum(int(line.split()[0]) for line in kept) == LAYERS
    assert all("kept as F32" in line for line in kept)


@pytest.mark.parametrize("form", ["compressed per channel", "transformers blocks"])
def test_experts(tmp_path, form):
    want = write_model(tmp_path / "m", form, "Qwen3Moe")
    assert distance(our_logits(tmp_path / "m", create(BackendOptions())), want) < 1e-5


def test_sixteen_bits_cost_what_is_told(tmp_path):
    want = write_model(tmp_path / "m", "transformers blocks")
    backend = create(BackendOptions(extra={"dtype": "bf16"}))
    assert 1e-4 < distance(our_logits(tmp_path / "m", backend), want) < 0.1
    assert f"{LAYERS} F8_E4M3 tensors are kept as BF16, values within 0.3" in " ".join(
        backend.conversions.lines()
    )


def run(*arguments):
    result = CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_inspect_and_plan_tell_of_it(tmp_path):
    write_model(tmp_path / "m", "transformers blocks")
    vocabulary = {f"word{i}": i for i in range(97)}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(tmp_path / "m/tokenizer.json"))
    about = run("inspect", tmp_path / "m", "--json", "--tensors")
    assert about["formats"] == {"F32": 7, "F8_E4M3": LAYERS}
    stored = sum(
        entry["data_offsets"][1] - entry["data_offsets"][0]
        for key, entry in header(tmp_path / "m/model.safetensors").items()
        if "metadata" not in key
    )
    assert stored <= about["bytes"] <= stored + LAYERS * 8, "scales count, and the block's size"
    row = next(r for r in about["tensors"] if r["name"] == "blk.0.ffn_down.weight")
    assert (row["format"], row["shape"]) == ("F8_E4M3", [160, 200])
    planned = run(
        *("plan", "--model", tmp_path / "m", "--backend", "cuda", "--profile", "h200-141"),
        *("--context", 64, "--json"),
    )
    told = f"format F8_E4M3 ({LAYERS} tensors): emulated: kept in 16 bits"
    assert told in planned["fallbacks"]
    shapes = [row["shape"] for row in about["tensors"]]
    # matrices, those of F32 too, are kept in 16 bits, norms in 32
    matrices = sum(prod(shape) for shape in shapes if len(shape) == 2)
    vectors = sum(prod(shape) for shape in shapes if len(shape) == 1)
    assert planned["pools"]["static"] == 2 * matrices + 4 * vectors


def prod(shape):
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def header(file):
    raw = file.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
