"""Pools, plans and options: the sums are right and impossible wishes are refused with numbers."""

import random
import subprocess

import attrs
import numpy as np
import pytest
from ascend_steps import BLOCK, Config, Decoder, f32, open_sim, step

from halogen_ascend.backend import create
from halogen_ascend.device_string import parse_device
from halogen_ascend.probe import probe
from halogen_ascend.sim.memory import POOLS, Hbm
from halogen_ascend.sim.profiles import profile, profiles
from halogen_ascend.weights.quantize import quantize_rows
from halogen_core.spi import (
    BackendOptions,
    BackendUnavailable,
    ConfigError,
    KVSpec,
    MemoryRequest,
    OutOfMemory,
    ProbeContext,
    WeightRole,
)


def test_sizes_are_rounded_to_512_and_freed_bytes_come_back(backend):
    pools = backend.device.hbm.pools
    a = backend.upload(np.ones(1, np.float32))
    assert pools["temp"].used == 512
    b = backend.upload(np.ones(129, np.float32))
    assert pools["temp"].used == 512 + 1024
    view = b.rows(3, 5)
    del b
    assert pools["temp"].used == 512 + 1024, "a view keeps its memory"
    del view, a
    assert pools["temp"].used == 0


def test_weights_are_aligned_and_nz_padding_is_paid_for():
    made = open_sim("910B2")
    for n, k in ((100, 70), (3, 5), (33, 64)):
        packed = made.pack([f32(np.ones((n, k)))], WeightRole.LINEAR)
        want = -(-n // 16) * 16 * (-(-k // 16) * 16) * 2
        assert packed.nbytes == -(-want // 512) * 512
        assert packed.payload.buffer.allocation.address % 512 == 0
        assert np.array_equal(made.unpack(packed), np.ones((n, k)))


def test_fragmentation_stays_below_5_percent_over_100_000_turns():
    rng, hbm, live = random.Random(0), Hbm.open(profile("tiny"), {"temp": 32 << 20}), []
    seen = []
    for turn in range(100_000):
        if turn % 500 == 499:
            seen.append(hbm.pools["temp"].fragmentation)
        if live and (len(live) > 60 or rng.random() < 0.5):
            live.pop(rng.randrange(len(live))).free()
        else:
            live.append(hbm.allocate(rng.choice((512, 4096, 100_000, 600_000)), "temp"))
    pool = hbm.pools["temp"]
    assert pool.used == sum(a.nbytes for a in live)
    assert 0 < sum(seen) / len(seen) < 0.05
    assert pool.peak >= pool.used
    for allocation in live:
        allocation.free()
    assert (pool.used, pool.top, pool.fragmentation) == (0, 0, 0)
    assert hbm.bank_bytes == [0] * len(hbm.bank_bytes)


def test_the_temp_pool_follows_the_batch_and_shrinks_back(backend):
    decoder = Decoder(backend)
    pool, peaks = backend.device.hbm.pools["temp"], []
    for rows in (1, 64, 120):
        pool.peak = 0
        decoder.logits(step([([1] * rows, 0, [0])]))
        peaks.append(pool.peak)
        assert pool.used == 0
    assert peaks == sorted(set(peaks))


def test_decode_allocates_nothing_in_the_kv_pool_and_leaks_nothing(backend):
    decoder = Decoder(backend, Config(layers=1))
    decoder.logits(step([([1] * 4, 0, [0])]))
    pools = backend.device.hbm.pools
    before = {name: (p.used, p.allocations) for name, p in pools.items()}
    for position in range(4, 60):
        decoder.logits(step([([1], position, [0])]))
    assert pools["dynamic"].allocations == before["dynamic"][1]
    assert {n: p.used for n, p in pools.items()} == {n: u for n, (u, _) in before.items()}


def test_a_plan_is_a_promise(backend):
    layout = backend.kv_layout(KVSpec(num_layers=3, num_kv_heads=2, head_dim=80, block_size=BLOCK))
    request = MemoryRequest(
        static_bytes=10 << 20, temp_bytes=5 << 20, kv_layout=layout, graph_bytes=1 << 20
    )
    plan = backend.plan(request)
    free = backend.memory()[0].free
    assert sum(p.bytes for p in plan.pools) <= free
    assert {p.name for p in plan.pools} == set(POOLS)
    kv = backend.kv_alloc(layout, plan.num_blocks)
    assert backend.device.hbm.pools["dynamic"].used <= next(
        p.bytes for p in plan.pools if p.name == "dynamic"
    )
    assert kv.num_blocks == plan.num_blocks
    assert backend.memory()[0].free >= free - sum(p.bytes for p in plan.pools)
    with pytest.raises(OutOfMemory, match=r"a session of 12800000 tokens takes .*less static"):
        backend.plan(
            MemoryRequest(static_bytes=0, temp_bytes=0, kv_layout=layout, min_blocks=100_000)
        )


def test_a_neighbour_on_the_card_gets_what_was_reserved_for_it():
    made = open_sim("910B4")
    layout = made.kv_layout(KVSpec(num_layers=32, num_kv_heads=8, head_dim=128, block_size=BLOCK))
    asked = MemoryRequest(static_bytes=8 << 30, temp_bytes=0, kv_layout=layout, kv_ratio=1.0)
    alone, shared = (made.plan(attrs.evolve(asked, host_reserve=r)) for r in (0, 10 << 30))
    lost = (alone.num_blocks - shared.num_blocks) * layout.bytes_per_block
    assert abs(lost - (10 << 30)) <= layout.bytes_per_block
    assert any("reserve 10.00 GiB" in reason for reason in shared.reasons)
    with pytest.raises(OutOfMemory, match="reserve 30.00 GiB"):
        made.plan(attrs.evolve(asked, host_reserve=30 << 30, min_blocks=1))


def test_a_big_pool_costs_the_host_what_is_touched():
    made = open_sim("910B1")
    layout = made.kv_layout(KVSpec(num_layers=32, num_kv_heads=8, head_dim=128, block_size=BLOCK))
    plan = made.plan(MemoryRequest(static_bytes=0, temp_bytes=0, kv_layout=layout))
    kv = made.kv_alloc(layout, plan.num_blocks)
    assert kv.num_blocks * layout.bytes_per_block > 50 << 30


def test_w8a8_takes_less_memory_than_16_bits_at_the_peak():
    rng = np.random.default_rng(0)
    peaks = {}
    for scheme in ("F32", "W8A8"):
        made = open_sim()
        for _ in range(4):
            w = f32(rng.standard_normal((256, 256)))
            made.pack([w if scheme == "F32" else quantize_rows(w, scheme)], WeightRole.LINEAR)
        made.upload(np.ones((4, 256), np.float32))
        peaks[scheme] = sum(p.peak for p in made.device.hbm.pools.values())
    assert peaks["W8A8"] < 0.6 * peaks["F32"]


def test_kv_round_trip_is_exact_and_layout_free(backend):
    spec = KVSpec(num_layers=2, num_kv_heads=3, head_dim=40, dtype="bf16", block_size=BLOCK)
    kv = backend.kv_alloc(backend.kv_layout(spec), 5)
    blank = backend.kv_export(kv, [0, 3])
    assert blank.data.shape == (2, 2, 2, BLOCK, 3, 80)
    data = np.random.default_rng(0).integers(0, 256, blank.data.shape).astype(np.uint8)

    backend.kv_import(kv, [4, 1], attrs.evolve(blank, data=data))
    backend.kv_copy(kv, [(4, 2), (2, 0)])
    assert np.array_equal(backend.kv_export(kv, [4, 1]).data, data)
    assert np.array_equal(backend.kv_export(kv, [0]).data, data[:1])


@pytest.mark.parametrize("block", [-1, 5])
def test_blocks_outside_the_pool_are_refused(backend, block):
    """Block 5 of 5 is the trash block; -1 would count from the end."""
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=16, dtype="f16", block_size=BLOCK)
    kv = backend.kv_alloc(backend.kv_layout(spec), 5)
    data = backend.kv_export(kv, [0])
    for act in (
        lambda: backend.kv_export(kv, [block]),
        lambda: backend.kv_import(kv, [block], data),
        lambda: backend.kv_copy(kv, [(0, block)]),
    ):
        with pytest.raises(ConfigError) as error:
            act()
        assert error.value.code == "HRT-3104"


BAD = [
    ("ascend:sim:911X", {}, r"`911X` is unknown; known: 910B1, 910B2"),
    ("ascend:cpu", {}, "ascend:sim:PROFILE"),
    ("cuda:0", {}, "not an ascend device"),
    ("ascend:sim:910B3", {"core_num": "32"}, "32 is not within 1 to 20 of `910B3`"),
    ("ascend:sim:910B2", {"core_affinity_mask": "0xffffffff"}, "beyond the 24 of.*0xffffff"),
    ("ascend:sim:910B2", {"core_num": "4", "core_affinity_mask": "3"}, "contradict"),
    (
        "ascend:sim:910B4",
        {"dynamic_pool_gb": "20", "static_pool_gb": "15"},
        "static 15.00 GiB = 35.00 GiB exceed the 30.50 GiB usable of `910B4`",
    ),
    ("ascend:sim", {"max_batch_size": "8"}, "explain batching"),
    ("ascend:sim", {"kv_cache_pool_gb": "4"}, "dynamic_pool_gb"),
    ("ascend:sim", {"dtype": "f8"}, "f16, bf16, f32"),
    ("ascend:sim", {"graph_buckets": "4,2"}, "not ascending"),
    ("ascend:sim", {"faults": "boom"}, "oom, device_lost"),
    ("ascend:sim", {"kv_split": "many"}, "`many`; allowed: a whole number"),
    ("ascend:sim", {"kv_split": "-1"}, "0 or more KV blocks"),
    ("ascend:sim", {"core_num": "x"}, "`x`; allowed: a whole number"),
    ("ascend:sim", {"core_affinity_mask": "0"}, "0x0 names cores"),
    ("ascend:sim", {"static_pool_gb": "nan"}, "`nan`; allowed: GiB, more than 0"),
    ("ascend:sim", {"dynamic_pool_gb": "-1"}, "`-1`; allowed: GiB"),
    ("ascend:sim:910B1", {"dynamic_pool_gb": "70"}, "dynamic 70.00 GiB exceed the 61.00 GiB"),
    ("ascend:sim", {"launch_us": "inf"}, "0 or more microseconds"),
    ("ascend:sim", {"rope_align": "48"}, "power of two"),
    ("ascend:sim", {"blocking": "maybe"}, "true or false"),
]


@pytest.mark.parametrize(("device", "extra", "words"), BAD)
def test_impossible_wishes_are_refused_with_the_numbers(device, extra, words):
    with pytest.raises(ConfigError, match=words) as caught:
        create(BackendOptions(device=device, extra=extra))
    assert caught.value.fix
    assert caught.value.code.startswith("HRT-")


@pytest.mark.parametrize("size", [16, 64, 100, 640, 0])
def test_block_sizes_that_the_part_cannot_do(backend, size):
    with pytest.raises(ConfigError, match=f"block size {size} is impossible.*128"):
        backend.kv_layout(KVSpec(num_layers=1, num_kv_heads=1, head_dim=64, block_size=size))
    assert size not in backend.capabilities().kv_block_sizes


def test_a_mask_leaves_the_cores_it_names():
    made = open_sim("910B2", core_affinity_mask="0xff")
    assert made.options.part.cube_cores == 8
    assert "8 cube cores" in made.capabilities().device
    w = made.pack([f32(np.ones((512, 64)))], WeightRole.LINEAR)
    made.device.timeline.watching = True
    made.ops.linear(made.upload(np.ones((1, 64), np.float32)), w)
    assert {p.core for p in made.device.timeline.spans[0].schedule.placed} == set(range(8))


def test_an_absent_part_is_refused_and_never_simulated():
    with pytest.raises(BackendUnavailable) as caught:
        create(BackendOptions(device="ascend:0"))
    assert "torch_npu" in str(caught.value)
    result = probe(ProbeContext(device="ascend"))  # asks in a real subprocess
    assert result.score == 0
    assert "torch_npu" in result.reasons[0].text


def answering(text, code=0):
    return lambda: subprocess.CompletedProcess([], code, stdout=text, stderr="no libhccl.so")


def test_the_probe_counts_devices_and_keeps_simulation_apart():
    assert probe(ProbeContext(device="ascend:1"), answering("noise\n2\n")).score > 0
    absent = probe(ProbeContext(device="ascend:3"), answering("2"))
    assert absent.score == 0
    assert "`ascend:3` is absent: torch_npu sees 2" in absent.reasons[0].text
    assert probe(ProbeContext(device="ascend"), answering("", 1)).score == 0
    named = probe(ProbeContext(device="ascend:sim:910C"))
    assert named.score > 0
    assert named.devices[0].id == "ascend:sim:910C"
    assert probe(ProbeContext(device="ascend:sim:911")).reasons[0].code == "HRT-7102"
    assert parse_device("ascend:1").index == 1


def test_profiles_hold_what_the_vendor_table_says():
    table = profiles()
    assert {n: p.cube_cores for n, p in table.items()} == {
        "910B1": 24,
        "910B2": 24,
        "910B3": 20,
        "910B4": 20,
        "910C": 24,
        "tiny": 4,
    }
    assert table["910B4"].hbm_bytes == 32 << 30
    assert table["910B1"].macs_per_second(2) * 24 * 2 == pytest.approx(363.7e12, rel=1e-3)
    assert table["910B1"].macs_per_second(1) == 2 * table["910B1"].macs_per_second(2)
    assert [n for n, p in table.items() if p.hypothetical] == ["tiny"]
    assert all(p.vector_cores == 2 * p.cube_cores for p in table.values())
