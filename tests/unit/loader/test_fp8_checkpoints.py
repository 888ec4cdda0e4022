"""Directories with fp8 weights in every maker's layout: exact values, or a refusal by name."""

import json

import attrs
import numpy as np
import pytest
import torch
from fp8_files import FORMS, Fp8, numbers, write_fp8
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_files import HF_CONFIG, TOKENS, hf_name

from halogen_core.errors import ConfigError, ModelError
from halogen_core.loader import open_model
from halogen_core.spi import check_float8, float8_values

HIDDEN, INNER = 160, 200
CONFIG = {**HF_CONFIG, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1}
CONFIG["head_dim"] = 40
LINEAR = {
    "attn_q": (160, HIDDEN), "attn_k": (80, HIDDEN), "attn_v": (80, HIDDEN),
    "attn_output": (HIDDEN, 160),
    "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
}  # fmt: skip
Q = "model.layers.0.self_attn.q_proj"


def state(seed=0):
    """Float16 weights of one layer by Hugging Face names."""
    rng = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes |= {f"blk.0.{norm}.weight": (HIDDEN,) for norm in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.{name}.weight": shape for name, shape in LINEAR.items()}
    return {hf_name(n): rng.standard_normal(s).astype(np.float16) for n, s in shapes.items()}


def written(directory, form, **config):
    rounder = Fp8(form)
    return write_fp8(directory, rounder, state(), {**CONFIG, **config}), rounder


def change(directory, change_tensors=None, **quantisation):
    """Rewrite tensors, or entries of `quantization_config`."""
    file = directory / "model.safetensors"
    with safe_open(file, "pt") as opened:
        tensors = {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
    if change_tensors is not None:
        change_tensors(tensors)
        save_file(tensors, file)
    config = json.loads((directory / "config.json").read_text())
    config.setdefault("quantization_config", {}).update(quantisation)
    if not config["quantization_config"]:
        del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def refusal(directory, name="blk.0.attn_q.weight"):
    with pytest.raises(ModelError) as caught:
        check_float8(open_model(directory).tensor(name))
    return caught.value


@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_codes_and_scales(tmp_path, form):
    directory, rounder = written(tmp_path / "m", form)
    model = open_model(directory)
    for name, shape in LINEAR.items():
        tensor = model.tensor(f"blk.0.{name}.weight")
        values = rounder.values[hf_name(f"blk.0.{name}.weight").removesuffix(".weight")]
        assert (tensor.format, tensor.shape) == (rounder.kind, shape)
        assert model.shape(tensor.name) == shape
        check_float8(tensor)
        assert np.array_equal(float8_values(tensor), values.astype(np.float32)), name
        if tensor.aux:
            assert tuple(tensor.aux["block"]) == rounder.block_of(shape)


def test_what_is_not_quantised_stays(tmp_path):
    directory, _ = written(tmp_path / "m", "transformers blocks")
    model = open_model(directory)
    kinds = {name: model.tensor(name).format for name in model.names()}
    plain = {name for name, kind in kinds.items() if kind == "F16"}
    assert plain == {
        *("token_embd.weight", "output_norm.weight"),
        *("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"),
    }


def test_some_matrices_may_be_left_out(tmp_path):
    directory, _ = written(tmp_path / "m", "compressed per channel")

    def leave_out(tensors):
        del tensors[f"{Q}.weight_scale"]
        tensors[f"{Q}.weight"] = torch.ones(LINEAR["attn_q"], dtype=torch.bfloat16)

    model = open_model(change(directory, leave_out))
    assert model.tensor("blk.0.attn_q.weight").format == "BF16"
    assert model.tensor("blk.0.attn_k.weight").format == "F8_E4M3"


def test_opening_reads_headers_only_and_codes_stay_in_the_file(tmp_path, monkeypatch):
    from halogen_core.loader import packed_matrix

    directory, _ = written(tmp_path / "m", "transformers blocks")
    with monkeypatch.context() as patch:
        patch.setattr(packed_matrix.PackedMatrix, "tensor", lambda self: 1 / 0)
        patch.setattr(packed_matrix.PackedMatrix, "array", lambda self, suffix: 1 / 0)
        model = open_model(directory)
        assert model.shape("blk.0.ffn_down.weight") == (HIDDEN, INNER)
    # a view of the mapped file, not a copy: all arrays over it have one base
    codes, table = (model.tensor(f"{n}.weight").data for n in ("blk.0.ffn_down", "token_embd"))
    assert base(codes) is base(table)


def base(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def test_scales_of_activations_and_of_a_cache_are_told_or_ignored(tmp_path, caplog):
    directory, rounder = written(tmp_path / "m", "compressed per tensor, static")
    cache = {"model.layers.0.self_attn.k_scale": torch.tensor(0.5)}
    directory = change(directory, lambda t: t.update(cache))
    with caplog.at_level("INFO", "halogen_core.loader"):
        model = open_model(directory)
    (record,) = caplog.records
    assert "static scales" in record.getMessage()
    assert np.array_equal(
        float8_values(model.tensor("blk.0.attn_q.weight")), rounder.values[Q].astype(np.float32)
    )


WRONG_SCHEMES = {
    "fp4 experts": ("transformers blocks", {"expert_dtype": "fp4"}, "fp4"),
    "fnuz": ("transformers blocks", {"fmt": "e4m3fnuz"}, "e4m3fnuz"),
    "blocks of three sizes": ("transformers blocks", {"weight_block_size": [1, 2, 3]}, "1, 2, 3"),
    "blocks of none": ("transformers blocks", {"weight_block_size": [0, 128]}, "0, 128"),
    "blocks of text": ("transformers blocks", {"weight_block_size": "128"}, "'128'"),
    "other activations": ("transformers blocks", {"activation_scheme": "none"}, "none"),
    "no groups": ("compressed blocks", {"config_groups": {}}, "without groups"),
    "no weights": ("compressed blocks", {"config_groups": {"group_0": {}}}, "weights"),
}


@pytest.mark.parametrize("name", WRONG_SCHEMES)
def test_schemes_that_are_not_read_are_refused_by_name(tmp_path, name):
    form, entries, word = WRONG_SCHEMES[name]
    directory, _ = written(tmp_path / "m", form)
    error = refusal(change(directory, **entries))
    assert error.code == "HRT-2011"
    assert word in error.message


@pytest.mark.parametrize(
    "entries",
    [{"num_bits": 4}, {"type": "int"}, {"strategy": "group"}, {"symmetric": False}],
    ids=str,
)
def test_other_compressed_weights_are_refused(tmp_path, entries):
    directory, _ = written(tmp_path / "m", "compressed blocks")
    config = json.loads((directory / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"]["weights"].update(entries)
    assert refusal(change(directory, config_groups=groups)).code == "HRT-2011"


def test_two_block_sizes_are_refused(tmp_path):
    directory, _ = written(tmp_path / "m", "compressed blocks")
    config = json.loads((directory / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = json.loads(json.dumps(groups["group_0"]))
    groups["group_1"]["weights"]["block_structure"] = [64, 64]
    assert "several sizes" in refusal(change(directory, config_groups=groups)).message


def cut(tensors, suffix):
    tensors[f"{Q}.{suffix}"] = tensors[f"{Q}.{suffix}"][:-1].clone()


def put(tensors, suffix, value):
    tensors[f"{Q}.{suffix}"] = value


def fill(tensors, suffix, value):
    tensors[f"{Q}.{suffix}"].fill_(value)


def odd_codes(tensors):
    codes = tensors[f"{Q}.weight"].view(torch.uint8)
    codes[3, 5] = 0x7F


INVERSE = "weight_scale_inv"
DAMAGE = {
    "no scale": (lambda t: t.pop(f"{Q}.{INVERSE}"), "HRT-2011", "it has 0"),
    "no weight": (lambda t: t.pop(f"{Q}.weight"), "HRT-2011", "odd shapes|no `weight`"),
    "two scales": (lambda t: put(t, "weight_scale", torch.ones(1)), "HRT-2011", "it has 2"),
    "a line of scales less": (lambda t: cut(t, INVERSE), "HRT-2011", "scales"),
    "scales of another grid": (lambda t: put(t, INVERSE, torch.ones(3, 2)), "HRT-2011", "3, 2"),
    "endless scales": (lambda t: fill(t, INVERSE, torch.inf), "HRT-2011", "finite"),
    "scales that are NaN": (lambda t: fill(t, INVERSE, torch.nan), "HRT-2011", "finite"),
    "products out of range": (lambda t: fill(t, INVERSE, 1e38), "HRT-2411", "range"),
    "whole scales": (
        lambda t: put(t, INVERSE, torch.ones(2, 2, dtype=torch.int32)), "HRT-2011", "int32",
    ),
    "wide scales": (
        lambda t: put(t, INVERSE, torch.ones(2, 2, dtype=torch.float64)), "HRT-2011", "F64",
    ),
    "weights of 16 bits beside scales": (
        lambda t: put(t, "weight", torch.ones(LINEAR["attn_q"]).half()), "HRT-2011", "F16",
    ),
    "int8 weights": (
        lambda t: put(t, "weight", torch.ones(LINEAR["attn_q"]).char()), "HRT-2011", "I8",
    ),
    "codes of another kind": (
        lambda t: put(t, "weight", torch.ones(LINEAR["attn_q"]).to(torch.float8_e4m3fnuz)),
        "HRT-2011", "FNUZ",
    ),
    "codes that are no numbers": (odd_codes, "HRT-2411", "no numbers"),
    "zero points": (
        lambda t: put(t, "weight_zero_point", torch.ones(160, 1).to(torch.float8_e4m3fn)),
        "HRT-2011", "zero points",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_when_read(tmp_path, name):
    damage, code, words = DAMAGE[name]
    directory, _ = written(tmp_path / "m", "transformers blocks")
    error = refusal(change(directory, damage))
    assert error.code == code
    assert any(word in error.message for word in words.split("|")), error.message
    assert "q_proj" in error.message or "attn_q" in error.message
    assert error.fix


def test_scales_of_256_exponents_end_before_nan(tmp_path):
    directory, _ = written(tmp_path / "m", "powers of two")
    error = refusal(change(directory, lambda t: t[f"{Q}.{INVERSE}"].view(torch.uint8).fill_(255)))
    assert (error.code, "finite" in error.message) == ("HRT-2011", True)


@pytest.mark.parametrize("method", ["awq", "mxfp4"])
def test_fp8_without_scales_under_another_scheme_is_refused(tmp_path, method):
    directory, _ = written(tmp_path / "m", "no scales")
    error = refusal(change(directory, quant_method=method))
    assert (error.code, "F8_E5M2" in error.message) == ("HRT-2006", True)


def test_plain_fp8_of_another_kind_is_refused(tmp_path):
    directory, _ = written(tmp_path / "m", "no scales")
    other = {f"{Q}.weight": torch.ones(LINEAR["attn_q"]).to(torch.float8_e5m2fnuz)}
    error = refusal(change(directory, lambda t: t.update(other)))
    assert (error.code, "F8_E5M2FNUZ" in error.message) == ("HRT-2006", True)


def test_a_vector_of_fp8_is_refused(tmp_path):
    directory, _ = written(tmp_path / "m", "no scales")
    norm = torch.ones(HIDDEN).to(torch.float8_e5m2)
    error = refusal(change(directory, lambda t: t.update({"model.norm.weight": norm})))
    assert error.code == "HRT-2006"


def test_experts_keep_their_own_scales(tmp_path):
    from halogen_core.loader.packed_matrix import stacked

    rng = np.random.default_rng(4)
    directory, _ = written(tmp_path / "m", "transformers blocks")
    one = open_model(directory).tensor("blk.0.attn_q.weight")
    other = attrs.evolve(
        one,
        data=rng.choice(numbers("F8_E4M3"), one.data.size),
        aux={**one.aux, "scale": one.aux["scale"] * 2},
    )
    both = stacked([one, other], "blk.0.ffn_gate_exps.weight")
    check_float8(both)
    want = np.concatenate([float8_values(one), float8_values(other)])
    assert np.array_equal(float8_values(both), want)
    unlike = attrs.evolve(one, aux={**one.aux, "block": np.array([64, 128], np.int32)})
    with pytest.raises(ModelError, match="differently"):
        stacked([one, unlike], "blk.0.ffn_gate_exps.weight")


def test_converting_it_is_refused_before_anything_is_written(tmp_path):
    from halogen_core.loader.convert import QuantPlan, convert_directory

    for form, code in (("transformers blocks", "HRT-2012"), ("no scales", "HRT-2006")):
        directory, _ = written(tmp_path / form, form)
        with pytest.raises((ConfigError, ModelError)) as caught:
            convert_directory(directory, tmp_path / "out", QuantPlan.whole("w8a16"))
        assert caught.value.code == code
        assert not (tmp_path / "out").exists()
    assert list(tmp_path.glob(".*")) == []
