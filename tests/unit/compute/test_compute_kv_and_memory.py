"""KV pool moves, memory plans, the cost model, and a vendor growing out of the host fallback."""

import attrs
import numpy as np
import pytest
import torch

from halogen_core.errors import ConfigError, OutOfMemory, UnsupportedOp
from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.spi import (
    OPS,
    BackendOptions,
    HostFallbackOps,
    KVBlocks,
    KVSpec,
    MemoryRequest,
    OpSignature,
    PackedWeight,
    StepShape,
    SupportLevel,
    TorchBackend,
    TorchOps,
    WeightRole,
    kv_block_shape,
)
from halogen_core.spi.costs import LinearCost
from halogen_core.spi.testing import (
    Handle,
    OpaqueBackend,
    Share,
    f32_tensor,
    step_batch,
    tiny_checkpoint,
)
from halogen_core.torch_backend.host_memory import divide, host_tier
from halogen_core.torch_backend.step import upload_arrays

KV_DTYPES = ["f32", "f16", "bf16", "q8_0", "f8_e5m2"]


def pool(dtype="f16", blocks=6, backend=None, **changes):
    fields = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 32, "dtype": dtype, "block_size": 4}
    backend = backend or TorchBackend()
    return backend, backend.kv_alloc(backend.kv_layout(KVSpec(**{**fields, **changes})), blocks)


def random_blocks(kv, count, seed=0):
    shape = kv_block_shape(kv.layout.spec, count)
    data = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return KVBlocks(spec=kv.layout.spec, data=data)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_import_export_and_copy_are_bit_exact(dtype):
    backend, kv = pool(dtype)
    data = random_blocks(kv, 3)
    backend.kv_import(kv, [4, 0, 2], data)
    np.testing.assert_array_equal(backend.kv_export(kv, [4, 0, 2]).data, data.data)
    np.testing.assert_array_equal(backend.kv_export(kv, [2, 4]).data, data.data[[2, 0]])
    # in order: 4 -> 1, then that copy -> 3, then 0 over 4
    backend.kv_copy(kv, [(4, 1), (1, 3), (0, 4)])
    np.testing.assert_array_equal(backend.kv_export(kv, [1, 3, 4]).data, data.data[[0, 0, 1]])
    assert not backend.kv_export(kv, [5]).data.any()
    assert kv.layout.bytes_per_block == data.data[0].nbytes
    assert backend.kv_export(kv, []).data.shape[0] == 0


@pytest.mark.parametrize("blocks", [[6], [-1], [0, 99]])
def test_blocks_outside_the_pool_are_refused(blocks):
    """Block N is the trash block: nobody else's business."""
    backend, kv = pool()
    for attempt in (
        lambda: backend.kv_export(kv, blocks),
        lambda: backend.kv_import(kv, blocks, random_blocks(kv, len(blocks))),
        lambda: backend.kv_copy(kv, [(0, blocks[-1])]),
    ):
        with pytest.raises(ConfigError, match="blocks 0 to 5"):
            attempt()


def test_foreign_blocks_are_refused():
    backend, kv = pool()
    _, other = pool(block_size=8)
    with pytest.raises(ConfigError, match="this pool takes"):
        backend.kv_import(kv, [0], random_blocks(other, 1))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": "f64"}, "allowed are f32"),
        ({"dtype": "q8_0", "head_dim": 48}, "multiple of 32"),
        ({"block_size": 0}, "allowed are 1 to"),
    ],
)
def test_impossible_layouts_are_refused(changes, text):
    with pytest.raises(ConfigError, match=text):
        pool(**changes)


# ---------------------------------------------------------------- memory and cost


