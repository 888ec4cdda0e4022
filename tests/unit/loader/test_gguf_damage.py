"""Damaged GGUF files: always one `ModelError` that names the file, at once, in little memory."""

import json
import struct
import subprocess
import sys
import textwrap
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_files import llama_shapes, write_llama

from halogen_core.errors import ModelError
from halogen_core.loader import load_tokenizer, open_model
from halogen_core.models import config_of

HEADER = struct.Struct("<4sIQQ")


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return u64(len(raw)) + raw


def file(pairs=(), tensors=(), *, counts=None, magic=b"GGUF", version=3, data=b""):
    """A GGUF file from raw pieces: pairs and tensor rows are bytes already."""
    n_tensors, n_pairs = counts or (len(tensors), len(pairs))
    return HEADER.pack(magic, version, n_tensors, n_pairs) + b"".join([*pairs, *tensors]) + data


def pair(key, kind, value):
    return text(key) + u32(kind) + value


def row(name, dims, kind=0, offset=0):
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


ARCH = pair("general.architecture", 8, text("llama"))
HUGE = 1 << 60

RAW = {
    "empty file": b"",
    "magic only": b"GGUF",
    "half a header": b"GGUF\3\0\0\0\1\0",
    "other magic": file(magic=b"GGJT"),
    "zip": b"PK\3\4" + bytes(60),
    "pickle": b"\x80\x04" + bytes(60),
    "elf": b"\x7fELF" + bytes(60),
    "version 0": file(version=0),
    "version 1": file(version=1),
    "version 4": file(version=4),
    "big-endian": file(version=3 << 24),
    "no keys": file(),
    "2^63 keys": file(counts=(0, 1 << 63)),
    "2^63 tensors": file(counts=(1 << 63, 0)),
    "more keys than there are": file([ARCH], counts=(0, 4)),
    "37 bytes, empty key": file(counts=(0, 1)) + u64(0) + u32(0) + b"\0",
    "empty key": file([pair("", 0, b"\0")] * 2),
    "key of 2^60 bytes": file(counts=(0, 1), data=u64(HUGE) + bytes(40)),
    "string of 2^60 bytes": file([text("k") + u32(8) + u64(HUGE) + bytes(40)]),
    "string over the end": file([ARCH, text("k") + u32(8) + u64(30) + bytes(29)]),
    "key not utf-8": file([pair(b"\xff\xfe", 0, b"\0" * 8)]),
    "string not utf-8": file([pair("k", 8, text(b"\xc3\x28"))]),
    "value type 13": file([pair("k", 13, bytes(40))]),
    "value type 2^31": file([pair("k", 1 << 31, bytes(40))]),
    "array of arrays": file([pair("k", 9, u32(9) + u64(2) + bytes(80))]),
    "array type 77": file([pair("k", 9, u32(77) + u64(2) + bytes(80))]),
    "array of 2^60 numbers": file([pair("k", 9, u32(4) + u64(HUGE) + bytes(40))]),
    "array of 2^60 strings": file([pair("k", 9, u32(8) + u64(HUGE) + bytes(40))]),
    "array of empty strings over the end": file([pair("k", 9, u32(8) + u64(6) + bytes(41))]),
    "string in array over the end": file([pair("k", 9, u32(8) + u64(2) + u64(99) + bytes(40))]),
    "string in array not utf-8": file([pair("k", 9, u32(8) + u64(1) + text(b"\xff") + bytes(9))]),
    "repeated key": file([ARCH, ARCH]),
    "architecture is a number": file([pair("general.architecture", 4, u32(7))]),
    "architecture unknown": file([pair("general.architecture", 8, text("mamba9"))]),
    "alignment 0": file([ARCH, pair("general.alignment", 4, u32(0))]),
    "alignment 3": file([ARCH, pair("general.alignment", 4, u32(3))]),
    "alignment is text": file([ARCH, pair("general.alignment", 8, text("32"))]),
    "tensor without dims": file([ARCH], [row("t", [])], data=bytes(99)),
    "tensor of 5 dims": file([ARCH], [row("t", [1] * 5)], data=bytes(99)),
    "tensor of 2^32-1 dims": file([ARCH], [text("t") + u32(0xFFFFFFFF) + bytes(60)]),
    "dimension 0": file([ARCH], [row("t", [0, 4])], data=bytes(99)),
    "dims overflow 64 bits": file([ARCH], [row("t", [1 << 33, 1 << 33])], data=bytes(99)),
    "tensor type 255": file([ARCH], [row("t", [32], kind=255)], data=bytes(999)),
    "tensor type IQ4_XS": file([ARCH], [row("t", [256], kind=23)], data=bytes(999)),
    "row not a multiple of the block": file([ARCH], [row("t", [33], kind=8)], data=bytes(999)),
    "tensor past the end": file([ARCH], [row("t", [64])], data=bytes(99)),
    "offset past the end": file([ARCH], [row("t", [8], offset=1 << 40)], data=bytes(999)),
    "offset not aligned": file([ARCH], [row("t", [8], offset=4)], data=bytes(999)),
    "tensors overlap": file([ARCH], [row("t", [16]), row("u", [16], offset=32)], data=bytes(999)),
    "tensors leave a hole": file([ARCH], [row("t", [8]), row("u", [8], offset=64)], data=bytes(999)),
    "repeated tensor": file([ARCH], [row("t", [8]), row("t", [8], offset=32)], data=bytes(999)),
    "nameless tensor": file([ARCH], [row("", [8])], data=bytes(999)),
}  # fmt: skip


