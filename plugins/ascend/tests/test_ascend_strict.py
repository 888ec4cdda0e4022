"""The device refuses what hardware would silently get wrong."""

import attrs
import numpy as np
import pytest
import torch
from ascend_steps import Config, Decoder, f32, open_sim, step

from halogen_ascend.errors import (
    CaptureError,
    CollectiveError,
    LayoutError,
    MissingSynchronize,
    OutOfRange,
    PlacementError,
    PoisonRead,
    UseAfterFree,
)
from halogen_ascend.sim.collectives import Group
from halogen_ascend.sim.queues import (
    HOST_ALIGN,
    CopyQueue,
    SlotRing,
    check_host_alignment,
    host_aligned,
    host_like,
)
from halogen_core.spi import DeviceLost, OutOfDeviceMemory, Transient, WeightRole


@pytest.fixture
def buffer(backend):
    return backend.upload(np.ones((4, 16), np.float32))


@pytest.mark.parametrize(
    ("attempt", "op"),
    [
        (lambda b: torch.add(b, 1), "torch.add"),
        (lambda b: torch.cat([torch.ones(1), b]), "torch.cat"),
        (torch.nn.functional.silu, "torch.silu"),
        (lambda b: torch.ones(4, 16) + b, "add"),
        (lambda b: np.add(np.ones(1), b), "numpy.add"),
        (lambda b: np.concatenate([b, b]), "numpy.concatenate"),
        (np.asarray, "numpy.asarray"),
        (torch.from_dlpack, "dlpack"),
        (lambda b: b + 1, "__add__"),
        (lambda b: b[0], "__getitem__"),
        (list, "__iter__"),
        (float, "__float__"),
        (bool, "__bool__"),
    ],
)
def test_host_code_cannot_touch_device_memory(buffer, attempt, op):
    with pytest.raises((PlacementError, TypeError), match=op.replace(".", r"\.")):
        attempt(buffer)


def test_the_argument_is_named(backend, buffer):
    w = backend.pack([f32(np.ones((8, 16)))], WeightRole.LINEAR)
    with pytest.raises(PlacementError, match="`linear` wants argument `x` on the device"):
        backend.ops.linear(np.ones((4, 16), np.float32), w)
    with pytest.raises(PlacementError, match="`add` wants argument `y`"):
        backend.ops.add(buffer, torch.ones(4, 16))


def test_another_devices_memory_is_not_ours(backend, buffer):
    other = open_sim()
    with pytest.raises(PlacementError, match="sim:tiny"):
        other.ops.add(buffer, buffer)


def test_use_after_free_and_double_free(backend, buffer):
    view = buffer.rows(0, 2)
    backend.device.free(buffer)
    with pytest.raises(UseAfterFree, match="after it"):
        backend.ops.add(view, view)
    with pytest.raises(UseAfterFree, match="freed twice"):
        backend.device.free(buffer)


def test_unwritten_memory_is_poison(backend):
    fresh = backend.device.empty((4, 16), "f32")
    with pytest.raises(PoisonRead, match="nothing has written"):
        backend.ops.add(fresh, fresh)
    decoder = Decoder(backend)
    with pytest.raises(PoisonRead, match="KV slots"):
        # the sequence claims 50 tokens before this step, but none was computed
        decoder.logits(step([([1], 50, [0])]))


def test_a_result_is_read_only_after_synchronising(backend, buffer):
    made = backend.ops.add(buffer, buffer)
    with pytest.raises(MissingSynchronize, match="submission 1 of queue `compute`"):
        backend.device.copy_out(made)
    backend.synchronize()
    assert float(backend.device.copy_out(made).sum()) == 128


def test_a_copy_queue_needs_its_event_and_its_source(backend):
    queue, target = CopyQueue(backend.device), backend.device.empty((4,), "f32")
    host = host_like(np.ones(4, np.float32))
    host[:] = 1
    event = queue.upload(target, host)
    with pytest.raises(MissingSynchronize, match="queue `copy`"):
        backend.ops.add(target, target)
    queue.wait(event)
    assert backend.download(backend.ops.add(target, target)).tolist() == [2] * 4
    event = queue.upload(target, host)
    host[0] = 5  # as if the next step reused a pinned buffer
    with pytest.raises(MissingSynchronize, match="was changed before its event"):
        queue.wait(event)


def test_ring_slots_are_reused_only_after_their_event(backend):
    queue, ring = CopyQueue(backend.device), SlotRing(3)
    hosts = [host_like(np.zeros(4, np.float32)) for _ in range(3)]
    targets = [backend.device.empty((4,), "f32") for _ in range(3)]
    before = backend.device.hbm.pools["temp"].allocations
    for turn in range(20):
        slot = ring.take(queue)
        hosts[slot][:] = turn
        ring.put(slot, queue.upload(targets[slot], hosts[slot]))
    for slot in (ring.take(queue) for _ in range(3)):
        assert backend.download(targets[slot]).max() in (17, 18, 19)
    assert backend.device.hbm.pools["temp"].allocations == before


def test_host_buffers_for_transfer_are_aligned(backend):
    with pytest.raises(PlacementError, match="not aligned"):
        CopyQueue(backend.device).upload(backend.device.empty((2,), "f32"), host_aligned(16)[8:])
    good = host_aligned(1000)
    check_host_alignment(good)
    assert good.nbytes == 1000
    with pytest.raises(PlacementError, match=str(HOST_ALIGN)):
        check_host_alignment(good[8:])


