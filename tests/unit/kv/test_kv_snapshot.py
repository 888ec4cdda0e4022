"""Snapshots: all of it back, or refused with the cache unharmed (T16, C48, bug 47)."""

import random

import attrs
import numpy as np
import pytest

from halogen_core.errors import HalogenError
from halogen_core.kv.block_pool import BlockPool
from halogen_core.kv.ledger import breach, nodes_of
from halogen_core.kv.snapshot import Identity, SnapshotRefused, dump, load

IDENTITY = Identity(model="sha256:1", layout="plain/f16", build="0.1")


class Device:
    """Rows of bytes by block."""

    def __init__(self, num_blocks, width=24):
        self.bytes_per_block = width
        self.rows = np.zeros((num_blocks, width), np.uint8)

    def export_blocks(self, blocks):
        return self.rows[list(blocks)].copy()

    def import_blocks(self, blocks, data):
        self.rows[list(blocks)] = data


def filled(num_blocks=32, prefixes=5, seed=1):
    rng = random.Random(seed)
    pool, device = BlockPool(num_blocks, 4), Device(num_blocks)
    device.rows[:] = np.random.default_rng(seed).integers(0, 256, device.rows.shape, np.uint8)
    prompts = [[0, 1, 2, 3, *(rng.randrange(9) for _ in range(16))] for _ in range(prefixes)]
    for owner, tokens in enumerate(prompts):
        lease = pool.open(owner, salt=b"s" if owner % 2 else b"")
        pool.adopt(lease, pool.match(lease, tokens))
        pool.grow(lease, len(tokens))
        pool.end_step()
        pool.release(lease, tokens, len(tokens))
    return pool, device, prompts


def rows_of(pool, device, tokens, salt=b""):
    lease = pool.open(99, salt)
    match = pool.match(lease, [*tokens, 1])
    rows = [device.rows[node.block].tolist() for node in match.nodes]
    pool.release(lease)
    return rows


def test_everything_comes_back(tmp_path):
    pool, device, prompts = filled()
    file = tmp_path / "kv"
    written = dump(pool, device, file, IDENTITY)
    assert file.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["kv"]
    other, other_device = BlockPool(64, 4), Device(64)
    assert load(other, other_device, file, IDENTITY) == written > 15
    assert breach(other) is None
    for owner, tokens in enumerate(prompts):
        salt = b"s" if owner % 2 else b""
        rows = rows_of(pool, device, tokens, salt)
        assert len(rows) == 5
        assert rows_of(other, other_device, tokens, salt) == rows
    assert other.stats().active == 0
    assert load(other, other_device, file, IDENTITY) == 0, "what is there stays"


def test_a_smaller_pool_takes_what_fits_and_evicts_nothing(tmp_path):
    pool, device, _ = filled()
    dump(pool, device, tmp_path / "kv", IDENTITY)
    small, small_device = BlockPool(6, 4), Device(6)
    lease = small.open(1)
    small.grow(lease, 8)
    small.release(lease, [70, 71, 72, 73, 74, 75, 76, 77], 8)
    assert load(small, small_device, tmp_path / "kv", IDENTITY) == 4
    assert len(rows_of(small, small_device, [70, 71, 72, 73, 74, 75, 76, 77])) == 2
    assert breach(small) is None
    lease = small.open(2)
    assert small.grow(lease, 24), "all of them can be evicted"


def test_an_empty_cache_makes_a_file_that_loads(tmp_path):
    pool, device = BlockPool(4, 4), Device(4)
    assert dump(pool, device, tmp_path / "kv", IDENTITY) == 0
    assert load(pool, device, tmp_path / "kv", IDENTITY) == 0


def test_a_bit_flipped_anywhere_is_refused(tmp_path):
    pool, device, _ = filled()
    file = tmp_path / "kv"
    dump(pool, device, file, IDENTITY)
    whole = file.read_bytes()
    rng = random.Random(7)
    for _ in range(1000):
        broken = bytearray(whole)
        broken[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        file.write_bytes(broken)
        fresh, fresh_device = BlockPool(32, 4), Device(32)
        with pytest.raises(SnapshotRefused):
            load(fresh, fresh_device, file, IDENTITY)
        assert fresh.stats().free == 32
        assert not fresh_device.rows.any()
        assert not list(nodes_of(fresh))


@pytest.mark.parametrize("keep", [0, 1, 10, 18, 19, 100, -33, -32, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    pool, device, _ = filled()
    file = tmp_path / "kv"
    dump(pool, device, file, IDENTITY)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(SnapshotRefused):
        load(BlockPool(32, 4), Device(32), file, IDENTITY)


@pytest.mark.parametrize(
    "change", [{"model": "sha256:2"}, {"layout": "plain/q8_0"}, {"build": "0.2"}]
)
def test_a_foreign_file_is_refused_by_name(tmp_path, change):
    pool, device, _ = filled()
    dump(pool, device, tmp_path / "kv", IDENTITY)
    with pytest.raises(SnapshotRefused, match=f"is of {next(iter(change))} `") as caught:
        load(pool, device, tmp_path / "kv", attrs.evolve(IDENTITY, **change))
    assert caught.value.code == "HRT-3310"


def test_another_block_size_is_refused(tmp_path):
    pool, device, _ = filled()
    dump(pool, device, tmp_path / "kv", IDENTITY)
    with pytest.raises(SnapshotRefused, match="block_size `4`, this engine of `8`"):
        load(BlockPool(32, 8), Device(32), tmp_path / "kv", IDENTITY)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(SnapshotRefused, match="cannot be read"):
        load(BlockPool(4, 4), Device(4), tmp_path / "none", IDENTITY)


def test_a_dump_that_fails_leaves_the_old_file(tmp_path):
    pool, device, prompts = filled()
    file = tmp_path / "kv"
    dump(pool, device, file, IDENTITY)
    before = file.read_bytes()

    class Failing(Device):
        def export_blocks(self, blocks):
            raise OSError(28, "No space left on device")

    with pytest.raises(HalogenError, match="No space left on device") as caught:
        dump(pool, Failing(32), file, IDENTITY)
    assert caught.value.code == "HRT-3311"
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["kv"]
    assert prompts