def shapes(**changed):
    return {**llama_shapes(), **changed}


def without(name):
    return {key: shape for key, shape in llama_shapes().items() if key != name}


WRITTEN = {
    "no architecture hparams": {"drop": ["llama.block_count"]},
    "no head count": {"drop": ["llama.attention.head_count"]},
    "no norm eps": {"drop": ["llama.attention.layer_norm_rms_epsilon"]},
    "block_count 0": {"metadata": [("add_block_count", 0)]},
    "block_count 3 for 2 layers": {"metadata": [("add_block_count", 3)]},
    "block_count 513": {"metadata": [("add_block_count", 513)]},
    "block_count 2^31": {"metadata": [("add_block_count", 1 << 31)]},
    "head_count 0": {"metadata": [("add_head_count", 0)]},
    "3 KV heads of 4": {"metadata": [("add_head_count_kv", 3)]},
    "KV heads of 9 layers": {"metadata": [("add_head_count_kv", [2] * 9)]},
    "odd head dim": {"metadata": [("add_key_length", 7)]},
    "rope wider than a head": {"metadata": [("add_rope_dimension_count", 64)]},
    "eps 0": {"metadata": [("add_layer_norm_rms_eps", 0.0)]},
    "eps nan": {"metadata": [("add_layer_norm_rms_eps", float("nan"))]},
    "negative rope base": {"metadata": [("add_rope_freq_base", -1.0)]},
    "context 0": {"metadata": [("add_context_length", 0)]},
    "experts without any": {"metadata": [("add_expert_count", 4)]},
    "more tokens than rows": {"metadata": [("add_token_list", ["t"] * 33)]},
    "swapped dims": {"shapes": shapes(**{"blk.1.ffn_up.weight": (32, 64)})},
    "tensor missing": {"shapes": without("blk.1.attn_k.weight")},
    "output norm missing": {"shapes": without("output_norm.weight")},
    "unknown tensor": {"shapes": shapes(**{"blk.0.attn_q_norm.weight": (8,)})},
    "tensor of layer 2": {"shapes": shapes(**{"blk.2.attn_norm.weight": (32,)})},
    "qwen2 without biases": {"arch": "qwen2"},
    "gemma3 without its norms": {"arch": "gemma3"},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Name -> path of every damaged file."""
    folder = tmp_path_factory.mktemp("damaged")
    paths = {}
    for i, (name, content) in enumerate(RAW.items()):
        paths[name] = folder / f"raw-{i}.gguf"
        paths[name].write_bytes(content)
    for i, (name, how) in enumerate(WRITTEN.items()):
        paths[name] = write_llama(folder / f"written-{i}.gguf", **how)
    whole = write_llama(folder / "whole.gguf").read_bytes()
    for end in (24, 25, 100, 1000, 2000, *range(4096, len(whole), 4096), len(whole) - 1):
        paths[f"cut at {end}"] = folder / f"cut-{end}.gguf"
        paths[f"cut at {end}"].write_bytes(whole[:end])
    return paths


def refusal(path):
    """The error of opening a damaged file; anything else fails the test."""
    with pytest.raises(ModelError) as failure:
        config_of(open_model(path))
    return failure.value


@pytest.mark.parametrize("name", [*RAW, *WRITTEN])
def test_each_damage_is_refused_with_file_reason_and_fix(corpus, name):
    began = time.process_time()
    error = refusal(corpus[name])
    assert time.process_time() - began < 1
    assert str(corpus[name]) in error.message
    assert error.code.startswith("HRT-2")
    assert error.fix


def test_a_cut_anywhere_is_refused(corpus):
    cuts = [path for name, path in corpus.items() if name.startswith("cut")]
    assert len(cuts) > 10
    for path in cuts:
        assert str(path) in refusal(path).message


def test_the_whole_corpus_takes_little_memory(corpus):
    """In a fresh process, so that its peak is the corpus's own."""
    script = """
        import json, resource, sys
        from halogen_core.errors import ModelError
        from halogen_core.loader import open_model
        from halogen_core.models import config_of
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        before, refused = peak(), 0
        for path in sys.argv[1:]:
            try:
                config_of(open_model(path))
            except ModelError:
                refused += 1
        print(json.dumps([refused, peak() - before]))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, corpus.values())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    refused, grown_mb = json.loads(done.stdout)
    assert refused == len(corpus) >= 43
    assert grown_mb < 100


def try_everything(path):
    """Open, tokenizer and configuration: a model or a `ModelError`, nothing else."""
    try:
        model = open_model(path)
        config_of(model)
        load_tokenizer(model).encode("ab a")
    except ModelError:
        return False
    return True


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("whole") / "whole.gguf")


mutations = st.lists(
    st.tuples(st.integers(0, 4000), st.sampled_from([1, 4, 8]), st.integers(0, (1 << 64) - 1)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=400, deadline=1000, suppress_health_check=[HealthCheck.too_slow])
@given(mutations, st.integers(0, 3))
def test_mutated_files_never_surprise(whole, changes, way):
    content = bytearray(whole.read_bytes())
    for at, width, value in changes:
        values = [value, value & 0xFF, (1 << (8 * width)) - 1 - (value & 3), 1 << (value % 64)]
        raw = (values[way] & ((1 << (8 * width)) - 1)).to_bytes(width, "little")
        content[at : at + width] = raw
    path = whole.with_name("mutated.gguf")
    path.write_bytes(content)
    try_everything(path)


def test_the_whole_file_is_fine(whole):
    assert try_everything(whole)