def test_blocks_and_slots_outside_the_pool_name_sequence_and_block(backend):
    decoder = Decoder(backend, blocks=4)
    with pytest.raises(OutOfRange, match="row 0 goes to slot 512"):
        decoder.logits(step([([1], 0, [4])]))
    decoder.logits(step([([1] * 3, 0, [1])]))
    bad = step([([1], 3, [1]), ([2], 0, [2])])
    bad.block_tables[0, 0] = 9
    with pytest.raises(OutOfRange, match="sequence 0 names block 9; the pool has 0 to 3"):
        decoder.logits(bad)
    twice = step([([1], 0, [1]), ([2], 0, [1])])
    with pytest.raises(OutOfRange, match="slot 128 is written by two rows"):
        decoder.logits(twice)


def test_a_private_layout_has_no_views(backend):
    w = backend.pack([f32(np.ones((64, 32)))], WeightRole.LINEAR).payload
    with pytest.raises(LayoutError, match="FRACTAL_NZ"):
        w.buffer.rows(0, 16)


def test_a_capture_refuses_the_host(backend):
    decoder = Decoder(backend)
    decoder.logits(step([([1] * 4, 0, [0])]))
    batch = step([([1], 4, [0])])
    with pytest.raises(CaptureError, match="107027"):
        backend.capture(lambda meta: backend.download(decoder.forward(meta)), batch)
    with pytest.raises(CaptureError, match="107027"):
        backend.capture(lambda meta: backend.synchronize(), batch)
    # the device is usable afterwards
    assert decoder.logits(batch).shape == (1, 97)


def test_a_replay_without_host_arguments_is_an_error_not_a_stale_answer(backend):
    decoder = Decoder(backend)
    decoder.logits(step([([1] * 4, 0, [0])]))
    replay = backend.capture(decoder.run, step([([1], 4, [0])]))
    with pytest.raises(CaptureError, match="`attention`"):
        backend.device.replay(replay.tasks, None)


def test_out_of_memory_names_pool_asked_and_free():
    small = open_sim(temp_pool_gb=0.001)
    with pytest.raises(OutOfDeviceMemory, match=r"pool `temp` was asked for \d+ bytes") as caught:
        small.upload(np.zeros(1 << 20, np.float32))
    assert caught.value.asked == 4 << 20
    assert 0 < caught.value.free < 4 << 20
    assert small.download(small.upload(np.ones(4, np.float32))).sum() == 4


def test_injected_faults_surface_with_the_op_that_caused_them():
    lost = open_sim(faults="device_lost@1")
    x = lost.upload(np.ones((2, 16), np.float32))
    y = lost.ops.add(x, x)
    z = lost.ops.add(y, y)  # the queue breaks here, silently
    lost.ops.add(z, z)
    with pytest.raises(DeviceLost, match=r"`add` \(submission 2\)"):
        lost.download(z)
    with pytest.raises(DeviceLost):
        lost.upload(np.ones(1, np.float32))
    loud = open_sim(faults="device_lost@0", blocking="true")
    x = loud.upload(np.ones((2, 16), np.float32))
    with pytest.raises(DeviceLost, match="submission 1"):
        loud.ops.add(x, x)
    shaky = open_sim(faults="transient@0,oom@3")
    x = shaky.upload(np.ones((2, 16), np.float32))
    with pytest.raises(Transient):
        shaky.ops.add(x, x)
    shaky.ops.add(x, x)
    with pytest.raises(OutOfDeviceMemory):
        shaky.ops.add(x, x)


def test_slow_core_and_throttle_cost_time():
    def seconds(**extra):
        made = open_sim(**extra)
        w = made.pack([f32(np.ones((512, 512)))], WeightRole.LINEAR)
        before = made.device.now
        made.ops.linear(made.upload(np.ones((256, 512), np.float32)), w)
        return made.device.now - before

    base = seconds()
    assert seconds(faults="slow_core=1:3") > 1.5 * base
    assert seconds(faults="throttle=0.25") > 1.1 * base


def test_collectives_in_another_order_or_without_a_rank_are_errors():
    ranks = [open_sim() for _ in range(3)]
    buffers = [r.upload(np.full(4, i, np.float32)) for i, r in enumerate(ranks)]
    group = Group(3)
    for rank, buffer in enumerate(buffers):
        group.offer(rank, "all_reduce", "mlp", buffer)
    assert [r.download(b).tolist() for r, b in zip(ranks, buffers, strict=True)] == [[3] * 4] * 3
    for rank in (0, 1):
        group.offer(rank, "all_reduce", "attention", buffers[rank])
    with pytest.raises(CollectiveError, match=r"ranks \[2\], which offer nothing: a deadlock"):
        group.finish()
    group.offer_dummy(2, "all_reduce", "attention", buffers[0])
    group.finish()
    group.offer(0, "all_reduce", "mlp", buffers[0])
    group.offer(1, "all_reduce", "attention", buffers[1])
    with pytest.raises(CollectiveError, match="rank 1 offers"):
        group.offer(2, "all_reduce", "mlp", buffers[2])


def test_stale_lengths_are_refused(backend):
    decoder = Decoder(backend, Config(layers=1))
    good = step([([1] * 3, 0, [0]), ([2] * 2, 0, [1])])
    for field, value, words in (
        ("seq_lens", np.array([3], np.int32), "for 1 KV lengths"),
        ("query_start_loc", np.array([0, 2, 1], np.int32), "-1 queries"),
        ("seq_lens", np.array([2, 2], np.int32), "3 queries and length 2"),
    ):
        with pytest.raises(OutOfRange, match=words):
            decoder.logits(attrs.evolve(good, **{field: value}))
