"""Our GGUF reader says what the format's own library says, at once and without copying."""

import os
import time

import gguf
import numpy as np
import pytest
from tiny_files import LAYERS, llama_shapes, write_llama

from halogen_core.errors import ModelError
from halogen_core.loader import open_model
from halogen_core.loader.gguf import read_gguf
from halogen_core.spi import RopeStyle


def test_tensors_equal_the_library(tiny_gguf):
    ours, theirs = open_model(tiny_gguf), gguf.GGUFReader(tiny_gguf)
    assert set(ours.names()) == {t.name for t in theirs.tensors} == set(llama_shapes())
    for tensor in theirs.tensors:
        mine = ours.tensor(tensor.name)
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.format == tensor.tensor_type.name
        assert np.array_equal(mine.data, tensor.data.reshape(-1).view(np.uint8))


def test_metadata_equal_the_library(tiny_gguf):
    ours, theirs = read_gguf(tiny_gguf).metadata, gguf.GGUFReader(tiny_gguf)
    for key, value in ours.items():
        due = theirs.fields[key].contents()
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == due
    assert set(ours) == {key for key in theirs.fields if not key.startswith("GGUF.")}


def test_a_checkpoint_speaks_the_seam(tiny_gguf):
    model = open_model(tiny_gguf)
    assert model.architecture == "llama"
    assert model.rope_style is RopeStyle.INTERLEAVED
    assert model.hparams["block_count"] == LAYERS
    assert model.hparams["vocab_size"] == 32  # from the token list
    assert model.path == str(tiny_gguf)


def test_every_scalar_and_array_type_is_read(tmp_path):
    values = {
        "u8": ("add_uint8", 255), "i8": ("add_int8", -5), "u16": ("add_uint16", 65535),
        "i16": ("add_int16", -300), "u32": ("add_uint32", 1 << 31), "i32": ("add_int32", -7),
        "f32": ("add_float32", 0.5), "bool": ("add_bool", True), "string": ("add_string", "é🙂"),
        "u64": ("add_uint64", 1 << 60), "i64": ("add_int64", -(1 << 60)), "f64": ("add_float64", 0.1),
        "ints": ("add_array", [1, 2, 3]), "strings": ("add_array", ["a", "", "ü"]),
        "bools": ("add_array", [True, False]), "floats": ("add_array", [0.5, 1.5]),
    }  # fmt: skip
    calls = [(method, f"x.{key}", value) for key, (method, value) in values.items()]
    metadata = read_gguf(write_llama(tmp_path / "m.gguf", metadata=calls)).metadata
    for key, (_, value) in values.items():
        got = metadata[f"x.{key}"]
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == value


def test_shards_open_as_one(tmp_path):
    write_llama(tmp_path / "m.gguf", split_max_tensors=7)
    shards = sorted(tmp_path.glob("*.gguf"))
    assert len(shards) > 2
    whole = open_model(write_llama(tmp_path / "whole.gguf"))
    sharded = open_model(shards[0])
    for name in whole.names():
        assert np.array_equal(whole.tensor(name).data, sharded.tensor(name).data)
    assert set(sharded.names()) == set(whole.names())


@pytest.mark.parametrize("break_it", ["second first", "missing", "renamed", "swapped", "stranger"])
def test_broken_shards_are_refused(tmp_path, break_it):
    write_llama(tmp_path / "m.gguf", split_max_tensors=7)
    first, second, third, *_ = sorted(tmp_path.glob("*.gguf"))
    opened = first
    if break_it == "second first":
        opened = second
    elif break_it == "missing":
        second.unlink()
    elif break_it == "renamed":
        opened = first.rename(tmp_path / "model.gguf")
    elif break_it == "swapped":
        content = second.read_bytes()
        second.write_bytes(third.read_bytes())
        third.write_bytes(content)
    else:
        write_llama(second)
    with pytest.raises(ModelError) as failure:
        open_model(opened)
    assert failure.value.code == "HRT-2009"
    assert str(tmp_path) in str(failure.value)


def test_content_id_follows_the_weights(tmp_path, tiny_gguf):
    same = write_llama(tmp_path / "copy.gguf")
    assert open_model(same).content_id == open_model(tiny_gguf).content_id
    changed = bytearray(same.read_bytes())
    changed[-3] ^= 1
    same.write_bytes(changed)
    assert open_model(same).content_id != open_model(tiny_gguf).content_id


def test_a_directory_with_one_gguf_opens(tmp_path):
    write_llama(tmp_path / "m.gguf")
    assert open_model(tmp_path).architecture == "llama"
    write_llama(tmp_path / "n.gguf")
    with pytest.raises(ModelError, match="several models"):
        open_model(tmp_path)


def test_smollm2_opens_at_once(smollm2_path):
    def cpu_seconds():
        began = time.process_time()
        assert len(open_model(smollm2_path).names()) == 272
        return time.process_time() - began

    assert min(cpu_seconds() for _ in range(5)) < 0.1


def test_no_copy_is_made(smollm2_path):
    model = open_model(smollm2_path)
    one, other = model.tensor("token_embd.weight"), model.tensor("token_embd.weight")
    assert np.shares_memory(one.data, other.data)
    assert one.data.flags.writeable  # private pages: torch wants to be able to


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    for name in ("pipe", "empty", "absent"):
        with pytest.raises(ModelError, match=name) as failure:
            open_model(tmp_path / name)
        assert failure.value.code in ("HRT-2002", "HRT-2003")
