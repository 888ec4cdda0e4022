"""Weights on their way from a file's map to the device: which is which, and what is held once."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest

from halogen_core.spi import FORMATS, BackendOptions, QuantTensor, WeightRole
from halogen_rocm.backend import RocmBackend, _read
from halogen_rocm.direct_read import file_span

sys.path.insert(0, str(Path(__file__).parent))
from trees import tree

N, K, COUNT = 1024, 2048, 6


def mapped(tmp_path, kind):
    """`COUNT` matrices of a file, each larger than what is read from its map."""
    size = FORMATS[kind].nbytes(N * K)
    rng = np.random.default_rng(7)
    # all bytes below 0x3c: every float16 scale among them is a finite number
    stored = rng.integers(0, 0x3C, COUNT * size, dtype=np.uint8)
    (tmp_path / "weights").write_bytes(stored.tobytes())
    view = np.memmap(tmp_path / "weights", np.uint8, mode="r")
    return [
        QuantTensor(
            format=kind, shape=(N, K), data=view[i * size : (i + 1) * size], name=f"blk.{i}"
        )
        for i in range(COUNT)
    ]


def values(stored, kind):
    """What the bytes mean, in float64."""
    if kind == "BF16":
        bits = stored.view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64).reshape(N, K)
    blocks = stored.reshape(-1, 34)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float64)
    return (scales * blocks[:, 2:].view(np.int8)).reshape(N, K)


def opened(tmp_path, mlock="off"):
    options = BackendOptions(extra={"mlock": mlock})
    return RocmBackend(options, root=tree(tmp_path / "root", "A"), device="cpu")


@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
def test_matrices_of_one_size_stay_apart(tmp_path, kind):
    """Each is read into memory that the one before it has left."""
    backend, tensors = opened(tmp_path), mapped(tmp_path, kind)
    packed = [backend.pack([tensor], WeightRole.LINEAR) for tensor in tensors]
    assert len({id(weight.payload) for weight in packed}) == COUNT
    for weight, tensor in zip(packed, tensors, strict=True):
        np.testing.assert_allclose(
            backend.unpack(weight), values(np.array(tensor.data), kind), rtol=2**-20
        )


def test_what_goes_to_the_device_lies_in_no_map(tmp_path):
    large = mapped(tmp_path, "Q8_0")[0]
    assert file_span(large.data) is not None
    read = _read(large)
    assert file_span(read.data) is None
    assert (read.data == large.data).all()


@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
def test_a_tied_table_is_held_and_counted_once(tmp_path, kind):
    backend = opened(tmp_path, mlock="auto")
    table = mapped(tmp_path, kind)[0]
    before = backend.memory()[0].free
    rows = backend.pack([table], WeightRole.EMBEDDING)
    head = backend.pack([table], WeightRole.LINEAR)
    assert rows.payload is head.payload
    assert before - backend.memory()[0].free == rows.nbytes
    gauges = backend.counters().gauges
    assert gauges["device_ledger_bytes"] == rows.nbytes
    assert gauges["working_set_bytes"] == rows.nbytes
