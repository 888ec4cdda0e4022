"""What cannot fit a device is refused before a byte of it is loaded."""

import attrs
import pytest

from halogen_core.engine.building import assemble_engine
from halogen_core.errors import OutOfMemory
from halogen_core.loader import open_model
from halogen_core.loader.sizes import least_bytes
from halogen_core.models import Decoder, config_of
from halogen_core.spi import BackendOptions, MemoryTier
from halogen_core.torch_backend.backend import TorchBackend

from .conftest import engine_options


class SmallDevice(TorchBackend):
    """A device of `free` bytes beside the host; counts what was packed on it."""

    free, packed = 0, 0

    def memory(self):
        return (MemoryTier(name="device", total=self.free, free=self.free), *super().memory())

    def pack(self, parts, role):
        self.packed += 1
        return super().pack(parts, role)


def device(free):
    backend = SmallDevice(BackendOptions(threads=1))
    backend.free = free
    return backend


def test_nothing_is_loaded_of_what_cannot_fit(tiny_gguf):
    checkpoint = open_model(tiny_gguf)
    config = config_of(checkpoint)
    least = least_bytes(checkpoint, config)
    backend = device(least - 1)
    with pytest.raises(OutOfMemory, match="weights"):
        assemble_engine(engine_options(tiny_gguf), backend, checkpoint, config)
    assert backend.packed == 0
    backend = device(64 << 20)
    assemble_engine(engine_options(tiny_gguf), backend, checkpoint, config).close()
    assert backend.packed


def test_sizes_from_headers_are_never_more_than_what_is_packed(tiny_gguf, checkpoint):
    stored = open_model(tiny_gguf)
    config = config_of(stored)
    least = least_bytes(stored, config)
    packed = Decoder.load(config, stored, device(1 << 30)).nbytes
    assert packed / 2.2 < least <= packed, "F32 counts half"
    assert least_bytes(checkpoint, config) == 0, "not ours to know"
    fewer = attrs.evolve(config, layers=config.layers[:-1])
    assert 0 < least_bytes(stored, fewer) < least


def test_an_exact_pool_is_exact(tiny_gguf):
    """Only without a size does the engine stop at eight sequences of full context."""
    checkpoint = open_model(tiny_gguf)
    config = config_of(checkpoint)

    def blocks(**changes):
        options = engine_options(str(tiny_gguf), **changes)
        engine = assemble_engine(options, device(1 << 30), checkpoint, config)
        size = engine.runner.kv.layout.bytes_per_block
        engine.close()
        return engine.plan.num_blocks, size

    own, size = blocks()
    assert own == 8 * config.context_length // 8
    wanted = 3 * own * size
    assert blocks(kv_bytes=wanted)[0] == wanted // size - 1
