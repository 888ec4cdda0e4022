"""Layered int8: the plan, the files, what loads from them."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from halogen_core.cli.convert import command
from halogen_core.cli.convert_check import compare, judge
from halogen_core.errors import ConfigError, ModelError
from halogen_core.loader import convert, open_model
from halogen_core.loader.convert import QuantPlan, convert_directory
from halogen_core.loader.int8 import SCALES_FILE, quantize_rows, signal_to_noise

LAYERED = """
embedding: fp16
attention: {qkv: w8a8}
ffn.w1: w8a16
ffn.w2: w8a8
"""


@pytest.fixture
def calm_hf(tiny_hf):
    """The tiny model with weights of a trained one's size: answers that rounding leaves alone."""
    path = tiny_hf / "model.safetensors"
    tensors = load_file(path)
    save_file({k: v / np.float16(4) if v.ndim == 2 else v for k, v in tensors.items()}, path)
    return tiny_hf


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "quant.yaml"
    path.write_text(LAYERED)
    return QuantPlan.read(path)


def test_layers_get_the_formats_they_were_given(tiny_hf, tmp_path, plan):
    report = convert_directory(tiny_hf, tmp_path / "out", plan)
    made, original = open_model(tmp_path / "out"), open_model(tiny_hf)
    assert sorted(made.names()) == sorted(original.names())
    formats = {name: made.tensor(name).format for name in made.names()}
    assert {formats[f"blk.0.attn_{x}.weight"] for x in "qkv"} == {"W8A8"}
    assert formats["blk.0.attn_output.weight"] == "F16"
    assert {formats[f"blk.0.ffn_{x}.weight"] for x in ("gate", "up")} == {"W8A16"}
    assert formats["blk.0.ffn_down.weight"] == "W8A8"
    assert formats["token_embd.weight"] == "F16"
    tensor = made.tensor("blk.0.ffn_down.weight")
    values = tensor.data.view(np.int8).reshape(tensor.shape) * tensor.aux["scale"][:, None]
    before = original.tensor("blk.0.ffn_down.weight").data.view(np.float16).reshape(tensor.shape)
    assert np.abs(values - before).max() <= np.abs(before).max() / 127 / 2 * 1.001
    assert min(report.values()) > 35
    assert json.loads((tmp_path / "out/quant_report.json").read_text())["snr_db"] == report
    assert made.content_id != original.content_id


def test_rounding_is_symmetric_and_survives_zeros():
    values = np.array([[1, -1, 0.5], [0, 0, 0]], np.float32)
    rounded, scale = quantize_rows(values)
    assert rounded.tolist() == [[127, -127, 64], [0, 0, 0]]
    assert scale[0] == pytest.approx(1 / 127)
    assert signal_to_noise(values[1:], rounded[1:], scale[1:]) == float("inf")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"attention.qvk": "w8a8"}, "did you mean `attention.qkv`"),
        ({"ffn.w2": "w4a4"}, "known: fp16, w8a8, w8a16"),
        ({"embedding": "w8a8"}, "must stay fp16"),
    ],
)
def test_plans_that_make_no_sense(table, words):
    with pytest.raises(ConfigError, match=words):
        QuantPlan.of(table)


def test_a_layer_that_loses_too_much_stops_it_and_leaves_nothing(
    tiny_hf, tmp_path, plan, monkeypatch
):
    monkeypatch.setattr(convert, "LEAST_DB", 90.0)
    with pytest.raises(ModelError, match=r"keeps \d\d\.\d+ dB over its rounding error, 90"):
        convert_directory(tiny_hf, tmp_path / "out", plan)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*partial*"))


def test_the_target_is_whole_or_absent(tiny_hf, tmp_path, plan):
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        convert_directory(tiny_hf, tmp_path / "there", plan)
    with pytest.raises(ModelError, match="config.json"):
        convert_directory(tmp_path / "there", tmp_path / "new", plan)
    assert not (tmp_path / "new").exists()


def test_lost_scales_are_a_damaged_model(tiny_hf, tmp_path, plan):
    convert_directory(tiny_hf, tmp_path / "out", plan)
    (tmp_path / "out" / SCALES_FILE).unlink()
    with pytest.raises(ModelError):
        open_model(tmp_path / "out")


def test_the_command_warns_guards_and_reports(calm_hf, tmp_path):
    tiny_hf = calm_hf
    run = CliRunner()
    done = run.invoke(command, [str(tiny_hf), str(tmp_path / "a"), "--quantize", "w8a8"])
    assert done.exit_code == 0, done.output
    assert "tensors are int8" in done.output
    assert "answers repeat themselves" in done.output + (done.stderr or "")
    wrong = run.invoke(
        command, [str(tiny_hf), str(tmp_path / "b"), "--quantize", "w8a8", "--rope-theta", "123"]
    )
    assert isinstance(wrong.exception, ConfigError)
    assert "is not the model's" in str(wrong.exception)
    assert isinstance(run.invoke(command, [str(tiny_hf), "x"]).exception, ConfigError)


def test_answers_are_compared_and_a_spoiled_model_is_refused(calm_hf, tmp_path, plan):
    convert_directory(calm_hf, tmp_path / "out", plan)
    found = compare(calm_hf, tmp_path / "out")
    assert 0 < found.divergence < 0.1
    assert found.same_choice > 0.8
    judge(found, tmp_path / "out")
    path = tmp_path / "out" / SCALES_FILE
    scales = load_file(path)
    save_file({k: v * 30 if "_proj" in k else v for k, v in scales.items()}, path)
    spoiled = compare(calm_hf, tmp_path / "out")
    with pytest.raises(ModelError, match="answers otherwise than its original"):
        judge(spoiled, tmp_path / "out")
