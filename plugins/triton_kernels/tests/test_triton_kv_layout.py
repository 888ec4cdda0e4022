"""Where KV lies: what one program reads of a block is one aligned piece."""

import pytest
import torch

from halogen_core.spi import KVSpec
from halogen_triton import kv


@pytest.mark.parametrize("dtype", ["bf16", "q8_0", "f8_e5m2"])
def test_a_head_of_a_block_is_one_aligned_piece(dtype):
    spec = KVSpec(num_layers=2, num_kv_heads=3, head_dim=64, dtype=dtype, block_size=64)
    layout = kv.layout_of(spec)
    own = kv.payload(kv.allocate(layout, 4, torch.device("cpu")))
    for head in range(3):
        piece = own.data[1, 2, 0, head]
        assert piece.is_contiguous()
        start = (piece.data_ptr() - own.data.data_ptr()) % layout.alignment
        assert (start, piece.nbytes % layout.alignment) == (0, 0)
    assert own.layers[1].data.data_ptr() == own.data[1].data_ptr()