def fixture_tree(root, *, limit, used, cache=0):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        "MemTotal: 1000 kB\nMemFree: 300 kB\nMemAvailable: 600 kB\nHugePages_Total: 0\n"
    )
    (root / "proc/self/cgroup").write_text("0::/pod/box\n")
    group = root / "sys/fs/cgroup/pod"
    (group / "box").mkdir(parents=True)
    for folder, value in ((group, limit), (group / "box", "max")):
        (folder / "memory.max").write_text(f"{value}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    return str(root)


def test_memory_without_a_limit(tmp_path):
    tier = host_tier(fixture_tree(tmp_path, limit="max", used=0))
    assert (tier.total, tier.free, tier.reclaimable) == (1000 << 10, 600 << 10, 300 << 10)
    assert tier.shared_with_host


def test_a_parent_control_group_bounds_it(tmp_path):
    root = fixture_tree(tmp_path, limit=400 << 10, used=350 << 10, cache=20 << 10)
    tier = host_tier(root)
    assert (tier.total, tier.free, tier.reclaimable) == (400 << 10, 70 << 10, 20 << 10)
    assert "cgroup" in tier.source


def test_this_machine_has_memory():
    (tier,) = TorchBackend().memory()
    assert 0 < tier.free <= tier.total


def request(backend, **changes):
    layout = backend.kv_layout(KVSpec(num_layers=2, num_kv_heads=2, head_dim=32))
    fields = {"static_bytes": 0, "temp_bytes": 0, "kv_layout": layout}
    return MemoryRequest(**{**fields, **changes})


def test_a_plan_adds_up():
    backend = TorchBackend()
    (tier,) = backend.memory()
    tier = attrs.evolve(tier, free=10_000_000, total=20_000_000)
    per_block = request(backend).kv_layout.bytes_per_block
    asked = request(
        backend, static_bytes=3_000_000, temp_bytes=1_000_000, host_reserve=1_000_000, kv_ratio=0.5
    )
    plan = divide(tier, asked, held_static=0)
    assert plan.num_blocks == 2_500_000 // per_block - 1
    assert sum(pool.bytes for pool in plan.pools) <= 10_000_000 - 1_000_000
    held = divide(tier, asked, held_static=3_000_000)
    assert held.num_blocks == 4_000_000 // per_block - 1
    assert divide(tier, attrs.evolve(asked, max_blocks=3), held_static=0).num_blocks == 3
    exact = divide(tier, attrs.evolve(asked, kv_bytes=10 * per_block), held_static=0)
    assert exact.num_blocks == 9


@pytest.mark.parametrize(
    "changes", [{"static_bytes": 1 << 60}, {"kv_bytes": 1 << 60}, {"min_blocks": 1 << 50}]
)
def test_a_plan_that_cannot_fit_says_why(changes):
    backend = TorchBackend()
    with pytest.raises(OutOfMemory, match=r"GiB free of .*weights .*workspace"):
        backend.plan(request(backend, **changes))


def test_cost_is_learnt_from_steps():
    model, rng = LinearCost(), np.random.default_rng(0)
    assert model.predict(StepShape(prefill_tokens=1, decode_sequences=0, kv_tokens=0)) is None

    def seconds(shape):
        return (
            1e-3
            + 2e-5 * shape.prefill_tokens
            + 1e-4 * shape.decode_sequences
            + 1e-8 * shape.kv_tokens
        )

    for _ in range(200):
        shape = StepShape(
            prefill_tokens=int(rng.integers(0, 500)),
            decode_sequences=int(rng.integers(0, 32)),
            kv_tokens=int(rng.integers(0, 50_000)),
        )
        model.observe(shape, seconds(shape) * rng.lognormal(0, 0.05))
    probe = StepShape(prefill_tokens=256, decode_sequences=8, kv_tokens=9000)
    cost = model.predict(probe)
    assert cost.p50 == pytest.approx(seconds(probe), rel=0.1)
    assert 1.02 * cost.p50 < cost.p95 < 1.3 * cost.p50


# ---------------------------------------------------------------- placement and vendors


def test_supports_denies_what_cannot_work():
    backend = TorchBackend()
    assert backend.supports(OpSignature(op="linear", weight_format="Q4_K")).level != SupportLevel.NO
    for signature in (
        OpSignature(op="conv"),
        OpSignature(op="linear", dtype="bf16"),
        OpSignature(op="linear", weight_format="Q3_X"),
        OpSignature(op="attention", kv_dtype="f64"),
        OpSignature(op="attention", block_size=0),
    ):
        answer = backend.supports(signature)
        assert answer.level is SupportLevel.NO
        assert answer.reasons


class HalfOps(TorchOps):
    """A vendor with one op of its own."""

    def rms_norm(self, x, weight, *, eps):
        return super().rms_norm(x, weight, eps=eps)


class HalfBackend(TorchBackend):
    ops_class = HalfOps


def test_placement_tells_own_ops_from_inherited_ones():
    placed = {p.op: p for p in HalfBackend(name="half").placement()}
    assert placed["rms_norm"].level is SupportLevel.NATIVE
    assert "HalfOps" in placed["rms_norm"].implementation
    assert placed["linear"].level is SupportLevel.FALLBACK
    assert "`half`" in placed["linear"].reasons[0]


class OwnOps(HostFallbackOps[Handle]):
    """A vendor's second day: a linear of its own, on weights in its own (transposed) layout."""

    def linear(self, x, weight, *, bias=None):
        if bias is not None:
            return super().linear(x, weight, bias=bias)
        return Handle(x._secret @ weight.payload._secret)


class OwnBackend(OpaqueBackend):
    """Its own linear weights, and its own KV layout: canonical blocks in a dict."""

    ops_class = OwnOps

    def pack(self, parts, role):
        if role is not WeightRole.LINEAR:
            return super().pack(parts, role)
        host = self.host.pack(parts, role)
        values = np.ascontiguousarray(self.host.unpack(host).T)
        return PackedWeight(
            payload=Handle(values), shape=host.shape, nbytes=values.nbytes,
            format_id="own/transposed", role=role, parts=host.parts,
        )  # fmt: skip

    def unpack(self, weight):
        if isinstance(weight.payload, Handle):
            return weight.payload._secret.T.copy()
        return super().unpack(weight)

    def kv_alloc(self, layout, num_blocks):
        shape = kv_block_shape(layout.spec, num_blocks)
        host = super().kv_alloc(layout, num_blocks)
        return attrs.evolve(host, payload=np.zeros(shape, np.uint8))

    def kv_export(self, kv, blocks):
        return KVBlocks(spec=kv.layout.spec, data=kv.payload[list(blocks)])

    def kv_import(self, kv, blocks, data):
        kv.payload[list(blocks)] = data.data


def test_a_vendor_grows_out_of_the_fallback():
    """Own weights and own KV keep working with every op that still falls back."""

    def tokens(backend):
        checkpoint = tiny_checkpoint("qwen2", seed=3)
        config = config_of(checkpoint)
        decoder = Decoder.load(config, checkpoint, backend)
        kv = backend.kv_alloc(backend.kv_layout(kv_spec(config, dtype="f32", block_size=8)), 6)
        found, start = [3, 1, 4, 1, 5, 9, 2, 6, 5], 0
        for _ in range(10):
            share = Share(tokens=tuple(found[start:]), blocks=(4, 0, 3), start=start)
            meta = backend.upload_step(step_batch([share], 8))
            start = len(found)
            found.append(int(backend.download(decoder.step(backend.ops, meta, kv).token_ids)[0]))
        return found

    own = OwnBackend(name="own")
    assert tokens(own) == tokens(TorchBackend())
    placed = {p.op: p.level for p in own.placement()}
    assert placed == {
        op: SupportLevel.NATIVE if op == "linear" else SupportLevel.FALLBACK for op in OPS
    }
    assert own.counters().counters["fallback_calls_linear"] > 0  # the biased ones


def test_a_pool_takes_memory_when_it_is_touched():
    spec = KVSpec(num_layers=1, num_kv_heads=4, head_dim=64, dtype="f16", block_size=16)
    backend = TorchBackend()
    before = resident_bytes()
    kv = backend.kv_alloc(backend.kv_layout(spec), (256 << 20) // 16384)
    assert resident_bytes() - before < 32 << 20
    assert not backend.kv_export(kv, [0, 5, kv.num_blocks - 1]).data.any()


def resident_bytes():
    with open("/proc/self/statm", encoding="utf-8") as text:
        return int(text.read().split()[1]) * 4096


def test_the_hosts_promises_end_where_a_device_has_ops_of_its_own():
    options = BackendOptions(deterministic=True)
    inherited = OpaqueBackend(options, name="opaque").capabilities()
    own = OwnBackend(options, name="own").capabilities()
    assert inherited.deterministic
    assert inherited.batch_invariant
    assert not own.deterministic
    assert not own.batch_invariant


def test_a_tied_table_is_held_once():
    backend = TorchBackend()
    part = f32_tensor("token_embd.weight", np.ones((8, 4), np.float32))
    table = backend.pack([part], WeightRole.EMBEDDING)
    head = backend.pack([part], WeightRole.LINEAR)
    assert head.payload.data_ptr() == table.payload.rows.data_ptr()


def test_unknown_activation_is_refused():
    backend = TorchBackend()
    with pytest.raises(UnsupportedOp, match="tanh"):
        backend.ops.gated_act(backend.upload(np.ones((1, 4), np.float32)), "tanh")


def test_one_transfer_carries_all_arrays():
    """Off the host, one buffer is sent and cut into views (shapes and dtypes seen on `meta`)."""
    arrays = [
        np.arange(5, dtype=np.int32),
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.ones(3, np.bool_),
        np.zeros((0, 4), np.float32),
    ]
    for device in ("cpu", "meta"):
        tensors = upload_arrays(arrays, torch.device(device))
        assert [tuple(t.shape) for t in tensors] == [a.shape for a in arrays]
        assert [t.dtype for t in tensors] == [torch.int32, torch.int64, torch.bool, torch.float32]
        assert {t.device.type for t in tensors} == {device}
    # on `meta` now: where in the buffer each begins
    assert all(t.storage_offset() * t.element_size() % 16 == 0 for t in tensors)


def test_close_may_be_called_twice():
    for backend in (TorchBackend(BackendOptions()), OpaqueBackend()):
        backend.close()
        backend.close()
