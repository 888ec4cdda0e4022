"""AWQ, GPTQ, compressed-tensors and MXFP4 directories against packers written by definition."""

import json

import numpy as np
import pytest
from packed_files import E2M1, Packer, write_packed
from safetensors.numpy import load_file, save_file
from tiny_files import hf_name, llama_shapes

from halogen_core.errors import ModelError
from halogen_core.loader import open_model
from halogen_core.loader.gguf import read_gguf
from halogen_core.spi import QuantTensor

FORMS = [
    ("awq", {}),
    ("awq", {"group": 32, "symmetric": True}),
    ("gptq", {}),
    ("gptq", {"act_order": True}),
    ("gptq_v2", {"symmetric": True}),
    ("packed", {}),
    ("packed", {"symmetric": True}),
    ("packed", {"act_order": True}),
    ("packed8", {}),
    ("int8", {}),
    ("mxfp4", {}),
]


def values_of(tensor):
    """What a tensor in canonical form stands for, in float64."""
    if tensor.format in ("W8A8", "W8A16"):
        return tensor.data.view(np.int8).reshape(tensor.shape) * tensor.aux["scale"][
            :, None
        ].astype(np.float64)
    n, k = tensor.shape
    if tensor.format == "MXFP4":
        blocks = tensor.data.reshape(-1, 17)
        codes = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], 1)
        table = np.array([*E2M1, *(-v for v in E2M1)])
        exponent = blocks[:, :1].astype(np.float64) - 127
        return (table[codes] * 2.0**exponent).reshape(n, k)
    both = tensor.data.reshape(n, k // 2)
    codes = np.stack([both & 15, both >> 4], -1).reshape(n, k).astype(np.float64)
    scale = tensor.aux["scale"].astype(np.float64)
    size = k // scale.shape[1]
    zero = tensor.aux.get("zero", np.full(scale.shape, 8)).astype(np.float64)
    stored = scale.repeat(size, 1) * (codes - zero.repeat(size, 1))
    values = np.empty_like(stored)
    values[:, tensor.aux.get("perm", np.arange(k))] = stored
    return values


@pytest.mark.parametrize(("form", "options"), FORMS)
def test_values_are_exact(tmp_path, form, options):
    packer = Packer(form, **options)
    model = open_model(write_packed(tmp_path / "m", packer, llama_shapes()))
    assert set(model.names()) == set(llama_shapes())
    for name in llama_shapes():
        tensor, key = model.tensor(name), hf_name(name).removesuffix(".weight")
        assert tensor.name == name or tensor.format == "F16"
        assert (key in packer.values) == (tensor.format != "F16")
        if key in packer.values:
            assert np.array_equal(values_of(tensor), packer.values[key]), name
            assert ("perm" in tensor.aux) == packer.act_order
            assert ("zero" in tensor.aux) == (tensor.format == "INT4" and not packer.symmetric)


def test_formats_by_form(tmp_path):
    found = {}
    for form in ("awq", "packed8", "int8", "mxfp4"):
        model = open_model(write_packed(tmp_path / form, Packer(form), llama_shapes()))
        found[form] = model.tensor("blk.0.attn_q.weight").format
    assert found == {"awq": "INT4", "packed8": "W8A16", "int8": "W8A8", "mxfp4": "MXFP4"}


def test_opening_reads_headers_only(tmp_path, monkeypatch):
    from halogen_core.loader import packed_matrix

    monkeypatch.setattr(packed_matrix.PackedMatrix, "tensor", lambda self: 1 / 0)
    open_model(write_packed(tmp_path / "m", Packer("awq"), llama_shapes()))


REFUSED = {
    "gguf-ish method": {"quant_method": "bitsandbytes"},
    "gptq of 3 bits": {"quant_method": "gptq", "bits": 3, "group_size": 16},
    "gptq of another form": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
    "awq gemv": {"quant_method": "awq", "version": "gemv", "bits": 4},
    "awq with odd groups": {"quant_method": "awq", "bits": 4, "group_size": 0},
    "a list": ["awq"],
    "no groups": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "fp8 of no layers": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
    },
    "stored activation scales": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"input_activations": {"num_bits": 8, "dynamic": False}}},
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_represented_is_refused(tmp_path, name):
    directory = write_packed(tmp_path / "m", Packer("awq"), llama_shapes())
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = REFUSED[name]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as failure:
        open_model(directory)
    assert failure.value.code == "HRT-2011"


DAMAGE = {
    "no scales": ("awq", lambda t: t.pop("scales")),
    "no zeros": ("gptq", lambda t: t.pop("qzeros")),
    "scales of another size": ("awq", lambda t: t.update(scales=t["scales"][:, 8:])),
    "zeros of another size": ("gptq", lambda t: t.update(qzeros=t["qzeros"][1:])),
    "an endless scale": ("awq", lambda t: t["scales"].fill(np.inf)),
    "unequal groups": ("gptq", lambda t: t["g_idx"].__setitem__(0, 1)),
    "groups out of range": ("gptq", lambda t: t["g_idx"].__setitem__(0, 99)),
    "floating codes": ("awq", lambda t: t.update(qweight=t["qweight"].astype(np.float32))),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_when_read(tmp_path, name):
    form, damage = DAMAGE[name]
    directory = write_packed(tmp_path / "m", Packer(form), llama_shapes())
    tensors = load_file(directory / "model.safetensors")
    prefix = "model.layers.0.self_attn.q_proj."
    own = {key.removeprefix(prefix): tensors.pop(key) for key in list(tensors) if prefix in key}
    damage(own)
    tensors |= {f"{prefix}{key}": np.ascontiguousarray(value) for key, value in own.items()}
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match="q_proj") as failure:
        open_model(directory).tensor("blk.0.attn_q.weight")
    assert failure.value.code == "HRT-2011"


def test_mxfp4_in_a_gguf_file(tmp_path):
    """Type 39, as gpt-oss files have it; values by the `gguf` package."""
    import gguf

    kind = gguf.GGMLQuantizationType.MXFP4
    values = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    raw = gguf.quantize(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "m.gguf")
    entry = file.tensors["w"]
    tensor = QuantTensor(format=entry.format, shape=entry.shape, data=file.view(entry))
    assert (tensor.format, tensor.shape) == ("MXFP4", (8, 64))
    assert np.array_equal(values_of(tensor), gguf.dequantize(raw, kind))


def test_planning_knows_the_sizes(tmp_path):
    from halogen_core.cli.bounds import active_weights
    from halogen_core.models import config_of

    model = open_model(write_packed(tmp_path / "m", Packer("awq"), llama_shapes()))
    found = active_weights(model, config_of(model))
    assert found.elements == sum(int(np.prod(shape)) for shape in llama_shapes().values())
    tensors = [model.tensor(name) for name in model.names()]
    assert found.bytes == sum(
        t.data.nbytes + sum(a.nbytes for a in t.aux.values()) for t in tensors
    )
