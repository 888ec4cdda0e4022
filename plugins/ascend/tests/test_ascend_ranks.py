"""Two ranks are one: the row-parallel product in the simulator, and between real processes."""

import multiprocessing

import numpy as np
import pytest
import torch
from ascend_steps import f32, open_sim

from halogen_ascend.errors import CollectiveError
from halogen_ascend.npu.backend import NpuBackend
from halogen_ascend.npu.collectives import RankGroup, row_parallel_linear, share_of
from halogen_ascend.sim import collectives as simulated
from halogen_ascend.sim.collectives import Group, ring_seconds
from halogen_core.spi import BackendOptions, DeviceLost, WeightRole

HALF = 2.0**-11
T, K, N = 21, 100, 70


def operands(kind, seed=0):
    """x [T, K], w [N, K]; whole numbers are summed without rounding, in whatever order."""
    rng = np.random.default_rng(seed)
    if kind == "whole":
        return (rng.integers(-3, 4, s).astype(np.float32) for s in ((T, K), (N, K)))
    return (rng.standard_normal(s).astype(np.float32) / 10 for s in ((T, K), (N, K)))


def agree(kind, got, whole, x, w):
    if kind == "whole":
        assert np.array_equal(got, whole)
    assert np.abs(got - x.astype(np.float64) @ w.T.astype(np.float64)).max() < 8 * HALF


@pytest.mark.parametrize("kind", ["whole", "real"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_simulated_ranks_give_what_one_gives(size, kind):
    x, w = operands(kind, size)
    one = open_sim()
    packed = one.pack([f32(w)], WeightRole.LINEAR)
    whole = one.download(one.ops.linear(one.upload(x), packed))
    ranks, group = [open_sim() for _ in range(size)], Group(size)
    shares = [share_of(K, r, size) for r in range(size)]
    outs = simulated.row_parallel_linear(
        [r.ops for r in ranks],
        [r.upload(x[:, s]) for r, s in zip(ranks, shares, strict=True)],
        [r.pack([f32(w[:, s])], WeightRole.LINEAR) for r, s in zip(ranks, shares, strict=True)],
        group,
    )
    group.finish()
    results = [r.download(out) for r, out in zip(ranks, outs, strict=True)]
    for got in results:
        assert np.array_equal(got, results[0]), "every rank has the same sum"
        agree(kind, got, whole, x, w)


def test_no_rank_is_done_before_the_last_one_came():
    ranks, group = [open_sim() for _ in range(2)], Group(2)
    buffers = [r.upload(np.ones((4, 8), np.float32)) for r in ranks]
    ranks[1].device.now += 1.0
    late = ranks[1].device.now
    for rank, buffer in enumerate(buffers):
        group.offer(rank, "all_reduce", "mlp", buffer)
    assert [r.device.now for r in ranks] == [late + ring_seconds(4 * 8 * 4, 2)] * 2


def test_a_ring_costs_messages_and_bytes():
    assert ring_seconds(10**9, 1) == 0
    assert ring_seconds(0, 4) == 6 * ring_seconds(0, 2) / 2
    assert ring_seconds(10**9, 8) == pytest.approx(2 * 7 / 8 * 1e9 / 56e9, rel=0.01)


@pytest.mark.parametrize(("width", "size"), [(100, 3), (7, 4), (3, 4), (96, 2)])
def test_shares_cover_the_width_once(width, size):
    picked = [i for r in range(size) for i in range(width)[share_of(width, r, size)]]
    assert picked == list(range(width))


# -- the code of the real path, over another transport


def _rank(rank, size, address, results):
    torch.set_num_threads(1)
    group = RankGroup.join(rank, size, address, transport="gloo")
    x, w = operands("whole")
    backend = NpuBackend(BackendOptions(), device="cpu", name="ascend")
    share = share_of(K, rank, size)
    packed = backend.pack([f32(w[:, share])], WeightRole.LINEAR)
    bias = backend.pack([f32(np.arange(N))], WeightRole.BIAS)
    mine = backend.upload(np.ascontiguousarray(x[:, share]))
    out = row_parallel_linear(backend.ops, mine, packed, group, name="mlp", bias=bias)
    results.put((rank, backend.download(out)))
    if rank == 1:
        group.leave()
        return
    try:
        group.sum(torch.ones(4), "attention")
    except DeviceLost as exc:
        results.put(("lost", str(exc)))


@pytest.mark.slow
def test_two_processes_give_what_one_gives_and_a_rank_that_leaves_is_no_hang(tmp_path):
    context = multiprocessing.get_context("spawn")
    results, address = context.Queue(), f"file://{tmp_path}/meeting"
    processes = [context.Process(target=_rank, args=(rank, 2, address, results)) for rank in (0, 1)]
    for process in processes:
        process.start()
    got = dict(results.get(timeout=90) for _ in range(3))
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    x, w = operands("whole")
    assert np.array_equal(got[0], got[1])
    assert np.array_equal(got[0], x @ w.T + np.arange(N)), "the bias is added once"
    assert "rank 0 of 2: sum of `attention` failed" in got["lost"]


def test_a_transport_that_is_not_there_is_refused_with_the_address(tmp_path):
    with pytest.raises(
        CollectiveError, match=r"rank 0 of 2 could not join a `hccl` group at file:"
    ):
        RankGroup.join(0, 2, f"file://{tmp_path}/meeting")
