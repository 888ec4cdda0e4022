"""A KV pool that cannot be is refused in bytes, with a size that can be."""

import re

import attrs
import pytest

from halogen_core.errors import OutOfMemory
from halogen_core.spi import KVLayout, KVSpec, MemoryRequest, MemoryTier, pool_refusal
from halogen_core.torch_backend import host_memory
from halogen_cpu_ggml import memory as ggml_memory

MIB = 1 << 20
LAYOUT = KVLayout(
    spec=KVSpec(num_layers=1, num_kv_heads=1, head_dim=64), id="t", bytes_per_block=MIB
)


def request(**changes):
    return MemoryRequest(
        static_bytes=10 * MIB, temp_bytes=0, kv_layout=LAYOUT, min_blocks=8, **changes
    )


def dividers(free):
    tier = MemoryTier(name="host", total=free, free=free)
    return {
        "torch": lambda asked: host_memory.divide(tier, asked, held_static=0),
        "ggml": lambda asked: ggml_memory.divide(asked, tier),
    }


@pytest.mark.parametrize("name", ["torch", "ggml"])
def test_the_size_that_is_advised_can_be(name):
    """Too large and too small: what the fix names is then planned."""
    divide = dividers(100 * MIB)[name]
    for asked, words, advice in (
        (500 * MIB, "500.0 MiB; 90.0 MiB are left", r"at most (\d+)MiB"),
        (3 * MIB, r"of 3.0 MiB holds \d+ tokens; a session of 128 tokens", r"at least (\d+)MiB"),
    ):
        with pytest.raises(OutOfMemory, match=words) as caught:
            divide(request(kv_bytes=asked))
        advised = int(re.search(advice, caught.value.fix)[1]) * MIB
        assert divide(request(kv_bytes=advised)).num_blocks >= 8
        with pytest.raises(OutOfMemory):
            divide(request(kv_bytes=advised + (MIB if asked > advised else -MIB)))


@pytest.mark.parametrize("name", ["torch", "ggml"])
def test_a_workspace_of_too_many_rows_is_named(name):
    divide = dividers(100 * MIB)[name]
    asked = attrs.evolve(request(), temp_bytes=500 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        divide(asked)
    assert "--max-batch" in caught.value.fix
    with pytest.raises(OutOfMemory) as caught:  # no workspace at all would help here
        divide(attrs.evolve(asked, static_bytes=99 * MIB))
    assert "--max-batch" not in caught.value.fix


@pytest.mark.parametrize("name", ["torch", "ggml"])
def test_where_no_size_would_do_none_is_advised(name):
    divide = dividers(12 * MIB)[name]
    with pytest.raises(OutOfMemory, match="2.0 MiB are left") as caught:
        divide(request(kv_bytes=500 * MIB))
    assert "--pool-size" not in caught.value.fix
    with pytest.raises(OutOfMemory, match=r"share of 0.85 of 2.0 MiB"):
        divide(request())


def test_a_shorter_context_is_the_other_way_out():
    told = pool_refusal(request(kv_bytes=3 * MIB), left=90 * MIB, extra=MIB)
    assert told.fix == "set --pool-size to at least 9MiB, or --max-context to at most 32"
