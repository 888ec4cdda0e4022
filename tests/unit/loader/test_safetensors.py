"""Safetensors directories: equal to the library where sound, refused cleanly where not."""

import contextlib
import json
import os
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_files import HF_CONFIG, LAYERS, hf_name, llama_shapes, write_hf

from halogen_core.errors import ModelError
from halogen_core.loader import open_model
from halogen_core.loader.safetensors import read_safetensors
from halogen_core.spi import RopeStyle


def test_values_equal_the_library(tiny_hf):
    model, theirs = open_model(tiny_hf), load_file(tiny_hf / "model.safetensors")
    assert model.architecture == "llama"
    assert model.rope_style is RopeStyle.NEOX
    assert set(model.names()) == set(llama_shapes())
    for name, shape in llama_shapes().items():
        tensor = model.tensor(name)
        assert (tensor.shape, tensor.format) == (shape, "F16")
        assert np.array_equal(tensor.data.view(np.float16), theirs[hf_name(name)].reshape(-1))


def test_the_file_inside_opens_its_directory(tiny_hf):
    assert open_model(tiny_hf / "model.safetensors").content_id == open_model(tiny_hf).content_id


def split(directory, *, index=True):
    """Spread model.safetensors over two files with an index."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    if index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (directory / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize("index", [True, False])
def test_several_files_open_as_one(tiny_hf, index):
    before = {name: open_model(tiny_hf).tensor(name).data.copy() for name in llama_shapes()}
    split(tiny_hf, index=index)
    after = open_model(tiny_hf)
    assert all(np.array_equal(after.tensor(name).data, data) for name, data in before.items())


def test_a_missing_shard_is_named(tiny_hf):
    split(tiny_hf)
    (tiny_hf / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002") as failure:
        open_model(tiny_hf)
    assert failure.value.code == "HRT-2002"


def test_float32_and_bfloat16_are_read(tmp_path):
    import torch
    from safetensors.torch import save_file as save_torch

    for dtype, name in ((torch.float32, "F32"), (torch.bfloat16, "BF16")):
        directory = write_hf(tmp_path / name)
        tensors = {
            hf_name(n): torch.ones(shape, dtype=dtype) for n, shape in llama_shapes().items()
        }
        save_torch(tensors, directory / "model.safetensors")
        assert open_model(directory).tensor("blk.0.attn_q.weight").format == name


def raw(header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


EIGHT = bytes(8)
DAMAGED = {
    "empty": b"",
    "9 bytes": bytes(9),
    "header longer than the file": raw({"t": entry()}, EIGHT, length=10_000),
    "header of 2^60 bytes": raw({"t": entry()}, EIGHT, length=1 << 60),
    "header of 2^64-1 bytes": raw({"t": entry()}, EIGHT, length=(1 << 64) - 1),
    "header not JSON": raw(b"{]", EIGHT),
    "header not UTF-8": raw(b'{"\xff": 1}', EIGHT),
    "header a list": raw(b"[1, 2, 3]", EIGHT),
    "header nested 10,000 deep": raw(b'{"a":' * 10_000 + b"1" + b"}" * 10_000, EIGHT),
    "name twice": raw(b'{"t":' + json.dumps(entry()).encode() + b',"t":1}', EIGHT),
    "row a number": raw({"t": 7}, EIGHT),
    "row without dtype": raw({"t": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT),
    "unknown dtype": raw({"t": entry("F99")}, EIGHT),
    "dtype of another size": raw({"t": entry("F64")}, EIGHT),
    "shape too large": raw({"t": entry(shape=(3,))}, EIGHT),
    "shape overflows": raw({"t": entry(shape=(1 << 40, 1 << 40))}, EIGHT),
    "negative shape": raw({"t": entry(shape=(-2,))}, EIGHT),
    "shape of floats": raw({"t": entry(shape=(2.0,))}, EIGHT),
    "shape of text": raw({"t": entry(shape=("2",))}, EIGHT),
    "100 dims": raw({"t": entry(shape=(1,) * 100)}, EIGHT),
    "offsets past the end": raw({"t": entry(offsets=(8, 16))}, EIGHT),
    "offsets backwards": raw({"t": entry(offsets=(8, 0))}, EIGHT),
    "offsets negative": raw({"t": entry(offsets=(-8, 0))}, EIGHT),
    "three offsets": raw({"t": entry(offsets=(0, 4, 8))}, EIGHT),
    "overlap": raw({"t": entry(), "u": entry(offsets=(4, 12))}, bytes(12)),
    "hole": raw({"t": entry(), "u": entry(offsets=(12, 20))}, bytes(20)),
    "bytes left over": raw({"t": entry()}, bytes(12)),
    "cut": raw({"t": entry()}, bytes(7)),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused(tmp_path, name):
    path = tmp_path / "model.safetensors"
    path.write_bytes(DAMAGED[name])
    began = time.process_time()
    with pytest.raises(ModelError) as failure:
        read_safetensors(path)
    assert time.process_time() - began < 1
    assert failure.value.code == "HRT-2004"
    assert str(path) in failure.value.message


@settings(max_examples=200, deadline=1000)
@given(st.lists(st.tuples(st.integers(0, 2200), st.binary(min_size=1, max_size=8)), min_size=1))
def test_mutated_files_never_surprise(tmp_path_factory, changes):
    directory = write_hf(tmp_path_factory.mktemp("hf"))
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    for at, raw_bytes in changes:
        content[at : at + len(raw_bytes)] = raw_bytes
    path.write_bytes(content)
    with contextlib.suppress(ModelError):
        open_model(directory)


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return (open, (str(self.canary), "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "x.ckpt"])
def test_pickles_are_refused_and_never_opened(tiny_hf, name):
    import pickle

    canary = tiny_hf / "canary"
    (tiny_hf / name).write_bytes(pickle.dumps(Payload(canary)))
    (tiny_hf / "model.safetensors").unlink()
    for path in (tiny_hf, tiny_hf / name):
        with pytest.raises(ModelError) as failure:
            open_model(path)
        assert failure.value.code == "HRT-2010"
    assert not canary.exists()


def test_links_out_of_the_directory_are_refused(tiny_hf, tmp_path):
    outside = tmp_path / "outside.safetensors"
    (tiny_hf / "model.safetensors").rename(outside)
    (tiny_hf / "model.safetensors").symlink_to(outside)
    with pytest.raises(ModelError) as failure:
        open_model(tiny_hf)
    assert failure.value.code == "HRT-2013"


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_index_names_out_of_the_directory_are_refused(tiny_hf, name):
    text = json.dumps({"weight_map": {"t": name}})
    (tiny_hf / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError) as failure:
        open_model(tiny_hf)
    assert failure.value.code == "HRT-2013"


def test_the_hub_cache_layout_opens(tiny_hf, tmp_path):
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in tiny_hf.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / file.name, snapshot))
    assert open_model(snapshot).hparams["block_count"] == LAYERS


def test_unknown_extra_and_missing_tensors_are_refused(tiny_hf):
    path = tiny_hf / "model.safetensors"
    whole = load_file(path)
    bias = {"model.layers.0.mlp.gate_proj.bias": np.zeros(64, np.float16)}
    for tensors in (
        whole | {"model.vision.weight": np.zeros(4, np.float16)},
        whole | bias,
        {k: v for k, v in whole.items() if "q_proj" not in k},
    ):
        save_file(tensors, path)
        with pytest.raises(ModelError) as failure:
            open_model(tiny_hf)
        assert failure.value.code == "HRT-2007"


def test_other_dtypes_are_refused_by_name(tiny_hf):
    path = tiny_hf / "model.safetensors"
    tensors = load_file(path) | {"model.norm.weight": np.zeros(32, np.float64)}
    save_file(tensors, path)
    with pytest.raises(ModelError, match="F64") as failure:
        open_model(tiny_hf)
    assert failure.value.code == "HRT-2006"


def test_tied_heads_are_dropped(tiny_hf):
    path = tiny_hf / "model.safetensors"
    save_file(load_file(path) | {"lm_head.weight": np.zeros((32, 32), np.float16)}, path)
    assert "output.weight" not in open_model(tiny_hf).names()
    untied = json.dumps({**HF_CONFIG, "tie_word_embeddings": False})
    (tiny_hf / "config.json").write_text(untied)
    assert "output.weight" in open_model(tiny_hf).names()
